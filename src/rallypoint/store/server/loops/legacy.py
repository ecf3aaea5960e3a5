"""The standard-library loop: one selector, one thread, nothing to install."""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import time

from rallypoint.store.server.loops.loop import Callback, Loop

_MOST_FOR_SELECT = 500


class _Watch:
    """What a selector key carries: whom to call when."""

    __slots__ = ("fd", "on_readable", "on_writable")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.on_readable: Callback | None = None
        self.on_writable: Callback | None = None

    @property
    def events(self) -> int:
        readable = selectors.EVENT_READ if self.on_readable else 0
        return readable | (selectors.EVENT_WRITE if self.on_writable else 0)


class LegacyLoop(Loop):
    """A loop on `selectors.DefaultSelector`: epoll, kqueue, or select, as the system has it."""

    name = "legacy"

    def __init__(self) -> None:
        super().__init__()
        self._selector = selectors.DefaultSelector()
        if isinstance(self._selector, selectors.SelectSelector):  # Windows: select() takes no more
            self.capacity = _MOST_FOR_SELECT
        self._watches: dict[int, _Watch] = {}  # what is registered with the selector
        self._timers: list[tuple[float, int, Callback]] = []  # a heap; what is due at a time comes in order
        self._counter = itertools.count()
        self._stopping = False
        # A signal handler writes a byte here, so that a select under way returns.
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self._bell.setblocking(False)
        self.watch_readable(self._alarm, self._hear)

    def watch_readable(self, file: socket.SocketType | int, callback: Callback | None) -> None:
        watch = self._watch(file)
        watch.on_readable = callback
        self._select(watch)

    def watch_writable(self, file: socket.SocketType, callback: Callback | None) -> None:
        watch = self._watch(file)
        watch.on_writable = callback
        self._select(watch)

    def later(self, seconds: float, callback: Callback) -> None:
        due = time.monotonic() + seconds if seconds else 0.0
        heapq.heappush(self._timers, (due, next(self._counter), callback))

    def run(self) -> None:
        while not self._stopping:
            ready = self._selector.select(self._patience())
            self.begin_turn()
            for key, events in ready:
                watch: _Watch = key.data
                try:
                    # Either may be gone by now, because of an event before it in this same round.
                    if events & selectors.EVENT_READ and watch.on_readable:
                        watch.on_readable()
                    if events & selectors.EVENT_WRITE and watch.on_writable:
                        watch.on_writable()
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

    def _watch(self, file: socket.SocketType | int) -> _Watch:
        fd = file if isinstance(file, int) else file.fileno()
        return self._watches.get(fd) or _Watch(fd)

    def _select(self, watch: _Watch) -> None:
        known = watch.fd in self._watches
        if not watch.events:
            if known:
                self._selector.unregister(watch.fd)
                del self._watches[watch.fd]
        elif known:
            self._selector.modify(watch.fd, watch.events, watch)
        else:
            self._selector.register(watch.fd, watch.events, watch)
            self._watches[watch.fd] = watch

    def close(self) -> None:
        self._selector.close()
        self._alarm.close()
        self._bell.close()
