"""A relay in a process of its own, hosted as the store server is."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.server.loops.backend import Choice
from rallypoint.server.process.binding import listen
from rallypoint.server.process.hosting import WITH_PARENT, HostedServer, Lifespan, ServerKind, host_on

RELAY = ServerKind("relay", "rallypoint.relay.child")

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
