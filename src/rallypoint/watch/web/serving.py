"""The page on sockets that listen, until a signal, or until its parent has ended.

uvicorn alone would wait for ever for the rest of a request. A connection is waiting while none of its
requests is being answered. If it waits for too long, it is closed. If there are too many connections, of one
address or of all, the oldest that waits is closed for the new one. So connections on which nothing is asked
keep nobody from the page.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rallypoint.client.snapshots import fetch_job_snapshot
from rallypoint.errors import RallypointError
from rallypoint.store.connect.connecting import first_to_answer
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import format_address
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.store.server.process.line import Host
from rallypoint.store.server.process.startup import settle_in
from rallypoint.watch.web.app import make_app
from rallypoint.watch.web.hosting import Access, access_to
from rallypoint.watch.web.poller import StoreWatch

LOOK_SECONDS: Final = 5.0
"""How long the store may take to answer before the page says that it does not."""
_GOODBYE_SECONDS: Final = 3
MOST_CONNECTIONS: Final = 512
MOST_PER_ADDRESS: Final = 128
"""All who come by one proxy have one address."""
_REQUEST_SECONDS: Final = 10.0


def watch_store(*places: tuple[str, int]) -> StoreWatch:
    """A watch over the store, or relay, at one of these addresses."""

    def ask(question: Question) -> Snapshot:
        return first_to_answer(
            places, lambda host, port: fetch_job_snapshot(host, port, question, Deadline(LOOK_SECONDS))
        )

    return StoreWatch(ask, ",".join(format_address(*place) for place in places))


def one_too_many(connections: Iterable[PageProtocol], new: PageProtocol) -> PageProtocol | None:
    """The connection to close, now that there is a new one, which is among them; None: there is room."""
    everybody = list(connections)
    neighbours = [each for each in everybody if each.address == new.address]
    crowd = neighbours if len(neighbours) > MOST_PER_ADDRESS else everybody
    if len(crowd) <= MOST_CONNECTIONS and crowd is everybody:
        return None
    waiting = [each for each in crowd if each.is_waiting]
    return min(waiting, key=lambda each: each.since, default=new)


class PageProtocol(H11Protocol):
    """One connection, as uvicorn serves it, but with these bounds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.since = time.monotonic()  # the time of uvloop stands still while it accepts
        self.is_leaving = False
        self._seen: tuple[object, int] = (None, 0)
        self._next_check = self.loop.call_later(_REQUEST_SECONDS, self._check_idle)
        everybody = (
            each for each in self.connections if isinstance(each, PageProtocol) and not each.is_leaving
        )
        leaving = one_too_many(everybody, self)
        if leaving is not None:
            leaving.is_leaving = True  # it is among the connections until the loop's next turn
            leaving.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_check.cancel()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """Whether no request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _check_idle(self) -> None:
        """Close it, if since the last check no request has come, and the client has read nothing more."""
        seen = (self.cycle, self.transport.get_write_buffer_size())
        if self.is_waiting and seen == self._seen:
            self.transport.abort()  # to close it would be to wait until the client reads
            return
        self._seen = seen
        self._next_check = self.loop.call_later(_REQUEST_SECONDS, self._check_idle)


class WebServer(uvicorn.Server):
    """Serves the page. When it ends, it ends the events of all browsers first."""

    def __init__(self, watch: StoreWatch, access: Access, on_ready: Callable[[], None]) -> None:
        self._watch = watch
        self._on_ready = on_ready
        super().__init__(
            uvicorn.Config(
                make_app(watch, access),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # the address of a client is that of its connection, whatever it claims
                lifespan="off",
                http=PageProtocol,
                ws="none",
                timeout_graceful_shutdown=_GOODBYE_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._watch.close()
        await super().shutdown(sockets)


def serve(server: WebServer, listeners: Sequence[socket.socket]) -> None:
    """Serve until SIGINT or SIGTERM, or until `server.should_exit`."""
    try:
        asyncio.run(server.serve(list(listeners)))
    except KeyboardInterrupt:
        pass  # uvicorn has ended in good order, and then repeats the signal


def main() -> None:
    """Serve the page until the parent ends, or closes our standard input."""
    settle_in(logging.WARNING)
    host = Host()
    given = host.read_order()
    if given is None:
        return
    order, listeners = given
    try:
        server = WebServer(
            watch_store(order["store"]),
            access_to(listeners, order["token"]),
            on_ready=lambda: host.answer({"backend": "uvicorn", "warning": ""}),
        )
    except RallypointError as error:
        host.answer({"error": str(error)})
        sys.exit(1)
    threading.Thread(target=_watch_parent, args=(host, server), daemon=True).start()
    serve(server, listeners)


def _watch_parent(host: Host, server: WebServer) -> None:
    """End the server with its parent."""
    host.await_end()
    server.should_exit = True
