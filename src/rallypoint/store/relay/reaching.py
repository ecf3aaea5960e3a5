"""Where the store of a relay is, and reaching it there.

A store may be at one of several places: all are dialled side by side, again and again (`Race`). The first
place that answers a PING is taken, and the others are closed. A connection is not enough: the system accepts
connections for a process that is stopped, and nobody answers them. A BEAT goes with the PING: the leader of a
replicated store answers that at once, and says why it cannot answer the PING now.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Final, NamedTuple

from rallypoint.errors import ConnectError, ProtocolError
from rallypoint.store.connect.connecting import Attempts, connect, first_to_answer, resolve
from rallypoint.store.connect.connection import who_am_i
from rallypoint.store.connect.deadline import Deadline, in_thread
from rallypoint.store.machine.addresses import format_address, is_numeric
from rallypoint.store.relay.core.upstream import BEAT, BEAT_SECONDS
from rallypoint.store.relay.outgoing import Address, Outgoing
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.wire.encoding import VALIDATE, request, unpack_u64
from rallypoint.store.wire.opcodes import LOCKED, READY, Op
from rallypoint.store.wire.sessions import ASK, ASK_FOR_NAMES, Note, parse_note

_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.5
_LOOK_UP_SECONDS: Final = 5.0
"""A place that cannot be reached for so long is looked up again: its machine may have another address now."""
_NONCE_BYTES: Final = 4
_NONCE_END: Final = b"\xff"
"""So it is never taken for the length of a note."""
_LONGEST_NOTE: Final = 1 << 16
_FRESH_SECONDS: Final = 4 * BEAT_SECONDS
"""For how long a note counts."""


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


class Race:
    """All places of a store, as far as they are to be dialled."""

    def __init__(
        self,
        loop: Loop,
        store: StoreAddress,
        *,
        on_won: Callable[[Outgoing, str], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """`on_won` is called with a connection, which is to be handed over, and the name of its place.

        `on_failed` is called with the reason whenever one of the places could not be reached.
        """
        self.loop = loop
        self.opening = VALIDATE + (request(Op.ENTER, store.store) if store.store else b"")
        self.is_on = False
        self.on_failed = on_failed
        self._on_won = on_won
        self._runners = [_Runner(self, place) for place in store.places]

    def begin(self) -> None:
        """Dial until there is a winner. Those that have failed before are dialled after a pause."""
        self.is_on = True
        for runner in self._runners:
            runner.begin()

    def stop(self) -> None:
        self.is_on = False
        for runner in self._runners:
            runner.stop()

    def rest(self) -> None:
        """All is well: pauses are short again."""
        for runner in self._runners:
            runner.pause = _FIRST_PAUSE

    def win(self, winner: _Runner, connection: Outgoing) -> None:
        self.stop()
        self._on_won(connection, winner.place.name)

    @property
    def trouble(self) -> Note:
        """What keeps the store from going on, as it says at one of its places, and has said just now."""
        fresh = time.monotonic() - _FRESH_SECONDS
        notes = (runner.note for runner in self._runners if runner.noted_at > fresh)
        return next((note for note in notes if note.trouble), Note())

    def describe_failures(self) -> str:
        """What was wrong with each place last."""
        return "; ".join(f"{runner.place.name}: {runner.why}" for runner in self._runners)


class _Runner:
    """Dials one place."""

    def __init__(self, race: Race, place: Place) -> None:
        self._race = race
        self.place = place
        self.why = "not tried yet"
        self.pause = 0.0
        self._addresses = place.addresses
        self._fresh = Deadline(0.0)
        """For how long the addresses need not be looked up."""
        self._has_dial = False
        self._connection: Outgoing | None = None
        self._nonce = b""
        self._heard = b""
        self._has_answered = self._is_owed = False
        self.note = Note()
        self.noted_at = 0.0

    def begin(self) -> None:
        if self._addresses:
            self._fresh = Deadline(_LOOK_UP_SECONDS)
        if self._connection is None:
            self._dial_later()

    def stop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _dial_later(self) -> None:
        """Try again after a while, which grows."""
        if not self._has_dial:
            self._has_dial = True
            self._race.loop.later(self.pause * random.uniform(0.5, 1.0), self._dial)
            self.pause = min(max(2 * self.pause, _FIRST_PAUSE), _LONGEST_PAUSE)

    def _dial(self) -> None:
        self._has_dial = False
        if not self._race.is_on:
            return
        if self._fresh.passed:
            self._look_up()
        if not self._addresses:
            self._dial_later()
            return
        self._heard = b""
        self._connection = Outgoing(
            self._race.loop,
            self.place.host,
            self._addresses,
            on_open=self._on_open,
            on_data=self._on_data,
            on_closed=self._on_closed,
        )

    def _look_up(self) -> None:
        """Ask for the addresses, in a thread: the resolver may take its time."""
        host, port, _ = self.place
        self._fresh = Deadline(_LOOK_UP_SECONDS)
        look_up = partial(resolve, host, port, Deadline(_LOOK_UP_SECONDS))
        if is_numeric(host):
            self._take_addresses(look_up())
        else:
            in_thread(look_up, self._take_addresses, self._miss_addresses)

    def _take_addresses(self, addresses: list[Address]) -> None:
        self._addresses = addresses

    def _miss_addresses(self, error: BaseException) -> None:
        if not self._addresses:
            self.why = f"name not resolved: {error}"

    def _on_open(self) -> None:
        assert self._connection is not None
        self.why = "it accepts connections, but does not answer"
        self._nonce = os.urandom(_NONCE_BYTES - len(_NONCE_END)) + _NONCE_END
        self._has_answered, self._is_owed = False, True
        self._connection.send(self._race.opening + BEAT + request(Op.PING, tail=self._nonce))

    def _beat(self, connection: Outgoing) -> None:
        """Ask again, as long as the PING has no answer."""
        if self._connection is connection and not self._has_answered:
            self._is_owed = True
            connection.send(BEAT)

    def _on_data(self, data: bytes) -> None:
        self._heard += data
        connection = self._connection
        assert connection is not None
        try:
            while self._take_answer(connection):
                pass
        except ProtocolError as error:
            self.stop()
            self._fail(error.message)
            return
        if self._has_answered and not self._is_owed:
            self._connection = None
            self._race.win(self, connection)

    def _take_answer(self, connection: Outgoing) -> bool:
        """Take the next answer, to the PING or to a BEAT; False if it is not complete yet."""
        heard = self._heard
        if len(heard) < _NONCE_BYTES:
            return False
        if heard.startswith(self._nonce):
            self._has_answered = True
            self._heard = heard[_NONCE_BYTES:]
            return True
        if heard.startswith(LOCKED):
            raise ProtocolError("it takes nobody from another machine without the job's secret")
        size = unpack_u64(heard.ljust(8, b"\0"))[0]
        if size > _LONGEST_NOTE:
            raise ProtocolError(f"it does not answer as a store does ({heard[:_NONCE_BYTES]!r})")
        if len(heard) < 8 + size:
            return False
        self._heard, self._is_owed = heard[8 + size :], False
        if size and (note := parse_note(heard[8 : 8 + size])):
            self.note, self.noted_at = note, time.monotonic()
            self.why = note.trouble or "it does not know whether it leads"
        self._race.loop.later(BEAT_SECONDS, partial(self._beat, connection))
        return True

    def _on_closed(self, why: str) -> None:
        self._connection = None
        self._fail(why)

    def _fail(self, why: str) -> None:
        self.why = why
        self._race.on_failed(why)
        self._dial_later()
