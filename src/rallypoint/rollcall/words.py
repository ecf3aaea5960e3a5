"""The roll in words: a line, a list of the missing, a report of a stall. Pure.

All of it may go to a terminal, so names that came over the network are made printable; and all of it is
bounded, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rallypoint.rollcall.roll import Awaited, Roll, Standing, State

_LONGEST_LIST: Final = 270
_LONGEST_NAME: Final = 80
_LONGEST_SECONDS: Final = 1e10
_MOST_RUNS: Final = 8
_WAITING_RUNS: Final = 3
_WAITS_SHOWN: Final = 7


# The whole of it


def headline(roll: Roll) -> str:
    """One line: how many have joined, who is missing, and what the longest wait is for."""
    parts = [_joined(roll)]
    if missing := missing_text(roll):
        parts.append(f"missing: {missing}")
    if unseen := unseen_text(roll):
        parts.append(f"not seen: {unseen}")
    if roll.awaited:
        parts.append(wait_text(roll.awaited[0]))
    return "; ".join(parts)


def missing_text(roll: Roll) -> str:
    """Who is missing, machine by machine; nothing if nobody is known to be."""
    late = _by_machine(each for each in roll.missing if each.state is State.LATE)
    gone = _by_machine(each for each in roll.missing if each.state is State.GONE)
    if gone:
        gone[0] = (f"gone: {gone[0][0]}", gone[0][1])
    return _bounded([*late, *gone])


def unseen_text(roll: Roll) -> str:
    """Of whom nobody knows whether they are here, machine by machine; nothing if there is no such rank."""
    return _bounded(_by_machine(roll.unseen))


def stall_text(roll: Roll, seconds: float) -> str:
    """Nobody has progressed for so long: who waits for which key, and who should have written it."""
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
    noun = "rank" if len(each.ranks) == 1 else "ranks"
    who = [f"{noun} {ranks_text(each.ranks, _WAITING_RUNS)}"] if each.ranks else []
    return " and ".join([*who, *([counted(each.others, "client")] if each.others else [])])


def owed_text(roll: Roll, each: Awaited) -> str:
    """Who should have written the key or come to the barrier, and how it stands; nothing: not known."""
    if not each.owed:
        return ""
    standing = next((known for known in roll.ranks if known.rank == each.owed_by), None)
    where = f" on {shown(standing.host)}" if standing and standing.host else ""
    how = f": {_STANDS[standing.state]}" if standing else ""
    verb = "should come" if each.is_barrier else "should write it"
    return f"{shown(each.owed)}{where} {verb}{how}"


_STANDS: Final = {
    State.JOINED: "it is here",
    State.WAITING: "it is here, and waits itself",
    State.LATE: "it has not come",
    State.UNSEEN: "it was not seen",
    State.GONE: "it has gone",
}


# Names and numbers


def ranks_text(ranks: Sequence[int], most: int = _MOST_RUNS) -> str:
    """`3`, `3 and 7`, `0 to 5, 7 and 1,024 more`."""
    runs = _runs(ranks)
    names = [name for name, _ in runs[:most]]
    if len(runs) > most:
        names.append(f"{sum(count for _, count in runs[most:]):,} more")
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def counted(number: int, noun: str) -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """`0.4 s`, `41 s`, `3 min 20 s`, `2 h 5 min`."""
    seconds = seconds if seconds < _LONGEST_SECONDS else _LONGEST_SECONDS  # so that NaN is a number as well
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def printable(text: str) -> str:
    """The text with its control characters written out: a terminal obeys nothing in it."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def shown(name: str) -> str:
    """A name that came over the network, printable, and with its middle left out if it is long."""
    text = printable(name if len(name) <= _LONGEST_NAME else _ends(name))
    return text if len(text) <= _LONGEST_NAME else _ends(text)


def _ends(text: str) -> str:
    half = _LONGEST_NAME // 2
    return f"{text[: half - 2]}...{text[1 - half :]}"


def _runs(ranks: Iterable[int]) -> list[tuple[str, int]]:
    """Runs of ranks that follow each other, and how many each has: `3`, `8 to 15`."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return [named for first, last in runs for named in _named(first, last)]


def _named(first: int, last: int) -> list[tuple[str, int]]:
    count = last - first + 1
    return (
        [(f"{first} to {last}", count)] if count > 2 else [(f"{rank}", 1) for rank in range(first, last + 1)]
    )


def _by_machine(standings: Iterable[Standing]) -> list[tuple[str, int]]:
    """`3 and 7 on node-b`, with how many they are; those whose machine is not known come last."""
    by_host: dict[str, list[int]] = {}
    for each in standings:
        by_host.setdefault(each.host, []).append(each.rank)
    nowhere = by_host.pop("", None)
    named = [(f"{ranks_text(ranks)} on {shown(host)}", len(ranks)) for host, ranks in by_host.items()]
    return named + ([(f"{ranks_text(nowhere)} (machine not known)", len(nowhere))] if nowhere else [])


def _bounded(parts: Sequence[tuple[str, int]]) -> str:
    """As many of the parts as fit; the rest is counted."""
    length = 0
    text: list[str] = []
    for at, (part, _) in enumerate(parts):
        length += len(part) + 2
        if length > _LONGEST_LIST and at:
            return "; ".join([*text, f"and {sum(count for _, count in parts[at:]):,} more"])
        text.append(part)
    return "; ".join(text)
