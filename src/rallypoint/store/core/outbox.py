"""What a core wants its driver to do, besides sending the replies: a list of plain data. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from rallypoint.errors import ProtocolError

if TYPE_CHECKING:  # most servers never make an event
    from rallypoint.store.rollcall.events import Event

T = TypeVar("T")


class Work(Enum):
    """Something that the driver is to do soon, once."""

    SNAPSHOTS = "call Looks.step until it is done"
    PROCESSES = "find the processes behind clients that have no name, and call Front.processes_found"
    FLUSH = "pass on what was asked, when all that can be read now has been read"
    HOLD = "read nothing more from the clients"
    READ_ON = "read from the clients again"
    CROWDED = "serve none of the clients that ask for much"
    ROOM = "serve them again"
    ABANDONED = "end: the last owner of the server has left"
    LIGHTEN = "call Front.lighten: more is held than the limit held_bytes"
    REST = "call Front.go_on until it returns False, with turns for the clients in between"


@dataclass(frozen=True)
class Close(Generic[T]):
    """A client is to be closed, with this error."""

    client: T
    error: ProtocolError
    at_once: bool = False
    """Whether it gets nothing more, not even what it has not read yet."""


@dataclass(frozen=True)
class GoOn(Generic[T]):
    """A client has asked for more than what is done at once: call its `receive`, be it with nothing, when
    others have had their turn. Until then, nothing more is to be read from it."""

    client: T


@dataclass(frozen=True)
class Pause(Generic[T]):
    """A client has as much under way as it may have: read nothing more from it, and do not go on with its
    requests, until the same comes with `is_over`."""

    client: T
    is_over: bool = False


@dataclass(frozen=True)
class Enter(Generic[T]):
    """A client means the store of this name. What it has sent behind that, its `rest`, is for that store."""

    client: T
    name: bytes


@dataclass(frozen=True)
class CoreFault:
    """An exception that is a fault of ours. The core goes on; the driver writes it to the log."""

    error: Exception


Other: TypeAlias = "Work | Close[Any] | GoOn[Any] | Pause[Any] | Enter[Any] | CoreFault | Event"


class Outbox(Generic[T]):
    """Filled by all parts of one core. The driver empties both lists whenever one is not empty."""

    __slots__ = ("others", "woken")

    def __init__(self) -> None:
        self.woken: list[T] = []
        """The clients that are to be sent their `take_notice`, once for each time that they are listed.
        It is always this same list, so that the driver may keep it."""
        self.others: list[Other] = []
        """All else, in order. It is always this same list, too."""

    def take_woken(self) -> list[T]:
        woken = self.woken[:]
        self.woken.clear()
        return woken

    def take_others(self) -> list[Other]:
        others = self.others[:]
        self.others.clear()
        return others
