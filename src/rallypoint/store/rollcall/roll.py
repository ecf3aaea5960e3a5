"""The roll of a job: what a snapshot means to people who ask who is missing; and the same in words. Pure.

`judgement` makes it. All words may go to a terminal, so names that came over the network are made printable;
and all of them are bounded, however many ranks there are.
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
