"""`rallypoint serve`: a store server in the foreground."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from rallypoint.server.backend import Choice, make_pump
from rallypoint.server.binding import describe, listen
from rallypoint.server.core import Core
from rallypoint.wire.limits import Limits

logger = logging.getLogger("rallypoint.server")


def serve(
    host: Annotated[
        str,
        typer.Option(
            help="Listen where this name says: localhost on loopback, an address of this machine there, "
            "0.0.0.0 or a name that is not this machine's on every interface."
        ),
    ] = "localhost",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 29500,
    backend: Annotated[
        Choice, typer.Option(help="libuv (uvloop, winloop), legacy (standard library), or what is there.")
    ] = Choice.AUTO,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Change a limit; may be repeated.")
    ] = None,
) -> None:
    """Serve a TCPStore until SIGINT or SIGTERM.

    Prints one line on standard output when it is ready; logs to standard error.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="rallypoint: %(message)s")
    core = Core(Limits().override(limit or ()))
    listeners = listen(host, port)
    pump, warning = make_pump(backend, core, listeners)
    if warning:
        logger.warning("%s", warning)
    logger.info("listening on %s", ", ".join(map(describe, listeners)))
    place = f"{f'[{host}]' if ':' in host else host}:{listeners[0].getsockname()[1]}"
    pump.serve(on_ready=lambda: print(f"rallypoint: serving on {place} ({pump.name})", flush=True))
