"""The time, as a core knows it: its driver writes it down once per turn of the loop. Pure."""

from __future__ import annotations


class Turn:
    """When the turn under way began. All cores on one loop share one."""

    __slots__ = ("now", "wall_ahead")

    def __init__(self, now: float = 0.0, wall_ahead: float = 0.0) -> None:
        self.now = now
        """Seconds of a monotonic clock."""
        self.wall_ahead = wall_ahead
        """How far the time of day is ahead of that clock. The driver looks about once a second."""

    @property
    def wall(self) -> float:
        """The time of day, as unix time."""
        return self.now + self.wall_ahead
