"""What all parts of a core share: its limits, the time, and the outbox, with what its driver is to do.

The outbox has, besides the clients to wake, plain data: a `DriverTask`, or one of the classes below it. Long
requests are carried out a slice at a time, so that other clients need not wait for them: a request reads or
writes at one moment, and what takes long is to prepare that, or to put the reply together.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from rallypoint.errors import ProtocolError
from rallypoint.store.core.turn import Turn
from rallypoint.store.engine.keyspace import Budget
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.parser import STEPS_AT_ONCE

if TYPE_CHECKING:
    from rallypoint.store.core.event_journal import EventJournal
    from rallypoint.store.rollcall.events import Event

T = TypeVar("T")


class DriverTask(Enum):
    """A task that the driver does soon, once."""

    SNAPSHOTS = "call Snapshots.step until it is done"
    PROCESSES = "find the processes behind clients that have no name, and call ServerCore.processes_found"
    FLUSH = "pass on what was asked, when all that can be read now has been read"
    HOLD = "read nothing more from the clients"
    READ_ON = "read from the clients again"
    CROWDED = "serve none of the clients that ask for much"
    ROOM = "serve them again"
    ABANDONED = "end: the last owner of the server has left"
    LIGHTEN = "call ServerCore.lighten: more is held than the limit held_bytes"
    REST = "call ServerCore.go_on until it returns False, with turns for the clients in between"


@dataclass(frozen=True)
class Close(Generic[T]):
    """Close a client, with this error."""

    client: T
    error: ProtocolError
    at_once: bool = False
    """Whether to drop even what it has not read yet."""


@dataclass(frozen=True)
class GoOn(Generic[T]):
    """A client has asked for more than is done at once: call its `receive`, even with no bytes, when others
    have had their turn. Read nothing more from it until then."""

    client: T


@dataclass(frozen=True)
class Pause(Generic[T]):
    """A client has as much under way as it may have: read nothing more from it, and do not go on with its
    requests, until the same comes with `is_over`."""

    client: T
    is_over: bool = False


@dataclass(frozen=True)
class Enter(Generic[T]):
    """A client means the store of this name. What it has sent since, its `rest`, is for that store."""

    client: T
    name: bytes


@dataclass(frozen=True)
class CoreFault:
    """An exception that is a bug of ours. The core goes on; the driver logs it."""

    error: Exception


Other: TypeAlias = "DriverTask | Close[Any] | GoOn[Any] | Pause[Any] | Enter[Any] | CoreFault | Event"


class Outbox(Generic[T]):
    """Filled by all parts of one core. The driver empties both lists whenever one is not empty."""

    __slots__ = ("others", "woken")

    def __init__(self) -> None:
        self.woken: list[T] = []
        """The clients to send their `take_notice`, once for each time that they are listed. The list is never
        replaced, so that the driver may keep it."""
        self.others: list[Other] = []
        """All else, in order. This list is never replaced, either."""

    def take_woken(self) -> list[T]:
        woken = self.woken[:]
        self.woken.clear()
        return woken

    def take_others(self) -> list[Other]:
        others = self.others[:]
        self.others.clear()
        return others


@dataclass(frozen=True)
class About:
    """Where a server or a relay runs, for its snapshots and its first event."""

    version: str = ""
    host: str = ""
    pid: int = 0
    backend: str = ""


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
        wants_events: bool = False,
    ) -> None:
        self.limits = limits or Limits()
        self.turn = turn or Turn()
        self.about = about or About()
        self.budget = budget or Budget(self.limits)
        self.outbox: Outbox[Any] = Outbox()
        self.journal: EventJournal | None = None
        """Makes events of what happens to clients, if anybody reads them."""
        if wants_events:
            from rallypoint.store.core.event_journal import EventJournal  # late: most servers write no events

            self.journal = EventJournal(self.turn, self.outbox.others.append)

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


# Slices

Slices = Generator[bytes | None, None, bytes]
"""A request under way: it yields after each slice but the last, and returns the reply. If that is long, it
yields pieces of it first."""

Rest = Iterator[None]
"""Work under way for which nobody waits: it yields after each slice but the last."""

SLICE = STEPS_AT_ONCE
"""How many keys are a slice; an even number, as keys and values alternate in some requests."""

PIECE_BYTES: Final = 1 << 18
"""How much of a long reply is made and sent at a time."""


def sliced(keys: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(keys), SLICE):
        yield keys[start : start + SLICE]
