"""Stacks as Python's `faulthandler` writes them, read back. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from rallypoint.frames import MOST_FRAMES, Frame, Stack

__all__ = ["MOST_FRAMES", "Dump", "Frame", "Stack", "is_complete", "read_dump"]

_HEAD: Final = re.compile(
    r"(?P<kind>Current thread|Thread|Stack)(?: (?P<ident>0x[0-9a-f]+))?.*\(most recent call first\):\s*$"
)
_FRAME: Final = re.compile(
    r'  File (?:"(?P<file>.*)"|\?\?\?), line (?P<line>\d{1,9}|\?\?\?) in (?P<name>.*)$'
)
# It writes what is no ASCII, and control characters, as escapes; a backslash in a name stays as it is.
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_AND_MORE: Final = "..."
"""Instead of further threads; further frames of a thread are indented."""
_OUTERMOST: Final = "<module>"


@dataclass(frozen=True)
class Dump:
    """What one process has written at once."""

    threads: tuple[tuple[Frame, ...], ...]
    """The main thread's is the last one. The thread that has written all of them is left out."""
    idents: tuple[int, ...]
    """What Python identifies each thread by; 0: not known."""
    lock_holder: Stack = ()
    """The thread that keeps the interpreter lock (GIL), if it is not the main thread."""

    @property
    def stack(self) -> tuple[Frame, ...]:
        return self.threads[-1]

    @property
    def others(self) -> tuple[tuple[Frame, ...], ...]:
        return self.threads[:-1]


def read_dump(text: str) -> Dump | None:
    """The stacks of one process; None if there is none in the text.

    The youngest thread is written first, so the main thread is the last one; it is missing if there are more
    threads than are written. The current thread wrote the dump: a helper, unless it is the main thread.
    """
    threads: list[list[Frame]] = []
    idents: list[int] = []
    writer = -1
    for line in text.split("\n"):
        if head := _HEAD.match(line):
            if head["kind"] == "Current thread":
                writer = len(threads)
            threads.append([])
            idents.append(int(head["ident"] or "0", 16))
        elif line == _AND_MORE:
            return None
        elif threads and len(threads[-1]) < MOST_FRAMES and (found := _FRAME.match(line)):
            number = found["line"]
            where = Frame(
                _unescaped(found["file"] or ""),
                int(number) if number.isdigit() else 0,
                _unescaped(found["name"]),
            )
            threads[-1].append(where)
    if 0 <= writer < len(threads) - 1:
        del threads[writer], idents[writer]
    return Dump(tuple(map(tuple, threads)), tuple(idents)) if threads else None


def is_complete(text: str) -> bool:
    """Whether a dump is certainly written to its end: the main thread, the last one, began in a module."""
    last = text[:-1].rpartition("\n")[2]
    found = _FRAME.match(last) if text.endswith("\n") else None
    return found is not None and found["name"] == _OUTERMOST


def _unescaped(name: str) -> str:
    return _ESCAPE.sub(_character, name) if "\\" in name else name


def _character(found: re.Match[str]) -> str:
    number = int(next(filter(None, found.groups())), 16)
    # What `faulthandler` writes as it is was a backslash in the name.
    return found[0] if 0x20 <= number < 0x7F or number > 0x10FFFF else chr(number)
