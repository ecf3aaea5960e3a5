"""Which rows a figure has, and what is on them. Pure.

Members stand together by their machines, each machine below its name. Of a crowd, only the machines are shown
on which the last ones are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rallypoint.watch.timeline.records import Ending, Wait
from rallypoint.watch.timeline.timeline import Member, Timeline

MOST_ROWS: Final = 128
"""As many members have a row each; more are a crowd."""
_CROWD_ROWS: Final = 40
_OF_ONE_MACHINE: Final = 16
"""Rows of one machine, in a crowd."""
_UNKNOWN_HOST: Final = "machine not known"

Span = tuple[float, float]
"""Seconds since the first member came: from, to."""


@dataclass(frozen=True)
class Row:
    """A member; or the name of a machine, above its members."""

    label: str
    member: Member | None = None
    is_late: bool = False
    """Whether it is a straggler."""


def is_crowd(timeline: Timeline) -> bool:
    return len(timeline.members) > MOST_ROWS


def rows_of(timeline: Timeline) -> list[Row]:
    """All members, or of a crowd those on the machines of the last ones."""
    members = _last_of(timeline.members) if is_crowd(timeline) else timeline.members
    groups: dict[str, list[Member]] = defaultdict(list)
    for each in sorted(members, key=lambda each: (each.rank < 0, each.rank, each.came or 0.0, each.name)):
        groups[each.host].append(each)
    late = timeline.straggling.members if timeline.straggling is not None else ()
    return list(_arrange(groups, {id(each) for each in late}))


def _last_of(members: Sequence[Member]) -> list[Member]:
    """The last ones, and those who are on their machines: the members are in this order."""
    of_host: dict[str, list[Member]] = defaultdict(list)
    for each in members:
        if len(of_host[each.host]) < _OF_ONE_MACHINE:
            of_host[each.host].append(each)
    chosen: list[Member] = []
    for group in of_host.values():  # the machine of the last one is the first
        if chosen and len(chosen) + len(group) > _CROWD_ROWS:
            break
        chosen += group
    return chosen


def _arrange(groups: dict[str, list[Member]], late: set[int]) -> Iterable[Row]:
    count = sum(map(len, groups.values()))
    with_names = set(groups) != {""} and 2 * len(groups) <= count  # else the names would be most of all rows
    for host, members in groups.items():
        if with_names:
            yield Row(host or _UNKNOWN_HOST)
        where = f" on {host}" if host and not with_names else ""
        yield from (Row(f"{each.name}{where}", each, id(each) in late) for each in members)


def spans_of(timeline: Timeline, waits: Iterable[Wait], *, met: bool) -> list[Span]:
    """Waits, those that are too close to be told apart as one; either those that were met, or all others."""
    spans: list[Span] = []
    for wait in waits:
        if (wait.ending is Ending.MET) is met:
            _extend(
                spans, wait.began - timeline.origin, wait.ended - timeline.origin, timeline.seconds / 1000
            )
    return spans


def _extend(spans: list[Span], begin: float, end: float, gap: float) -> None:
    if spans and begin <= spans[-1][1] + gap:
        spans[-1] = (spans[-1][0], max(spans[-1][1], end))
    else:
        spans.append((begin, end))


def counts(spans: Sequence[Span], times: Iterable[float]) -> list[int]:
    """How many of the spans cover each of the times."""
    begins, ends = sorted(begin for begin, _ in spans), sorted(end for _, end in spans)
    return [bisect_right(begins, time) - bisect_right(ends, time) for time in times]
