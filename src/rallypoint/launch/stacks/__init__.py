"""What the ranks of this machine are doing: their stacks, what those mean, and a report to the job's store.

Each rank has a helper thread that writes the stacks of all threads into a file when it is sent a signal; no
other thread is interrupted (`pytorch/injection/rallypoint_hooks.py`). docs/concepts/architecture.md lists the
modules, from the launcher's thread (`watching`) to what users read (`words`).

Here are the settings: whether stacks are requested, by which signals, and how long ranks may stand still. It
imports next to nothing.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from typing import Final

from rallypoint.errors import UsageError

STACKS_VARIABLE: Final = "RALLYPOINT_STACKS"
STALL_VARIABLE: Final = "RALLYPOINT_STALL_AFTER"
STALL_SECONDS: Final = 180.0
"""After so many seconds without progress, the launcher reports what each rank is doing."""
# Programs take such signals from the lower end, if at all; the last one is used by debuggers.
_BY_DEFAULT: Final = "SIGRTMAX-3,SIGRTMAX-4"
_HINT: Final = f"write on, off, or the names or numbers of one or two signals: {_BY_DEFAULT}"
_ON_MACOS: Final = "SIGINFO"
_ON_WINDOWS: Final = (0,)
"""No signal, but an event: see `requesting`."""
_SIGNAL: Final = re.compile(r"(?:(?P<name>SIG[A-Z0-9]+)|(?P<number>\d{1,3}))(?P<more>[+-]\d{1,2})?")
_RESERVED: Final = ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL")


def signals_of(text: str, source: str) -> tuple[int, ...]:
    """The signals for the interpreter, and for a rank whose interpreter lock is held in C code; empty: off.

    The second one may be missing. UsageError, naming the source, for what is none.
    """
    word = text.strip()
    if word.lower() == "off":
        return ()
    if word.lower() in ("on", "auto", ""):
        if sys.platform == "win32":
            return _ON_WINDOWS
        word = _BY_DEFAULT if hasattr(signal, "SIGRTMAX") else _ON_MACOS
    elif sys.platform != "linux":  # elsewhere it is not known whether a process handles it
        raise UsageError(f"{source} is {text!r}, but the signal can be chosen on Linux alone", hint=_HINT)
    try:
        numbers = tuple(_number(each) for each in word.split(","))
    except ValueError:
        raise UsageError(f"{source} is {text!r}, which is no signal", hint=_HINT) from None
    if len(numbers) > 2 or len(set(numbers)) < len(numbers):
        raise UsageError(f"{source} is {text!r}: one or two different signals are needed", hint=_HINT)
    return numbers


def stack_signals(environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """What RALLYPOINT_STACKS says."""
    return signals_of(environ.get(STACKS_VARIABLE, ""), f"the variable {STACKS_VARIABLE}")


def stall_seconds(environ: Mapping[str, str] = os.environ) -> float:
    """What RALLYPOINT_STALL_AFTER says."""
    text = environ.get(STALL_VARIABLE, "")
    try:
        seconds = float(text or STALL_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(
            f"the variable {STALL_VARIABLE} is {text!r}, which is no time", hint="write seconds, more than 0"
        )
    return seconds


def _number(text: str) -> int:
    """`SIGUSR2`, `SIGRTMAX-3`, `60`."""
    found = _SIGNAL.fullmatch(text.strip().upper())
    if found is None:
        raise ValueError(text)
    number = int(found["number"] or getattr(signal, found["name"], 0)) + int(found["more"] or 0)
    refused = {int(getattr(signal, each)) for each in _RESERVED if hasattr(signal, each)}
    if number in refused or number not in set(map(int, signal.valid_signals())):
        raise ValueError(text)
    return number
