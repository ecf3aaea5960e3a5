"""`rallypoint serve`: a store server in the foreground."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated

import typer

from rallypoint.server.backend import Choice, choose, make_loop
from rallypoint.server.binding import describe, listen
from rallypoint.server.core import Core
from rallypoint.server.process import limits_of_environment, settle_in
from rallypoint.server.pump import Pump

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
        Choice,
        typer.Option(
            help="libuv (uvloop, winloop), legacy (standard library), or as USE_LIBUV says and what is there."
        ),
    ] = Choice.AUTO,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Change a limit; may be repeated.")
    ] = None,
) -> None:
    """Serve a TCPStore until SIGINT or SIGTERM.

    Prints one line on standard output when it is ready; logs to standard error.
    """
    settle_in(logging.INFO)
    core = Core(limits_of_environment().override(limit or ()))
    listeners = listen(host, port)
    choice = choose() if backend is Choice.AUTO else backend
    loop, warning = make_loop(choice)
    if warning:
        logger.warning("%s", warning)
    logger.info("listening on %s", describe(listeners))
    place = f"{f'[{host}]' if ':' in host else host}:{listeners[0].getsockname()[1]}"
    on_ready = partial(print, f"rallypoint: serving on {place} ({loop.name})", flush=True)
    Pump(loop, core, listeners).serve(on_ready)
