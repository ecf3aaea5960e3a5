"""How much a server is asked, and how long its answers take: counters, and what was a minute ago. Pure.

Who pumps the bytes times a read here and there; the parsers count requests by themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import log2
from typing import Final

from rallypoint.rollcall.snapshot import Mishap, Operation, Second
from rallypoint.wire.opcodes import SHAPES, Op

_PER_OCTAVE: Final = 4
_BUCKETS: Final = 27 * _PER_OCTAVE  # up to two minutes
_HISTORY_SECONDS: Final = 300
_RATE_SECONDS: Final = 5
TURN_SECONDS: Final = 150.0
"""How long a request took is told of the last so many seconds, and of at most as many before."""
_ERRORS_KEPT: Final = 128


class Spread:
    """How durations are spread, to a quarter of an octave."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._total = 0

    def add(self, seconds: float) -> None:
        place = int(log2(max(seconds, 0.0) * 1e6 + 1.0) * _PER_OCTAVE)
        self._counts[min(place, _BUCKETS - 1)] += 1
        self._total += 1

    def __add__(self, other: Spread) -> Spread:
        both = Spread()
        both._counts = [one + more for one, more in zip(self._counts, other._counts, strict=True)]
        both._total = self._total + other._total
        return both

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


class Traffic:
    """Of one server or relay. Not safe for threads."""

    __slots__ = (
        "_counts",
        "_durations",
        "_durations_before",
        "_latest",
        "_turned",
        "error_count",
        "errors",
        "history",
    )

    def __init__(self) -> None:
        # By opcode: of the minutes under way, and of those before. What was slow is forgotten after a while.
        self._durations: dict[int, Spread] = {}
        self._durations_before: dict[int, Spread] = {}
        self._turned = 0.0
        self._latest = Spread()  # of the second under way
        self._counts: deque[tuple[float, Mapping[Op, int]]] = deque(maxlen=_RATE_SECONDS + 1)
        self.history: deque[Second] = deque(maxlen=_HISTORY_SECONDS)
        self.errors: deque[Mishap] = deque(maxlen=_ERRORS_KEPT)
        self.error_count = 0

    def note_duration(self, opcode: int, seconds: float) -> None:
        """A read whose first request was of this kind was answered within so many seconds."""
        spread = self._durations.get(opcode)
        if spread is None:
            if opcode not in _OPCODES:  # there are 256, but not so many operations
                return
            spread = self._durations[opcode] = Spread()
        spread.add(seconds)
        self._latest.add(seconds)

    def note_error(self, wall: float, peer: str, reason: str) -> None:
        """A connection was closed or refused."""
        self.errors.append(Mishap(wall, peer, reason))
        self.error_count += 1

    def end_second(
        self, now: float, wall: float, counts: Mapping[Op, int], *, clients: int, waiting: int
    ) -> None:
        """About once a second: what has been counted until now."""
        before = sum(self._counts[-1][1].values()) if self._counts else 0
        self._counts.append((now, counts))
        p99 = self._latest.quantile(0.99)
        self.history.append(Second(wall, sum(counts.values()) - before, p99, clients, waiting))
        self._latest = Spread()
        if now - self._turned >= TURN_SECONDS:
            self._turned, self._durations_before, self._durations = now, self._durations, {}

    def operations(self, now: float, counts: Mapping[Op, int]) -> list[Operation]:
        """What has been asked so far, by its kind; what has never been is left out."""
        then, before = self._counts[0] if self._counts else (now, {})
        seconds = max(now - then, 1.0)
        return [
            Operation(
                op.name,
                count,
                round((count - before.get(op, 0)) / seconds, 3) if self._counts else 0.0,
                self._quantile(op, 0.5),
                self._quantile(op, 0.99),
            )
            for op, count in sorted(counts.items())
            if count
        ]

    def _quantile(self, op: Op, share: float) -> float:
        if op in _WAITS:
            return -1.0
        empty = Spread()
        spread = self._durations.get(int(op), empty) + self._durations_before.get(int(op), empty)
        return spread.quantile(share)


_OPCODES: Final = frozenset(map(int, SHAPES))
_WAITS: Final = (Op.WAIT, Op.BARRIER)  # what they take depends on others
