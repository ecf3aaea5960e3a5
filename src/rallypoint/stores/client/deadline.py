"""A point in time by which something has to be done."""

from __future__ import annotations

import time


class Deadline:
    """The moment some seconds from now."""

    __slots__ = ("_began", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    @property
    def remaining(self) -> float:
        """Seconds left; 0 when it has passed."""
        return max(0.0, self.seconds - self.elapsed)

    @property
    def passed(self) -> bool:
        return self.elapsed >= self.seconds
