"""The event loop: it reports when a socket is ready or a timer expires, and nothing else.

`LegacyLoop` is on the standard library, `LibuvLoop` on uvloop, or winloop on Windows. `backend` chooses.
"""

from __future__ import annotations

import heapq
import importlib
import itertools
import logging
import math
import select
import selectors
import socket
import sys
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE
from time import monotonic
from typing import Any, Final

from rallypoint.store.core.turn import Durations, Turn
from rallypoint.store.machine.system import usable_cores

try:
    from rallypoint.store.server.loops import native
except ImportError:  # it is not compiled, or not for this system
    native = None  # type: ignore[assignment]

logger = logging.getLogger("rallypoint.server")

Callback = Callable[[], None]

SLICE: Final = 0.001
"""How many seconds of a turn deferrable work may take from other clients."""
_RESERVE_BYTES: Final = 4 << 20
_QUIET_SECONDS: Final = 60.0
_UNTIMED: Final = 15
"""One turn in 16 is timed: reading the clock and recording the time takes a good part of a short turn."""
_MOST_FOR_SELECT: Final = 500
_AT_ONCE: Final = 1024
_PATIENCE: Final = 60.0
_BRIEFLY: Final = 0.001
"""libuv counts milliseconds: a timer that is due by our clock may be due by its own a moment later."""
_MOST_HELPERS: Final = 3
"""The most threads that help to send."""
_CORES_TO_SPARE: Final = 4
"""With this many, the server may poll for the next request while the client runs on another core."""


class Loop(ABC):
    """Calls back, in one thread, from `run` until `stop`. Several pumps may share one.

    A turn is all callbacks between two waits for the system.
    """

    name: str
    """What the backend is called in messages and options."""

    capacity: int | None = None
    """How many sockets the backend can watch, if it has a limit of its own."""

    tells_errors_once = False
    """Whether a socket's error is reported only once, even if that callback finds data to read."""

    sending: native.Sending | None = None
    """Sends for all links together, at the latest at the end of a turn; None: each link sends by itself."""

    def __init__(self) -> None:
        self.turn = Turn(monotonic())
        """When the current turn began."""
        self.turns = Durations()
        """How long turns have taken, from the system's event until all callbacks had returned. A client waits
        no longer than that for its answer."""
        self._untimed = _UNTIMED
        self._reserve = bytes(_RESERVE_BYTES)  # of address space: nothing is ever written to it
        self._quiet_until = -math.inf

    def relieve(self) -> None:
        """Free the reserve when memory has run out, so that clients can be closed."""
        self._reserve = b""
        self.warn_of_memory("out of memory: clients that need more are closed")

    def warn_of_memory(self, message: str, *values: object) -> None:
        """Log that a client is closed for lack of memory, unless one was logged in the last minute."""
        now = monotonic()
        if now > self._quiet_until:
            logger.error(f"{message} (others that follow within a minute are not listed)", *values)
        self._quiet_until = now + _QUIET_SECONDS

    def restore(self) -> None:
        """Allocate the reserve again, if there is memory for it. Called about once a second."""
        if not self._reserve:
            try:
                self._reserve = bytes(_RESERVE_BYTES)
            except MemoryError:
                pass

    def begin_turn(self) -> None:
        self.turn.now = monotonic()

    def end_turn(self) -> None:
        self._untimed -= 1
        if self._untimed < 0:
            self._untimed = self.time_turn()

    def time_turn(self) -> int:
        """Record the duration of the turn that ends now; return how many turns to skip before the next."""
        self.turns.add(monotonic() - self.turn.now)
        return _UNTIMED

    @abstractmethod
    def watch_readable(self, file: socket.SocketType | int, callback: Callback | None) -> None:
        """Call back whenever `file` can be read; with None, stop doing so."""

    @abstractmethod
    def watch_writable(self, file: socket.SocketType, callback: Callback | None) -> None:
        """Call back whenever `file` can be written; with None, stop doing so."""

    @abstractmethod
    def later(self, seconds: float, callback: Callback) -> None:
        """Call back once, after this time; with 0, after everything that is ready now has been served."""

    @abstractmethod
    def run(self) -> None:
        """Call back until `stop`, which may have been called already."""

    @abstractmethod
    def stop(self) -> None:
        """End `run` soon. May be called from a callback or a signal handler."""

    @abstractmethod
    def close(self) -> None:
        """Release what the loop itself holds, after it has ended."""


class Sliced:
    """Deferrable work, done a slice at a time between the requests of other clients."""

    def __init__(self, loop: Loop, step: Callable[[], bool]) -> None:
        """`step` does a little of the work, and returns whether there may be more."""
        self._loop = loop
        self._step = step
        self._is_due = False

    def go_on(self) -> None:
        """Schedule the next slice, after everything that is ready now."""
        if not self._is_due:
            self._loop.later(0, self._do_slice)
            self._is_due = True  # only now: `later` may run out of memory

    def _do_slice(self) -> None:
        self._is_due = False
        end, has_more = monotonic() + SLICE, True
        try:
            while has_more:
                has_more = self._step()
                if monotonic() > end:
                    break
        finally:  # also when memory has run out
            if has_more:
                self.go_on()


class LegacyLoop(Loop):
    """One selector of the standard library, one thread, nothing to install."""

    name = "legacy"

    def __init__(self) -> None:
        super().__init__()
        self._selector = selectors.DefaultSelector()
        if isinstance(self._selector, selectors.SelectSelector):  # Windows: select() takes no more
            self.capacity = _MOST_FOR_SELECT
        # By file, what is registered with the selector: whom to call, by the selector's events.
        self._watched: dict[int, dict[int, Callback]] = {}
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
        due = monotonic() + seconds if seconds else 0.0
        heapq.heappush(self._timers, (due, next(self._counter), callback))

    def run(self) -> None:
        while not self._stopping:
            ready = self._selector.select(self._patience())
            self.begin_turn()
            for key, events in ready:
                callbacks: dict[int, Callback] = key.data
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
        return max(0.0, self._timers[0][0] - monotonic()) if self._timers else None

    def _call_due(self) -> None:
        """Call what is due now. What that schedules waits for the next round, or sockets would starve."""
        now, timers = monotonic(), self._timers
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
        except OSError:  # it is full, so the loop wakes anyway; or closed
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


class LibuvLoop(Loop):
    """A loop of the package named, uvloop or winloop; ImportError where that cannot be imported.

    Sockets are watched with `add_reader`, not served through transports: uvloop's own server accepts one
    connection per turn of its loop, which takes seconds beside busy clients, and for requests as short as a
    store's its transports cost as much as reading the socket here. Where the system has epoll, what is to be
    read is in a set beside libuv (`Readers`).
    """

    name = "libuv"

    def __init__(self, package: str) -> None:
        super().__init__()
        self._loop: Any = importlib.import_module(package).new_event_loop()
        self._loop.slow_callback_duration = math.inf  # a callback that waits is not slow
        self._due: list[float] = []  # when callbacks of `later` are due, in order
        self.sending = make_sending()
        self._readers = self._make_readers()
        self.tells_errors_once = self._readers is None

    def _make_readers(self) -> Readers | native.Readers | None:
        """A set beside libuv, if this system has epoll."""
        if sys.platform != "linux":
            return None
        other: int = self._loop._get_backend_id()
        if self.sending is None:
            return Readers(self, other)
        return native.Readers(self, self.sending, other, usable_cores() >= _CORES_TO_SPARE)

    def _in_turn(self, callback: Callback) -> None:
        """libuv does not report the start of its turns, so each callback counts as one."""
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
        """Wait for clients and for libuv, once in each of its turns, so that libuv itself never waits."""
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
        """Give libuv a turn soon."""
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


class Readers:
    """An epoll set of all files that are to be read, with the file of libuv itself.

    To be told by libuv of each client costs four system calls for a new one (libuv tries whether it can watch
    it, and makes it non-blocking again), half a kilobyte, and with thousands of them 5 to 10 % more CPU time.
    So the process waits here, and libuv has a turn when it has something to do: a turn of libuv takes longer
    than a request does. What can be read at one time is one turn of the loop. Errors are reported again and
    again until the file is closed, which libuv does not do.
    """

    def __init__(self, loop: Loop, other: int) -> None:
        """`other`: the file that becomes readable when `wait` has to return."""
        self._loop = loop
        self._turn = loop.turn
        self._epoll = select.epoll()
        self._epoll.register(other, select.EPOLLIN)
        self._other = other
        self.is_pressed = False
        """Whether the loop has something to do, whether or not a file is ready."""
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
        """Call back for readable files until the time is over, or the loop has something to do."""
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
                elif file == other:  # libuv has something to do
                    is_over = self.is_pressed = True
            if ready:
                self._loop.end_turn()
            if is_over or self.is_pressed:
                return

    def close(self) -> None:
        self._epoll.close()


def make_sending(helpers: int | None = None) -> native.Sending | None:
    """Sends for all links together, where that is compiled. By default, the cores decide how many help."""
    if native is None:  # or for another system
        return None
    if helpers is None:
        helpers = min(max(usable_cores() // 4, 1), _MOST_HELPERS)
    return native.Sending(helpers)
