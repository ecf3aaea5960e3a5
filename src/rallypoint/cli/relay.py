"""`rallypoint relay`: a relay in the foreground."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from rallypoint.cli.foreground import BackendOption, LimitOption, PortOption, announce, logger, open_loop
from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import Endpoint, parse_endpoint
from rallypoint.relay.hosting import UPSTREAM_SECONDS
from rallypoint.relay.kinds import make_relay
from rallypoint.relay.relay import find_upstream
from rallypoint.server.loops.backend import Choice
from rallypoint.server.process.binding import describe, listen
from rallypoint.server.process.startup import limits_of_environment, settle_in


def relay(
    upstream: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The store server, or another relay, that it asks.")
    ],
    host: Annotated[
        str,
        typer.Option(
            help="Listen where this name says, as with serve: the ranks of this machine connect here."
        ),
    ] = "127.0.0.1",
    port: PortOption = 0,
    backend: BackendOption = Choice.AUTO,
    limit: LimitOption = None,
) -> None:
    """Relay between clients here and a store elsewhere, until SIGINT or SIGTERM.

    Prints one line on standard output when it is ready; logs to standard error.
    """
    settle_in(logging.INFO)
    limits = limits_of_environment().override(limit or ())
    place = find_upstream(*_parse(upstream), UPSTREAM_SECONDS)
    listeners = listen(host, port)
    loop = open_loop(backend)
    pump = make_relay(loop, place, listeners, limits)
    logger.info("listening on %s, for %s", describe(listeners), place.name)
    pump.serve(announce(host, listeners, loop))


def _parse(upstream: str) -> Endpoint:
    endpoint = parse_endpoint(upstream)
    if not endpoint.port or not upstream.strip().endswith(f":{endpoint.port}"):
        raise UsageError(f"--upstream is {upstream!r}", hint="write HOST:PORT, for example node-a:29500")
    return endpoint
