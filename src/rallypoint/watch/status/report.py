"""The report of `rallypoint status` on a store, as lines and as JSON. It prints nothing itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

from rallypoint.client.snapshots import (
    check_name,
    fetch_round_snapshot,
    fetch_snapshot,
    fetch_snapshot_over,
    read_head,
)
from rallypoint.codec import to_json
from rallypoint.errors import NotOursError, RallypointError
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.stacks.frames import fold
from rallypoint.launch.stacks.progress import NO_ACTIVITY, JobActivity, activity_of
from rallypoint.launch.stacks.words import standstill, summary_lines
from rallypoint.store.connect.connecting import connect, first_to_answer
from rallypoint.store.connect.connection import Connection, who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import format_address
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.roll import Roll
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.watch.status import torch_store as foreign
from rallypoint.watch.status import views

_MOST_KEYS: Final = 100_000
_CONNECT_SECONDS: Final = 3.0
_ANSWER_SECONDS: Final = 20.0


@dataclass(frozen=True)
class StatusRequest:
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

    @property
    def is_summary(self) -> bool:
        return not self.waits and not self.keys and self.rank is None


def report_on(request: StatusRequest) -> StatusReport:
    """Ask the store. Raises NotOursError if it cannot tell; ConnectError, StoreTimeoutError and the like."""
    return first_to_answer(request.places, lambda host, port: _report_from(Endpoint(host, port), request))


def _report_from(endpoint: Endpoint, request: StatusRequest) -> StatusReport:
    question = Question(keys=_MOST_KEYS if request.keys else 0, search=request.search)
    try:
        # A server that is not there is soon found out; one that is there may have much to tell.
        patience, who = Deadline(_CONNECT_SECONDS), who_am_i(Role.TOOL)
        with closing(connect(*endpoint, patience, who, snapshot_only=True)) as connection:
            snapshot = fetch_snapshot_over(connection, str(endpoint), question, Deadline(_ANSWER_SECONDS))
            head = _head_of(connection) if snapshot.kind == "relay" else ""
        if request.name:
            check_name(snapshot, request.name, str(endpoint))
            snapshot = fetch_snapshot(*endpoint, question, Deadline(_ANSWER_SECONDS), request.name)
        else:
            snapshot = fetch_round_snapshot(snapshot, *endpoint, question, Deadline(_ANSWER_SECONDS))
    except NotOursError:
        if request.waits or request.stacks or request.rank is not None:
            raise
        return ForeignReport(request, foreign.examine(*endpoint, _CONNECT_SECONDS))
    return RollReport(request, snapshot, judge(snapshot), head)


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

    request: StatusRequest
    snapshot: Snapshot
    roll: Roll
    head: str = ""
    """Of a relay: where its server is, if a launcher has said so."""

    @property
    def is_good(self) -> bool:
        """Whether no rank is missing, as far as that is known, and the store answers."""
        roll, rank = self.roll, self.request.rank
        if roll.trouble:
            return False
        if rank is not None:
            return any(each.rank == rank and each.is_here for each in roll.ranks)
        return not roll.missing and roll.expected <= roll.joined + roll.unknown

    @property
    def essence(self) -> Hashable:
        """What of it is news when it changes: all but the time that goes by."""
        roll, told, rank = self.roll, self.snapshot, self.request.rank
        activity = self.activity.member(rank) if rank is not None else None
        return (
            roll.expected,
            roll.unknown,
            tuple((each.rank, each.state, each.host) for each in roll.ranks),
            tuple((each.key, each.ranks, each.others) for each in roll.awaited),
            tuple((each.key, each.size, each.arrived) for each in roll.gatherings),
            roll.meetings,
            bool(roll.trouble),
            told.replication and (told.replication.term, told.replication.leader),
            told.error_count,
            told.stall,
            told.keys,
            bool(standstill(self.activity)),
            essence(self.activity) if self.request.stacks else None,
            activity and (fold(activity.stack), activity.ended),
        )

    @cached_property
    def activity(self) -> JobActivity:
        """What the ranks do, unless keys or waits alone are requested."""
        return NO_ACTIVITY if self.request.waits or self.request.keys else activity_of(self.snapshot)

    def lines(self, width: int | None = None) -> list[str]:
        rank = self.request.rank
        if self.request.waits:
            return views.all_waits(self.roll)
        if self.request.keys:
            return views.all_keys(self.snapshot)
        if rank is not None:
            told = views.one_rank(self.snapshot, self.roll, rank)
            return [*told, *views.rank_lines(self.activity, rank)]
        return views.summary(self.snapshot, self.roll, width, head=self.head, job=self.activity)

    @property
    def below(self) -> list[str]:
        """What stands below the summary and is not cut: what a launcher says of a job that stands still, and
        what the ranks do.
        """
        stall = views.stall_lines(self.snapshot.stall) if self.request.is_summary else []
        if not self.request.stacks:
            return stall
        return [*stall, "", *views.all_lines(self.activity, with_summary=not stall)]

    def content(self) -> dict[str, Any]:
        """For JSON."""
        roll, rank = self.roll, self.request.rank
        told: dict[str, Any] = {}
        if self.request.stacks:
            told = {"work": activity_content(self.activity)}
        elif rank is not None:
            told = {"activity": to_json(self.activity.member(rank))}
        return {
            "roll": {
                "headline": views.first_line(roll, self.activity),
                "joined": roll.joined,
                "missing": [each.rank for each in roll.missing],
                "unseen": [each.rank for each in roll.unseen],
                **to_json(roll),
            },
            "head": self.head,
            "snapshot": to_json(self.snapshot, sparse=True),
            **told,
        }


def essence(job: JobActivity) -> Hashable:
    """What of the ranks is news when it changes: who is where."""
    return tuple((tuple(each.ranks), each.doing, each.ended) for each in job.groups)


def activity_content(job: JobActivity) -> dict[str, Any]:
    """For JSON: the summary, and all groups, the odd ones first, with all that is told of their ranks."""
    return {
        "summary": summary_lines(job) if job.main is not None else [],
        "groups": [
            {
                "ranks": each.ranks,
                "hosts": list(dict.fromkeys(each.hosts.values())),
                "is_main": each is job.main,
                "still_seconds": each.still_seconds,
                "ended": each.ended,
                **to_json(each.doing),
                "members": [to_json(member) for member in each.members],
            }
            for each in job.groups
        ],
    }


@dataclass(frozen=True)
class ForeignReport:
    """Of torch's own server: it is not known which ranks are expected."""

    request: StatusRequest
    store: foreign.ForeignStore
    is_good: ClassVar[bool] = True
    below: ClassVar[list[str]] = []

    @property
    def essence(self) -> Hashable:
        return (self.store.key_count, self.store.keys, self.store.workers, tuple(self.store.writers.items()))

    def lines(self, width: int | None = None) -> list[str]:
        if self.request.keys:
            return list(foreign.describe_keys(self.store, self.request.search))
        return [views.cut(line, width) for line in foreign.describe(self.store)]

    def content(self) -> dict[str, Any]:
        return {"torch": to_json(self.store)}


StatusReport = RollReport | ForeignReport
