"""`rallypoint serve`: a store server in the foreground."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack

from rallypoint.cli.command import Argument, command
from rallypoint.cli.foreground import (
    ACCESS_OPTIONS,
    LOOP_OPTIONS,
    announce,
    check_safety,
    host_option,
    listen_safely,
    logger,
    open_door,
    open_loop,
    port_option,
    prepare,
)
from rallypoint.errors import UsageError
from rallypoint.store.core.store import Core
from rallypoint.store.machine.addresses import format_address, is_everywhere
from rallypoint.store.relay.store_with_workers import auto_workers, make_server, parse_workers
from rallypoint.store.server.events import Events
from rallypoint.store.server.loops.pump import about_this_process
from rallypoint.store.server.process.binding import describe, reachable_at, reserve
from rallypoint.store.server.process.startup import EVENTS_VARIABLE
from rallypoint.store.wire.limits import Limits


@command(
    host_option(
        "localhost",
        "Listen where this name says: localhost on loopback, an address of this machine there, "
        "0.0.0.0 or a name that is not this machine's on every interface.",
    ),
    port_option(29500),
    *LOOP_OPTIONS,
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
    Argument(
        "--engine",
        metavar="URL",
        variable="RALLYPOINT_ENGINE",
        default="",
        help="Keep the store on an engine, so that it outlives this machine: etcd://a,b,c:2379/JOB, or "
        "redis://HOST/0, redis+sentinel://a,b,c/MASTER. Run this on two or three machines: one leads, the "
        "others stand by.",
    ),
    Argument(
        "--acks",
        type=int,
        metavar="NUMBER",
        default=0,
        help="With Redis: how many of its replicas must have a change before it counts.",
    ),
    Argument(
        "--workers",
        metavar="NUMBER|auto",
        default="0",
        help="Serve with so many processes more, which accept clients and combine what they ask, so that the "
        "store uses several cores. For thousands of clients. auto: as the number of cores says; 0: none.",
    ),
    *ACCESS_OPTIONS,
)
def serve(
    host: str,
    port: int,
    backend: str,
    limit: list[str] | None,
    events: str,
    web: int | None,
    engine: str,
    acks: int,
    workers: str,
    allow_user: list[str] | None,
    insecure: bool,
) -> None:
    """Serve a TCPStore until SIGINT or SIGTERM.

    Prints one line on standard output when it is ready; logs to standard error.
    """
    limits = prepare(limit, allow_user, insecure)
    asked = parse_workers(workers, "--workers")
    count = auto_workers() if asked is None else asked
    if engine:
        if events:
            raise UsageError("--events and --engine do not go together yet")
        if count:
            raise UsageError(
                "--workers and --engine do not go together: a store on an engine waits for the engine",
                hint="relays (`rallypoint relay`) take load off it",
            )
        _serve_on_engine(host, port, backend, limits, engine, acks, web)
        return
    listeners = listen_safely(host, port, max(count, 1))
    log = Events(events)
    loop = open_loop(backend)
    about = about_this_process(loop)
    core = Core(limits, loop.turn, about, wants_events=log.are_wanted, has_names=not count)
    logger.info("listening on %s", describe(listeners))
    with ExitStack() as stack:
        _show_page(web, listeners, stack)
        pump = make_server(loop, core, listeners, log, count)
        open_door(pump, listeners)
        pump.serve(announce(host, listeners, loop))


def _show_page(web: int | None, sockets: Sequence[socket.socket], stack: ExitStack) -> None:
    if web is not None:
        from rallypoint.watch.web.hosting import host_web  # late: most servers have no page

        page = host_web(reachable_at(sockets[0]), port=web)
        stack.callback(page.server.release)
        logger.info("the page is at %s", page.url)


def _serve_on_engine(
    host: str, port: int, backend: str, limits: Limits, engine: str, acks: int, web: int | None
) -> None:
    """Stand by, and lead when nobody else does."""
    from rallypoint.store.replica.engines.opening import open_log  # late: most servers have no engine
    from rallypoint.store.replica.node import Node

    check_safety(host)
    log = open_log(engine, acks=acks)
    sockets = reserve(host, port)
    # Each process of the store needs a name of its own.
    name = socket.gethostname() if is_everywhere(host) else host
    place = format_address(name, sockets[0].getsockname()[1])
    with ExitStack() as stack:
        _show_page(web, sockets, stack)
        node = Node(
            log,
            limits,
            place,
            sockets,
            lambda: open_loop(backend),
            lambda pump: open_door(pump, pump.sockets),
        )
        node.run(lambda: print(f"rallypoint: standing by at {place} ({log.name})", flush=True))
