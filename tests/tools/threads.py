"""Servers, relays, and whoever listens in between, in the test's own process: quick, for clients in Python.

torch's C++ client holds the interpreter in some of its calls: for that there are processes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rallypoint.store.connect.connection import GuardedSocket
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.core.store import Core
from rallypoint.store.relay.reaching import Place, StoreAddress
from rallypoint.store.relay.relay import Relay
from rallypoint.store.server.guard.secret import Secret
from rallypoint.store.server.guard.tls import client_channel
from rallypoint.store.server.loops.backend import Choice, make_loop
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.server.process.binding import listen
from rallypoint.store.wire.encoding import VALIDATE
from rallypoint.store.wire.opcodes import Op

_SECONDS = 20.0


Make = Callable[[Loop, list[socket.socket]], Pump[Any]]


@contextmanager
def running_here(
    make: Make, port: int = 0, *, backend: str = "auto", listeners: list[socket.socket] | None = None
) -> Iterator[int]:
    """The port of a server or relay that `make` makes, on a loop in a thread of this process."""
    loop, _ = make_loop(Choice(backend))
    listeners = listeners or listen("127.0.0.1", port)
    with _turning(loop, [make(loop, listeners)]):
        yield listeners[0].getsockname()[1]


@contextmanager
def serving_in_a_thread(relays: int) -> Iterator[int]:
    """A server and so many relays, each on the one before, on one loop in a thread; the last one's port."""
    loop, _ = make_loop(Choice.AUTO)
    listeners = listen("127.0.0.1", 0)
    pumps: list[Pump[Any]] = [Pump(loop, Core(turn=loop.turn), listeners)]
    for _ in range(relays):
        host, port = listeners[0].getsockname()
        upstream = StoreAddress([Place(host, port, [(socket.AF_INET, (host, port))])], True)
        listeners = listen("127.0.0.1", 0)
        pumps.append(Relay(loop, upstream, listeners))
    with _turning(loop, pumps):
        yield int(listeners[0].getsockname()[1])


@contextmanager
def _turning(loop: Loop, pumps: list[Pump[Any]]) -> Iterator[None]:
    for pump in pumps:
        pump.start()
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield
    finally:
        loop.stop()
        thread.join(_SECONDS)
        for pump in reversed(pumps):
            pump.close()
        loop.close()


def prove(sock: socket.socket, secret: Secret) -> None:
    """Prove the secret, and have a request answered."""
    client = GuardedSocket(sock, client_channel("localhost", secret), Deadline(_SECONDS))
    client.open()
    client.sendall(VALIDATE + bytes([Op.PING]) + b"ping")
    assert client.recv(4) == b"ping"
