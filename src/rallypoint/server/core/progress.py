"""Whether a job makes progress while some of its clients wait. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rallypoint.wire.opcodes import Op

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
