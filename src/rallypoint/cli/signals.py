"""How a command ends by a signal; and `--watch`, which shows a report again and again until Ctrl-C.

SIGTERM, SIGHUP and Ctrl-Break end a command as Ctrl-C does: what it has started is ended first.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rallypoint.errors import RallypointError, UsageError
from rallypoint.store.connect.deadline import Deadline
from rallypoint.text import LONGEST_SENTENCE, shown


@contextmanager
def signals_as_interrupts(ends: str = "") -> Iterator[None]:
    """Raise KeyboardInterrupt, with the signal's number, for SIGTERM, SIGHUP and Ctrl-Break as well.

    A signal that was ignored when the command started stays ignored, as under nohup. `ends` names the command
    whose processes have been ended by then, for the message.
    """

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    names = ("SIGTERM", "SIGHUP", "SIGBREAK")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    except KeyboardInterrupt:
        if ends:
            print(f"rallypoint: every process of {ends} has been ended", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(stop: KeyboardInterrupt) -> int:
    """The exit code that a shell expects of a program that a signal has ended."""
    number: int = stop.args[0] if stop.args else signal.SIGINT
    return 128 + number


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
        pause = Deadline(seconds)
        show()
        time.sleep(pause.remaining)


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
