"""Relays, and store servers with workers, in processes of their own: hosted as the store server is."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.store.server.loops.backend import Choice
from rallypoint.store.server.process.binding import ANY_PORT, listen_within
from rallypoint.store.server.process.hosting import (
    STORE_SERVER,
    WITH_PARENT,
    HostedServer,
    Lifespan,
    ServerKind,
    ServerProcess,
    host_on,
)

RELAY = ServerKind("relay", "rallypoint.store.relay.process")
STORE_WITH_WORKERS = ServerKind("store server", "rallypoint.store.relay.store_with_workers")

UPSTREAM_SECONDS = 30.0
"""How long a relay may take to reach its upstream at its start."""


def host_relay(
    places: Sequence[tuple[str, int]],
    *,
    store: str = "",
    host: str = "127.0.0.1",
    ports: range = ANY_PORT,
    backend: Choice = Choice.AUTO,
    lifespan: Lifespan = WITH_PARENT,
    seconds: float = UPSTREAM_SECONDS,
    prepared: ServerProcess | None = None,
    quiet: bool = False,
) -> HostedServer:
    """Start a relay on this machine, at one of these ports, for the store or relay at one of the places.

    `store` names one of several stores that are there. The relay listens where `host` says. `quiet`: it does
    not log that the store was away for a while, as another relay of this machine does. Raises BindError, or
    ServerStartError, also if the upstream is not reached in time.
    """
    order: dict[str, object] = {"places": [*places], "store": store, "seconds": seconds, "quiet": quiet}
    sockets = listen_within(host, ports)
    return host_on(sockets, RELAY, order, backend=backend, lifespan=lifespan, prepared=prepared)


def host_store(
    host: str,
    ports: range,
    *,
    backend: Choice = Choice.AUTO,
    lifespan: Lifespan = WITH_PARENT,
    workers: int = 0,
    prepared: ServerProcess | None = None,
) -> HostedServer:
    """Start a store server at one of these ports; if it is to have workers, with these."""
    listeners = listen_within(host, ports, max(workers, 1))
    kind = STORE_WITH_WORKERS if workers else STORE_SERVER
    order: dict[str, object] = {"workers": workers}
    return host_on(listeners, kind, order, backend=backend, lifespan=lifespan, prepared=prepared)
