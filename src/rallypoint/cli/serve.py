"""`rallypoint serve`: a store server in the foreground."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from rallypoint.cli.command import Argument, command
from rallypoint.cli.foreground import (
    ALLOW_USER,
    BACKEND,
    INSECURE,
    LIMIT,
    announce,
    host_option,
    listen_safely,
    logger,
    open_loop,
    port_option,
    set_access,
    tell_door,
)
from rallypoint.server.core.store import Core
from rallypoint.server.guard.secret import take_secret
from rallypoint.server.loops.pump import Pump, about_this_process
from rallypoint.server.process.binding import describe, reachable_at
from rallypoint.server.process.startup import EVENTS_VARIABLE, door_for, limits_of_environment, settle_in
from rallypoint.server.reporting.events import Events


@command(
    host_option(
        "localhost",
        "Listen where this name says: localhost on loopback, an address of this machine there, "
        "0.0.0.0 or a name that is not this machine's on every interface.",
    ),
    port_option(29500),
    BACKEND,
    LIMIT,
    Argument(
        "--events",
        metavar="FILE",
        variable=EVENTS_VARIABLE,
        default="",
        help="Write what happens, a line of JSON each.",
    ),
    Argument(
        "--web",
        type=int,
        metavar="PORT",
        help="Show who is here on a page at this port of localhost; 0 takes a free one.",
    ),
    ALLOW_USER,
    INSECURE,
)
def serve(
    host: str,
    port: int,
    backend: str,
    limit: list[str] | None,
    events: str,
    web: int | None,
    allow_user: list[str] | None,
    insecure: bool,
) -> None:
    """Serve a TCPStore until SIGINT or SIGTERM.

    Prints one line on standard output when it is ready; logs to standard error.
    """
    settle_in(logging.INFO)
    set_access(allow_user, insecure)
    limits = limits_of_environment().override(limit or ())
    take_secret()
    listeners = listen_safely(host, port)
    log = Events(events)
    loop = open_loop(backend)
    core = Core(limits, loop.turn, about_this_process(loop), wants_events=log.are_wanted)
    logger.info("listening on %s", describe(listeners))
    with ExitStack() as stack:
        if web is not None:
            from rallypoint.watch.web.hosting import host_web  # late: most servers have no page

            page = host_web(reachable_at(listeners[0]), port=web)
            stack.callback(page.server.release)
            logger.info("the page is at %s", page.url)
        pump = Pump(loop, core, listeners, log)
        pump.door = door_for(listeners)
        tell_door(pump)
        pump.serve(announce(host, listeners, loop))
