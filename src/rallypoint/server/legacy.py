"""The standard-library byte pump: one selector, one thread, nothing to install."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence

from rallypoint.server.core import Core
from rallypoint.server.pump import TICK_SECONDS, Callback, Pump

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


class LegacyPump(Pump):
    """Pumps on `selectors.DefaultSelector`: epoll, kqueue, or select, as the system has it."""

    name = "legacy"

    def __init__(self, core: Core, listeners: Sequence[socket.socket]) -> None:
        super().__init__(core, listeners)
        self._selector = selectors.DefaultSelector()
        if isinstance(self._selector, selectors.SelectSelector):  # Windows: select() takes no more
            self.capacity = _MOST_FOR_SELECT
        self._watches: dict[int, _Watch] = {}  # what is registered with the selector
        self._stopping = False
        # A signal handler writes a byte here, so that a select under way returns.
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self._bell.setblocking(False)
        self.watch_readable(self._alarm, self._hear)

    def watch_readable(self, file: socket.socket | int, callback: Callback | None) -> None:
        watch = self._watch(file)
        watch.on_readable = callback
        self._select(watch)

    def watch_writable(self, file: socket.socket, callback: Callback | None) -> None:
        watch = self._watch(file)
        watch.on_writable = callback
        self._select(watch)

    def run(self, on_tick: Callback) -> None:
        next_tick = time.monotonic() + TICK_SECONDS
        while not self._stopping:
            ready = self._selector.select(max(0.0, next_tick - time.monotonic()))
            for key, events in ready:
                watch: _Watch = key.data
                # Either may be gone by now, because of an event before it in this same round.
                if events & selectors.EVENT_READ and watch.on_readable:
                    watch.on_readable()
                if events & selectors.EVENT_WRITE and watch.on_writable:
                    watch.on_writable()
            if time.monotonic() >= next_tick:
                on_tick()
                next_tick = time.monotonic() + TICK_SECONDS

    def stop(self) -> None:
        self._stopping = True
        try:
            self._bell.send(b"!")
        except OSError:  # full, so it will be heard; or closed, so nobody listens
            pass

    def _hear(self) -> None:
        self._alarm.recv(4096)

    def _watch(self, file: socket.socket | int) -> _Watch:
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

    def _close(self) -> None:
        super()._close()
        self._selector.close()
        self._alarm.close()
        self._bell.close()
