"""The report of `rallypoint status` on a store, as lines and as JSON. It prints nothing itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from rallypoint.client.absence import read_head
from rallypoint.client.look import check_name, look, look_at_round, look_through
from rallypoint.codec import to_json
from rallypoint.errors import NotOursError, RallypointError
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.stacks.grouping import NO_WORK, Work, work_of
from rallypoint.launch.stacks.words import standstill
from rallypoint.store.connect.connecting import connect, first_to_answer
from rallypoint.store.connect.connection import Connection, who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import format_address
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.roll import Roll
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.watch.status import stacks
from rallypoint.watch.status import summary as rolls
from rallypoint.watch.status import torch_store as foreign

_MOST_KEYS: Final = 100_000
_CONNECT_SECONDS: Final = 3.0
_ANSWER_SECONDS: Final = 20.0


@dataclass(frozen=True)
class Asked:
    """The store to ask, and what to show; at most one of `waits`, `keys`, `rank` and `stacks`."""

    places: Sequence[Endpoint]
    waits: bool = False
    keys: bool = False
    search: str = ""
    rank: int | None = None
    name: str = ""
    """Which of several stores is meant that are there."""
    stacks: bool = False
    """Whether to tell below the summary what the ranks do."""


def report_on(asked: Asked) -> StatusReport:
    """Ask the store. Raises NotOursError if it cannot tell; ConnectError, StoreTimeoutError and the like."""
    return first_to_answer(asked.places, lambda host, port: _report_from(Endpoint(host, port), asked))


def _report_from(endpoint: Endpoint, asked: Asked) -> StatusReport:
    question = Question(keys=_MOST_KEYS if asked.keys else 0, search=asked.search)
    try:
        # A server that is not there is soon found out; one that is there may have much to tell.
        patience, who = Deadline(_CONNECT_SECONDS), who_am_i(Role.TOOL)
        with closing(connect(*endpoint, patience, who, to_look=True)) as connection:
            snapshot = look_through(connection, str(endpoint), question, Deadline(_ANSWER_SECONDS))
            head = _head_of(connection) if snapshot.kind == "relay" else ""
        if asked.name:
            check_name(snapshot, asked.name, str(endpoint))
            snapshot = look(*endpoint, question, Deadline(_ANSWER_SECONDS), asked.name)
        else:
            snapshot = look_at_round(snapshot, *endpoint, question, Deadline(_ANSWER_SECONDS))
    except NotOursError:
        if asked.waits or asked.stacks or asked.rank is not None:
            raise
        return ForeignReport(asked, foreign.examine(*endpoint, _CONNECT_SECONDS))
    return RollReport(asked, snapshot, judge(snapshot), head)


def _head_of(relay: Connection) -> str:
    """Where the server of a relay is; empty if no launcher has said so."""
    try:
        head = read_head(relay, Deadline(_CONNECT_SECONDS))
    except (RallypointError, ValueError, TypeError):  # any client can write any key
        return ""
    return format_address(*head[:2]) if head is not None else ""


@dataclass(frozen=True)
class RollReport:
    """Of a server or relay of ours."""

    asked: Asked
    snapshot: Snapshot
    roll: Roll
    head: str = ""
    """Of a relay: where its server is, if a launcher has said so."""

    @property
    def is_good(self) -> bool:
        """Whether no rank is missing, as far as that is known, and the store answers."""
        roll, rank = self.roll, self.asked.rank
        if roll.trouble:
            return False
        if rank is not None:
            return any(each.rank == rank and each.is_here for each in roll.ranks)
        return not roll.missing and roll.expected <= roll.joined + roll.unknown

    @property
    def essence(self) -> Hashable:
        """What of it is news when it changes: all but the time that goes by."""
        roll = self.roll
        return (
            roll.expected,
            roll.unknown,
            tuple((each.rank, each.state, each.host) for each in roll.ranks),
            tuple((each.key, each.ranks, each.others) for each in roll.awaited),
            tuple((each.key, each.size, each.arrived) for each in roll.gatherings),
            roll.meetings,
            bool(roll.trouble),
            self.snapshot.replication and (self.snapshot.replication.term, self.snapshot.replication.leader),
            self.snapshot.error_count,
            self.snapshot.stall,
            self.snapshot.keys,
            bool(standstill(self.work)),
            stacks.essence(self.work, self.asked.rank)
            if self.asked.stacks or self.asked.rank is not None
            else None,
        )

    @cached_property
    def work(self) -> Work:
        """What the ranks do, unless keys or waits alone are asked for."""
        return NO_WORK if self.asked.waits or self.asked.keys else work_of(self.snapshot)

    def lines(self, width: int | None = None) -> list[str]:
        if self.asked.waits:
            return rolls.all_waits(self.roll)
        if self.asked.keys:
            return rolls.all_keys(self.snapshot)
        if self.asked.rank is not None:
            return [
                *rolls.one_rank(self.snapshot, self.roll, self.asked.rank),
                *stacks.rank_lines(self.work, self.asked.rank),
            ]
        return rolls.summary(self.snapshot, self.roll, width, head=self.head, work=self.work)

    @property
    def below(self) -> list[str]:
        """What stands below the summary and is not cut: what a launcher says of a job that stands still, and
        what the ranks do.
        """
        is_summary = not self.asked.waits and not self.asked.keys and self.asked.rank is None
        told = rolls.stall_lines(self.snapshot.stall) if is_summary else []
        return [*told, "", *stacks.all_lines(self.work, with_summary=not told)] if self.asked.stacks else told

    def content(self) -> dict[str, Any]:
        """For JSON."""
        roll = self.roll
        judged = {
            "headline": rolls.first_line(roll, self.work),
            "joined": roll.joined,
            "missing": [each.rank for each in roll.missing],
            "unseen": [each.rank for each in roll.unseen],
            **to_json(roll),
        }
        told: dict[str, Any] = {}
        if self.asked.stacks:
            told = {"work": stacks.all_content(self.work)}
        elif self.asked.rank is not None:
            told = {"activity": stacks.rank_content(self.work, self.asked.rank)}
        return {"roll": judged, "head": self.head, "snapshot": to_json(self.snapshot, sparse=True), **told}


@dataclass(frozen=True)
class ForeignReport:
    """Of torch's own server: it is not known which ranks are expected."""

    asked: Asked
    store: foreign.ForeignStore

    @property
    def is_good(self) -> bool:
        return True

    @property
    def essence(self) -> Hashable:
        return (self.store.key_count, self.store.keys, self.store.workers, tuple(self.store.writers.items()))

    def lines(self, width: int | None = None) -> list[str]:
        if self.asked.keys:
            return list(foreign.describe_keys(self.store, self.asked.search))
        return [rolls.cut(line, width) for line in foreign.describe(self.store)]

    @property
    def below(self) -> list[str]:
        return []

    def content(self) -> dict[str, Any]:
        return {"torch": to_json(self.store)}


StatusReport = RollReport | ForeignReport
