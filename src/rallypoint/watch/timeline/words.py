"""A timeline as text that fits a screen.

Names came over the network: all of them are made printable, and long ones are cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from statistics import median
from typing import Final, TypeVar

from rallypoint.store.rollcall.events import BarrierComplete, Erred, Started
from rallypoint.store.rollcall.question import owing_rank
from rallypoint.text import counted, joined_by_and, named_ranks, printable, shown
from rallypoint.watch.timeline.judgement import StartupMember, Straggling, Timeline
from rallypoint.watch.timeline.records import WaitEnding, WaitRecord

_ROWS: Final = 8
"""Of the table of members."""
_ITEMS: Final = 4
"""Of each other list."""
_MACHINES_NAMED: Final = 2
_LONGEST_LINE: Final = 160
_SHORT: Final = 0.1
"""Of the longest wait."""
_ENDINGS: Final = {WaitEnding.OPEN: "and still did when the events ended", WaitEnding.GIVEN_UP: "in vain"}

_T = TypeVar("_T")


def as_text(timeline: Timeline) -> str:
    """The straggler first; then all members, and what matters of waits, barriers, stalls and errors."""
    record = timeline.record
    stalls = [(each.seconds, _first_line(each.text)) for each in record.stalls] + list(_hangs(timeline))
    errors: dict[str, list[Erred]] = defaultdict(list)
    for each in record.errors:
        errors[each.reason].append(each)
    parts = [
        [headline(timeline)],
        _summary(timeline),
        _table(timeline.members),
        _section("waits", _waits(timeline), lambda each: each[0].seconds, partial(_wait, timeline)),
        _section("barriers", record.barriers, lambda each: each.seconds, partial(_barrier, timeline)),
        _section("stalls", stalls, lambda each: each[0], lambda each: _time(each[0]) + each[1]),
        _section("errors", errors.values(), len, _error),
        [f"note: {printable(each)}" for each in timeline.remarks],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _section(
    title: str, items: Collection[_T], weight: Callable[[_T], float], row: Callable[[_T], str]
) -> list[str]:
    """The weightiest items, a row each, and how many more there are; nothing if there is none."""
    rows = [f"  {row(each)}" for each in sorted(items, key=weight, reverse=True)[:_ITEMS]]
    more = len(items) - len(rows)
    return [title, *rows, *([f"  and {more:,} more"] if more else [])] if rows else []


# The headline


def headline(timeline: Timeline) -> str:
    """One line: the last members, and for how long the others waited."""
    straggling = timeline.straggling
    if not timeline.members:
        return "nobody came"
    if straggling is not None:
        return f"{_who_is_late(straggling)}; {_cost(timeline, straggling)}"
    if not timeline.is_over:
        stuck = [each for each in timeline.members if each.ending is not WaitEnding.MET]
        return f"all came within {seconds(_last_came(timeline))}; {names_text(stuck)} waited in vain"
    return f"no straggler: all came within {seconds(_last_came(timeline))}"


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
    end = next((f", {text}" for ending, text in _ENDINGS.items() if ending in endings), "")
    return f"{who} waited {what}, {seconds(straggling.waited)} in sum{end}"


# The summary, and the table of members


def _summary(timeline: Timeline) -> list[str]:
    writers = [_writer(timeline, each) for each in timeline.record.writers[:_ITEMS]]
    present = timeline.present
    if not present:
        return writers
    machines = len({each.host for each in present} - {""})
    of = f"{len(present):,} of " if timeline.expected > len(present) else ""
    who = of + counted(timeline.expected if of else len(present), noun(present))
    where = f" on {counted(machines, 'machine')}" if machines else ""
    half = median(each.came for each in present if each.came is not None)
    came = f"half had come after {seconds(half)}, the last after {seconds(_last_came(timeline))}"
    over = "ready" if timeline.is_over else "the events end"
    return [f"{who}{where}: {came}; {over} after {seconds(timeline.seconds)}", *writers]


def _writer(timeline: Timeline, writer: Started) -> str:
    ahead = timeline.origin - writer.time
    side = "before" if ahead >= 0 else "after"
    when = f" {seconds(abs(ahead))} {side} the first came" if timeline.members else ""
    began = datetime(1970, 1, 1) + timedelta(seconds=writer.time)  # `fromtimestamp` has limits on Windows
    what = f"process {writer.pid}, rallypoint {shown(writer.version)}, {shown(writer.backend)}"
    return (
        f"{shown(writer.kind)} on {shown(writer.host)} ({what}), started{when}: {began:%Y-%m-%d %H:%M:%S} UTC"
    )


def _table(members: Sequence[StartupMember]) -> list[str]:
    """Columns: the first two are names, the others figures."""
    if not members:
        return []
    rows = [("", "machine", "came", "waited", "ready"), *map(_row, members[:_ROWS])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            f"{cell:{'<' if at < 2 else '>'}{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rest = members[_ROWS:]
    if rest:
        lines.append(f"and {len(rest):,} more, the last of them after {seconds(rest[0].late)}")
    return lines


def _row(each: StartupMember) -> tuple[str, str, str, str, str]:
    name, host = shown(each.name), shown(each.host) or "not known"
    if each.came is None:
        return name, host, "never", "", ""
    ready = {WaitEnding.GIVEN_UP: "gave up", WaitEnding.OPEN: "not yet"}.get(each.ending, seconds(each.ready))
    return name, host, seconds(each.came), seconds(each.waited), ready


# Waits, barriers, stalls and errors


def _waits(timeline: Timeline) -> list[tuple[WaitRecord, list[StartupMember]]]:
    """Waits for the same keys that ended in the same way: the longest one, and all that waited.

    Of a million waits, most are not worth a line: those that are short beside the longest.
    """
    members = timeline.members
    least = _SHORT * max((wait.ended - wait.began for each in members for wait in each.waits), default=0.0)
    found: dict[tuple[tuple[str, ...], int, WaitEnding], dict[str, StartupMember]] = defaultdict(dict)
    longest: dict[tuple[tuple[str, ...], int, WaitEnding], WaitRecord] = {}
    for member in members:
        for wait in member.waits:
            if wait.ended - wait.began >= least:
                alike = wait.keys, wait.by, wait.ending
                found[alike][member.name] = member
                longest[alike] = max(longest.get(alike, wait), wait, key=lambda each: each.seconds)
    return [(longest[alike], list(found[alike].values())) for alike in found]


def _wait(timeline: Timeline, alike: tuple[WaitRecord, Sequence[StartupMember]]) -> str:
    wait, members = alike
    keys = f"`{shown(wait.keys[0])}`" if wait.keys else "a key"
    if wait.key_count > 1:
        keys += f" and {counted(wait.key_count - 1, 'key')} more"
    who = names_text(sorted(members, key=lambda each: each.rank))
    return f"{_time(wait.seconds)}{who} for {keys}{_end_of(timeline, wait)}"


def _end_of(timeline: Timeline, wait: WaitRecord) -> str:
    if wait.by:
        at_barrier = wait.keys[:1] in {(each.key,) for each in timeline.record.barriers}
        name = shown(timeline.names.get(wait.by, ""))
        return f", until {name} {'came there' if at_barrier else 'wrote it'}"
    rank = owing_rank(wait.keys[0]) if len(wait.keys) == wait.key_count == 1 else -1
    owed = f", which rank {rank} writes" if rank >= 0 else ""
    return owed if wait.ending is WaitEnding.MET else f"{owed}, {_ENDINGS[wait.ending]}"


def _barrier(timeline: Timeline, each: BarrierComplete) -> str:
    last = timeline.names.get(each.last, "")
    who = f", the last was {shown(last)}" if last else ""
    return f"{_time(each.seconds)}`{shown(each.key)}` of {each.size:,}{who}"


def _hangs(timeline: Timeline) -> Iterator[tuple[float, str]]:
    """Each time that the job stood still: for how long at least, and what launchers found out last."""
    began, text = 0.0, ""
    for each in timeline.record.hangs:
        if each.text and not text:
            began = each.time
        elif text and not each.text:
            yield each.time - began, f"{_first_line(text)}; then it went on"
        text = each.text
    if text:
        yield timeline.origin + timeline.ended - began, _first_line(text)


def _error(alike: Sequence[Erred]) -> str:
    return f"{len(alike):>6}x  {_first_line(alike[0].reason)} ({shown(alike[-1].peer)})"


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
    if len(by_host) > _MACHINES_NAMED:
        ranks = sorted(rank for each in by_host.values() for rank in each)
        parts = [(f"{named_ranks(ranks)} on {len(by_host):,} machines", len(ranks))]
    parts += [(shown(each.name) + _on(each.host), 1) for each in members if each.rank < 0]
    names = [name for name, _ in parts[:_MACHINES_NAMED]]
    if more := sum(count for _, count in parts[_MACHINES_NAMED:]):
        names.append(f"{more:,} more")
    return joined_by_and(names)


def _on(host: str) -> str:
    return f" on {shown(host)}" if host else ""


def noun(members: Iterable[StartupMember]) -> str:
    """The noun for these members: rank, or client if the rank of one is not known."""
    return "rank" if all(each.rank >= 0 for each in members) else "client"


def _last_came(timeline: Timeline) -> float:
    """When the last member came, of those that came at all."""
    return max((each.came for each in timeline.members if each.came is not None), default=0.0)


def _time(value: float) -> str:
    return f"{seconds(value):>7}  "


def seconds(value: float) -> str:
    """`0.41 s`, `41.2 s`, `1,288 s`: always in seconds, so that they compare."""
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s" if value < 99.95 else f"{value:,.0f} s"
