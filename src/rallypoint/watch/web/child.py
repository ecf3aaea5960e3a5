"""What runs in the process of a hosted page. `server/process/child.py` says how it speaks with its parent."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
from typing import BinaryIO

from rallypoint.errors import RallypointError
from rallypoint.server.process.child import report, take_listeners
from rallypoint.server.process.startup import settle_in
from rallypoint.watch.web.serving import WebServer, access_to, serve, watch_store

_CHECK_SECONDS = 1.0


def main() -> None:
    """Serve the page until the parent ends, or closes our standard input."""
    settle_in(logging.WARNING)
    commands = sys.stdin.buffer
    line = commands.readline()
    if not line:
        return  # the parent has ended before it could say a word
    try:
        order = json.loads(line)
        listeners = take_listeners(order, commands)
        server = WebServer(
            watch_store(*order["store"]),
            access_to(listeners, order["token"]),
            on_ready=lambda: report({"backend": "uvicorn", "warning": ""}),
        )
    except RallypointError as error:
        report({"error": str(error)})
        sys.exit(1)
    threading.Thread(target=_watch_parent, args=(commands, server), daemon=True).start()
    serve(server, listeners)


def _watch_parent(commands: BinaryIO, server: WebServer) -> None:
    """End the server with its parent, also if that has given our standard input to children that stay."""
    if sys.platform == "win32":
        commands.read()
    else:
        parent = os.getppid()
        while os.getppid() == parent and not select.select([commands], [], [], _CHECK_SECONDS)[0]:
            pass
    server.should_exit = True
