"""The time, as a core knows it, and how durations are spread.

Imports next to nothing: clients import the loops, and the loops import this.
"""

from __future__ import annotations

from math import log2
from typing import Final

_PER_OCTAVE: Final = 4
_BUCKETS: Final = 27 * _PER_OCTAVE  # up to two minutes


class Turn:
    """When the current turn of the loop began: the driver writes it once per turn.

    All cores on one loop share one.
    """

    __slots__ = ("now", "wall_ahead")

    def __init__(self, now: float = 0.0, wall_ahead: float = 0.0) -> None:
        self.now = now
        """Seconds of a monotonic clock."""
        self.wall_ahead = wall_ahead
        """How far the time of day is ahead of that clock. The driver updates it about once a second."""

    @property
    def wall(self) -> float:
        """The time of day, as unix time."""
        return self.now + self.wall_ahead


class Durations:
    """How durations are spread, to a quarter of an octave."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._total = 0

    def add(self, seconds: float) -> None:
        place = int(log2(max(seconds, 0.0) * 1e6 + 1.0) * _PER_OCTAVE)
        self._counts[min(place, _BUCKETS - 1)] += 1
        self._total += 1

    def copy(self) -> Durations:
        return self - Durations()

    def __sub__(self, earlier: Durations) -> Durations:
        """The durations that were added since the copy `earlier` was made."""
        rest = Durations()
        rest._counts = [now - then for now, then in zip(self._counts, earlier._counts, strict=True)]
        rest._total = self._total - earlier._total
        return rest

    def quantile(self, share: float) -> float:
        """The duration that this share of them does not exceed; -1 if there are none."""
        if not self._total:
            return -1.0
        wanted, seen = share * self._total, 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return float(2.0 ** ((place + 1) / _PER_OCTAVE) - 1.0) * 1e-6
        raise AssertionError("the counts do not add up")
