"""The roll of a job: what a snapshot means to people who ask who is missing. `judgement` makes it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter

from rallypoint.store.rollcall.identity import Source
from rallypoint.store.rollcall.plan import JobRound


class RankState(str, Enum):
    """How a rank stands."""

    JOINED = "joined"
    WAITING = "waiting"
    """It is here, and waits for a key or at a barrier."""
    LATE = "late"
    """It is expected, and has not come."""
    UNSEEN = "unseen"
    """It is expected, and may be here: clients are whose rank is not known."""
    GONE = "gone"
    """It was here."""


@dataclass(frozen=True)
class Standing:
    """One rank, with all its connections."""

    rank: int
    state: RankState
    host: str = ""
    """Its machine; nothing: not known. Of a late one, as the plan says."""
    pid: int = 0
    local_rank: int = -1
    source: Source = Source.NONE
    seconds: float = -1.0
    """Since it connected; of one that has gone, since then; -1: not known."""
    waits: tuple[str, ...] = ()
    """The first keys that it waits for, barriers included."""
    wait_seconds: float = -1.0
    """How long it has been waiting; -1: it does not wait."""
    operations: int = 0
    received: int = 0
    sent: int = 0
    why: str = ""
    """Of one that has gone: why its connection was closed, if not by itself."""

    @property
    def is_here(self) -> bool:
        return self.state in (RankState.JOINED, RankState.WAITING)


@dataclass(frozen=True)
class MachineRanks:
    """A machine and the ranks that it has or should have."""

    host: str
    """Nothing: the machine of these ranks is not known."""
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Awaited:
    """A key that is not there, or a barrier that is not full, and who waits for it."""

    key: str
    ranks: tuple[int, ...]
    others: int
    """Clients that wait for it, too, and whose rank is not known."""
    seconds: float
    """Of the one that has waited longest."""
    is_barrier: bool = False
    owed_by: int = -1
    """The rank that should write it, or come to it; -1: not known."""
    owed: str = ""
    """The same in words, where it is no rank as well: `the agent of machine 1`; nothing: not known."""


@dataclass(frozen=True)
class Gathering:
    """A barrier and its progress: one of the operation BARRIER, or one that torch makes of keys."""

    key: str
    size: int
    """-1: not known."""
    arrived: int
    ranks: tuple[int, ...]
    """Those of them that are known."""
    missing: tuple[int, ...] | None
    """Ranks that have not arrived; None: not known."""
    seconds: float
    """Since the first waiting client has arrived; -1: not known."""


@dataclass(frozen=True)
class Roll:
    """Who is here, who is missing, and who waits for what."""

    expected: int
    """Ranks; -1: not known."""
    ranks: tuple[Standing, ...]
    """By rank; late and unseen ones are among them where it is known who is expected."""
    unknown: int
    """Clients that may be ranks, but nobody knows which."""
    machines: tuple[MachineRanks, ...]
    awaited: tuple[Awaited, ...]
    """Longest first."""
    gatherings: tuple[Gathering, ...]
    meetings: tuple[JobRound, ...]
    remarks: tuple[str, ...] = ()
    """What cannot be told, and why."""
    trouble: str = ""
    """What keeps the store from answering, if something does; and what to look at."""
    advice: str = ""

    def standing(self, rank: int) -> Standing | None:
        """One rank; None: nothing is known of it."""
        at = bisect_left(self.ranks, rank, key=attrgetter("rank"))
        return self.ranks[at] if at < len(self.ranks) and self.ranks[at].rank == rank else None

    @property
    def joined(self) -> int:
        """Ranks that are here."""
        return sum(each.is_here for each in self.ranks)

    @property
    def missing(self) -> tuple[Standing, ...]:
        """Ranks that are expected and are not here: those that never came, and those that have gone."""
        return tuple(each for each in self.ranks if each.state in (RankState.LATE, RankState.GONE))

    @property
    def unseen(self) -> tuple[Standing, ...]:
        """Ranks that are expected, and of which nobody knows whether they are here."""
        return tuple(each for each in self.ranks if each.state is RankState.UNSEEN)

    @property
    def is_complete(self) -> bool:
        """Whether it is known who is expected, and all of them are here."""
        return 0 <= self.expected <= self.joined and not self.missing and not self.unseen
