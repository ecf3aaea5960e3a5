"""SIGTERM, SIGHUP and Ctrl-Break end a command as Ctrl-C does: what it has started is ended first."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
