"""What all clients of a process make it hold besides keys and values, in bytes. Pure."""

from __future__ import annotations

from rallypoint.store.wire.limits import Limits


class Budget:
    """Waits, unread replies, incomplete requests, what clients tell, and sessions.

    Each is counted where it is held, at what it occupies. All stores of a server share one budget.
    """

    __slots__ = ("ending", "held", "is_reported", "limit")

    def __init__(self, limits: Limits | None = None) -> None:
        self.limit = (limits or Limits()).held_bytes
        self.held = 0
        self.ending = 0
        """How many sessions have ended whose waits are not all withdrawn yet."""
        self.is_reported = False
        """Whether the driver has been asked to lighten the load."""

    @property
    def is_over(self) -> bool:
        """Whether all clients together hold more than the limit, and will in a moment."""
        return self.held > self.limit and not self.ending
