"""A deadline for calls that have none of their own, such as those of the system's resolver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result or error of a call; TimeoutError if it takes longer, and then nobody waits for it.

    It runs in a thread of its own, which ends with the process if it does not end before.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True, name="rallypoint-patience")
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
