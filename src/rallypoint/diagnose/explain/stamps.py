"""Times as logs write them: often without a year, sometimes without a date or a zone. Pure.

What is missing is taken from what is near: a stamp without a year means the year in which it lies closest to
the moment before it. So neither midnight nor the new year moves a line by a day or by a year.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

_DAY: Final = timedelta(days=1)
MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True)
class Stamp:
    """A time as it was written. `zone` is its distance from UTC, if it says so."""

    clock: timedelta
    """Since midnight."""
    year: int | None = None
    month: int | None = None
    day: int | None = None
    zone: timedelta | None = None

    @property
    def complete(self) -> bool:
        return self.year is not None

    def resolve(self, near: datetime) -> datetime:
        """The moment that it means; what it leaves open is chosen so that it lies nearest to `near`."""
        candidates = list(self._candidates(near))
        return min(candidates, key=lambda moment: abs(moment - near)) if candidates else near

    def _candidates(self, near: datetime) -> Iterator[datetime]:
        since_midnight = self.clock - (self.zone or timedelta(0))
        if self.month is None or self.day is None:
            midnight = near.replace(hour=0, minute=0, second=0, microsecond=0)
            yield from (midnight + days * _DAY + since_midnight for days in (-1, 0, 1))
            return
        years = range(near.year - 1, near.year + 2) if self.year is None else (self.year,)
        for year in years:
            try:
                yield datetime(year, self.month, self.day) + since_midnight
            except (ValueError, OverflowError):  # the 29th of February, or no date at all
                continue


def read_stamp(found: re.Match[str]) -> Stamp | None:
    """The time in the groups of a match: clock, and where they are year, month, day, zone."""
    groups = found.groupdict()
    clock = groups.get("clock")
    if not clock:
        return None
    hours, minutes, seconds = clock.replace(",", ".").split(":")
    since = timedelta(hours=int(hours), minutes=int(minutes), seconds=float(seconds))
    year, day = groups.get("year"), groups.get("day")
    return Stamp(
        since,
        int(year) if year else None,
        _month(groups.get("month")),
        int(day) if day else None,
        _zone(groups.get("zone") or ""),
    )


def moment_of(seconds: float) -> datetime:
    """Seconds since 1970 as a moment in UTC. `fromtimestamp` has limits on Windows."""
    return datetime(1970, 1, 1) + timedelta(seconds=seconds)


def complete_stamp(seconds: float) -> Stamp:
    """Seconds since 1970 as a stamp that leaves nothing open."""
    moment = moment_of(seconds)
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    return Stamp(moment - midnight, moment.year, moment.month, moment.day)


def _month(text: str | None) -> int | None:
    if not text:
        return None
    return int(text) if text.isdigit() else MONTHS.index(text) + 1


def _zone(text: str) -> timedelta | None:
    if not text or text == "Z":
        return timedelta(0) if text else None
    digits = text[1:].replace(":", "")
    offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:4] or 0))
    return -offset if text[0] == "-" else offset
