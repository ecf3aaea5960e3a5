"""Who waits in the engine: a client's connection, or the ticket of a relay. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rallypoint.store.core.journal import Journal, Numbered
from rallypoint.store.wire.opcodes import STOP_WAITING


class Member(Numbered, Protocol):
    """One that the engine may wake."""

    def wake(self) -> None:
        """Its waiting is over: tell the client or the relay."""


def wake(members: Sequence[Member], by: Member, journal: Journal) -> bytes:
    """Wake members because of what `by` has done.

    If `by` is itself among them, its STOP_WAITINGs are returned, to stand among its replies.
    """
    journal.woken(members, by)
    own = 0
    for member in members:
        if member is by:
            own += 1
        else:
            member.wake()
    return STOP_WAITING * own
