"""What a backend is: it tells when a socket can be read or written, or when a time has come, and no more."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

Callback = Callable[[], None]

Sample = Callable[[Callback, float], None]

SAMPLED: Final = 128
"""One event of so many is timed."""


def sampled_of(first: int, count: int) -> tuple[range, int]:
    """Which of so many events are timed if `first` is the next one, and which is next behind them."""
    return range(first, count, SAMPLED), (first - count) % SAMPLED


class Loop(ABC):
    """Calls back, in one thread, from `run` until `stop`. Several pumps may share one."""

    name: str
    """What the backend is called in messages and options."""

    capacity: int | None = None
    """How many sockets the backend can watch, if it has a limit of its own."""

    sample: Sample | None = None
    """Called in the place of a callback here and there, with it and when the turn began: to see how long
    clients wait. The time is of `time.monotonic`. Not every backend does so."""

    tells_errors_once = False
    """Whether an error of a socket leads to one last call back, even if that one finds data to read."""

    @abstractmethod
    def watch_readable(self, file: socket.SocketType | int, callback: Callback | None) -> None:
        """Call back whenever `file` can be read; with None, stop doing so."""

    @abstractmethod
    def watch_writable(self, file: socket.SocketType, callback: Callback | None) -> None:
        """Call back whenever `file` can be written; with None, stop doing so."""

    @abstractmethod
    def later(self, seconds: float, callback: Callback) -> None:
        """Call back once, so many seconds from now; with 0, after what is ready now has been seen to."""

    @abstractmethod
    def run(self) -> None:
        """Call back until `stop`, which may have been called already."""

    @abstractmethod
    def stop(self) -> None:
        """End `run` soon. May be called from a callback or a signal handler."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the loop itself holds; it has ended."""
