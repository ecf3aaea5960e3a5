"""What runs in the process of a hosted relay."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any

from rallypoint.store.relay.finding import find_upstream
from rallypoint.store.relay.passing import make_relay
from rallypoint.store.server.loops.backend import load_loop
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.server.process.child import run
from rallypoint.store.server.process.line import Order
from rallypoint.store.wire.limits import Limits


def main() -> None:
    """Be a relay."""
    load_loop()  # its order may come much later, and is in a hurry then
    run(_build)


def _build(order: Order, loop: Loop, listeners: Sequence[socket.socket]) -> Pump[Any]:
    if order["quiet"]:
        logging.getLogger("rallypoint.store.relay").setLevel(logging.ERROR)
    upstream = find_upstream(
        [(host, port) for host, port in order["places"]], order["seconds"], order["store"]
    )
    return make_relay(loop, upstream, listeners, Limits(**order["limits"]))
