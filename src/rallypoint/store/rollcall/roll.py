"""The roll of a job: which ranks are present and missing, and who waits for what; and its text. Pure.

`judgement` makes it. Text may go to a terminal: names that came over the network are made printable, and all
text is bounded, however many ranks there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Final

from rallypoint.store.rollcall.identity import Source
from rallypoint.store.rollcall.plan import JobRound
from rallypoint.text import counted, duration, named_ranks, ranks_text, shown


class RankState(str, Enum):
    """How a rank stands."""

    JOINED = "joined"
    WAITING = "waiting"
    """Present, and waits for a key or at a barrier."""
    LATE = "late"
    """Expected, but has not connected."""
    UNSEEN = "unseen"
    """Expected, and may be one of the clients of unknown rank."""
    GONE = "gone"
    """It has left."""


@dataclass(frozen=True)
class Standing:
    """One rank, with all its connections."""

    rank: int
    state: RankState
    host: str = ""
    """Its machine; empty if unknown. For a late rank, the planned machine."""
    pid: int = 0
    local_rank: int = -1
    source: Source = Source.NONE
    seconds: float = -1.0
    """Since it connected, or since it left; -1: unknown."""
    waits: tuple[str, ...] = ()
    """The first keys that it waits for, those of barriers included."""
    wait_seconds: float = -1.0
    """How long it has waited; -1: it does not wait."""
    operations: int = 0
    received: int = 0
    sent: int = 0
    why: str = ""
    """Why its connection was closed, if it has left and did not close it itself."""

    @property
    def is_here(self) -> bool:
        return self.state in (RankState.JOINED, RankState.WAITING)


@dataclass(frozen=True)
class MachineRanks:
    """A machine and the ranks that it has or should have."""

    host: str
    """Empty if unknown."""
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Awaited:
    """A missing key, or an incomplete barrier, and who waits for it."""

    key: str
    ranks: tuple[int, ...]
    others: int
    """How many clients of unknown rank wait for it, too."""
    seconds: float
    """The longest wait."""
    is_barrier: bool = False
    owed_by: int = -1
    """The rank that should write the key or arrive at the barrier; -1: unknown."""
    owed: str = ""
    """Who should, in words, be it a rank or not: `the agent of machine 1`; empty if unknown."""


@dataclass(frozen=True)
class Gathering:
    """A barrier, whether of the operation BARRIER or one that torch makes of keys, and its progress."""

    key: str
    size: int
    """-1: not known."""
    arrived: int
    ranks: tuple[int, ...]
    """Those of them that are known."""
    missing: tuple[int, ...] | None
    """Ranks that have not arrived; None: unknown."""
    seconds: float
    """Since the first waiting client arrived; -1: unknown."""


@dataclass(frozen=True)
class Roll:
    """Which ranks are present, which are missing, and who waits for what."""

    expected: int
    """Ranks; -1: not known."""
    ranks: tuple[Standing, ...]
    """By rank, including late and unseen ones if it is known how many are expected."""
    unknown: int
    """How many clients may be ranks of unknown number."""
    machines: tuple[MachineRanks, ...]
    awaited: tuple[Awaited, ...]
    """Longest first."""
    gatherings: tuple[Gathering, ...]
    meetings: tuple[JobRound, ...]
    remarks: tuple[str, ...] = ()
    """What is not known, and why."""
    trouble: str = ""
    """What keeps the store from answering, if anything; `advice` says what to check."""
    advice: str = ""

    def standing(self, rank: int) -> Standing | None:
        """One rank; None if nothing is known of it."""
        at = bisect_left(self.ranks, rank, key=attrgetter("rank"))
        return self.ranks[at] if at < len(self.ranks) and self.ranks[at].rank == rank else None

    @property
    def joined(self) -> int:
        """How many ranks are present."""
        return sum(each.is_here for each in self.ranks)

    @property
    def missing(self) -> tuple[Standing, ...]:
        """Expected ranks that are absent: those that never connected, and those that have left."""
        return tuple(each for each in self.ranks if each.state in (RankState.LATE, RankState.GONE))

    @property
    def unseen(self) -> tuple[Standing, ...]:
        """Expected ranks that may be among the clients of unknown rank."""
        return tuple(each for each in self.ranks if each.state is RankState.UNSEEN)

    @property
    def is_complete(self) -> bool:
        """Whether all expected ranks are present."""
        return 0 <= self.expected <= self.joined and not self.missing and not self.unseen


_LONGEST_LIST: Final = 270
_WAITING_RUNS: Final = 3
_WAITS_SHOWN: Final = 7


# The whole of it


def headline(roll: Roll) -> str:
    """One line: how many have joined, who is missing, and what the longest wait is for."""
    parts = [roll.trouble] if roll.trouble else []
    machines = [] if roll.joined else [_machines_text(each) for each in roll.meetings[:1] if not each.closed]
    parts += [*machines, *([] if machines and roll.expected < 0 and not roll.unknown else [_joined(roll)])]
    if missing := missing_text(roll):
        parts.append(f"missing: {missing}")
    if unseen := unseen_text(roll):
        parts.append(f"not seen: {unseen}")
    if roll.awaited:
        parts.append(wait_text(roll.awaited[0]))
    return "; ".join(parts)


def _machines_text(each: JobRound) -> str:
    """How many machines of a job have connected, before its ranks do."""
    of = f" of {each.expected:,}" if each.expected >= 0 else ""
    hosts = _bounded([(shown(host), 1) for host in each.joined])
    noun = "machine" if len(each.joined) == 1 and not of else "machines"
    return f"{len(each.joined):,}{of} {noun} connected{f': {hosts}' if hosts else ''}"


def missing_text(roll: Roll) -> str:
    """Who is missing, machine by machine; nothing if nobody is known to be."""
    late = _by_machine(each for each in roll.missing if each.state is RankState.LATE)
    gone = _by_machine(each for each in roll.missing if each.state is RankState.GONE)
    if gone:
        gone[0] = (f"gone: {gone[0][0]}", gone[0][1])
    return _bounded([*late, *gone])


def unseen_text(roll: Roll) -> str:
    """Ranks that may be here or not, machine by machine; nothing if all ranks are known."""
    return _bounded(_by_machine(roll.unseen))


def stall_text(roll: Roll, seconds: float) -> str:
    """A report after `seconds` without progress: who waits for which key, and who should have written it."""
    lines = [f"no progress for {duration(seconds)}: {_joined(roll)}"]
    if missing := missing_text(roll):
        lines.append(f"  missing: {missing}")
    if unseen := unseen_text(roll):
        lines.append(f"  not seen: {unseen}")
    for each in roll.awaited[:_WAITS_SHOWN]:
        owed = owed_text(roll, each)
        lines.append(f"  {wait_text(each)}{owed and '; '}{owed}")
    if (more := len(roll.awaited) - _WAITS_SHOWN) > 0:
        lines.append(f"  waits for {more:,} more are left out")
    return "\n".join(lines)


def _joined(roll: Roll) -> str:
    strangers = f", and {counted(roll.unknown, 'client')} whose rank is not known" if roll.unknown else ""
    if roll.expected < 0:
        return f"{counted(roll.joined, 'rank')} joined{strangers}; how many are expected is not known"
    whole = roll.is_complete and roll.expected > 1
    share = f"all {roll.expected:,}" if whole else f"{roll.joined:,} of {roll.expected:,}"
    return f"{share} ranks joined{strangers}"


# One wait


def wait_text(each: Awaited) -> str:
    """Who waits for a key or at a barrier, and for how long."""
    verb = "waits" if len(each.ranks) + each.others == 1 else "wait"
    what = f"at the barrier `{shown(each.key)}`" if each.is_barrier else f"for `{shown(each.key)}`"
    seconds = f" for {duration(each.seconds)}" if each.seconds >= 0 else ""
    return f"{waiting_text(each)} {verb} {what}{seconds}"


def waiting_text(each: Awaited) -> str:
    """Who waits: `rank 0`, `ranks 1 to 7 and 2 clients`."""
    who = [named_ranks(each.ranks, _WAITING_RUNS)] if each.ranks else []
    return " and ".join([*who, *([counted(each.others, "client")] if each.others else [])])


def owed_text(roll: Roll, each: Awaited) -> str:
    """Who should have written the key or come to the barrier, and how it stands; nothing: not known."""
    if not each.owed:
        return ""
    standing = roll.standing(each.owed_by)
    where = f" on {shown(standing.host)}" if standing and standing.host else ""
    how = f": {_STANDS[standing.state]}" if standing else ""
    verb = "should come" if each.is_barrier else "should write it"
    return f"{shown(each.owed)}{where} {verb}{how}"


_STANDS: Final = {
    RankState.JOINED: "it is here",
    RankState.WAITING: "it is here, and waits itself",
    RankState.LATE: "it has not come",
    RankState.UNSEEN: "it was not seen",
    RankState.GONE: "it has gone",
}


def _by_machine(standings: Iterable[Standing]) -> list[tuple[str, int]]:
    """`3 and 7 on node-b`, with how many they are; those whose machine is not known come last."""
    by_host: dict[str, list[int]] = {}
    for each in standings:
        by_host.setdefault(each.host, []).append(each.rank)
    nowhere = by_host.pop("", None)
    named = [(f"{ranks_text(ranks)} on {shown(host)}", len(ranks)) for host, ranks in by_host.items()]
    return named + ([(f"{ranks_text(nowhere)} (machine not known)", len(nowhere))] if nowhere else [])


def _bounded(parts: Sequence[tuple[str, int]]) -> str:
    """The first parts, up to the longest list; the rest is counted."""
    length = 0
    text: list[str] = []
    for at, (part, _) in enumerate(parts):
        length += len(part) + 2
        if length > _LONGEST_LIST and at:
            return "; ".join([*text, f"and {sum(count for _, count in parts[at:]):,} more"])
        text.append(part)
    return "; ".join(text)
