"""Which machines take part in a job's current round, and which wait for the next: pure rules, no I/O.

A round is open until it is complete: every machine that may take part has come, or enough have and no
other came for a while. Then its members have ranks, and one of them, the keeper, starts a store for
this round alone, so that no try reads the keys of the one before. A member that has to start
again leaves, and waits; the others notice, and leave too; when the last has left, the waiting machines are
the next round. A member that is lost (it gave no sign of life) is noted, so that the others start again.

A roster never changes. Each rule returns a new one, or the same one where there is nothing to do. It is
written to the store by compare-and-set, so that rules only ever see the latest.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from rallypoint.codec import from_text, to_text
from rallypoint.errors import MeetingClosedError, RallypointError, UsageError
from rallypoint.text import LONGEST_SENTENCE, shown

_GONE_KEPT = 16
_TOLD_KEPT = 64


@dataclass(frozen=True)
class Member:
    """A machine's agent. `id` is unique among all processes; `rank` is what it asked for, or -1."""

    id: str
    host: str
    pid: int
    rank: int = -1
    keeps: bool = False
    """Whether it runs on the machine that the endpoint names, and so keeps the stores."""

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


@dataclass(frozen=True)
class Roster:
    """The state of a job's meeting."""

    version: int = 0
    """Counts changes. `Meeting` sets it; the rules do not look at it."""
    turn: int = 0
    """Counts the changes that others wait for."""
    round: int = 0
    least: int = -1
    """How many machines a round takes, as the last one that joined was told; -1: none has joined yet. For
    tools that look from outside: the rules go by what each machine itself was told."""
    most: int = -1
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
    """What machines said of failures of their own, first come first."""

    # Questions

    def rank_of(self, member_id: str) -> int | None:
        """The machine's rank, once the round is complete; None if it takes no part, or not any more."""
        if not any(each.id == member_id for each in self.present):
            return None
        return next((rank for rank, each in enumerate(self.members) if each.id == member_id), None)

    def knows(self, member_id: str) -> bool:
        """Whether a machine takes part or waits."""
        return any(each.id == member_id for each in self.everybody)

    @property
    def everybody(self) -> tuple[Member, ...]:
        return self.present + self.waiting

    @property
    def keeper(self) -> Member | None:
        """The machine that starts the round's store: one that the endpoint names, else rank 0."""
        return next((each for each in self.members if each.keeps), self.members[0] if self.members else None)

    @property
    def is_kept(self) -> bool:
        """Whether the round has a store, or its keeper is there to start it."""
        return bool(self.store) or self.keeper in self.present

    def wants_restart(self, size: Size) -> bool:
        """Whether the members of a complete round should start again: one is lost, or another may come in."""
        wanted = bool(self.lost) or (bool(self.waiting) and len(self.present) < size.most)
        return self.complete and not self.closed and wanted  # none could start again when it is closed

    # Rules

    def join(self, member: Member, size: Size) -> Roster:
        """Take part, or wait for the next round. UsageError if the rank cannot be had."""
        if self.knows(member.id):
            return self
        if self.closed:
            raise closed_error(self.closed)
        self._check_rank(member, size)
        waiting = (*self.waiting, member)
        return replace(self, least=size.least, most=size.most, waiting=waiting)._settle(size)

    def fill(self) -> Roster:
        """Complete the round with the machines that are present: they have ranks from now on."""
        if self.complete:
            return self
        ranked = _ranked(self.present)
        gone = (*self.gone, *self.lost)[-_GONE_KEPT:]
        return replace(self, complete=True, present=ranked, members=ranked, lost=(), gone=gone)

    def leave(self, member_id: str, size: Size) -> Roster:
        """Take no part any more. The last to leave a complete round opens the next, for those that wait."""
        return self._without({member_id}, size)

    def lose(self, member_ids: Set[str], size: Size) -> Roster:
        """Note that these members gave no sign of life, and go on without them."""
        lost = tuple(each for each in self.present if each.id in member_ids)
        return replace(self, lost=(*self.lost, *lost))._without(member_ids, size)

    def publish(self, store: str) -> Roster:
        """Say where the round's store listens."""
        return self if self.store == store else replace(self, store=store)

    def tell(self, text: str) -> Roster:
        """Say what failed on a machine, for the others to know."""
        return replace(self, told=(*self.told, text)[:_TOLD_KEPT])

    def close(self, reason: str) -> Roster:
        """Let no machine join any more; those that take part go on."""
        return self if self.closed else replace(self, closed=reason)

    def reopen(self) -> Roster:
        """Be open for another job with the same id, once all of this one have left."""
        return Roster(round=self.round + 1) if self.closed and not self.everybody else self

    def _check_rank(self, member: Member, size: Size) -> None:
        if member.rank >= size.most:
            raise UsageError(
                f"machine rank {member.rank} does not exist among {size.most} machines",
                hint="ranks of machines go from 0 to one less than --nnodes",
            )
        rival = next((each for each in self.everybody if _rivals(each, member)), None)
        # On the same host it is an agent started again, which waits until its predecessor counts as lost.
        if rival is not None and rival.host != member.host:
            raise UsageError(
                f"{shown(member.host)} (process {member.pid}) asks for a rank that is taken: {rival}",
                hint="give every machine a rank of its own (rank= in --rdzv-conf), or none to any",
            )

    def _without(self, member_ids: Set[str], size: Size) -> Roster:
        if not any(map(self.knows, member_ids)):
            return self
        left = replace(
            self,
            present=tuple(each for each in self.present if each.id not in member_ids),
            waiting=tuple(each for each in self.waiting if each.id not in member_ids),
        )
        return left._settle(size)

    def _settle(self, size: Size) -> Roster:
        """Open the next round if all have left this one, let in those that wait, complete a full one."""
        if self.complete:
            if self.present:
                return self
            fresh = Roster(
                round=self.round + 1,
                least=self.least,
                most=self.most,
                closed=self.closed,
                waiting=self.waiting,
                gone=(*self.gone, *self.lost)[-_GONE_KEPT:],
                told=self.told,
            )
            return fresh._settle(size)
        if self.closed:
            return self
        present: list[Member] = list(self.present)
        waiting: list[Member] = []
        for each in self.waiting:
            free = len(present) < size.most and not any(_rivals(each, other) for other in present)
            (present if free else waiting).append(each)
        settled = replace(self, present=tuple(present), waiting=tuple(waiting))
        return settled.fill() if len(present) == size.most else settled

    def turned_from(self, before: Roster, size: Size) -> bool:
        """Whether others wait for what has changed since `before`.

        No machine waits for one more to come or go: with thousands of them, each would wake all.
        """
        names = ("round", "complete", "closed", "store", "lost", "told", "is_kept")
        changed = any(getattr(self, name) != getattr(before, name) for name in names)
        return changed or self.wants_restart(size) != before.wants_restart(size)

    # On the wire: text that anyone may read, and that nothing is executed of

    def to_json(self) -> str:
        return to_text(self)

    @staticmethod
    def from_json(text: str | bytes) -> Roster:
        """Raises RallypointError for what is no roster: another program uses the same keys."""
        try:
            return from_text(Roster, text)
        except ValueError as error:
            raise RallypointError(
                f"the meeting's state cannot be read: {error}",
                hint="do all machines run the same version of Rallypoint?",
            ) from error


def round_name(number: int, members: tuple[Member, ...]) -> str:
    """A name that this round has, and no other one, also not of another job with the same id."""
    return f"{number}-{members[0].id}"


def closed_error(reason: str) -> MeetingClosedError:
    """The error for a machine that wants to join a meeting that is closed."""
    return MeetingClosedError(
        f"the job's meeting is closed: {shown(reason, LONGEST_SENTENCE)}",
        hint="a job that has ended does not come back: start it with another --rdzv-id",
    )


def _ranked(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """In the order of ranks: as asked for, then those that keep the stores, then as they came."""
    return tuple(sorted(members, key=lambda each: (each.rank < 0, each.rank, not each.keeps)))


def _rivals(one: Member, other: Member) -> bool:
    """Whether two members ask for the same rank."""
    return one.rank >= 0 and one.rank == other.rank
