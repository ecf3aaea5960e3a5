"""Relays, and store servers with workers, in processes of their own: hosted as the store server is."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.server.loops.backend import Choice
from rallypoint.server.process.binding import listen
from rallypoint.server.process.hosting import (
    WITH_PARENT,
    HostedServer,
    Lifespan,
    ServerKind,
    host_on,
    host_server,
)

RELAY = ServerKind("relay", "rallypoint.relay.child")
STORE_WITH_WORKERS = ServerKind("store server", "rallypoint.relay.head")

UPSTREAM_SECONDS = 30.0
"""How long a relay may take to reach its upstream at its start."""


def host_relay(
    places: Sequence[tuple[str, int]],
    *,
    store: str = "",
    host: str = "127.0.0.1",
    backend: Choice = Choice.AUTO,
    lifespan: Lifespan = WITH_PARENT,
    seconds: float = UPSTREAM_SECONDS,
) -> HostedServer:
    """Start a relay on this machine, at a free port, for the store or relay that is at one of these places.

    `store` names one of several stores that are there. The relay listens where `host` says. Raises BindError,
    or ServerStartError, also if the upstream is not reached in time.
    """
    order: dict[str, object] = {"places": [*places], "store": store, "seconds": seconds}
    return host_on(listen(host, 0), RELAY, order, backend=backend, lifespan=lifespan)


def host_store(
    host: str,
    port: int,
    *,
    backend: Choice = Choice.AUTO,
    lifespan: Lifespan = WITH_PARENT,
    workers: int = 0,
) -> HostedServer:
    """Start a store server, as `host_server` does; if it is to have workers, with these."""
    if not workers:
        return host_server(host, port, backend=backend, lifespan=lifespan)
    order: dict[str, object] = {"workers": workers}
    return host_on(listen(host, port, workers), STORE_WITH_WORKERS, order, backend=backend, lifespan=lifespan)
