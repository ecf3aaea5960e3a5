"""`--watch`: showing a report again and again, until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from rallypoint.cli.signals import signals_as_interrupts
from rallypoint.errors import RallypointError, UsageError
from rallypoint.text import LONGEST_SENTENCE, shown


def check_watch(watch: bool, as_json: bool) -> None:
    """UsageError for `--watch` with `--json`."""
    if watch and as_json:
        raise UsageError("--watch shows no JSON", hint="ask for --json again and again")


@contextmanager
def until_ctrl_c() -> Iterator[None]:
    """Leave the block on Ctrl-C, which is how `--watch` is meant to end. Other signals end the command."""
    with signals_as_interrupts():
        try:
            yield
        except KeyboardInterrupt as stop:
            if stop.args:
                raise


def repeat(show: Callable[[], None], seconds: float) -> NoReturn:
    """Call `show` every so many seconds, until it raises."""
    while True:
        begin = time.monotonic()
        show()
        time.sleep(max(begin + seconds - time.monotonic(), 0.0))


class ChangedLines:
    """Prints a block of lines each time that something but the time has changed."""

    def __init__(self) -> None:
        self._last: Hashable = None

    def show(self, essence: Hashable, lines: Sequence[str]) -> None:
        if essence != self._last:
            print(time.strftime("%H:%M:%S"), *lines, "", sep="\n", flush=True)
        self._last = essence

    def miss(self, error: RallypointError) -> None:
        """The store does not answer."""
        self.show(type(error).__name__, [f"no answer: {in_a_line(error)}"])


def in_a_line(error: RallypointError) -> str:
    return shown(" ".join(error.message.split()), LONGEST_SENTENCE)
