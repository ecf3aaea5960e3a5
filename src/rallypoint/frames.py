"""A call of a stack, as a rank reports it or as a traceback in a log shows it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final

from rallypoint.codec import Within, at_most

MOST_FRAMES: Final = 100
"""Of one thread; `faulthandler` writes no more either."""
_Text = Annotated[str, at_most(500)]
_LIBRARY: Final = re.compile(
    r"^<frozen |^<string>$|(?:^|[/\\])(?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3"
    r"|[/\\]lib[/\\](?:runpy|threading|multiprocessing|concurrent|asyncio|importlib|queue|socket|selectors)\b"
    r"|[/\\]rallypoint[/\\](?:(?:pytorch|client|store|launch|cli)[/\\]|__main__\.py$)|\.so(?:\.[\d.]+)?$|\.dylib$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: _Text
    line: Annotated[int, Within(0, 1 << 32)]
    """0: not known."""
    function: _Text

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}" if self.function else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class QuotedFrame(Frame):
    """One call of a traceback in a log, which may show its line of code."""

    source: str = ""


Stack = Annotated[tuple[Frame, ...], at_most(MOST_FRAMES)]
"""Frames, the innermost first."""


def is_library_file(path: str) -> bool:
    """Whether it is a file of Python itself, or of a package."""
    return bool(_LIBRARY.search(path))
