"""What a backend is: it tells when a socket can be read or written, or when a time has come, and no more."""

from __future__ import annotations

import logging
import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final

from rallypoint.store.core.turn import Durations, Turn

if TYPE_CHECKING:
    from rallypoint.store.server.loops.native import Sending

logger = logging.getLogger("rallypoint.server")

Callback = Callable[[], None]

SLICE: Final = 0.001
"""For how many seconds work that can wait may hold up other clients in a turn."""
_RESERVE_BYTES: Final = 4 << 20
_QUIET_SECONDS: Final = 60.0
_UNTIMED: Final = 15
"""One turn in 16 is timed: to read the clock and to note the time takes a good part of a short turn."""


class Loop(ABC):
    """Calls back, in one thread, from `run` until `stop`. Several pumps may share one.

    All callbacks that the loop makes without asking the system in between are one turn.
    """

    name: str
    """What the backend is called in messages and options."""

    capacity: int | None = None
    """How many sockets the backend can watch, if it has a limit of its own."""

    tells_errors_once = False
    """Whether an error of a socket leads to one last call back, even if that one finds data to read."""

    sending: Sending | None = None
    """What sends for all links together, at the end of a turn at the latest; None: each sends by itself."""

    def __init__(self) -> None:
        self.turn = Turn(monotonic())
        """When the turn under way began."""
        self.turns = Durations()
        """How long turns have taken: from the system's word that there is something to do, until all of it
        was done. A client waits no longer than that for its answer."""
        self._untimed = _UNTIMED
        self._reserve = bytes(_RESERVE_BYTES)  # of address space: nothing is ever written to it
        self._quiet_until = -math.inf

    def relieve(self) -> None:
        """Memory has run out: free the reserve, so that clients can be closed."""
        self._reserve = b""
        self.warn_of_memory("out of memory: clients that need more are closed")

    def warn_of_memory(self, message: str, *values: object) -> None:
        """Log that a client is closed for want of memory, unless another one was within the last minute."""
        now = monotonic()
        if now > self._quiet_until:
            logger.error(f"{message} (others that follow within a minute are not listed)", *values)
        self._quiet_until = now + _QUIET_SECONDS

    def restore(self) -> None:
        """Allocate the reserve again, if there is memory for it; to be called now and then."""
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
        """Note how long a turn has taken that ends now; return how many are not to be timed."""
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
        """Call back once, after this time; with 0, after all that is ready now has been seen to."""

    @abstractmethod
    def run(self) -> None:
        """Call back until `stop`, which may have been called already."""

    @abstractmethod
    def stop(self) -> None:
        """End `run` soon. May be called from a callback or a signal handler."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the loop itself holds; it has ended."""


class Sliced:
    """Work that can wait: it is done a slice at a time, between the requests of other clients."""

    def __init__(self, loop: Loop, step: Callable[[], bool]) -> None:
        """`step` does a little of it, and returns whether there may be more."""
        self._loop = loop
        self._step = step
        self._is_due = False

    def go_on(self) -> None:
        """There is something to do: begin behind all that is ready now."""
        if not self._is_due:
            self._loop.later(0, self._do_slice)
            self._is_due = True  # only now: there may be no memory for that

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
