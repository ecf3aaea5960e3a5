"""Who is missing, for the error of a wait: the server is asked shortly before the time is over.

Not after it: then the ranks leave one after the other, barriers empty, and the error would come late. A
snapshot of thousands of ranks costs the server a tenth of a second, and where one rank is missing, all
others time out together. So only a few of them ask, and none asks often; and a short wait is a poll, which
does not ask at all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from rallypoint.errors import StoreTimeoutError
from rallypoint.rollcall.identity import Identity, Role
from rallypoint.rollcall.judgement import judge
from rallypoint.rollcall.roll import Gathering, RankState, Roll
from rallypoint.rollcall.snapshot import Question
from rallypoint.rollcall.torch_keys import owing_rank
from rallypoint.rollcall.words import headline, missing_text, owed_text, unseen_text
from rallypoint.stores.client.connection import Connection
from rallypoint.stores.client.deadline import Deadline
from rallypoint.stores.client.look import look, look_through
from rallypoint.stores.client.patience import within
from rallypoint.stores.client.pool import ConnectionPool
from rallypoint.wire.encoding import counted_request, request
from rallypoint.wire.opcodes import READY, Op

ASKERS: Final = 16
"""At most so many ranks of a job ask when all of them time out."""

HEAD: Final = "rallypoint/head"
"""The key at which a launcher says where the store itself is, `[host, port]`, for ranks behind a relay."""

_SHORTEST_WAIT: Final = 1.0
_AHEAD_SECONDS: Final = 2.0
_AHEAD_PER_RANK: Final = 0.00025  # a snapshot of many takes its time to be made, sent and understood
_AHEAD_SHARE: Final = 0.25  # of the whole time, at most
_LEAST_PAUSE: Final = 0.5
_FAILED_PAUSE: Final = 10.0  # after a question to which there was no answer
_PAUSE_PER_RANK: Final = 0.002  # so that those who ask again and again take some percent of the server's time


@dataclass(frozen=True)
class Absence:
    """Who is missing, as a part of a message, and by their ranks."""

    text: str = ""
    ranks: tuple[int, ...] = ()

    def named_in(self, error: StoreTimeoutError) -> StoreTimeoutError:
        """The error, with names; the same one if there are none."""
        if not self.text:
            return error
        message = f"{error.message}; {self.text}"
        return StoreTimeoutError(message, hint=error.hint, keys=error.keys, missing=self.ranks)


NOT_KNOWN: Final = Absence()


# What a roll says


def of_keys(roll: Roll | None, keys: Iterable[str]) -> Absence:
    """Who has not joined; and of a key that somebody who is here should have written, who that is."""
    if roll is None or roll.expected < 0:
        return NOT_KNOWN
    missing = tuple(each.rank for each in roll.missing)
    wanted = {key for key in keys if owing_rank(key) not in missing}
    owed = next((owed_text(roll, each) for each in roll.awaited if each.key in wanted and each.owed), "")
    return Absence("; ".join(filter(None, (_summary(roll), owed))), missing)


def of_barrier(roll: Roll | None, key: str, size: int) -> Absence:
    """Who has not come to a barrier, and who has not joined at all."""
    if roll is None:
        return NOT_KNOWN
    found = next((each for each in roll.gatherings if (each.key, each.size) == (key, size)), None)
    joined = of_keys(roll, ())
    if found is None:
        return joined
    arrived = f"{found.arrived:,} of {size:,} have arrived"
    if found.missing is None:
        return replace(joined, text="; ".join(filter(None, (arrived, joined.text))))
    there = f"{arrived}; missing there: {_machines_of(roll, found)}"
    more = "" if found.missing == joined.ranks else f"; {joined.text}"
    return Absence(there + more, found.missing)


def of_workers(roll: Roll | None, size: int) -> Absence:
    """Which of so many workers have not come."""
    if roll is None or roll.expected != size:  # they may be others than the ranks of the job
        return NOT_KNOWN
    return Absence(absent_text(roll), tuple(each.rank for each in roll.missing))


def absent_text(roll: Roll) -> str:
    """Who is missing, and of whom nobody knows whether they are here; nothing: all are here."""
    named = {"missing": missing_text(roll), "not seen": unseen_text(roll)}
    return "; ".join(f"{word}: {text}" for word, text in named.items() if text)


def _summary(roll: Roll) -> str:
    return headline(replace(roll, awaited=()))


def _machines_of(roll: Roll, found: Gathering) -> str:
    """Those who are missing at a barrier with their machines, whether they have joined or not."""
    missing = set(found.missing or ())
    late = tuple(replace(each, state=RankState.LATE) for each in roll.ranks if each.rank in missing)
    return missing_text(replace(roll, ranks=late))


# Whether to ask, and when


def is_asker(who: Identity) -> bool:
    """Whether a client is among those who ask. Launchers and tools are not: their waits are polls."""
    if who.role in (Role.AGENT, Role.TOOL):
        return False
    if who.rank < 0:
        return who.world_size <= ASKERS or random.random() < ASKERS / who.world_size
    if who.world_size < 0:
        return who.rank < ASKERS
    return who.rank % max(1, -(-who.world_size // ASKERS)) == 0


class Inquiry:
    """The questions of one store, over its connections, to the server at an address."""

    def __init__(self, pool: ConnectionPool, server: str, who: Identity) -> None:
        self._pool = pool
        self._server = server
        self._ahead = _AHEAD_SECONDS + _AHEAD_PER_RANK * max(who.world_size, 0)
        self._pause = Deadline(0.0)
        self.is_asker = is_asker(who)

    def moment(self, deadline: Deadline) -> Deadline:
        """When to ask about a wait that has so long."""
        return Deadline(deadline.remaining - min(self._ahead, _AHEAD_SHARE * deadline.seconds))

    def ask(self, deadline: Deadline) -> Roll | None:
        """Who is here; None if that is not told by the deadline, or was asked a moment ago."""
        if deadline.seconds < _SHORTEST_WAIT or not self._pause.passed:
            return None
        self._pause = Deadline(_FAILED_PAUSE)
        try:
            roll = within(deadline.remaining, lambda: self._look(deadline))
        except Exception:  # whatever goes wrong: the error of the wait is the one to be told
            return None
        if roll is not None:
            self._pause = Deadline(max(_LEAST_PAUSE, _PAUSE_PER_RANK * (len(roll.ranks) + roll.unknown)))
        return roll

    def _look(self, deadline: Deadline) -> Roll | None:
        """The roll of the whole job; None behind a relay of which nobody says whose it is."""
        with self._pool.lend(deadline) as connection:
            snapshot = look_through(connection, self._server, Question(), deadline)
            if snapshot.kind != "relay":
                return judge(snapshot)
            head = _read_head(connection, deadline)
        return judge(look(*head, Question(), deadline)) if head is not None else None


def _read_head(connection: Connection, deadline: Deadline) -> tuple[str, int] | None:
    key = b"/" + HEAD.encode()
    connection.send(counted_request(Op.CHECK, [key]), deadline)
    is_told = connection.read(1, deadline) == READY
    if is_told:
        connection.send(request(Op.GET, key), deadline)
        host, port = json.loads(connection.read_blob(deadline))
    connection.finish()
    return (str(host), int(port)) if is_told else None
