"""The roll in words: a line, a list of the missing, a report of a stall. Pure.

All of it may go to a terminal, so names that came over the network are made printable; and all of it is
bounded, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rallypoint.store.rollcall.plan import JobRound
from rallypoint.store.rollcall.roll import Awaited, RankState, Roll, Standing
from rallypoint.text import counted, duration, named_ranks, ranks_text, shown

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
