"""What all clients of a server or relay make it hold besides keys and values, in bytes. Pure."""

from __future__ import annotations

from rallypoint.wire.limits import Limits


class Budget:
    """Replies that clients do not read, requests that are not complete, what clients tell, and sessions.

    Waits are the engine's. Each client and each session counts here what is held for it, whenever that
    changes.
    """

    __slots__ = ("held", "limit")

    def __init__(self, limits: Limits) -> None:
        self.limit = limits.held_bytes
        self.held = 0
