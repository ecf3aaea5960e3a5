"""`rallypoint relay`: a relay in the foreground."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated

import typer

from rallypoint.errors import UsageError
from rallypoint.meeting.endpoint import Endpoint, parse_endpoint
from rallypoint.relay.hosting import UPSTREAM_SECONDS
from rallypoint.relay.making import make_relay
from rallypoint.relay.running import find_upstream
from rallypoint.server.backend import Choice, choose, make_loop
from rallypoint.server.binding import describe, listen
from rallypoint.server.process import limits_of_environment, settle_in

logger = logging.getLogger("rallypoint.relay")


def relay(
    upstream: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The store server, or another relay, that it asks.")
    ],
    host: Annotated[
        str,
        typer.Option(
            help="Listen where this name says, as with serve; the ranks of this machine connect here."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 0,
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
    """Relay between clients here and a store elsewhere, until SIGINT or SIGTERM.

    Prints one line on standard output when it is ready; logs to standard error.
    """
    settle_in(logging.INFO)
    limits = limits_of_environment().override(limit or ())
    place = find_upstream(*_parse(upstream), UPSTREAM_SECONDS)
    listeners = listen(host, port)
    loop, warning = make_loop(choose() if backend is Choice.AUTO else backend)
    if warning:
        logger.warning("%s", warning)
    pump = make_relay(loop, place, listeners, limits)
    logger.info("listening on %s, for %s", describe(listeners), place.name)
    where = f"{f'[{host}]' if ':' in host else host}:{listeners[0].getsockname()[1]}"
    pump.serve(partial(print, f"rallypoint: serving on {where} ({loop.name})", flush=True))


def _parse(upstream: str) -> Endpoint:
    endpoint = parse_endpoint(upstream)
    if not endpoint.port or not upstream.strip().endswith(f":{endpoint.port}"):
        raise UsageError(f"--upstream is {upstream!r}", hint="write HOST:PORT, for example node-a:29500")
    return endpoint
