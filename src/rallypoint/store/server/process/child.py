"""What runs in a hosted server process, which `hosting` starts and commands over a `line`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.errors import RallypointError, UsageError
from rallypoint.store.core.store import Core
from rallypoint.store.server.events import Events
from rallypoint.store.server.guard.secret import Secret, set_process_secret
from rallypoint.store.server.loops.backend import Choice, load_loop, make_loop
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump, about_this_process
from rallypoint.store.server.loops.stores import StorePump
from rallypoint.store.server.process.line import Host, Order
from rallypoint.store.server.process.startup import EVENTS_VARIABLE, door_for, settle_in
from rallypoint.store.wire.limits import Limits

logger = logging.getLogger("rallypoint.server")

_FOR_RANKS = ("SIGINT", "SIGBREAK", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals of a terminal and of schedulers, which send them to every process of a job."""

Builder = Callable[[Order, Loop, list[socket.socket]], Pump[Any]]
"""Makes a pump that serves on these sockets. It may take some out of the list for another use."""


def main() -> None:
    """Be a store server."""
    run(_build)


def _build(order: Order, loop: Loop, listeners: Sequence[socket.socket]) -> Pump[Any]:
    core, events = make_core(order, loop, has_names=True)
    return StorePump(loop, core, listeners, events)


def make_core(order: Order, loop: Loop, *, has_names: bool = False) -> tuple[Core, Events]:
    """The store that the order asks for, and where its events go."""
    events = Events()
    try:
        events = Events(os.environ.get(EVENTS_VARIABLE, ""))
    except UsageError as error:  # no reason to fail a job
        logger.warning("the variable %s: %s", EVENTS_VARIABLE, error.message)
    core = Core(
        Limits(**order["limits"]),
        loop.turn,
        about_this_process(loop),
        wants_events=events.are_wanted,
        owner_key=order["owner_key"].encode() if order["owner_key"] else None,
        has_names=has_names,
    )
    return core, events


def run(build: Builder) -> None:
    """Serve as ordered, until the parent ends or ends this process."""
    for name in _FOR_RANKS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    settle_in(logging.WARNING)
    load_loop()  # the order may come much later, and is in a hurry then
    host = Host()
    given = host.read_order()
    if given is not None:
        _serve(host, build, *given)


def _serve(host: Host, build: Builder, order: Order, listeners: list[socket.socket]) -> None:
    try:
        set_process_secret(Secret(order["secret"], "the order") if order["secret"] else None)
        loop, warning = make_loop(Choice(order["backend"]))
        pump = build(order, loop, listeners)
        pump.door = door_for(pump.loop, listeners)
    except RallypointError as error:
        host.answer({"error": str(error)})
        sys.exit(1)
    except BaseException:
        host.answer({"error": traceback.format_exc(limit=-3)})
        raise
    life = _Life(pump, host, stays_for_clients=order["stays_for_clients"])

    def tell_ready() -> None:
        signal.signal(signal.SIGTERM, lambda *_: life.wind_down())
        host.answer({"backend": loop.name, "warning": warning})

    pump.serve(on_ready=tell_ready, on_tick=life.check)


class _Life:
    """Decides when to end: with the parent, or, if ordered to stay, with the last client after that."""

    def __init__(self, pump: Pump[Any], host: Host, *, stays_for_clients: bool) -> None:
        self._pump = pump
        self._host = host
        self._stays_for_clients = stays_for_clients
        self._left = False
        if sys.platform == "win32":
            threading.Thread(target=self._await_end, daemon=True).start()
        else:
            pump.loop.watch_readable(host.fileno(), self._on_word)

    def _await_end(self) -> None:
        self._host.await_end()
        self._leave()

    def _on_word(self) -> None:
        if self._host.read_word():  # END_NOW
            self._pump.loop.stop()
        else:
            self._pump.loop.watch_readable(self._host.fileno(), None)  # its end stays readable for ever
            self._leave()

    def _leave(self) -> None:
        """Note that the parent has gone, or has let go of the server."""
        self._left = True
        if not self._stays_for_clients or not self._pump.has_clients:
            self._pump.loop.stop()

    def wind_down(self) -> None:
        """On SIGTERM, which the whole job may have got: end with the last client."""
        self._left = True

    def check(self) -> None:
        """Called once a second."""
        if self._host.has_ended:
            self._leave()
        if self._left and not self._pump.has_clients:
            self._pump.loop.stop()
