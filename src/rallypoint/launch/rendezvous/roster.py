"""Which machines take part in a job's current round, and which wait for the next: pure rules, no I/O.

A round is open until it is complete: every machine that may take part has come, or enough have and no
other came for a while. Then its members have ranks, and one of them, the keeper, starts a store for
this round alone, so that no try reads the keys of the one before. A member that has to start
again leaves, and waits; the others notice, and leave too; when the last has left, the waiting machines are
the next round. A member that is lost (it gave no sign of life) is noted, so that the others start again.

A roster never changes. Each rule returns a new one, or the same one where there is nothing to do. It is
written to the store by compare-and-set, so that rules only ever see the latest. What every machine asks for
(`RosterRequest`) is taken in many at a time: with n machines, one after the other would take n times n steps.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from rallypoint.codec import from_text
from rallypoint.errors import MeetingClosedError, RallypointError, UsageError
from rallypoint.text import LONGEST_SENTENCE, shown

_T = TypeVar("_T")

_GONE_KEPT = 16
_SICK_KEPT = 16
_TOLD_KEPT = 64
_ENDINGS_KEPT = 8


@dataclass(frozen=True)
class Member:
    """A machine's agent. `id` is unique among all processes; `rank` is what it asked for, or -1."""

    id: str
    host: str
    pid: int
    rank: int = -1
    keeps: bool = False
    """Whether it runs on the machine that the endpoint names, and so keeps the stores."""
    visit: int = 0
    """How often it has come before: what it asked for on an earlier visit does not count any more."""

    def __str__(self) -> str:
        asked = f"machine rank {self.rank} on " if self.rank >= 0 else ""
        return f"{asked}{shown(self.host)} (process {self.pid})"


@dataclass(frozen=True)
class Size:
    """How many machines a round takes, at least and at most."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


Settings = tuple[tuple[str, str], ...]
"""Options and their values that all machines of a job must have alike."""


@dataclass(frozen=True)
class Ending:
    """Why one machine's part in a round has ended: what failed there first."""

    text: str
    """One line, for people."""
    time: float = 0.0
    """When, by the clock of the machine with the store."""
    follows: bool = False
    """Whether it is the consequence of a failure elsewhere: a lost connection."""
    detail: str = ""
    """The whole report, for launchers."""


@dataclass(frozen=True)
class RosterRequest:
    """What a machine asks for: to be in the next round, to leave, to close the meeting."""

    come: Member | None = None
    """Who wants to take part, and leaves the round that it is in."""
    leave: Member | None = None
    lost: bool = False
    """Whether the one that leaves is missed, so that the others are to start again."""
    sick: str = ""
    """Why the one that leaves is not fit to take part."""
    close: str = ""
    """Why nobody is to join any more."""
    ending: Ending | None = None
    """Why the machine that comes or leaves has ended its part in the round, if something failed there."""
    least: int = -1
    """How many machines a round takes, as the one that comes was told."""
    most: int = -1
    spares: int = 0
    settings: Settings = ()


def read_requests(text: bytes) -> tuple[RosterRequest, ...]:
    """The requests of a desk; what is none is left out, since any client can write there."""
    return tuple(request for request in map(_read_request, text.splitlines()) if request is not None)


def _read_request(text: bytes) -> RosterRequest | None:
    try:
        return from_text(RosterRequest, text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Sick:
    """A machine that is not fit to take part, and why."""

    host: str
    pid: int
    reason: str

    def __str__(self) -> str:
        return f"{shown(self.host)} (process {self.pid}) is not fit: {shown(self.reason, LONGEST_SENTENCE)}"


Refusals = dict[Member, RallypointError]
"""Machines that may not join, and why."""


@dataclass(frozen=True)
class Roster:
    """The state of a job's meeting."""

    round: int = 0
    least: int = -1
    """How many machines a round takes, as the last one that joined was told; -1: none has joined yet. For
    tools that look from outside: the rules go by what each machine itself was told."""
    most: int = -1
    spares: int = 0
    """How many more are to wait, to take the place of one that is lost."""
    settings: Settings = ()
    """Those of all machines that are here."""
    has_run: bool = False
    """Whether an earlier round of this job was complete."""
    complete: bool = False
    closed: str = ""
    """Why no machine may join any more; empty while the meeting is open."""
    present: tuple[Member, ...] = ()
    """The machines that take part, and have not left."""
    members: tuple[Member, ...] = ()
    """The machines of the round when it became complete, in the order of ranks, also those that have left."""
    waiting: tuple[Member, ...] = ()
    lost: tuple[Member, ...] = ()
    """Members of this round that gave no sign of life."""
    store: str = ""
    """Where the round's own store listens, HOST:PORT, once its keeper has started it."""
    gone: tuple[Member, ...] = ()
    """Members that earlier rounds have lost, the last few: to be named if they are missed."""
    told: tuple[str, ...] = ()
    """What machines said of failures of their own, and why some were refused; first come first."""
    endings: tuple[Ending, ...] = ()
    """Why machines have left this round, the first failure first: a consequence is never before its cause,
    whatever the clocks show."""
    ended: Ending | None = None
    """The first failure of the round before; None: it ended because a machine was to come in."""
    sick: tuple[Sick, ...] = ()
    """The last few that were not fit to take part."""
    desk: int = 0
    """The number of the key at which machines write requests. Those that are late write at the one before."""
    read: int = 0
    """How many bytes of it have been taken in."""
    read_before: int = 0
    """How many of the one before."""
    folded: int = 0
    """The number of the last request of which it is sure that it has been taken in."""

    # Questions

    def rank_of(self, member_id: str) -> int | None:
        """The machine's rank, once the round is complete; None if it takes no part, or not any more."""
        if not any(each.id == member_id for each in self.present):
            return None
        return next((rank for rank, each in enumerate(self.members) if each.id == member_id), None)

    @property
    def everybody(self) -> tuple[Member, ...]:
        return self.present + self.waiting

    @property
    def name(self) -> str:
        """A name that a complete round has, and no other one, also not of another job with the same id."""
        return f"{self.round}-{self.members[0].id}" if self.members else ""

    @property
    def keeper(self) -> Member | None:
        """The machine that starts the round's store: one that the endpoint names, else rank 0."""
        return next((each for each in self.members if each.keeps), self.members[0] if self.members else None)

    def wants_restart(self, size: Size) -> bool:
        """Whether the members of a complete round should start again: one is lost, or another may come in."""
        wanted = bool(self.lost) or (bool(self.waiting) and len(self.present) < size.most)
        return self.complete and not self.closed and wanted  # none could start again when it is closed

    # Rules

    def apply(self, requests: Sequence[RosterRequest], size: Size) -> tuple[Roster, Refusals]:
        """Do what machines have asked for, in its order; who may not join is refused."""
        editor = _RosterEditor(self, size)
        for request in requests:
            editor.apply(request)
        return editor.settled(), editor.refused

    def at_next_desk(self) -> Roster:
        """The same, but machines are to write at another desk from now on."""
        return replace(self, desk=self.desk + 1, read=0, read_before=self.read)

    def fill(self) -> Roster:
        """Complete the round with the machines that are present: they have ranks from now on."""
        if self.complete:
            return self
        ranked = _ranked(self.present)
        gone = (*self.gone, *self.lost)[-_GONE_KEPT:]
        return replace(self, complete=True, present=ranked, members=ranked, lost=(), gone=gone)

    def lose(self, silent: Set[Member], size: Size, ending: Ending | None = None) -> Roster:
        """Note that these gave no sign of life, and go on without them. Who came again stays."""
        if silent.isdisjoint(self.everybody):
            return self
        lost = tuple(each for each in self.present if each in silent)
        left = replace(
            self._with_ending(ending) if lost else self,
            lost=(*self.lost, *lost),
            present=tuple(each for each in self.present if each not in silent),
            waiting=tuple(each for each in self.waiting if each not in silent),
        )
        return left._settle(size)

    def _with_ending(self, ending: Ending | None) -> Roster:
        """Note why a machine of this round has left it. Only the likeliest causes are kept."""
        if ending is None or not self.complete:
            return self
        endings = sorted((*self.endings, ending), key=lambda each: (each.follows, each.time, each.text))
        told = self if ending.follows else self._with_told(ending.text)
        return replace(told, endings=tuple(endings[:_ENDINGS_KEPT]))

    def _with_told(self, text: str) -> Roster:
        return replace(self, told=(*self.told, text)[:_TOLD_KEPT])

    def publish(self, store: str) -> Roster:
        """Say where the round's store listens."""
        return self if self.store == store else replace(self, store=store)

    def reopen(self) -> Roster:
        """Be open for another job with the same id, once all of this one have left."""
        return self._after(Roster(round=self.round + 1)) if self.closed and not self.everybody else self

    def _settle(self, size: Size) -> Roster:
        """Open the next round if all have left this one, let in those that wait, complete a full one."""
        if self.complete:
            if self.present:
                return self
            fresh = Roster(
                round=self.round + 1,
                least=self.least,
                most=self.most,
                spares=self.spares,
                settings=self.settings,
                has_run=True,
                closed=self.closed,
                waiting=self._by_seniority(),
                gone=(*self.gone, *self.lost)[-_GONE_KEPT:],
                told=self.told,
                ended=self.endings[0] if self.endings else None,
                sick=self.sick,
            )
            return self._after(fresh)._settle(size)
        if self.closed:
            return self
        present: list[Member] = list(self.present)
        waiting: list[Member] = []
        taken = {each.rank for each in present if each.rank >= 0}
        for each in self.waiting:
            free = len(present) < size.most and each.rank not in taken
            (present if free else waiting).append(each)
            if free and each.rank >= 0:
                taken.add(each.rank)
        settled = replace(self, present=tuple(present), waiting=tuple(waiting))
        return settled.fill() if len(present) == size.most else settled

    def _by_seniority(self) -> tuple[Member, ...]:
        """Those that wait: first the members of this round, by rank, so that no spare takes their place."""
        ranks = {each.id: rank for rank, each in enumerate(self.members)}
        return tuple(sorted(self.waiting, key=lambda each: ranks.get(each.id, len(ranks))))

    def _after(self, fresh: Roster) -> Roster:
        """A roster of the next round, which goes on with what has been read."""
        read = replace(fresh, desk=self.desk, read=self.read, folded=self.folded)
        return read.at_next_desk()


def closed_error(reason: str) -> MeetingClosedError:
    """The error for a machine that wants to join a meeting that is closed."""
    return MeetingClosedError(
        f"the job's meeting is closed: {shown(reason, LONGEST_SENTENCE)}",
        hint="a job that has ended does not come back: start it with another --rdzv-id",
    )


def different_settings(member: Member, name: str, value: str, other: object, theirs: str) -> UsageError:
    """The error for machines that were not started with the same value of a setting."""
    name = shown(name)
    return UsageError(
        f"machines were started with different settings: {member} has {name}={shown(value)}, and {other} has "
        f"{name}={shown(theirs)}",
        hint=f"start every machine with the same {name}",
    )


def read_value(kind: type[_T], text: str | bytes) -> _T:
    """A value in the meeting place; RallypointError if it is another: anybody can write there."""
    try:
        return from_text(kind, text)
    except ValueError as error:
        raise unreadable(str(error)) from error


def unreadable(reason: str) -> RallypointError:
    """The error for a text in the meeting place that is not what it should be."""
    return RallypointError(
        f"the meeting's state cannot be read: {reason}",
        hint="do all machines run the same version of Rallypoint?",
    )


def _ranked(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """In the order of ranks: as asked for, then those that keep the stores, then as they came."""
    return tuple(sorted(members, key=lambda each: (each.rank < 0, each.rank, not each.keeps)))


class _RosterEditor:
    """A roster whose machines are found by their id, while requests are taken in."""

    def __init__(self, roster: Roster, size: Size) -> None:
        self._roster = roster
        self._size = size
        self._present = {each.id: each for each in roster.present}
        self._waiting = {each.id: each for each in roster.waiting}
        self._ranked: dict[int, dict[str, Member]] = {}
        self.refused: Refusals = {}
        for each in roster.everybody:
            self._note_rank(each)

    def apply(self, request: RosterRequest) -> None:
        if request.come is not None:
            self._join(request.come, request)
        if request.leave is not None:
            self._leave(request.leave, request)
        if request.close and not self._roster.closed:
            self._roster = replace(self._roster, closed=request.close)

    def settled(self) -> Roster:
        """The roster after all requests."""
        present, waiting = tuple(self._present.values()), tuple(self._waiting.values())
        return replace(self._roster, present=present, waiting=waiting)._settle(self._size)

    def _join(self, member: Member, request: RosterRequest) -> None:
        known = self._present.get(member.id) or self._waiting.get(member.id)
        if known is not None and known.visit >= member.visit:
            return
        self._remove(member, request.ending)
        error: RallypointError | None = closed_error(self._roster.closed) if self._roster.closed else None
        if error is None and (error := self._settings_error(member, request.settings)):
            self._refuse_unfinished(error)
        error = error or self._rank_error(member)
        if error is not None:
            self.refused[member] = error
            return
        settings = self._roster.settings if self._present or self._waiting else request.settings
        self._roster = replace(
            self._roster, least=request.least, most=request.most, spares=request.spares, settings=settings
        )
        self._waiting[member.id] = member
        self._note_rank(member)

    def _leave(self, member: Member, request: RosterRequest) -> None:
        present = self._present.get(member.id)
        self._remove(member, request.ending)
        if request.lost and present is not None and member.id not in self._present:
            self._roster = replace(self._roster, lost=(*self._roster.lost, present))
        if request.sick:
            sick = (*self._roster.sick, Sick(member.host, member.pid, request.sick))
            self._roster = replace(self._roster, sick=sick[-_SICK_KEPT:])

    def _remove(self, member: Member, ending: Ending | None) -> None:
        if member.id in self._present and self._present[member.id].visit <= member.visit:
            self._roster = self._roster._with_ending(ending)
        for group in (self._present, self._waiting):
            if member.id in group and group[member.id].visit <= member.visit:
                self._ranked.get(group.pop(member.id).rank, {}).pop(member.id, None)

    def _note_rank(self, member: Member) -> None:
        if member.rank >= 0:
            self._ranked.setdefault(member.rank, {})[member.id] = member

    def _settings_error(self, member: Member, settings: Settings) -> UsageError | None:
        """The first setting that is not that of the machines that are here."""
        here = next(chain(self._present.values(), self._waiting.values()), None)
        theirs = dict(self._roster.settings)
        different = [pair for pair in settings if theirs.get(*pair) != pair[1]]
        if here is None or not different:
            return None
        name, value = different[0]
        return different_settings(member, name, value, here, theirs[name])

    def _refuse_unfinished(self, error: UsageError) -> None:
        """Refuse all machines of a job that has not run yet. One that runs is not ended by a newcomer.

        Those that come later are told why they may wait for nobody.
        """
        if not (self._roster.complete or self._roster.has_run):
            self._roster = self._roster._with_told(error.message)
            everybody = (*self._present.values(), *self._waiting.values())
            for each in everybody:
                self.refused[each] = error
                self._remove(each, None)

    def _rank_error(self, member: Member) -> UsageError | None:
        if member.rank >= self._size.most:
            return UsageError(
                f"machine rank {member.rank} does not exist among {self._size.most} machines",
                hint="ranks of machines go from 0 to one less than --nnodes",
            )
        rivals = self._ranked.get(member.rank, {}).values()
        # On the same host it is an agent started again, which waits until its predecessor counts as lost.
        rival = next((each for each in rivals if each.host != member.host), None)
        if rival is None:
            return None
        return UsageError(
            f"{shown(member.host)} (process {member.pid}) asks for a rank that is taken: {rival}",
            hint="give every machine a rank of its own (rank= in --rdzv-conf), or none to any",
        )
