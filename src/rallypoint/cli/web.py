"""`rallypoint web`: a page about a store, and figures for Prometheus."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from rallypoint.cli.foreground import PortOption
from rallypoint.cli.signals import signals_as_interrupts
from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import Endpoint, parse_endpoint


def web(
    store: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", envvar="RALLYPOINT_STORE", help="The store, or relay, to look at."),
    ],
    host: Annotated[
        str,
        typer.Option(
            help="Listen where this name says, as with serve; anywhere but on loopback, a token is needed."
        ),
    ] = "localhost",
    port: PortOption = 0,
    token: Annotated[
        str,
        typer.Option(
            envvar="RALLYPOINT_WEB_TOKEN",
            help="Only who has it sees the page. Better in the variable: options can be seen by others.",
        ),
    ] = "",
) -> None:
    """Serve a page about a store until SIGINT or SIGTERM: who is here, who is missing, who waits for what.

    Prints its address on standard output when it is ready. It also answers /metrics, for Prometheus, and
    /healthz. It only reads.
    """
    from rallypoint.server.process.startup import settle_in
    from rallypoint.watch.web.hosting import open_listeners, url_of

    place = _parse(store)
    settle_in(logging.WARNING)
    listeners = open_listeners(host, port, token)
    line = f"rallypoint: page on {url_of(host, listeners)}"

    from rallypoint.watch.web.serving import WebServer, access_to, serve, watch_store

    server = WebServer(watch_store(*place), access_to(listeners, token), on_ready=lambda: print(line))
    with signals_as_interrupts():
        serve(server, listeners)


def _parse(store: str) -> Endpoint:
    endpoint = parse_endpoint(store)
    if not endpoint.port or not store.strip().endswith(f":{endpoint.port}"):
        raise UsageError(
            f"the store (--store, or RALLYPOINT_STORE) is {store!r}",
            hint="write HOST:PORT, for example localhost:29500",
        )
    return endpoint
