"""How durations are spread. Pure, and imports next to nothing: clients import the loops."""

from __future__ import annotations

from math import log2
from typing import Final

_PER_OCTAVE: Final = 4
_BUCKETS: Final = 27 * _PER_OCTAVE  # up to two minutes


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
        """The durations that were added since it was as `earlier`."""
        rest = Durations()
        rest._counts = [now - then for now, then in zip(self._counts, earlier._counts, strict=True)]
        rest._total = self._total - earlier._total
        return rest

    def quantile(self, share: float) -> float:
        """What this share of the durations does not go beyond; -1 if there is none."""
        if not self._total:
            return -1.0
        wanted, seen = share * self._total, 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return float(2.0 ** ((place + 1) / _PER_OCTAVE) - 1.0) * 1e-6
        raise AssertionError("the counts do not add up")
