"""The page on sockets that listen, until a signal, or until its parent has ended."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final

import uvicorn

from rallypoint.client.look import look_at_job
from rallypoint.errors import RallypointError
from rallypoint.store.connect.connecting import first_to_answer
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import format_address
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.store.server.process.line import Host
from rallypoint.store.server.process.startup import settle_in
from rallypoint.watch.web.access import Access
from rallypoint.watch.web.app import make_app
from rallypoint.watch.web.connections import PageProtocol
from rallypoint.watch.web.hosting import on_loopback
from rallypoint.watch.web.poller import StoreWatch

LOOK_SECONDS: Final = 5.0
"""How long the store may take to answer before the page says that it does not."""

_GOODBYE_SECONDS: Final = 3


def watch_store(*places: tuple[str, int]) -> StoreWatch:
    """A watch over the store, or relay, at one of these addresses."""

    def ask(question: Question) -> Snapshot:
        def look(host: str, port: int) -> Snapshot:
            return look_at_job(host, port, question, Deadline(LOOK_SECONDS))

        return first_to_answer(places, look)

    return StoreWatch(ask, ",".join(format_address(*place) for place in places))


class WebServer(uvicorn.Server):
    """Serves the page. When it ends, it ends the events of all browsers first."""

    def __init__(self, watch: StoreWatch, access: Access, on_ready: Callable[[], None]) -> None:
        self._watch = watch
        self._on_ready = on_ready
        super().__init__(
            uvicorn.Config(
                make_app(self._watch, access),
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


def access_to(listeners: Sequence[socket.socket], token: str) -> Access:
    """The rules for a page on these sockets."""
    loopback = on_loopback(listeners)
    return Access(token, loopback, f"rallypoint_{listeners[0].getsockname()[1]}")


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
