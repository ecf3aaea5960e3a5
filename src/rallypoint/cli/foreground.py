"""The shared parts of commands that serve in the foreground: options, the loop, the line with the address."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rallypoint.cli.command import Argument
from rallypoint.errors import UsageError
from rallypoint.store.machine.addresses import format_address, is_loopback
from rallypoint.store.server.guard.other_users import INSECURE_VARIABLE, USERS_VARIABLE, access_of_environment
from rallypoint.store.server.guard.secret import job_secret, take_secret
from rallypoint.store.server.loops.backend import Choice, choose, make_loop
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.server.process.binding import addresses_for, listen
from rallypoint.store.server.process.startup import door_for, limits_of_environment, settle_in
from rallypoint.store.wire.limits import Limits

logger = logging.getLogger("rallypoint.server")

LOOP_OPTIONS = (
    Argument(
        "--backend",
        choices=[each.value for each in Choice],
        default=Choice.AUTO.value,
        help="libuv (uvloop, winloop), legacy (standard library), or as USE_LIBUV says and what is there.",
    ),
    Argument("--limit", action="append", metavar="NAME=VALUE", help="Change a limit; may be repeated."),
)
ALLOW_USER = Argument(
    "--allow-user",
    action="append",
    metavar="NAME|UID",
    help="Another user of this machine who may connect, besides yourself and root; may be repeated. "
    f"[env var: {USERS_VARIABLE}]",
)
ACCESS_OPTIONS = (
    ALLOW_USER,
    Argument(
        "--insecure",
        action="store_true",
        help="Let every user of this machine connect; and, without a secret, every machine that can reach "
        f"it. [env var: {INSECURE_VARIABLE}]",
    ),
)


def prepare(limit: list[str] | None, allow_user: list[str] | None, insecure: bool) -> Limits:
    """Make this process a server's, with these options; the limits."""
    settle_in(logging.INFO)
    set_access(allow_user, insecure)
    limits = limits_of_environment().override(limit or ())
    take_secret()
    return limits


def set_access(allow_user: list[str] | None, insecure: bool) -> None:
    """Let these options hold for this process and all that it starts."""
    if allow_user:
        os.environ[USERS_VARIABLE] = ",".join(allow_user)
    if insecure:
        os.environ[INSECURE_VARIABLE] = "1"


def listen_safely(host: str, port: int, parts: int = 1) -> list[socket.socket]:
    """As `listen` does, after `check_safety`."""
    check_safety(host)
    return listen(host, port, parts)


def check_safety(host: str) -> None:
    """UsageError if other machines could come in unproved, and nobody has said they may."""
    is_open = not all(map(is_loopback, addresses_for(host).addresses))
    if is_open and job_secret() is None and not access_of_environment().insecure:
        raise UsageError(
            f"with --host {host}, whoever reaches this machine could read and change the store",
            hint="give it a secret (`rallypoint secret --help`); or say --insecure, if all who reach it are "
            "trusted; or serve this machine alone, with --host localhost",
        )


def open_door(pump: Pump[Any], listeners: Sequence[socket.socket]) -> None:
    """Let other machines in, if the job has a secret that they can prove."""
    pump.door = door_for(pump.loop, listeners)
    if pump.door is not None:
        logger.info("other machines speak TLS, and prove the job's secret")


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
