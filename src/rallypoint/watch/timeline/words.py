"""A timeline as text that fits a screen.

Names came over the network: all of them are made printable, and long ones are cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import median
from typing import Final

from rallypoint.store.rollcall.events import Erred, Started
from rallypoint.store.rollcall.torch_keys import owing_rank
from rallypoint.text import counted, joined_by_and, named_ranks, printable, shown
from rallypoint.watch.timeline.records import WaitEnding, WaitRecord
from rallypoint.watch.timeline.timeline import StartupMember, Straggling, Timeline

_ROWS: Final = 8
"""Of the table of members."""
_ITEMS: Final = 4
"""Of each other list."""
_MACHINES_NAMED: Final = 2
_LONGEST_LINE: Final = 160
_SHORT: Final = 0.1
"""Of the longest wait."""
_ENDINGS: Final = {WaitEnding.GIVEN_UP: "in vain", WaitEnding.OPEN: "and still did when the events ended"}


# The whole of it


def as_text(timeline: Timeline) -> str:
    """The straggler first; then all members, and what matters of waits, barriers, stalls and errors."""
    parts = [
        [headline(timeline)],
        _summary(timeline),
        _table(timeline),
        _titled("waits", _waits(timeline)),
        _titled("barriers", _barriers(timeline)),
        _titled("stalls", _stalls(timeline)),
        _titled("errors", _errors(timeline)),
        [f"note: {printable(each)}" for each in timeline.remarks],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def headline(timeline: Timeline) -> str:
    """One line: the last members, and for how long the others waited."""
    straggling = timeline.straggling
    if not timeline.members:
        return "nobody came"
    if straggling is not None:
        return f"{_who_is_late(straggling)}; {_cost(timeline, straggling)}"
    if not timeline.is_over:
        stuck = [each for each in timeline.members if each.ending is not WaitEnding.MET]
        return f"all came within {seconds(last_came(timeline))}; {names_text(stuck)} waited in vain"
    return f"no straggler: all came within {seconds(last_came(timeline))}"


def _who_is_late(straggling: Straggling) -> str:
    last, names = straggling.members[0], names_text(straggling.members)
    if last.came is None:
        return f"{names} never came"
    if not last.came_late:
        return f"{names} kept others waiting until {seconds(last.late)} after the first came"
    first = min(each.came for each in straggling.members if each.came is not None)
    span = f"{seconds(first)} to " if seconds(first) != seconds(last.came) else ""
    return f"{names} came {span}{seconds(last.came)} after the first"


def _cost(timeline: Timeline, straggling: Straggling) -> str:
    if not straggling.waiters:
        return "nobody is known to have waited"
    who = counted(straggling.waiters, noun(timeline.members))
    them = "it" if len(straggling.members) == 1 else "them"
    what = f"for {them}" if straggling.is_for_them else "meanwhile"
    endings = {each.ending for each in timeline.members}
    end = next(
        (f", {_ENDINGS[each]}" for each in (WaitEnding.OPEN, WaitEnding.GIVEN_UP) if each in endings), ""
    )
    return f"{who} waited {what}, {seconds(straggling.waited)} in sum{end}"


def _summary(timeline: Timeline) -> list[str]:
    lines = [_arrivals(timeline)] if timeline.present else []
    return lines + [_writer(timeline, each) for each in timeline.writers[:_ITEMS]]


def _arrivals(timeline: Timeline) -> str:
    present = timeline.present
    machines = len({each.host for each in present} - {""})
    of = f"{len(present):,} of " if timeline.expected > len(present) else ""
    who = of + counted(timeline.expected if of else len(present), noun(present))
    where = f" on {counted(machines, 'machine')}" if machines else ""
    half = median(each.came for each in present if each.came is not None)
    over = "ready" if timeline.is_over else "the events end"
    return (
        f"{who}{where}: half had come after {seconds(half)}, the last after {seconds(last_came(timeline))}; "
        f"{over} after {seconds(timeline.seconds)}"
    )


def _writer(timeline: Timeline, writer: Started) -> str:
    ahead = timeline.origin - writer.time
    side = "before" if ahead >= 0 else "after"
    when = f" {seconds(abs(ahead))} {side} the first came" if timeline.members else ""
    began = datetime(1970, 1, 1) + timedelta(seconds=writer.time)  # `fromtimestamp` has limits on Windows
    what = f"process {writer.pid}, rallypoint {shown(writer.version)}, {shown(writer.backend)}"
    return (
        f"{shown(writer.kind)} on {shown(writer.host)} ({what}), started{when}: {began:%Y-%m-%d %H:%M:%S} UTC"
    )


# The table of members


def _table(timeline: Timeline) -> list[str]:
    if not timeline.members:
        return []
    rows = [("", "machine", "came", "waited", "ready"), *map(_row, timeline.members[:_ROWS])]
    lines = _aligned(rows)
    rest = timeline.members[_ROWS:]
    if rest:
        lines.append(f"and {len(rest):,} more, the last of them after {seconds(rest[0].late)}")
    return lines


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns: the first two are names, the others figures."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{'<' if at < 2 else '>'}{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(each: StartupMember) -> tuple[str, str, str, str, str]:
    came = "never" if each.came is None else seconds(each.came)
    waited = "" if each.came is None else seconds(each.waited)
    readiness = {
        WaitEnding.MET: seconds(each.ready),
        WaitEnding.GIVEN_UP: "gave up",
        WaitEnding.OPEN: "not yet",
    }
    ready = "" if each.came is None else readiness[each.ending]
    return shown(each.name), shown(each.host) or "not known", came, waited, ready


# Lists


def _titled(title: str, items: Sequence[str]) -> list[str]:
    return [title, *(f"  {each}" for each in items)] if items else []


def _and_more(items: list[str], count: int) -> list[str]:
    return [*items, f"and {count - len(items):,} more"] if count > len(items) else items


@dataclass
class _Awaited:
    """Waits for the same keys that ended in the same way."""

    longest: WaitRecord
    members: dict[str, StartupMember] = field(default_factory=dict)


def _waits(timeline: Timeline) -> list[str]:
    found: dict[tuple[tuple[str, ...], int, str], _Awaited] = {}
    for member, wait in _long_waits(timeline):
        awaited = found.setdefault((wait.keys, wait.by, wait.ending.value), _Awaited(wait))
        if wait.seconds > awaited.longest.seconds:
            awaited.longest = wait
        awaited.members[member.name] = member
    longest = sorted(found.values(), key=lambda each: -each.longest.seconds)
    return _and_more([_wait(timeline, each) for each in longest[:_ITEMS]], len(found))


def _long_waits(timeline: Timeline) -> Iterator[tuple[StartupMember, WaitRecord]]:
    """The waits that are not short beside the longest: of a million waits, most are not worth a line."""
    least = _SHORT * max(
        (wait.ended - wait.began for each in timeline.members for wait in each.waits), default=0.0
    )
    for member in timeline.members:
        yield from ((member, wait) for wait in member.waits if wait.ended - wait.began >= least)


def _wait(timeline: Timeline, awaited: _Awaited) -> str:
    wait = awaited.longest
    keys = f"`{shown(wait.keys[0])}`" if wait.keys else "a key"
    if wait.key_count > 1:
        keys += f" and {counted(wait.key_count - 1, 'key')} more"
    who = names_text(sorted(awaited.members.values(), key=lambda each: each.rank))
    return f"{seconds(wait.seconds):>7}  {who} for {keys}{_end_of(timeline, wait)}"


def _end_of(timeline: Timeline, wait: WaitRecord) -> str:
    if wait.by:
        at_barrier = wait.keys[:1] in {(each.key,) for each in timeline.barriers}
        name = shown(timeline.names.get(wait.by, ""))
        return f", until {name} {'came there' if at_barrier else 'wrote it'}"
    rank = owing_rank(wait.keys[0]) if len(wait.keys) == wait.key_count == 1 else -1
    owed = f", which rank {rank} writes" if rank >= 0 else ""
    return owed if wait.ending is WaitEnding.MET else f"{owed}, {_ENDINGS[wait.ending]}"


def _barriers(timeline: Timeline) -> list[str]:
    slowest = sorted(timeline.barriers, key=lambda each: -each.seconds)[:_ITEMS]
    lines = []
    for each in slowest:
        last = timeline.names.get(each.last, "")
        who = f", the last was {shown(last)}" if last else ""
        lines.append(f"{seconds(each.seconds):>7}  `{shown(each.key)}` of {each.size:,}{who}")
    return _and_more(lines, len(timeline.barriers))


def _stalls(timeline: Timeline) -> list[str]:
    """What the server reported, and what launchers found out."""
    found = [(each.seconds, _first_line(each.text)) for each in timeline.stalls]
    found += _hangs(timeline)
    longest = sorted(found, key=lambda each: -each[0])[:_ITEMS]
    return _and_more([f"{seconds(lasted):>7}  {what}" for lasted, what in longest], len(found))


def _hangs(timeline: Timeline) -> Iterator[tuple[float, str]]:
    """Each time that the job stood still: for how long at least, and what was found out last."""
    began, text = 0.0, ""
    for each in timeline.hangs:
        if each.text and not text:
            began = each.time
        elif text and not each.text:
            yield each.time - began, f"{_first_line(text)}; then it went on"
        text = each.text
    if text:
        yield timeline.origin + timeline.ended - began, _first_line(text)


def _errors(timeline: Timeline) -> list[str]:
    by_reason: dict[str, list[Erred]] = defaultdict(list)
    for each in timeline.errors:
        by_reason[each.reason].append(each)
    most = sorted(by_reason.items(), key=lambda item: -len(item[1]))[:_ITEMS]
    lines = [f"{len(each):>6}x  {_first_line(reason)} ({shown(each[-1].peer)})" for reason, each in most]
    return _and_more(lines, len(by_reason))


def _first_line(text: str) -> str:
    return shown(text.strip().partition("\n")[0], _LONGEST_LINE)


# Names and numbers


def names_text(members: Sequence[StartupMember]) -> str:
    """`rank 3 on node-b`, `ranks 8 to 15 on node-b and 2 more`, `10.0.0.7:4242`."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for each in members:
        if each.rank >= 0:
            by_host[each.host].append(each.rank)
    parts = [(f"{named_ranks(sorted(ranks))}{_on(host)}", len(ranks)) for host, ranks in by_host.items()]
    parts += [(shown(each.name) + _on(each.host), 1) for each in members if each.rank < 0]
    if len(by_host) > _MACHINES_NAMED:
        ranks = sorted(rank for each in by_host.values() for rank in each)
        parts = [
            (f"{named_ranks(ranks)} on {len(by_host):,} machines", len(ranks)),
            *parts[len(by_host) :],
        ]
    names = [name for name, _ in parts[:_MACHINES_NAMED]]
    if more := sum(count for _, count in parts[_MACHINES_NAMED:]):
        names.append(f"{more:,} more")
    return joined_by_and(names)


def _on(host: str) -> str:
    return f" on {shown(host)}" if host else ""


def noun(members: Iterable[StartupMember]) -> str:
    """The noun for these members: rank, or client if the rank of one is not known."""
    return "rank" if all(each.rank >= 0 for each in members) else "client"


def last_came(timeline: Timeline) -> float:
    """When the last member came, of those that came at all."""
    return max((each.came for each in timeline.members if each.came is not None), default=0.0)


def seconds(value: float) -> str:
    """`0.41 s`, `41.2 s`, `1,288 s`: always in seconds, so that they compare."""
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s" if value < 99.95 else f"{value:,.0f} s"
