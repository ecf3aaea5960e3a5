"""A point in time by which something has to be done; and one for calls that know no deadline themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

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


def in_thread(
    call: Callable[[], T], done: Callable[[T], None], failed: Callable[[BaseException], None]
) -> threading.Thread:
    """Run a call in a thread of its own, which ends with the process if not before.

    The thread hands the result to `done`, or the error to `failed`.
    """

    def work() -> None:
        try:
            result = call()
        except BaseException as error:
            failed(error)
        else:
            done(result)

    thread = threading.Thread(target=work, daemon=True, name="rallypoint-call")
    thread.start()
    return thread


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result or error of a call; TimeoutError if it takes longer than `seconds`."""
    results: list[T] = []
    failures: list[BaseException] = []
    in_thread(call, results.append, failures.append).join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
