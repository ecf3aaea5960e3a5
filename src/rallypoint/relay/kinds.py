"""Which kind of relay suits an upstream."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any

from rallypoint.relay.passing import PassingRelay
from rallypoint.relay.relay import Relay, StoreAddress
from rallypoint.server.loops.loop import Loop
from rallypoint.server.loops.pump import Pump
from rallypoint.wire.limits import Limits

logger = logging.getLogger("rallypoint.relay")


def make_relay(
    loop: Loop, upstream: StoreAddress, listeners: Sequence[socket.socket], limits: Limits
) -> Pump[Any]:
    """A relay that combines, or one that only passes on if its upstream knows no sessions."""
    if upstream.knows_sessions:
        return Relay(loop, upstream, listeners, limits)
    logger.warning(
        "%s knows no sessions, as a store of torch's own: each client gets a connection to it, and nothing "
        "is combined. hint: serve the store with `rallypoint serve` or `rallypoint run`",
        upstream.name,
    )
    return PassingRelay(loop, upstream, listeners, limits)
