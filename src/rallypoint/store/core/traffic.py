"""How much a server is asked, how long the turns of its loop take, and whether a job makes progress. Pure.

The loop times its turns, and the parsers count requests by themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from rallypoint.store.core.durations import Durations
from rallypoint.store.core.turn import Turn
from rallypoint.store.wire.opcodes import Op

_HISTORY_SECONDS: Final = 300
_RATE_SECONDS: Final = 5
MARK_SECONDS: Final = 150.0
"""How long turns take is told of the last 150 to 300 seconds."""
_ERRORS_KEPT: Final = 128


Second = tuple[float, int, float, int, int]
"""One second of the past, in the order of `snapshot.Second`."""


class Traffic:
    """The figures of one server or relay. Not safe for threads."""

    __slots__ = ("_counts", "_marks", "_turns", "error_count", "errors", "history")

    def __init__(self) -> None:
        self._turns = Durations()  # of all turns of the loop, when the last second ended
        self._marks: deque[tuple[float, Durations]] = deque(maxlen=2)  # and at two times before
        self._counts: deque[tuple[float, Mapping[Op, int]]] = deque(maxlen=_RATE_SECONDS + 1)
        self.history: deque[Second] = deque(maxlen=_HISTORY_SECONDS)
        self.errors: deque[tuple[float, str, str]] = deque(maxlen=_ERRORS_KEPT)
        self.error_count = 0

    def note_error(self, wall: float, peer: str, reason: str) -> None:
        """A connection was closed or refused."""
        self.errors.append((wall, peer, reason))
        self.error_count += 1

    def end_second(
        self, turn: Turn, turns: Durations, counts: Mapping[Op, int], *, clients: int, waiting: int
    ) -> None:
        """About once a second: what has been counted until now, and how long all turns of the loop took."""
        before = sum(self._counts[-1][1].values()) if self._counts else 0
        self._counts.append((turn.now, counts))
        p99 = (turns - self._turns).quantile(0.99)
        self.history.append((turn.wall, sum(counts.values()) - before, p99, clients, waiting))
        self._turns = turns
        if not self._marks or turn.now - self._marks[-1][0] >= MARK_SECONDS:
            self._marks.append((turn.now, turns))

    def turn_quantile(self, share: float) -> float:
        """Seconds that this share of the turns of the last minutes did not go beyond; -1: none was timed."""
        return (self._turns - self._marks[0][1]).quantile(share) if self._marks else -1.0

    def operations(self, now: float, counts: Mapping[Op, int]) -> list[tuple[str, int, float]]:
        """The operations that were asked: the name of each, how often so far, and how often per second."""
        then, before = self._counts[0] if self._counts else (now, {})
        seconds = max(now - then, 1.0)
        return [
            (op.name, count, round((count - before.get(op, 0)) / seconds, 3) if self._counts else 0.0)
            for op, count in sorted(counts.items())
            if count
        ]


# A client that asks one of these has come a step further, or lets others do so. Reads and waits may be
# repeated for ever; and with ADD and COMPARE_SET, launchers give signs of life.
_STEPS: Final = (
    *(Op.SET, Op.APPEND, Op.MULTI_SET, Op.QUEUE_PUSH, Op.QUEUE_POP, Op.POP_CALLED, Op.BARRIER, Op.ARRIVE),
)

_SHORT_BREAK: Final = 5.0
"""A client that waits in pieces, as torch's barrier does to log in between, has waited all the time."""


class Progress:
    """When somebody last came a step further, to a second, and since when somebody waits."""

    __slots__ = ("_seen", "_waited_at", "_waiting_since", "last")

    def __init__(self, now: float) -> None:
        self.last = now
        self._seen = 0
        self._waiting_since: float | None = None
        self._waited_at = 0.0

    def look(
        self, now: float, arrivals: int, counts: Mapping[Op, int], oldest_wait: float | None, waiting: int
    ) -> None:
        """About once a second: how many clients have come, what was asked so far, and who waits."""
        seen = arrivals + sum(counts.get(op, 0) for op in _STEPS)
        if seen != self._seen:
            self._seen, self.last = seen, now
        if waiting:
            self._waited_at = now
            if self._waiting_since is None:
                self._waiting_since = oldest_wait
        elif now - self._waited_at > _SHORT_BREAK:
            self._waiting_since = None

    def stalled_seconds(self, now: float) -> float:
        """How long nobody has made progress while somebody waited, to a second; 0: somebody has."""
        return 0.0 if self._waiting_since is None else now - max(self.last, self._waiting_since)
