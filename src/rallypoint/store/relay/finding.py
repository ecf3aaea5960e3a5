"""Where the store of a relay is, and whether it is there when the relay starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from rallypoint.errors import ConnectError
from rallypoint.store.connect.connecting import Attempts, connect, first_to_answer, resolve
from rallypoint.store.connect.connection import who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import format_address
from rallypoint.store.relay.outgoing import Address
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.wire.opcodes import READY
from rallypoint.store.wire.sessions import ASK, ASK_FOR_NAMES


class Place(NamedTuple):
    """Where a store or relay may be."""

    host: str
    port: int
    addresses: list[Address]
    """Those of the host; empty if they have not been looked up."""

    @property
    def name(self) -> str:
        return format_address(self.host, self.port)


class StoreAddress(NamedTuple):
    """The store or relay upstream of a relay: where it may be, and what it can do."""

    places: list[Place]
    """If there are several, the store moves from one to another; it answers at one of them at a time."""
    knows_sessions: bool
    store: bytes = b""
    """Which of several stores is meant that are at the same place."""

    @property
    def name(self) -> str:
        return ", ".join(place.name for place in self.places)

    @property
    def moves(self) -> bool:
        """Whether the store may go on at another place."""
        return len(self.places) > 1


def find_upstream(
    places: Sequence[tuple[str, int]],
    seconds: float,
    store: str = "",
    attempts: Sequence[Attempts] | None = None,
) -> StoreAddress:
    """Reach the store or relay that is at one of these places, as host and port.

    `attempts`, one for each place, tell another thread how far this has come.

    AccessError, at once, if one of the places refuses this process or is not trusted. ConnectError when it
    takes longer than the seconds given; or if it knows no sessions, or no names of stores, but has to.
    """
    deadline = Deadline(seconds)
    attempts = attempts or [Attempts(*place) for place in places]
    numbered = {(each.host, each.port): (number, each) for number, each in enumerate(attempts)}

    def ask(host: str, port: int) -> tuple[int, bool, bool]:
        number, place = numbered[host, port]
        return number, *_ask(place, deadline)

    try:
        number, knows_sessions, knows_names = first_to_answer(places, ask)
    finally:
        deadline.seconds = 0.0  # the other places need not be tried any longer
    found = [Place(*place, []) for place in places]
    found[number].addresses.extend(resolve(*places[number], Deadline(seconds)))
    if not knows_sessions and (store or len(places) > 1):
        raise ConnectError(
            f"{found[number].name} knows no sessions, which several upstreams and named stores need",
            hint="it is a store of torch's own, or of another version of rallypoint than this relay",
        )
    if store and not knows_names:
        raise ConnectError(
            f"{found[number].name} has no store named {store!r}, but only one, without a name",
            hint="a relay, and a server with workers, holds none with names: give the address of `rallypoint "
            "serve`, without --workers",
        )
    return StoreAddress(found, knows_sessions, store.encode(errors="surrogateescape"))


def knows_names(host: str, port: int, seconds: float) -> bool:
    """Whether what is there holds several stores, by their names; ConnectError if it does not answer."""
    return _ask(Attempts(host, port), Deadline(seconds))[1]


def _ask(place: Attempts, deadline: Deadline) -> tuple[bool, bool]:
    """Whether what answers at this place knows sessions, and names of stores."""
    connection = connect(place.host, place.port, deadline, who_am_i(Role.AGENT), attempts=place)
    with closing(connection):
        connection.send(ASK + ASK_FOR_NAMES, deadline)
        sessions, names = (connection.read(1, deadline) == READY for _ in range(2))
        return sessions, names
