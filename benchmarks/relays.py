"""Many relays in one process, on one loop: those of the machines of a job; led by orders."""

from __future__ import annotations

import errno
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from rallypoint.bench.results import BenchError
from rallypoint.errors import RallypointError
from rallypoint.store.machine.system import client_ports
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.relay.reaching import StoreAddress, find_upstream
from rallypoint.store.relay.relay import Relay
from rallypoint.store.server.loops.backend import Choice, make_loop
from rallypoint.store.server.loops.pump import TICK_SECONDS
from rallypoint.store.server.process.startup import settle_in
from rallypoint.store.wire.limits import Limits

START_AT_ONCE = 128
"""How many relays connect at the same time: less than any backlog."""

CHECK_S = 0.005
LOWEST_PORT = 10_000
BACKLOG = 128


def free_listeners(host: str, count: int) -> Iterator[socket.socket]:
    """Sockets that listen there, each on a port of its own.

    Below the ports that the system gives to clients, if there are enough: it gives none that is listened on
    to a client, whatever the address, and needs them all. Else wherever the system says.
    """
    first_client, _ = client_ports()
    port = LOWEST_PORT
    while count:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port if port < first_client else 0))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or port >= first_client:
                raise
        else:
            count -= 1
            yield listener
        port += 1


class RelayHost:
    """The relays, led by orders. An answer may come later: the loop goes on meanwhile."""

    def __init__(self, line: Connection) -> None:
        self._loop, _ = make_loop(Choice.LIBUV)
        self._relays: list[RelayCore] = []
        self._ports: list[int] = []
        self._line = line
        self._loop.watch_readable(self._line.fileno(), self._on_order)

    def run(self) -> None:
        """Serve until the orders end."""
        self._loop.run()

    def _on_order(self) -> None:
        order = self._line.recv()
        try:
            getattr(self, order.pop("do"))(**order)
        except (RallypointError, OSError) as error:
            self._line.send(BenchError(str(error)))

    def start(self, host: str, count: int, upstream: tuple[str, int], limit_s: float) -> None:
        """Start relays, some at a time; the answer is on which ports they listen."""
        place = find_upstream([upstream], limit_s)
        if not place.knows_sessions:
            raise BenchError(f"{place.name} knows no sessions")
        listeners = iter(list(free_listeners(host, count)))  # all of them first: here a fault is answered

        def start_some() -> None:
            for _ in range(min(START_AT_ONCE, count - len(self._relays))):
                self._start_one(place, next(listeners))
            more = start_some if len(self._relays) < count else lambda: self._line.send(self._ports)
            self._await("starting relays", self._are_up, more, time.monotonic() + limit_s)

        start_some()

    def settle(self) -> None:
        """Answer when all is quiet: the store knows which frames have come, so no relay has to tell it.

        A relay that has something to tell does so with its next tick; afterwards, none is waited for.
        """
        end = time.monotonic() + 1.5 * TICK_SECONDS

        def untold() -> int:
            return time.monotonic() < end and sum(
                not each.upstream.has_acknowledged_all for each in self._relays
            )

        self._await("", untold, lambda: self._line.send(None), math.inf)

    def messages(self) -> None:
        """How many have passed between the relays and the store so far."""
        self._line.send(sum(each.upstream.batches + each.upstream.frames for each in self._relays))

    def _start_one(self, place: StoreAddress, listener: socket.socket) -> None:
        relay = Relay(self._loop, place, [listener], Limits())
        relay.start()
        core = relay.core
        assert isinstance(core, RelayCore)
        self._relays.append(core)
        self._ports.append(listener.getsockname()[1])

    def _are_up(self) -> int:
        return sum(not relay.upstream.is_up for relay in self._relays[-START_AT_ONCE:])

    def _await(self, what: str, left: Callable[[], int], then: Callable[[], None], deadline: float) -> None:
        """Go on when no relay is left to wait for."""
        late = left()
        if not late:
            then()
        elif time.monotonic() > deadline:
            late_ones = f"{late:,} of {len(self._relays):,}"
            self._line.send(BenchError(f"{what}: time is up, and {late_ones} are not ready"))
        else:
            self._loop.later(CHECK_S, lambda: self._await(what, left, then, deadline))


class RelayProcess:
    """A worker with relays, whose loop has a thread of its own."""

    def __init__(self) -> None:
        settle_in(logging.WARNING)
        self._line, theirs = Pipe()
        threading.Thread(target=lambda: RelayHost(theirs).run(), daemon=True).start()

    def lead(self, **order: object) -> Any:
        """Let the host call the method `do`, with its arguments."""
        self._line.send(order)
        answer = self._line.recv()
        if isinstance(answer, BenchError):
            raise answer
        return answer
