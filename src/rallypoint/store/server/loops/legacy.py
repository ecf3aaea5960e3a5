"""The standard-library loop: one selector, one thread, nothing to install."""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import time
from selectors import EVENT_READ, EVENT_WRITE

from rallypoint.store.server.loops.loop import Callback, Loop

_MOST_FOR_SELECT = 500


_Callbacks = dict[int, Callback]
"""Whom to call when a file can be read or written, by the selector's events."""


class LegacyLoop(Loop):
    """A loop on `selectors.DefaultSelector`: epoll, kqueue, or select, as the system has it."""

    name = "legacy"

    def __init__(self) -> None:
        super().__init__()
        self._selector = selectors.DefaultSelector()
        if isinstance(self._selector, selectors.SelectSelector):  # Windows: select() takes no more
            self.capacity = _MOST_FOR_SELECT
        self._watched: dict[int, _Callbacks] = {}  # by file: what is registered with the selector
        self._timers: list[tuple[float, int, Callback]] = []  # a heap; what is due at a time comes in order
        self._counter = itertools.count()
        self._stopping = False
        # A signal handler writes a byte here, so that a select under way returns.
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self._bell.setblocking(False)
        self.watch_readable(self._alarm, self._hear)

    def watch_readable(self, file: socket.SocketType | int, callback: Callback | None) -> None:
        self._watch(file, EVENT_READ, callback)

    def watch_writable(self, file: socket.SocketType, callback: Callback | None) -> None:
        self._watch(file, EVENT_WRITE, callback)

    def later(self, seconds: float, callback: Callback) -> None:
        due = time.monotonic() + seconds if seconds else 0.0
        heapq.heappush(self._timers, (due, next(self._counter), callback))

    def run(self) -> None:
        while not self._stopping:
            ready = self._selector.select(self._patience())
            self.begin_turn()
            for key, events in ready:
                callbacks: _Callbacks = key.data
                try:
                    # Either may be gone by now, because of an event before it in this same round.
                    if events & EVENT_READ and EVENT_READ in callbacks:
                        callbacks[EVENT_READ]()
                    if events & EVENT_WRITE and EVENT_WRITE in callbacks:
                        callbacks[EVENT_WRITE]()
                except MemoryError:
                    self.relieve()
            self._call_due()
            self.end_turn()

    def _patience(self) -> float | None:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _call_due(self) -> None:
        """What is due now; what that asks for comes in the next round, or sockets would starve."""
        now, timers = time.monotonic(), self._timers
        due = []
        while timers and timers[0][0] <= now:
            due.append(heapq.heappop(timers)[2])
        for callback in due:
            try:
                callback()
            except MemoryError:
                self.relieve()

    def stop(self) -> None:
        self._stopping = True
        try:
            self._bell.send(b"!")
        except OSError:  # full, so it will be heard; or closed, so nobody listens
            pass

    def _hear(self) -> None:
        self._alarm.recv(4096)

    def _watch(self, file: socket.SocketType | int, event: int, callback: Callback | None) -> None:
        fd = file if isinstance(file, int) else file.fileno()
        known = fd in self._watched
        callbacks = self._watched.get(fd, {})
        if callback is None:
            callbacks.pop(event, None)
        else:
            callbacks[event] = callback
        if known and callbacks:
            self._selector.modify(fd, sum(callbacks), callbacks)
        elif known:
            self._selector.unregister(fd)
            del self._watched[fd]
        elif callbacks:
            self._selector.register(fd, sum(callbacks), callbacks)
            self._watched[fd] = callbacks

    def close(self) -> None:
        self._selector.close()
        self._alarm.close()
        self._bell.close()
