"""Reaching a store that may be at one of several places: all are dialled side by side, again and again.

The first place that answers a PING is taken, and the others are closed. To be connected is not enough: for a
process that is stopped, the system accepts connections, and nobody answers them.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from rallypoint.relay.finding import Place, StoreAddress
from rallypoint.relay.outgoing import Address, Outgoing
from rallypoint.server.loops.loop import Loop
from rallypoint.stores.client.connecting import is_numeric, resolve
from rallypoint.stores.client.deadline import Deadline, in_thread
from rallypoint.wire.encoding import VALIDATE, request
from rallypoint.wire.opcodes import LOCKED, Op

_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.5
_LOOK_UP_SECONDS: Final = 5.0
"""A place that cannot be reached for so long is looked up again: its machine may have another address now."""
_NONCE_BYTES: Final = 4


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

    def tell(self) -> str:
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
        self._look_up_at = 0.0
        self._has_dial = False
        self._connection: Outgoing | None = None
        self._nonce = b""
        self._heard = b""

    def begin(self) -> None:
        if self._addresses:
            self._look_up_at = time.monotonic() + _LOOK_UP_SECONDS
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
        if time.monotonic() >= self._look_up_at:
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
        self._look_up_at = time.monotonic() + _LOOK_UP_SECONDS
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
        self._nonce = os.urandom(_NONCE_BYTES)
        self._connection.send(self._race.opening + request(Op.PING, tail=self._nonce))

    def _on_data(self, data: bytes) -> None:
        self._heard += data
        if len(self._heard) < _NONCE_BYTES:
            return
        connection, self._connection = self._connection, None
        assert connection is not None
        if self._heard == self._nonce:
            self._race.win(self, connection)
            return
        connection.close()
        if self._heard.startswith(LOCKED):
            self._fail("it takes nobody from another machine without the job's secret")
        else:
            self._fail(f"it does not answer as a store does ({self._heard[:_NONCE_BYTES]!r})")

    def _on_closed(self, why: str) -> None:
        self._connection = None
        self._fail(why)

    def _fail(self, why: str) -> None:
        self.why = why
        self._race.on_failed(why)
        self._dial_later()
