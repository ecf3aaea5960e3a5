"""The libuv loop: uvloop, or winloop on Windows.

Sockets are watched with `add_reader`, not served through transports: uvloop's own server accepts one
connection per turn of its loop, which takes seconds beside busy clients, and for requests as short as a
store's its transports cost as much as reading the socket here. Where the system has epoll, what is to be read
is in a set beside libuv: see `readers`.
"""

from __future__ import annotations

import importlib
import math
import socket
from bisect import bisect_left, insort
from time import monotonic
from typing import Any, Final

from rallypoint.store.server.loops.loop import Callback, Loop
from rallypoint.store.server.loops.readers import make_readers, make_sending

_PATIENCE: Final = 60.0
_BRIEFLY: Final = 0.001
"""libuv counts milliseconds: what is due by now may be due to it a moment later."""


class LibuvLoop(Loop):
    """A loop of the package named, uvloop or winloop; ImportError where that cannot be imported."""

    name = "libuv"

    def __init__(self, package: str) -> None:
        super().__init__()
        self._loop: Any = importlib.import_module(package).new_event_loop()
        self._loop.slow_callback_duration = math.inf  # it is slow to wait
        self._due: list[float] = []  # when callbacks of `later` are due, in order
        self.sending = make_sending()
        self._readers = make_readers(self, self._loop)
        self.tells_errors_once = self._readers is None

    def _in_turn(self, callback: Callback) -> None:
        """libuv does not say when a turn of its own begins, so each call back is one."""
        self.begin_turn()
        try:
            callback()
        except MemoryError:
            self.relieve()
        finally:
            if self.sending is not None:
                self.sending.flush()
        self.end_turn()

    def watch_readable(self, file: socket.SocketType | int, callback: Callback | None) -> None:
        if self._readers is not None:
            self._readers.watch(file if isinstance(file, int) else file.fileno(), callback)
        elif callback is None:
            self._loop.remove_reader(file)
        else:
            self._loop.add_reader(file, self._in_turn, callback)

    def watch_writable(self, file: socket.SocketType, callback: Callback | None) -> None:
        self._press()  # libuv tells the system of it in its next turn
        if callback is None:
            self._loop.remove_writer(file)
        else:
            self._loop.add_writer(file, self._in_turn, callback)

    def later(self, seconds: float, callback: Callback) -> None:
        self._press()
        if not seconds:
            self._loop.call_soon(self._in_turn, callback)
            return
        due = monotonic() + seconds
        self._loop.call_later(seconds, self._be_due, due, callback)
        insort(self._due, due)

    def _be_due(self, due: float, callback: Callback) -> None:
        del self._due[bisect_left(self._due, due)]
        self._in_turn(callback)

    def run(self) -> None:
        if self._readers is not None:
            self._loop.call_soon(self._wait)
        self._loop.run_forever()

    def _wait(self) -> None:
        """Wait for clients and for libuv, once in each of its turns. It never has to wait by itself."""
        assert self._readers is not None
        seconds = 0.0
        if not self._readers.is_pressed:
            seconds = max(self._due[0] - monotonic(), _BRIEFLY) if self._due else _PATIENCE
        self._readers.is_pressed = False
        self._loop.call_soon(self._wait)
        try:
            self._readers.wait(seconds)
        except MemoryError:
            self.relieve()

    def _press(self) -> None:
        """libuv is to have a turn soon."""
        if self._readers is not None:
            self._readers.is_pressed = True

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._press()
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._press()  # uvloop stops one turn later
        self._loop.stop()

    def close(self) -> None:
        if self.sending is not None:
            self.sending.flush()  # there may be files to close
        self._loop.close()
        if self._readers is not None:
            self._readers.close()
