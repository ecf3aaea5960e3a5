"""A store server with workers: its first process, the *head*, has the store, its workers have the clients.

The head listens nowhere. Workers inherit the server's listening sockets, accept, parse and combine. The head
takes the connections that they hand over, and keeps the order of all requests. For a worker that has ended,
it starts another; and when it ends itself, it ends all of them. `worker` is the other side.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from subprocess import Popen
from typing import Final

from rallypoint.errors import LimitError, ServerStartError, UsageError
from rallypoint.store.core.store import Connection, Core
from rallypoint.store.machine.system import usable_cores
from rallypoint.store.relay.outgoing import Control, Message
from rallypoint.store.rollcall.identity import WORKER
from rallypoint.store.server.events import Events
from rallypoint.store.server.loops.backend import Choice
from rallypoint.store.server.loops.link import Link
from rallypoint.store.server.loops.loop import Callback, Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.server.loops.stores import StorePump
from rallypoint.store.server.process.binding import share_out
from rallypoint.store.server.process.child import make_core, run
from rallypoint.store.server.process.hosting import (
    ServerKind,
    ServerProcess,
    end_process,
    ending,
    whole_order,
)
from rallypoint.store.server.process.line import ANSWER_MARK, Order
from rallypoint.text import counted

logger = logging.getLogger("rallypoint.server")

WORKER_PROCESS: Final = ServerKind("worker", "rallypoint.store.relay.worker")

MOST_WORKERS: Final = 64

_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_STEADY_SECONDS: Final = 10.0
"""A worker that has lived so long is started anew at once."""
_REAP_SECONDS: Final = 0.01
_REAP_TRIES: Final = 500
_NO_SESSION: Final = 0.0005
"""A worker's session is given up as soon as its connection is gone: a worker does not come back."""


def parse_workers(text: str, source: str) -> int | None:
    """A number of workers; None: `auto`. UsageError if a server cannot have so many here."""
    if text == "auto":
        return None
    count = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= count <= MOST_WORKERS:
        raise UsageError(f"{source} is {text!r}", hint=f"write a number from 0 to {MOST_WORKERS}, or auto")
    if count and sys.platform == "win32":
        raise UsageError(
            "a server has no workers on Windows: sockets cannot be handed over there as workers need it",
            hint=f"leave out {source}; relays (`rallypoint relay`) take load off a store on every system",
        )
    return count


def auto_workers() -> int:
    """How many workers this machine has cores to spare for; 0: the server does better alone."""
    cores = usable_cores()
    return min(4, cores // 4) if sys.platform != "win32" and cores >= 8 else 0


class _WorkerProcess:
    """One worker, as the head knows it."""

    def __init__(self, number: int, listeners: Sequence[socket.socket]) -> None:
        self.number = number
        self.listeners = listeners
        self.process: Popen[bytes] | None = None
        self.control: Control | None = None
        self.began = 0.0
        self.is_ready = False
        self.clients = 0
        self.reported_elsewhere = 0
        self.pause = 0.0

    @property
    def name(self) -> str:
        return f"{WORKER}{self.number}:{self.process.pid if self.process is not None else 0}"


class Head(Pump[Connection]):
    """Serves the clients of a core by means of workers on listening sockets, which it owns from now on."""

    def __init__(
        self,
        loop: Loop,
        core: Core,
        listeners: Sequence[socket.socket],
        events: Events | None,
        count: int,
    ) -> None:
        super().__init__(loop, core, (), events)
        self._sockets = listeners
        self._workers = [_WorkerProcess(at + 1, some) for at, some in enumerate(share_out(listeners, count))]
        held = max(core.limits.held_bytes // (count + 1), 1)
        limits = replace(core.limits, session_seconds=_NO_SESSION, held_bytes=held)
        self._order = whole_order({"head": os.getpid()}, limits, Choice(loop.name))
        self._on_ready: Callback = lambda: None
        self._is_ready = False
        self._error: ServerStartError | None = None

    def serve(self, on_ready: Callback = lambda: None, on_tick: Callback = lambda: None) -> None:
        """As every pump does. ServerStartError if a worker does not come up at the start."""
        self._on_ready = on_ready
        super().serve(on_tick=on_tick)
        if self._error is not None:
            raise self._error

    def start(self, on_tick: Callback = lambda: None) -> None:
        super().start(on_tick)
        for worker in self._workers:
            self._start_worker(worker)

    def close(self) -> None:
        self._closed = True
        processes = [each.process for each in self._workers if each.process is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            end_process(process, os.getpid())
        for worker in self._workers:
            if worker.control is not None:
                worker.control.close()
        super().close()
        for listener in self._sockets:
            listener.close()

    @property
    def has_clients(self) -> bool:
        """Whether anybody is connected, besides the workers, or may be back in a moment."""
        others = any(not each.peer.startswith(WORKER) for each in (*self.core.clients, *self.core.sessions))
        return others or any(each.clients for each in self._workers)

    # Workers

    def _start_worker(self, worker: _WorkerProcess) -> None:
        if self._closed:
            return
        worker.began = time.monotonic()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._restart_later(worker, f"cannot be started: {error}")
            return
        try:
            sockets = [*worker.listeners, theirs]
            order = {**self._order, "number": worker.number}
            process = ServerProcess(WORKER_PROCESS)
            process.give(order, sockets)
            worker.process = process.popen
        except (OSError, ServerStartError) as error:
            ours.close()
            self._restart_later(worker, f"cannot be started: {error}")
            return
        finally:
            theirs.close()
        worker.control = Control(
            self.loop, ours, on_message=partial(self._on_message, worker), on_end=partial(self._reap, worker)
        )

    def _on_message(self, worker: _WorkerProcess, message: Message, handed: socket.socket | None) -> None:
        if handed is not None:
            self._adopt(handed, message["peer"])
        elif "clients" in message:
            worker.clients = message["clients"]
        elif "ready" in message:
            worker.is_ready = True
            if not self._is_ready and all(each.is_ready for each in self._workers):
                self._is_ready = True
                self._on_ready()

    def _adopt(self, sock: socket.socket, peer: str) -> None:
        """Serve a connection that a worker has handed over: the worker has seen to it that it may come in."""
        sock.setblocking(False)
        try:
            client = self.core.open(peer)
        except LimitError as error:
            self.core.note_error(peer, f"refused: {error.message}")
            sock.close()
            return
        link = self._links[client] = Link(self, sock, client)
        self.watch(link)

    def _tick(self) -> None:
        super()._tick()
        everywhere = sum(each.clients for each in self._workers)
        for worker in self._workers:
            elsewhere = everywhere - worker.clients
            if elsewhere != worker.reported_elsewhere and worker.control is not None:
                worker.reported_elsewhere = elsewhere
                worker.control.send({"elsewhere": elsewhere})

    def _reap(self, worker: _WorkerProcess, tries: int = _REAP_TRIES) -> None:
        """A worker has ended, or is about to: it cannot do without the connection that is gone."""
        process = worker.process
        if process is None or self._closed:
            return
        if process.poll() is None and tries:
            self.loop.later(_REAP_SECONDS, partial(self._reap, worker, tries - 1))
            return
        if process.poll() is None:
            process.kill()
        said = _last_words(process)
        end_process(process, os.getpid())
        self._restart_later(worker, f"has ended {ending(process.returncode)}{said}")

    def _restart_later(self, worker: _WorkerProcess, how: str) -> None:
        """Tell it, and start another after a while, which grows."""
        name = worker.name
        if not self._is_ready:
            self._error = ServerStartError(f"{name} {how}, before the server was ready")
            self._stop()
            return
        lived, clients = time.monotonic() - worker.began, worker.clients
        worker.pause = 0.0 if lived > _STEADY_SECONDS else worker.pause
        logger.error(
            "%s %s; its clients, %d of late, are closed, and all others go on; another one starts in %.1f s",
            *(name, how, clients, worker.pause),
        )
        self.core.note_error(name, f"{how}, with {counted(clients, 'client')}")
        worker.process, worker.control, worker.clients, worker.reported_elsewhere = None, None, 0, 0
        self.loop.later(worker.pause, partial(self._start_worker, worker))
        worker.pause = min(max(2 * worker.pause, _FIRST_PAUSE), _LONGEST_PAUSE)
        self.deliver()


def make_server(
    loop: Loop, core: Core, listeners: Sequence[socket.socket], events: Events, workers: int
) -> Pump[Connection]:
    """A server with so many workers, or without any."""
    if workers:
        return Head(loop, core, listeners, events, workers)
    return StorePump(loop, core, listeners, events)


def main() -> None:
    """Be a store server with workers."""
    run(_build)


def _build(order: Order, loop: Loop, listeners: list[socket.socket]) -> Pump[Connection]:
    core, events = make_core(order, loop)
    return Head(loop, core, listeners, events, order["workers"])


def _last_words(process: Popen[bytes]) -> str:
    """What a process that has ended has answered, if that is an error."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    for line in (process.stdout.read() or b"").decode(errors="replace").splitlines():
        if line.startswith(ANSWER_MARK) and "error" in (answer := json.loads(line.removeprefix(ANSWER_MARK))):
            return f": {answer['error'].strip()}"
    return ""
