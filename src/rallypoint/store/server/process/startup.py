"""The first steps of a process that only serves a store: its log, its limits, its door."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO, cast

from rallypoint.errors import UsageError
from rallypoint.store.core.turn import PeerLimit
from rallypoint.store.machine.addresses import is_loopback, plain_host
from rallypoint.store.machine.system import memory_bytes
from rallypoint.store.server.guard.other_users import checks_users
from rallypoint.store.server.guard.secret import job_secret
from rallypoint.store.wire.limits import Limits
from rallypoint.text import counted, printable_lines

_LOGGER = "rallypoint.server"
_LINE_CHARACTERS = 3_000
_MOST_LINES = 1_000
_FINISH_SECONDS = 1.0
_TELL_SECONDS = 1.1  # a little later than the second in which lines were left out


if TYPE_CHECKING:
    from rallypoint.store.server.loops.guarded import Door
    from rallypoint.store.server.loops.loop import Loop


class _StreamOfThread:
    """A stream that a thread writes to: for Windows, where no stream tells that a write would block."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._texts: queue.Queue[str | None] = queue.Queue(_MOST_LINES)
        self._writer = threading.Thread(target=self._write_all, name="rallypoint-log", daemon=True)
        self._writer.start()
        atexit.register(self._finish)

    @property
    def has_room(self) -> bool:
        return not self._texts.full()

    def write(self, text: str) -> None:
        self._texts.put(text)

    def flush(self) -> None:
        """The thread does so after each text."""

    def _write_all(self) -> None:
        while (text := self._texts.get()) is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):  # its reader is gone
                pass

    def _finish(self) -> None:
        if self.has_room:
            self._texts.put(None)
            self._writer.join(_FINISH_SECONDS)


class DroppingHandler(logging.StreamHandler):  # type: ignore[type-arg] # not subscriptable in Python 3.10
    """Logs to standard error, and drops lines that would block the server, or fill the disk.

    A writable pipe takes at least 4,096 bytes at once, so lines are cut to less than that. Lines about
    trouble with a client have a `peer`: a few a second are written for each kind and peer. Dropped lines are
    counted, and reported later. Lines may quote what clients have sent: control characters are escaped.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._thread: _StreamOfThread | None = None
        if sys.platform == "win32" and sys.stderr is not None:
            self._thread = _StreamOfThread(sys.stderr)
            self.stream = cast(TextIO, self._thread)  # it has all that a handler needs
        self._unread = 0
        self._limit = PeerLimit()
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self._tell_left_out()
        peer: str | None = getattr(record, "peer", None)
        if peer is None or self._limit.admits(str(record.msg), peer, time.monotonic()):
            self._write(record)
        elif self._timer is None:
            self._timer = self._start_timer()

    def format(self, record: logging.LogRecord) -> str:
        text = printable_lines(super().format(record)[: 2 * _LINE_CHARACTERS])
        return text if len(text) <= _LINE_CHARACTERS else text[:_LINE_CHARACTERS] + " …"

    def _write(self, record: logging.LogRecord) -> None:
        if not self._has_room():
            self._unread += 1
            return
        if self._unread:
            record.msg = f"({self._unread} lines were lost, as nobody read them) {record.msg}"
            self._unread = 0
        super().emit(record)

    def _start_timer(self) -> threading.Timer | None:
        """Report that lines were left out, also if no other line comes."""
        timer = threading.Timer(_TELL_SECONDS, self._on_timer)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # the system gives no thread: the next line reports it
            return None
        return timer

    def _on_timer(self) -> None:
        self.acquire()
        try:
            self._tell_left_out()
            self._timer = self._start_timer() if self._limit.has_left_out else None
        finally:
            self.release()

    def _tell_left_out(self) -> None:
        for address, count in self._limit.take_left_out(time.monotonic()):
            of = f" of {address}" if address else ""
            text = f"{counted(count, 'more such line')}{of} {'was' if count == 1 else 'were'} left out"
            self._write(logging.LogRecord(_LOGGER, logging.WARNING, "", 0, text, None, None))

    def _has_room(self) -> bool:
        if sys.stderr is None:
            return False
        if self._thread is not None:
            return self._thread.has_room
        try:
            return bool(select.select([], [sys.stderr], [], 0)[1])
        except (OSError, ValueError):
            return False


LIMITS_VARIABLE = "RALLYPOINT_LIMITS"

EVENTS_VARIABLE = "RALLYPOINT_EVENTS"
"""The events file of hosted store servers."""

# A collection visits every object. Connections leave no cycles, so a storm of them should not cause one
# collection after the other, as the default of 700 would.
_COLLECT_AFTER = 100_000


def settle_in(log_level: int) -> None:
    """Prepare this process for many connections, and log to standard error without ever blocking."""
    logging.basicConfig(handlers=[DroppingHandler()], level=log_level, format="rallypoint: %(message)s")
    logging.raiseExceptions = False  # without memory for a line, the line is lost
    _raise_file_limit()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def limits_of_environment() -> Limits:
    """The limits for this machine, changed by the variable RALLYPOINT_LIMITS: NAME=VALUE,..."""
    memory = memory_bytes()
    limits = Limits() if memory is None else Limits().within(memory)
    try:
        return limits.override(filter(None, os.environ.get(LIMITS_VARIABLE, "").split(",")))
    except UsageError as error:
        raise UsageError(f"the variable {LIMITS_VARIABLE}: {error.message}", hint=error.hint) from None


def door_for(loop: Loop, listeners: Iterable[socket.socket]) -> Door | None:
    """The door for clients of these sockets, if this process has a secret and they can come from elsewhere.

    UsageError if no certificate can be had.
    """
    secret = job_secret()
    hosts = [plain_host(listener.getsockname()) for listener in listeners]
    if secret is None or (all(map(is_loopback, hosts)) and checks_users()):
        return None
    from rallypoint.store.server.loops.guarded import Door  # late: few servers have a secret

    return Door(secret, loop)


def _raise_file_limit() -> None:
    if sys.platform == "win32":
        return
    import resource

    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (most, 10_240):  # macOS says "unlimited", but allows no more than this
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, soft), most))
        except (OSError, ValueError):
            continue
        return
