"""`rallypoint serve`: a store server in the foreground."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from rallypoint.cli.serving import BackendOption, LimitOption, PortOption, announce, logger, open_loop
from rallypoint.server.backend import Choice
from rallypoint.server.binding import describe, listen
from rallypoint.server.core import Core
from rallypoint.server.process import limits_of_environment, settle_in
from rallypoint.server.pump import Pump


def serve(
    host: Annotated[
        str,
        typer.Option(
            help="Listen where this name says: localhost on loopback, an address of this machine there, "
            "0.0.0.0 or a name that is not this machine's on every interface."
        ),
    ] = "localhost",
    port: PortOption = 29500,
    backend: BackendOption = Choice.AUTO,
    limit: LimitOption = None,
) -> None:
    """Serve a TCPStore until SIGINT or SIGTERM.

    Prints one line on standard output when it is ready; logs to standard error.
    """
    settle_in(logging.INFO)
    core = Core(limits_of_environment().override(limit or ()))
    listeners = listen(host, port)
    loop = open_loop(backend)
    logger.info("listening on %s", describe(listeners))
    Pump(loop, core, listeners).serve(announce(host, listeners, loop))
