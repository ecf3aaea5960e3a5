"""What a core tells of its clients while it runs. This journal forgets it; `EventJournal` makes events of it.

Most servers write no events, and need not import what an event is: they are up sooner. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rallypoint.store.core.about import About
from rallypoint.store.rollcall.identity import Identity


class Numbered(Protocol):
    """A client's connection, or the ticket of a relay."""

    since: float
    """When the client connected, or when the ticket began to wait; by the monotonic clock."""

    @property
    def id(self) -> int:
        """The number by which events call the client or the relay."""


class Journal:
    """Is told what happens, and keeps nothing of it."""

    is_wanted = False
    """Whether anybody reads the events."""

    def started(self, kind: str, about: About) -> None:
        """A server or a relay begins to serve."""

    def stopped(self) -> None:
        """The server serves no more. This is the last call."""

    def connected(self, client: Numbered, peer: str) -> None:
        """A client is there."""

    def named(self, client: Numbered, who: Identity) -> None:
        """It is known now which rank or tool the client is."""

    def left(self, client: Numbered, why: str) -> None:
        """A client has gone."""

    def erred(self, peer: str, reason: str) -> None:
        """A client was refused, or is closed because of what it did."""

    def waits(self, client: Numbered, keys: Sequence[bytes]) -> None:
        """A client begins to wait, for keys or at a barrier."""

    def woken(self, waiters: Sequence[Numbered], by: Numbered) -> None:
        """Clients, and tickets of relays, wait no more because of what another has done."""

    def gave_up(self, client: Numbered) -> None:
        """A client waits no more, though what it waited for has not come."""

    def gathered(self, key: bytes, size: int, waiters: Sequence[Numbered], last: Numbered) -> None:
        """A barrier is complete; `last` was the last to arrive. `woken` comes next."""

    def look(self, plan: bytes | bytearray | None, stall: bytes | bytearray | None) -> None:
        """About once a second: what has come of waits, of the launcher's plan and what it says of a stall?"""
