"""What a machine reads of a roster: the digest, the same for all, its assignment, and its arc of the ring.

A roster of n machines is n names long. If each machine read it, n machines would read n times n names. So
only the machine that changes it reads it. All others read the digest, which is as long for ten machines as
for ten thousand, and wait for a key of their own: whoever changes the roster tells them there what they wait
for.

The machines of a roster are a ring, and each watches the next one. While that one is silent, those behind it
may be unwatched. So a check goes on, up to the first machine that is alive: that one watches those behind it.
It goes several times as far as the check before, so that a machine that is silent by chance costs little.
Machines that died together are thus missed together, soon after the time that one alone would take; and while
all live, each check reads the heartbeats of one machine. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple
from zlib import crc32

from rallypoint.errors import MeetingClosedError, RallypointError, UsageError
from rallypoint.launch.rendezvous.roster import Ending, Member, Roster, Size, closed_error
from rallypoint.text import LONGEST_SENTENCE, shown

_FURTHER = 8
_ARC = 128  # so many machines at most, or a few more
_NEWCOMERS_NAMED = 4


@dataclass(frozen=True)
class Digest:
    """The state of a meeting, without its names: the one key that is changed by compare-and-set."""

    version: int = 0
    """Counts changes."""
    names: str = ""
    """The key that holds the roster; nothing: the roster is empty."""
    names_before: str = ""
    """The key that held the one before, for those who are just reading it."""
    arcs: int = 0
    """In how many pieces the ring of all machines is written beside the roster."""
    arcs_before: int = 0
    round: int = 0
    complete: bool = False
    closed: str = ""
    store: str = ""
    wants_restart: bool = False
    present: int = 0
    """How many machines take part, and have not left."""
    everybody: int = 0
    """The same, and those that wait."""
    scribe: str = ""
    """The id of the machine that looks every second for requests that nobody has taken in."""
    keeper: str = ""
    """The id of the machine that starts the round's store."""
    desk: int = 0
    folded: int = 0
    sick: str = ""
    """The last machine that was not fit to take part, and why."""

    @staticmethod
    def of(roster: Roster, size: Size, before: Digest, names: str) -> Digest:
        """The digest of a roster that is written to the key `names`, after another digest."""
        everybody, keeper = roster.everybody, roster.keeper
        return Digest(
            version=before.version + 1,
            names=names,
            names_before=before.names,
            arcs=arc_count(roster),
            arcs_before=before.arcs,
            round=roster.round,
            complete=roster.complete,
            closed=roster.closed,
            store=roster.store,
            wants_restart=roster.wants_restart(size),
            present=len(roster.present),
            everybody=len(everybody),
            scribe=everybody[0].id if everybody else "",
            keeper=keeper.id if keeper else "",
            desk=roster.desk,
            folded=roster.folded,
            sick=str(roster.sick[-1]) if roster.sick else "",
        )

    def is_due(self, request: int, size: Size) -> bool:
        """Whether the machine that has written the request of this number is the one to take requests in.

        It is if others are to learn of it at once: the request is the first of all, the first in a round that
        runs, or the last that is waited for. All other requests are left to that machine, or to the scribe.
        """
        runs = self.complete and not self.closed and not self.wants_restart
        is_first = request == self.folded + 1 and (runs or not self.everybody)
        return is_first or request == self.folded + self._due(size)

    def _due(self, size: Size) -> int:
        if self.closed:
            return self.everybody
        return self.present if self.complete else size.most - self.present


@dataclass(frozen=True)
class Assignment:
    """What a machine is told that has come: its place in a round, or why it has none."""

    round: int = -1
    rank: int = -1
    size: int = 0
    """How many machines the round has."""
    name: str = ""
    """A name that this round has, and no other one."""
    store: str = ""
    """Where the round's store listens; nothing: this machine is to start it."""
    again: bool = False
    """Whether there is no such round any more: come again."""
    closed: str = ""
    refused: str = ""
    hint: str = ""
    time: float = 0.0
    """What the clock of the one who tells it shows."""

    @property
    def error(self) -> RallypointError | None:
        """Why this machine has no place, and will have none."""
        why, hint = (shown(text, LONGEST_SENTENCE) for text in (self.closed or self.refused, self.hint))
        if self.closed:
            return MeetingClosedError(why, hint=hint)
        return UsageError(why, hint=hint) if why else None


@dataclass(frozen=True)
class RoundEnd:
    """How a round has ended, the same for all its machines, and what the next one waits for."""

    first: Ending | None = None
    """The first failure; None: no machine has reported any."""
    complete: bool = False
    """Whether the next round has all its machines."""
    present: int = 0
    newcomers: tuple[str, ...] = ()
    """Machines of the next round that were not in this one, the first few."""

    def outlook(self, size: Size, join_seconds: float, last_call: float) -> str:
        """What a job of several machines does now."""
        if self.complete and self.newcomers:
            names = ", ".join(shown(each) for each in self.newcomers)
            return f"{names} takes over" if self.first else f"{names} joins"
        if self.complete:
            return f"all {self.present} machines go on"
        if self.present >= size.least:
            return f"waiting {last_call:g} s for more machines; {self.present} of {size} are here"
        return f"waiting up to {join_seconds:g} s for {size.least - self.present} of {size.least} machines"


def end_of(before: Roster, after: Roster) -> RoundEnd | None:
    """How the round of `before` has ended, if it has in the change to `after`."""
    if not before.complete or after.round == before.round:
        return None
    known = {each.id for each in before.members}
    new = [str(each) for each in after.present if each.id not in known]
    return RoundEnd(after.ended, after.complete, len(after.present), tuple(new[:_NEWCOMERS_NAMED]))


def assignment_of_refused(error: RallypointError) -> Assignment:
    """What a machine is told that may not join."""
    if isinstance(error, MeetingClosedError):
        return Assignment(closed=error.message, hint=error.hint)
    return Assignment(refused=error.message, hint=error.hint)


def assignment_of(roster: Roster, rank: int, now: float) -> Assignment:
    """The assignment of a member of a complete round."""
    return Assignment(roster.round, rank, len(roster.members), roster.name, roster.store, time=now)


def notices(before: Roster, after: Roster, now: float) -> Iterator[tuple[Member, Assignment]]:
    """The machines that wait for what has changed, each with its assignment; `now` is by the clock."""
    if after.closed and not before.closed:
        assignment = assignment_of_refused(closed_error(after.closed))
        yield from ((each, assignment) for each in (after.waiting if after.complete else after.everybody))
    if not after.complete:
        return
    is_new = not before.complete or before.round != after.round
    has_gone = before.keeper in before.present and after.keeper not in after.present
    if is_new:
        yield from (each for each in _assignments(after, now) if each[0] == after.keeper)
    elif has_gone and (not after.store or after.keeper in after.lost):  # it may not have told all of them
        yield from ((each, Assignment(again=True)) for each in after.present)
    elif after.store and not before.store:
        yield from _assignments(after, now)


def _assignments(roster: Roster, now: float) -> Iterator[tuple[Member, Assignment]]:
    present = {each.id for each in roster.present}
    for rank, each in enumerate(roster.members):
        if each.id in present:
            yield each, assignment_of(roster, rank, now)


def arc_count(roster: Roster) -> int:
    """In how many pieces the ring of a roster is cut: twice as many, or as before, when more machines come.

    So most machines have the same next one as before.
    """
    count = len(roster.everybody)
    return 1 << ((count - 1) // _ARC).bit_length() if count else 0


def arc_of(member_id: str, count: int) -> int:
    """The number of the arc that a machine is in, the same wherever it is in the roster."""
    return crc32(member_id.encode()) % count


def arcs(roster: Roster) -> list[list[str]]:
    """The machines as a ring, in which each watches the next, cut in pieces.

    A machine finds its own piece by its id, so it need not know its place.
    """
    cut: list[list[str]] = [[] for _ in range(arc_count(roster))]
    for each in roster.everybody:
        cut[arc_of(each.id, len(cut))].append(each.id)
    return cut


class _Sign(NamedTuple):
    """The last heartbeat seen of a machine, and how many checks since then have seen no newer one."""

    number: int
    silent_checks: int


class Lookout:
    """One machine's checks of those that follow it."""

    def __init__(self, patience: int) -> None:
        """`patience`: for how many checks a machine may be silent."""
        self._patience = patience
        self._seen: dict[str, _Sign] = {}

    def find_silent(self, ring: Iterable[str], beats_of: Callable[[str], int]) -> set[str]:
        """Check once. Returns the machines that have been silent for too long.

        `ring` has the ids of all others, beginning with the next one; `beats_of` returns the number of a
        machine's last heartbeat. If that raises an error, the check does not count.
        """
        seen: dict[str, _Sign] = {}
        for each in islice(ring, _FURTHER * max(1, len(self._seen))):
            number, before = beats_of(each), self._seen.get(each)
            if before and before.number != number:
                seen[each] = _Sign(number, 0)
                break
            seen[each] = _Sign(number, before.silent_checks + 1 if before else 0)
        silent = {each for each, sign in seen.items() if sign.silent_checks > self._patience}
        self._seen = {each: sign for each, sign in seen.items() if each not in silent}  # it may come back
        return silent
