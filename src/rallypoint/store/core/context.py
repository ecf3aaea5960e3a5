"""What the parts of one core share: where it runs, its limits, the time, its outbox and its journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rallypoint.store.core.outbox import DriverTask, Outbox
from rallypoint.store.core.turn import Turn
from rallypoint.store.engine.keyspace import Budget
from rallypoint.store.rollcall.identity import Identity
from rallypoint.store.wire.limits import Limits


@dataclass(frozen=True)
class About:
    """Where a server or a relay runs, for its snapshots and its first event."""

    version: str = ""
    host: str = ""
    pid: int = 0
    backend: str = ""


class Numbered(Protocol):
    """A client's connection, or the ticket of a relay."""

    since: float
    """When the client connected, or when the ticket began to wait; by the monotonic clock."""

    @property
    def id(self) -> int:
        """The number by which events call the client or the relay."""


class Journal:
    """Is told what happens to clients, and keeps nothing of it; `EventJournal` makes events of it.

    Most servers write no events, and start sooner without importing what an event is.
    """

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

    def end_second(self, plan: bytes | bytearray | None, stall: bytes | bytearray | None) -> None:
        """About once a second: the launcher's plan and its report of a stall, as the store has them now."""


class Context:
    """The limits, the time, the outbox and the journal of one core. None of them is ever replaced."""

    __slots__ = ("about", "budget", "journal", "limits", "outbox", "turn")

    def __init__(
        self,
        limits: Limits | None = None,
        turn: Turn | None = None,
        about: About | None = None,
        budget: Budget | None = None,
        *,
        make_journal: Callable[[Turn, Outbox[Any]], Journal] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.turn = turn or Turn()
        self.about = about or About()
        self.budget = budget or Budget(self.limits)
        self.outbox: Outbox[Any] = Outbox()
        self.journal = make_journal(self.turn, self.outbox) if make_journal is not None else Journal()

    def count_held(self, count: int) -> None:
        """So many more bytes are held for a client, or fewer if negative."""
        self.budget.held += count
        if count > 0:
            self.check_budget()

    def check_budget(self) -> None:
        """Ask the driver to close the client that holds the most, if all of them hold too much."""
        if self.budget.is_over and not self.budget.is_reported:
            self.budget.is_reported = True
            self.outbox.others.append(DriverTask.LIGHTEN)
