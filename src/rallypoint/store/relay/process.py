"""The process of a relay: a relay that combines, or one that only passes bytes on.

A server that knows no sessions, as torch's own, needs the second kind: it has a connection upstream for each
client. Nothing is combined and nothing survives a broken connection; but the ranks of a machine still have
one address on it to connect to.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.errors import ProtocolError
from rallypoint.store.core.clients import Client
from rallypoint.store.core.context import Close, Context, DriverTask
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.sessions import NoCarrier
from rallypoint.store.relay.outgoing import Outgoing
from rallypoint.store.relay.reaching import Place, StoreAddress, find_upstream
from rallypoint.store.relay.relay import Relay
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump, about_this_process
from rallypoint.store.server.process.child import run
from rallypoint.store.server.process.line import Order
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.parser import RequestTable

logger = logging.getLogger("rallypoint.relay")


class Passenger(Client):
    """One client, and its own connection upstream."""

    __slots__ = ("_coming", "_core", "outgoing")

    def __init__(self, core: PassingCore, peer: str) -> None:
        super().__init__(core.clients, core.sessions, peer)
        self._core = core
        self._coming: list[bytes] = []
        self.receive = self._receive
        self.outgoing = Outgoing(
            core.loop,
            core.place.host,
            core.place.addresses,
            on_open=lambda: None,
            on_data=self._on_data,
            on_closed=self._on_closed,
        )

    def take_notice(self) -> bytes:
        notice = b"".join(self._coming)
        self._coming.clear()
        return notice

    def _receive(self, data: bytes) -> bytes:
        self._core.clients.complete_handshake(self)  # the server sees to that
        self.outgoing.send(data)
        if self.outgoing.unsent_bytes:
            self._core.check_pressure()
        return b""

    def _on_data(self, data: bytes) -> None:
        self._coming.append(data)
        self._core.outbox.woken.append(self)
        self._core.deliver()

    def _on_closed(self, why: str) -> None:
        error = ProtocolError(f"its connection to the store is gone: {why}")
        self._core.outbox.others.append(Close(self, error))
        self._core.deliver()


class PassingCore(ServerCore[Passenger]):
    """All clients of such a relay."""

    kind = "relay"

    __slots__ = ("_is_pressed", "deliver", "loop", "place")

    def __init__(self, loop: Loop, place: Place, limits: Limits, deliver: Callable[[], None]) -> None:
        """`deliver` empties the outbox: data comes from upstream without a call of the driver's."""
        context = Context(limits, loop.turn, about_this_process(loop))
        super().__init__(context, NoCarrier(), RequestTable(limits, {}))
        self.loop = loop
        self.place = place
        self.deliver = deliver
        self._is_pressed = False

    def _make(self, peer: str) -> Passenger:
        return Passenger(self, peer)

    def close(self, client: Passenger) -> None:
        super().close(client)
        client.outgoing.close()

    def overdue(self) -> list[tuple[Passenger, str]]:
        self.check_pressure()
        return super().overdue()

    def check_pressure(self) -> None:
        """Read nothing more from the clients while the server does not take what they have sent."""
        held = sum(passenger.outgoing.unsent_bytes for passenger in self.clients)
        is_pressed = held > (
            self.limits.relayed_bytes // 2 if self._is_pressed else self.limits.relayed_bytes
        )
        if is_pressed != self._is_pressed:
            self._is_pressed = is_pressed
            self.outbox.others.append(DriverTask.HOLD if is_pressed else DriverTask.READ_ON)


class PassingRelay(Pump[Passenger]):
    """Passes bytes between its clients and an upstream that knows no sessions."""

    def __init__(self, loop: Loop, place: Place, listeners: Sequence[socket.socket], limits: Limits) -> None:
        super().__init__(loop, PassingCore(loop, place, limits, self.deliver), listeners)


def make_relay(
    loop: Loop, upstream: StoreAddress, listeners: Sequence[socket.socket], limits: Limits
) -> Pump[Any]:
    """A relay that combines, or one that only passes on if its upstream knows no sessions."""
    if upstream.knows_sessions:
        return Relay(loop, upstream, listeners, limits)
    logger.warning(
        "%s knows no sessions, as a store of torch's own: each client gets a connection to it, and nothing "
        "is combined. hint: serve the store with `rallypoint serve` or `rallypoint run`",
        upstream.name,
    )
    return PassingRelay(loop, upstream.places[0], listeners, limits)


def main() -> None:
    """Be a relay."""
    run(_build)


def _build(order: Order, loop: Loop, listeners: Sequence[socket.socket]) -> Pump[Any]:
    if order["quiet"]:
        logging.getLogger("rallypoint.relay").setLevel(logging.ERROR)
    upstream = find_upstream(
        [(host, port) for host, port in order["places"]], order["seconds"], order["store"]
    )
    return make_relay(loop, upstream, listeners, Limits(**order["limits"]))
