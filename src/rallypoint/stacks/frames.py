"""Stacks as Python's `faulthandler` writes them, read back. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final

from rallypoint.codec import Within, at_most

_HEAD: Final = re.compile(r"(?P<current>Current thread|Thread|Stack)\b.*\(most recent call first\):\s*$")
_FRAME: Final = re.compile(
    r'  File (?:"(?P<file>.*)"|\?\?\?), line (?P<line>\d{1,9}|\?\?\?) in (?P<name>.*)$'
)
# It writes what is no ASCII, and control characters, as escapes; a backslash in a name stays as it is.
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_OUTERMOST: Final = "<module>"
_MOST_CHARACTERS: Final = 500
MOST_FRAMES: Final = 100
"""Of one thread; `faulthandler` writes no more either."""


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: Annotated[str, at_most(_MOST_CHARACTERS)]
    line: Annotated[int, Within(0, 1 << 32)]
    """0: not known."""
    function: Annotated[str, at_most(_MOST_CHARACTERS)]


Stack = Annotated[tuple[Frame, ...], at_most(MOST_FRAMES)]
"""Frames, the innermost first."""


@dataclass(frozen=True)
class Dump:
    """What one process has written at once."""

    threads: tuple[tuple[Frame, ...], ...]
    main: int
    """Which of them the main thread is."""
    is_within_c: bool = False
    """Whether the main thread was in a call of C code, and has written its own stack alone."""

    @property
    def stack(self) -> tuple[Frame, ...]:
        return self.threads[self.main]

    @property
    def others(self) -> tuple[tuple[Frame, ...], ...]:
        return tuple(each for at, each in enumerate(self.threads) if at != self.main)


def read_dump(text: str) -> Dump | None:
    """The stacks of one process; None if there is none in the text.

    A signal is handled by the main thread, if that does not block it: so the current thread is the main one.
    Otherwise that is the last one, as the youngest thread is written first.
    """
    threads: list[list[Frame]] = []
    current = -1
    is_within_c = False
    for line in text.split("\n"):
        if head := _HEAD.match(line):
            if head["current"] != "Thread":
                current = len(threads)
                is_within_c = head["current"] == "Stack"
            threads.append([])
        elif threads and len(threads[-1]) < MOST_FRAMES and (found := _FRAME.match(line)):
            number = found["line"]
            where = Frame(
                _unescaped(found["file"] or ""),
                int(number) if number.isdigit() else 0,
                _unescaped(found["name"]),
            )
            threads[-1].append(where)
    if not threads:
        return None
    main = current if current >= 0 else len(threads) - 1
    return Dump(tuple(tuple(each) for each in threads), main, is_within_c)


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
