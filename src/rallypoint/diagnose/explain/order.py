"""Which of two sightings came first, and how that is known. Pure.

Two sightings have an order if both have a time, or if they stand in the same log. Times of two machines come
from two clocks: they count only if they are further apart than clocks usually are. A time with a zone
and one without cannot be compared at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from rallypoint.diagnose.explain.evidence import Evidence, Incident, Sighting
from rallypoint.diagnose.explain.stamps import moment_of

_OTHER_CLOCK: Final = timedelta(seconds=2)
"""How much the clocks of two machines may differ."""
_HALF_A_YEAR: Final = timedelta(days=182)
_ANY: Final = datetime(2000, 7, 1)
_WHOLE_SECOND: Final = timedelta(seconds=1)


def date(evidence: Evidence) -> list[Incident]:
    """All incidents, with times that can be compared, and with their first sighting first."""
    incidents = [*evidence.known.values(), *evidence.unknown.values()]
    pairs = [(incident, sighting) for incident in incidents for sighting in incident.seen]
    pairs.sort(key=lambda pair: (pair[1].log, pair[1].line))
    near = _references([each for _, each in pairs], evidence)
    for incident, each in pairs:
        time = None
        if each.stamp is not None:
            time = near[each.log] = each.stamp.resolve(near[each.log])
        source = evidence.sources[each.log]
        attempt, rank = source.attempt_of(each.tries), each.rank
        if rank is None and each.local is not None:
            rank = source.table.local_ranks.rank_of(each.local, each.host)
        incident.sightings[each.writer] = replace(each, time=time, attempt=attempt, rank=rank)
    return [limited(incident, list(incident.seen)) for incident in incidents]


def _references(sightings: Iterable[Sighting], evidence: Evidence) -> list[datetime]:
    """For each log a moment near its times: one with a year, of any log; or when it was written."""
    complete: dict[int, datetime] = {}
    for each in sightings:
        if each.stamp is not None and each.stamp.complete:
            complete.setdefault(each.log, each.stamp.resolve(_ANY))
    other = next(iter(complete.values()), None)
    return [
        complete.get(index) or other or _last_half_year(source.modified)
        for index, source in enumerate(evidence.sources)
    ]


def _last_half_year(modified: float | None) -> datetime:
    """Half a year before a log was written: then the nearest date is the last one before the writing."""
    return moment_of(modified) - _HALF_A_YEAR if modified is not None else _ANY


def limited(incident: Incident, seen: Sequence[Sighting]) -> Incident:
    """The incident with some of its sightings, beginning with one that is not known to come after another."""
    first = min(seen, key=lambda each: (each.time or datetime.max, each.log, each.line))
    for each in seen:
        if precedes(each, first):  # one without a time, in the same log
            first = each
    return replace(incident, sightings={each.writer: each for each in (first, *seen)})


def precedes(one: Sighting, other: Sighting) -> str:
    """How it is known that one came before the other: time, clocks or lines; empty if it is not."""
    if one.log == other.log and not (one.exact and other.exact and _apart(one, other)):
        return "lines" if one.line < other.line else ""
    if one.time is None or other.time is None or one.time >= other.time or not _apart(one, other):
        return ""
    return "time" if _one_clock(one, other) else "clocks"


def _one_clock(one: Sighting, other: Sighting) -> bool:
    return one.host == other.host and (one.host is not None or one.log == other.log)


def _apart(one: Sighting, other: Sighting) -> bool:
    """Whether two times differ by more than their error."""
    if one.time is None or other.time is None or one.zoned != other.zoned:
        return False
    distance = abs(one.time - other.time)
    if not _one_clock(one, other):
        return distance > _OTHER_CLOCK
    whole = one.time.microsecond == 0 or other.time.microsecond == 0
    return distance > (_WHOLE_SECOND if whole else timedelta(0))
