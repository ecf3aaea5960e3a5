"""The libuv loop: uvloop, or winloop on Windows.

Sockets are watched with `add_reader`, not served through transports: uvloop's own server accepts one
connection per turn of its loop, which takes seconds beside busy clients, and for requests as short as a
store's its transports cost as much as reading the socket here. Where the system has epoll, what is to be read
is in a set that libuv watches as one file: see `readers`.
"""

from __future__ import annotations

import asyncio
import importlib
import socket

from rallypoint.server.loops.loop import Callback, Loop
from rallypoint.server.loops.readers import make_readers


class LibuvLoop(Loop):
    """A loop of the package named, uvloop or winloop; ImportError where that cannot be imported."""

    name = "libuv"

    def __init__(self, package: str) -> None:
        super().__init__()
        self._loop: asyncio.AbstractEventLoop = importlib.import_module(package).new_event_loop()
        self._readers = make_readers(self)
        self.tells_errors_once = self._readers is None
        if self._readers is not None:
            self._loop.add_reader(self._readers.fileno(), self._readers.call_back)

    def _in_turn(self, callback: Callback) -> None:
        """libuv does not say when a turn of its own begins, so each call back is one."""
        self.begin_turn()
        callback()
        self.end_turn()

    def watch_readable(self, file: socket.SocketType | int, callback: Callback | None) -> None:
        if self._readers is not None:
            self._readers.watch(file if isinstance(file, int) else file.fileno(), callback)
        elif callback is None:
            self._loop.remove_reader(file)
        else:
            self._loop.add_reader(file, self._in_turn, callback)

    def watch_writable(self, file: socket.SocketType, callback: Callback | None) -> None:
        if callback is None:
            self._loop.remove_writer(file)
        else:
            self._loop.add_writer(file, self._in_turn, callback)

    def later(self, seconds: float, callback: Callback) -> None:
        if seconds:
            self._loop.call_later(seconds, self._in_turn, callback)
        else:
            self._loop.call_soon(self._in_turn, callback)

    def run(self) -> None:
        self._loop.run_forever()

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)

    def close(self) -> None:
        self._loop.close()
        if self._readers is not None:
            self._readers.close()
