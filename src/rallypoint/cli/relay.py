"""`rallypoint relay`: a relay in the foreground."""

from __future__ import annotations

from rallypoint.cli.command import Argument, command
from rallypoint.cli.foreground import (
    ACCESS_OPTIONS,
    LOOP_OPTIONS,
    announce,
    host_option,
    listen_safely,
    logger,
    open_door,
    open_loop,
    port_option,
    prepare,
)
from rallypoint.launch.endpoint import parse_places
from rallypoint.store.relay.hosting import UPSTREAM_SECONDS
from rallypoint.store.relay.process import make_relay
from rallypoint.store.relay.reaching import find_upstream
from rallypoint.store.server.process.binding import describe
from rallypoint.text import shown


@command(
    Argument(
        "--upstream",
        metavar="HOST:PORT,...",
        required=True,
        help="The store server, or another relay, that it asks. Several addresses: those between which the "
        "store moves. The last port counts for those before it that have none.",
    ),
    Argument(
        "--name",
        metavar="NAME",
        default="",
        help="The store of this name there. It begins empty, and is dropped when nobody has used it for a "
        "minute: with the id of a run as its name, each run has a fresh store.",
    ),
    host_option(
        "127.0.0.1", "Listen where this name says, as with serve: the ranks of this machine connect here."
    ),
    port_option(0),
    *LOOP_OPTIONS,
    *ACCESS_OPTIONS,
)
def relay(
    upstream: str,
    name: str,
    host: str,
    port: int,
    backend: str,
    limit: list[str] | None,
    allow_user: list[str] | None,
    insecure: bool,
) -> None:
    """Relay between clients here and a store elsewhere, until SIGINT or SIGTERM.

    Prints one line on standard output when it is ready; logs to standard error.
    """
    limits = prepare(limit, allow_user, insecure)
    place = find_upstream(parse_places(upstream, "--upstream"), UPSTREAM_SECONDS, name)
    listeners = listen_safely(host, port)
    loop = open_loop(backend)
    pump = make_relay(loop, place, listeners, limits)
    open_door(pump, listeners)
    named = f"the store named {shown(name)} at " if name else ""
    logger.info("listening on %s, for %s%s", describe(listeners), named, place.name)
    pump.serve(announce(host, listeners, loop))
