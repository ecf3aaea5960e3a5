"""Loads of a job: its ranks come up, pass barriers, wait for a key, and come up again with a new store.

Ranks are simulated by the processes of a swarm. Only what PyTorch's tutorial on the libuv backend times has
real clients of torch, each rank a process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from rallypoint.bench import machine
from rallypoint.bench.contest import Measurement, Session
from rallypoint.bench.results import BenchError, Sample
from rallypoint.bench.swarm import Answer, RanksAt, load_of
from rallypoint.bench.targets import BehindRelays, Target
from rallypoint.bench.workers import ask_all, ask_each, start

RANKS_PER_PROCESS: Final = 18_000
FEWEST_RANKS: Final = 1_000
"""Where there are cores to spare, more processes than needed simulate ranks, of so many or more each: else a
quick server would wait for the load."""
RUN_LIMIT_S: Final = 180.0
TUTORIAL_LIMIT_S: Final = 120.0
TUTORIAL_BARRIERS: Final = 5
TUTORIAL_TARGETS: Final = ("rallypoint-libuv", "rallypoint-legacy", "torch-libuv", "torch-legacy")
"""Servers that torch's constructor can start: rank 0 is the master, so there is no server beforehand."""


def processes_for(ranks: int) -> int:
    """How many processes simulate that many ranks."""
    needed = -(-ranks // min(RANKS_PER_PROCESS, machine.most_connections()))
    return max(needed, min(machine.spare_processes(), ranks // FEWEST_RANKS))


def shares_of(places: Sequence[RanksAt], count: int) -> list[list[RanksAt]]:
    """The places of each process: a relay's ranks together, the ranks of a server in equal parts."""
    if len(places) >= count * 8:
        return [list(places[number::count]) for number in range(count)]
    return [
        [(*place[:3], place[3] // count + (number < place[3] % count)) for place in places]
        for number in range(count)
    ]


class WithRanks(Session):
    """A session with a swarm that is not connected yet."""

    def __init__(self, target: Target, measurement: Measurement) -> None:
        super().__init__(target, measurement)
        self.ranks = measurement.ranks
        self.barriers = 0
        self.joined = 0
        """How many have counted themselves at this store so far."""

    def open(self) -> None:
        self.swarm = [
            start(self.resources, "rallypoint.bench.swarm", f"ranks, process {number + 1}")
            for number in range(processes_for(self.ranks))
        ]
        self.everyone(do="leave")  # there are none yet, but an answer tells that it is up

    def everyone(self, **order: object) -> None:
        """The same order to all processes of the swarm."""
        ask_all(self.swarm, RUN_LIMIT_S, **order)

    def come_up(self) -> Sample:
        """Connect all ranks."""
        order = {"do": "connect", "dialect": self.target.dialect, "limit_s": RUN_LIMIT_S}
        shares = shares_of(self.target.places(self.ranks), len(self.swarm))
        measured = self.phase([{**order, "places": share} for share in shares], 2, self.joined)
        self.joined += self.ranks
        return measured

    def barrier(self, *, at_once: bool) -> Sample:
        """All ranks pass a barrier, with keys of its own."""
        self.barriers += 1
        order = {"do": "barrier", "name": str(self.barriers), "ranks": self.ranks, "at_once": at_once}
        return self.phase([{**order, "limit_s": RUN_LIMIT_S}] * len(self.swarm), 3)

    def phase(self, orders: Sequence[dict[str, Any]], requests: int = 0, before: int = 0) -> Sample:
        """Let the swarm do something, measure what that takes, and check what it was told.

        `requests` is how many each rank sends, besides a SET if it finds a count full; `before` is how many
        ranks have counted themselves already.
        """
        answers, cost = self.metered(lambda: self._carry_out(orders))
        check_counts(self.ranks, answers, before)
        load = load_of(answers)
        if requests and "messages" not in cost.extras:
            full = sum(answer.get("seen", []).count(self.ranks) for answer in answers)
            cost.extras["messages"] = 2 * requests * self.ranks + full
        cost.extras["swarm_cpu"] = load.cpu
        return cost.sample(load.seconds, load)

    def _carry_out(self, orders: Sequence[dict[str, Any]]) -> list[Answer]:
        """The answers of the swarm; relays have come to rest by then."""
        answers = ask_each(self.swarm, RUN_LIMIT_S, orders)
        self.target.settle()
        return answers


class ComingUp(WithRanks):
    """All ranks connect, and count themselves; then they leave again."""

    def round(self) -> Sample:
        files, resident = self.target.open_files(), self.target.resident_bytes()
        measured = self.come_up()
        memory = (self.target.resident_bytes() - resident) / self.ranks
        extras = {**measured.extras, "whole_seconds": self.start_seconds + measured.value}
        if isinstance(self.target, BehindRelays):
            extras |= {"relays": self.target.relays, "relays_bytes": self.target.relays_bytes()}
        self.everyone(do="leave")
        self.target.await_open_files(files)
        self.target.await_quiet()
        return replace(measured, memory=memory, extras=extras)


class Barriers(WithRanks):
    """All ranks are connected, and pass barriers, to which they come at once or one after the other."""

    def __init__(self, target: Target, measurement: Measurement, at_once: bool) -> None:
        super().__init__(target, measurement)
        self.at_once = at_once

    def open(self) -> None:
        super().open()
        self.come_up()
        self.barrier(at_once=False)  # to warm up

    def round(self) -> Sample:
        self.target.await_quiet()
        return self.barrier(at_once=self.at_once)


class Wakeups(WithRanks):
    """All ranks wait for one key; then it is set."""

    def open(self) -> None:
        super().open()
        self.come_up()
        self.rounds = 0
        self.round()

    def round(self) -> Sample:
        self.rounds += 1
        key = f"/bench/wake/{self.rounds}"
        self.everyone(do="wait", key=key)
        self.target.settle()
        self.target.await_quiet()
        self.everyone(do="check_asleep")
        order = {"do": "wake", "key": key, "since": time.monotonic(), "limit_s": RUN_LIMIT_S}
        # One of the processes sets it.
        return self.phase([{**order, "release": number == 0} for number in range(len(self.swarm))])


class Restarts(WithRanks):
    """A job that is up is started again: its ranks leave, the store is made anew, and they come back.

    It is over when they have passed their first barrier. A store that still had the counts of the try
    before would be found out.
    """

    def open(self) -> None:
        super().open()
        self.come_up()
        self.barrier(at_once=True)

    def round(self) -> Sample:
        begun = time.monotonic()
        self.everyone(do="leave")
        self.target.renew()
        self.joined = 0
        renewed = time.monotonic()
        self.come_up()
        self.barrier(at_once=True)
        ended = time.monotonic()
        return Sample(ended - begun, extras={"renew_seconds": renewed - begun})


def check_counts(ranks: int, answers: Sequence[Answer], before: int = 0) -> None:
    """Raise unless each count from `before` on was given once, and those seen later are not lower."""
    counted = sorted(number for answer in answers for number in answer.get("counted", ()))
    if counted and counted != list(range(before + 1, before + ranks + 1)):
        raise BenchError(f"{ranks:,} ADDs did not give each number from {before + 1} on once")
    for answer in answers:
        before_and_after = (sorted(answer.get(name, ())) for name in ("counted", "seen"))
        if any(now < then for then, now in zip(*before_and_after, strict=False)):
            raise BenchError("a count was lower than it had been before")
    seen = [number for answer in answers for number in answer.get("seen", ())]
    if seen and max(seen) != ranks:
        raise BenchError(f"ADDs of 0 found up to {max(seen):,}; of {ranks:,} ranks the last must see all")


# With real clients of torch


class Tutorial(Session):
    """Ranks with real clients of torch. Rank 0 makes the server itself, so there is none beforehand."""

    def start(self) -> None:
        """Nothing to do."""

    def open(self) -> None:
        """Nothing to do: all happens in a round."""

    def time(self, barriers: int) -> dict[str, Any]:
        """The times of the constructor, `init`, and of each `barrier`, as rank 0 sees them."""
        order = {"target": self.target.name, "ranks": self.measurement.ranks, "barriers": barriers}
        host = self.target.torch.get()
        times: dict[str, Any] = host.ask(TUTORIAL_LIMIT_S, do="tutorial", **order, limit_s=TUTORIAL_LIMIT_S)
        return times


class TutorialInit(Tutorial):
    """The constructor on rank 0, which returns when all have joined."""

    def round(self) -> Sample:
        return Sample(self.time(0)["init"])


class TutorialBarrier(Tutorial):
    """Barriers on that store: the median of some in a row."""

    def round(self) -> Sample:
        return Sample(statistics.median(self.time(TUTORIAL_BARRIERS)["barrier"]))
