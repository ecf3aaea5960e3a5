"""A point in time by which something has to be done; and one for calls that know no deadline themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


class Deadline:
    """The moment some seconds from now."""

    __slots__ = ("_began", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    @property
    def remaining(self) -> float:
        """Seconds left; 0 when it has passed."""
        return max(0.0, self.seconds - self.elapsed)

    @property
    def passed(self) -> bool:
        return self.elapsed >= self.seconds


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call in a thread of its own, which ends with the process if not before."""
    from concurrent.futures import Future  # late: it takes longer to import than the rest of a client

    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name="rallypoint-call").start()
    return future


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result or error of a call; TimeoutError if it takes longer than `seconds`."""
    from concurrent.futures import wait

    future = in_thread(call)
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()
