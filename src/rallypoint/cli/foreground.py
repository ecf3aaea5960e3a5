"""The shared parts of commands that serve in the foreground: options, the loop, the line with the address."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial

from rallypoint.cli.command import Argument
from rallypoint.server.loops.backend import Choice, choose, make_loop
from rallypoint.server.loops.loop import Loop
from rallypoint.stores.client.connecting import format_address

logger = logging.getLogger("rallypoint.server")

BACKEND = Argument(
    "--backend",
    choices=[each.value for each in Choice],
    default=Choice.AUTO.value,
    help="libuv (uvloop, winloop), legacy (standard library), or as USE_LIBUV says and what is there.",
)
LIMIT = Argument("--limit", action="append", metavar="NAME=VALUE", help="Change a limit; may be repeated.")


def host_option(default: str, help: str) -> Argument:
    return Argument("--host", metavar="NAME", default=default, help=help)


def port_option(default: int) -> Argument:
    return Argument(
        "--port", type=int, metavar="NUMBER", default=default, help="The port; 0 takes a free one."
    )


def open_loop(backend: str) -> Loop:
    """The loop for `--backend`. If it is another one than was asked for, that is logged."""
    loop, warning = make_loop(choose() if backend == Choice.AUTO else Choice(backend))
    if warning:
        logger.warning("%s", warning)
    return loop


def announce(host: str, listeners: Sequence[socket.socket], loop: Loop) -> Callable[[], None]:
    """A function that prints the one line on standard output."""
    place = format_address(host, listeners[0].getsockname()[1])
    return partial(print, f"rallypoint: serving on {place} ({loop.name})")
