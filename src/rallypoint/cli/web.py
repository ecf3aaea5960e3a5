"""`rallypoint web`: a page about a store, and figures for Prometheus."""

from __future__ import annotations

import logging

from rallypoint.cli.command import Argument, command
from rallypoint.cli.foreground import ALLOW_USER, host_option, port_option, set_access
from rallypoint.cli.signals import signals_as_interrupts
from rallypoint.launch.endpoint import parse_store
from rallypoint.store.server.process.startup import settle_in
from rallypoint.watch.web.hosting import access_to, open_place


@command(
    Argument(
        "--store",
        metavar="HOST:PORT",
        variable="RALLYPOINT_STORE",
        required=True,
        help="The store, or relay, to look at.",
    ),
    host_option(
        "localhost",
        "Listen where this name says, as with serve; anywhere but on loopback, requests need the token.",
    ),
    port_option(0),
    Argument(
        "--token",
        metavar="TEXT",
        variable="RALLYPOINT_WEB_TOKEN",
        default="",
        help="Requests need it. Better in the variable: options can be seen by others. Without one, the page "
        "is for you and root on loopback; elsewhere its printed address has a fresh one.",
    ),
    ALLOW_USER,
)
def web(store: str, host: str, port: int, token: str, allow_user: list[str] | None) -> None:
    """Serve a page about a store until SIGINT or SIGTERM: who is here, who is missing, who waits for what.

    Prints its address on standard output when it is ready. It also answers /metrics, for Prometheus, and
    /healthz. It only reads.
    """
    places = parse_store(store, "the store (--store, or RALLYPOINT_STORE)")
    settle_in(logging.WARNING)
    set_access(allow_user, insecure=False)
    at = open_place(host, port, token)
    line = f"rallypoint: page on {at.url}"

    from rallypoint.watch.web.serving import WebServer, serve, watch_store

    server = WebServer(watch_store(*places), access_to(at.listeners, at.token), on_ready=lambda: print(line))
    with signals_as_interrupts():
        serve(server, at.listeners)
