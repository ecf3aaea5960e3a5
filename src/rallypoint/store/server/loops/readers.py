"""Whom to call when a file can be read, for very many files: an epoll set of its own, where there is one.

To be told by libuv of each client costs four system calls for a new one (libuv tries whether it can watch it,
and makes it non-blocking again), half a kilobyte, and with thousands of them 5 to 10 % more CPU time. So all
of them are in a set, which also has the file of libuv itself. It is here that the process waits: a turn of
libuv takes longer than a request does, and it has one when it has something to do. Errors are told of again
and again until the file is closed, which libuv does not do.
"""

from __future__ import annotations

import select
import sys
from time import monotonic
from typing import Any, Final

from rallypoint.store.machine.resources import usable_cores
from rallypoint.store.server.loops.loop import Callback, Loop

try:
    from rallypoint.store.server.loops import native
except ImportError:  # not compiled
    native = None  # type: ignore[assignment]

_AT_ONCE: Final = 1024
_MOST_HELPERS: Final = 3
"""How many threads may help to send."""
_CORES_TO_SPARE: Final = 4
"""With so many, a client runs on another one while the server looks whether it has asked again."""


class Readers:
    """The files that are watched, by their descriptors. What can be read at one time is one turn."""

    def __init__(self, loop: Loop, other: int) -> None:
        """`other`: the file that can be read when `wait` is to return."""
        self._loop = loop
        self._turn = loop.turn
        self._epoll = select.epoll()
        self._epoll.register(other, select.EPOLLIN)
        self._other = other
        self.is_pressed = False
        """Whether the loop has something to do, whatever the files say."""
        self._callbacks: dict[int, Callback] = {}

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

    def wait(self, seconds: float) -> None:
        """Call back for what can be read, until so much time has passed, or the loop has something to do."""
        callbacks, other = self._callbacks, self._other
        now = monotonic()
        end = now + seconds
        while True:
            ready = self._epoll.poll(end - now if end > now else 0, _AT_ONCE)
            self._turn.now = now = monotonic()
            is_over = now >= end
            for file, _ in ready:
                callback = callbacks.get(file)
                if callback is not None:  # it may be gone by now, because of one before it
                    callback()
                elif file == other:  # what it does now may be for the turn behind that
                    is_over = self.is_pressed = True
            if ready:
                self._loop.end_turn()
            if is_over or self.is_pressed:
                return

    def close(self) -> None:
        self._epoll.close()


def make_sending(helpers: int | None = None) -> native.Sending | None:
    """What sends for all links together, where it is compiled; by default with helpers for this machine."""
    if native is None:  # or for another system
        return None
    if helpers is None:
        helpers = min(max(usable_cores() // 4, 1), _MOST_HELPERS)
    return native.Sending(helpers)


def make_readers(loop: Loop, libuv: Any) -> Readers | native.Readers | None:
    """A set beside a loop of uvloop, if this system has epoll."""
    if sys.platform != "linux":
        return None
    other: int = libuv._get_backend_id()
    if loop.sending is None:
        return Readers(loop, other)
    return native.Readers(loop, loop.sending, other, usable_cores() >= _CORES_TO_SPARE)
