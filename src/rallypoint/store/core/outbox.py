"""What a core wants its driver to do, besides sending the replies, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from rallypoint.errors import ProtocolError

if TYPE_CHECKING:  # most servers never make an event
    from rallypoint.store.rollcall.events import Event

T = TypeVar("T")


class DriverTask(Enum):
    """A task that the driver does soon, once."""

    SNAPSHOTS = "call Looks.step until it is done"
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
