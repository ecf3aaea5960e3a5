"""The way to a store for which this machine has a relay.

MASTER_ADDR and MASTER_PORT name the store, alike on all machines, because scripts use them for more than the
store. A launcher that has started a relay here names the relay in RALLYPOINT_RELAY, and the store that it is
for in RALLYPOINT_RELAY_OF, both as HOST:PORT. A client of exactly that address and port connects to the
relay. Every other address is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rallypoint.errors import ConnectError
from rallypoint.store.connect.connecting import connect, format_address
from rallypoint.store.connect.connection import RELAY_VARIABLE, STORE_VARIABLE, Connection
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Identity, Role


def relay_for(
    host: str, port: int, role: Role = Role.UNKNOWN, environ: Mapping[str, str] = os.environ
) -> tuple[str, int] | None:
    """The relay through which this process reaches a store; None: it connects to the store itself.

    Launchers and tools always do: they want to see the whole job.
    """
    if environ.get(STORE_VARIABLE) != format_address(host, port) or role in (Role.AGENT, Role.TOOL):
        return None
    relay, _, relay_port = environ.get(RELAY_VARIABLE, "").rpartition(":")
    return (relay.strip("[]"), int(relay_port)) if relay and relay_port.isdecimal() else None


def connect_to_relay(
    relay: tuple[str, int], store: tuple[str, int], deadline: Deadline, who: Identity
) -> Connection:
    """A connection to a relay; ConnectError, also about the store, if the relay does not answer in time."""
    try:
        return connect(*relay, deadline, who)
    except ConnectError as error:
        hint = relay_hint(relay, store)
        raise ConnectError(error.message, hint=hint, is_silent=error.is_silent) from error


def relay_hint(relay: tuple[str, int], store: tuple[str, int]) -> str:
    """What to do where a relay does not answer."""
    return (
        f"{format_address(*relay)} is this machine's relay for the store {format_address(*store)}: if the "
        "relay has died, the job has to be started again; --relay=off starts it without relays"
    )
