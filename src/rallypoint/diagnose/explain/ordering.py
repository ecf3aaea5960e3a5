"""What came before what, as far as logs tell. Pure.

Two sightings have an order if both have a time, or if they stand in the same log. Times of two machines come
from two clocks: they count only if they are further apart than such clocks usually are. A time with a zone
and one without cannot be compared at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from rallypoint.diagnose.explain.finding import Findings, Sighting
from rallypoint.diagnose.explain.stamps import moment_of

OTHER_CLOCK: Final = timedelta(seconds=2)
"""What clocks of two machines may differ by."""
_HALF_A_YEAR: Final = timedelta(days=182)
_ANY: Final = datetime(2000, 7, 1)
_WHOLE_SECOND: Final = timedelta(seconds=1)


@dataclass(frozen=True)
class Seen:
    """Where and when a writer said something for the first time."""

    log: int
    line: int
    rank: int | None
    host: str | None
    time: datetime | None
    zoned: bool
    """Whether the time was written with its zone."""
    exact: bool
    """Whether the time is the line's own; if not, it is that of a line shortly before."""
    attempt: int | None
    text: str
    mild: bool
    """Whether this writer has said it in warnings only."""


def all_seen(findings: Findings) -> dict[int, list[Seen]]:
    """The sightings of each finding, by the finding's identity, with times that can be compared."""
    everything = [*findings.known.values(), *findings.unknown.values()]
    pairs = [(id(finding), sighting) for finding in everything for sighting in finding.sightings.values()]
    pairs.sort(key=lambda pair: (pair[1].log, pair[1].line))
    near = _references([each for _, each in pairs], findings)
    seen: dict[int, list[Seen]] = {id(finding): [] for finding in everything}
    for name, each in pairs:
        time = None
        if each.stamp is not None:
            time = near[each.log] = each.stamp.resolve(near[each.log])
        zoned = each.stamp is not None and each.stamp.zone is not None
        attempt = findings.sources[each.log].attempt_of(each.tries)
        seen[name].append(
            Seen(
                each.log,
                each.line,
                each.rank,
                each.host,
                time,
                zoned,
                each.exact,
                attempt,
                each.text,
                each.mild,
            )
        )
    return seen


def _references(sightings: Iterable[Sighting], findings: Findings) -> list[datetime]:
    """For each log a moment near its times: one with a year, there or in another; or when it was written."""
    complete: dict[int, datetime] = {}
    for each in sightings:
        if each.stamp is not None and each.stamp.complete:
            complete.setdefault(each.log, each.stamp.resolve(_ANY))
    other = next(iter(complete.values()), None)
    return [
        complete.get(index) or other or _last_half_year(source.modified)
        for index, source in enumerate(findings.sources)
    ]


def _last_half_year(modified: float | None) -> datetime:
    """Half a year before a log was written: the nearest year is then the last in which it can have been."""
    return moment_of(modified) - _HALF_A_YEAR if modified is not None else _ANY


def first_first(seen: Sequence[Seen]) -> tuple[Seen, ...]:
    """The same, beginning with one that none of the others is known to have come before."""
    first = min(seen, key=lambda each: (each.time or datetime.max, each.log, each.line))
    for each in seen:
        if precedes(each, first):  # one without a time, in the same log
            first = each
    return (first, *(each for each in seen if each is not first))


def precedes(one: Seen, other: Seen) -> str:
    """How it is known that one came before the other: time, clocks or lines; empty if it is not."""
    if one.log == other.log and not (one.exact and other.exact and _apart(one, other)):
        return "lines" if one.line < other.line else ""
    if one.time is None or other.time is None or one.time >= other.time or not _apart(one, other):
        return ""
    return "time" if _one_clock(one, other) else "clocks"


def _one_clock(one: Seen, other: Seen) -> bool:
    return one.host == other.host and (one.host is not None or one.log == other.log)


def _apart(one: Seen, other: Seen) -> bool:
    """Whether two times differ by more than they are wrong by."""
    if one.time is None or other.time is None or one.zoned != other.zoned:
        return False
    distance = abs(one.time - other.time)
    if not _one_clock(one, other):
        return distance > OTHER_CLOCK
    whole = one.time.microsecond == 0 or other.time.microsecond == 0
    return distance > (_WHOLE_SECOND if whole else timedelta(0))
