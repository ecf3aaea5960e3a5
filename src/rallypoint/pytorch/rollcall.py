"""Who of a job has reached the store, and who is missing: seen by the first machine's agent.

Workers that were started with our help leave their rank and machine in the round's store; all workers count
themselves in, so the number is known in any case. Which machine a missing rank belongs to is told by
the entries that torchrun's agents make for each other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from itertools import accumulate

from rallypoint.errors import RallypointError, StoreTimeoutError
from rallypoint.meeting.roster import Member
from rallypoint.pytorch.reports import Roll, report_roll
from rallypoint.stores.base import Store
from rallypoint.stores.tcp import TCPStore

ROUND_VARIABLE = "RALLYPOINT_ROUND"
"""Tells a worker that its store is a round's own, in which it may leave its name."""

AGENTS = "rallypoint/agents"
"""Where the agents have their keys in a round's store."""

_LOOK_SECONDS = 0.5
_NAMES_EVERY = 10  # looks
_MOST_NAMED = 4_096  # as many as a store's time-out names
_WAIT_SECONDS = 0.05


def joined_key(rank: int) -> str:
    """The key that a worker sets when it has reached the store."""
    return f"rallypoint/joined/{rank}"


class RollCall:
    """Reports on a round until all have joined, or until it is stopped."""

    def __init__(self, store: TCPStore, members: Sequence[Member]) -> None:
        self._store = store
        self._members = members
        self._names: dict[str, list[int]] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rallypoint roll call", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._store.close()

    def _run(self) -> None:
        try:
            sizes = self._ranks_per_machine()
            looks = 1
            if not sizes:
                return
            while not self._look(sizes, named=looks % _NAMES_EVERY == 0):
                if self._stopped.wait(_LOOK_SECONDS):
                    self._look(sizes, named=True)  # the last word, should the job have failed
                    return
                looks += 1
        except RallypointError:
            pass  # the round's store has gone; who asks is told by others

    def _ranks_per_machine(self) -> list[int]:
        """As torchrun's agents tell each other, if they do; nothing if it is stopped before."""
        keys = [f"{AGENTS}/torchelastic/role_info/{rank}" for rank in range(len(self._members))]
        while not self._store.check(keys):
            if self._stopped.wait(_LOOK_SECONDS):
                return []
        return [int(json.loads(each)["local_world_size"]) for each in self._store.multi_get(keys)]

    def _look(self, sizes: Sequence[int], *, named: bool) -> bool:
        """Report; True if all have joined."""
        expected = sum(sizes)
        joined = min(self._store.count_workers(), expected)
        if named and joined < expected <= _MOST_NAMED:
            self._names = self._missing(sizes)
        report_roll(Roll(joined, expected, self._names))
        return joined == expected

    def _missing(self, sizes: Sequence[int]) -> dict[str, list[int]] | None:
        ranks = _missing_ranks(self._store, sum(sizes))
        if len(ranks) == sum(sizes):
            return None  # workers that nobody has told to leave their names
        bounds = [0, *accumulate(sizes)]
        found: dict[str, list[int]] = {}
        for index, member in enumerate(self._members):
            theirs = [rank for rank in ranks if bounds[index] <= rank < bounds[index + 1]]
            if theirs:
                found.setdefault(member.host, []).extend(theirs)
        return found


def _missing_ranks(store: Store, expected: int) -> list[int]:
    keys = [joined_key(rank) for rank in range(expected)]
    try:
        store.wait(keys, _WAIT_SECONDS)
    except StoreTimeoutError as late:
        missing = set(late.keys)
        return [rank for rank, key in enumerate(keys) if key in missing]
    return []
