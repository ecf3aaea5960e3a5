"""What all clients of a server or relay make it hold besides keys and values, in bytes. Pure."""

from __future__ import annotations

from rallypoint.wire.limits import Limits


class Budget:
    """Replies that clients do not read, requests that are not complete, what clients tell, and sessions.

    Waits are the engine's. Each client and each session counts here what is held for it, whenever that
    changes. Several stores of one server have a budget each, and one limit for all together.
    """

    __slots__ = ("_held", "_limit", "_together")

    def __init__(self, limits: Limits, beside: Budget | None = None) -> None:
        """`beside`: that of another store of the same server."""
        self._limit = limits.held_bytes
        self._held = 0
        # The sum, which all of them change.
        self._together: list[int] = [0] if beside is None else beside._together

    @property
    def held(self) -> int:
        """What is held for the clients of this store."""
        return self._held

    @held.setter
    def held(self, count: int) -> None:
        self._together[0] += count - self._held
        self._held = count

    @property
    def is_over(self) -> bool:
        """Whether all stores together hold more than the limit."""
        return self._together[0] > self._limit
