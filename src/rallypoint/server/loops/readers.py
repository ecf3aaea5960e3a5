"""Whom to call when a file can be read, for very many files: an epoll set of its own, where there is one.

A loop watches the set as one file. To be told by libuv of each client costs four system calls for a new one
(libuv tries whether it can watch it, and makes it non-blocking again), half a kilobyte, and with thousands of
them 5 to 10 % more CPU time. The price is a system call more where only one client says something. Errors are
told of again and again until the file is closed, which libuv does not do.
"""

from __future__ import annotations

import select
import sys
from time import monotonic
from typing import Final

from rallypoint.server.loops.loop import Callback, Loop

try:
    from rallypoint.server.loops import native
except ImportError:  # not compiled
    native = None  # type: ignore[assignment]

_AT_ONCE: Final = 1024
_MANY: Final = 8
"""Where so many could be read, more can be by now: to ask the set again costs less than a turn of libuv."""


class Readers:
    """The files that are watched, by their descriptors. What can be read at one time is one turn."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._turn = loop.turn
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callback] = {}

    def fileno(self) -> int:
        """The set itself, which can be read when one of its files can."""
        return self._epoll.fileno()

    def watch(self, file: int, callback: Callback | None) -> None:
        """Call back whenever `file` can be read; with None, stop doing so, before it is closed."""
        known = file in self._callbacks
        if callback is None:
            if known:
                del self._callbacks[file]
                self._epoll.unregister(file)
            return
        if not known:
            self._epoll.register(file, select.EPOLLIN)
        self._callbacks[file] = callback

    def call_back(self) -> None:
        """Call back for those that can be read now, some at a time: other things are due as well."""
        callbacks = self._callbacks
        count, total = _MANY, 0
        while count >= _MANY and total < _AT_ONCE:
            self._turn.now = monotonic()
            ready = self._epoll.poll(0, _AT_ONCE)
            for file, _ in ready:
                callback = callbacks.get(file)
                if callback is not None:  # it may be gone by now, because of one before it
                    callback()
            count = len(ready)
            total += count
            self._loop.end_turn()

    def close(self) -> None:
        self._epoll.close()


def make_readers(loop: Loop) -> Readers | native.Readers | None:
    """A set for this system, if it has epoll."""
    if sys.platform != "linux":
        return None
    return Readers(loop) if native is None else native.Readers(loop)
