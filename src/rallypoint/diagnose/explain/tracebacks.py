"""Python's tracebacks in a log: blocks of lines of one writer, with an exception at their end. Pure.

Lines of several ranks may be mixed, so each writer has a state of its own. Of a chain ("During handling of
the above exception, another exception occurred") the first exception is nearest to the cause: those after it
are marked, so that none of them is taken for a failure of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

BEGIN: Final = "Traceback (most recent call last)"
UNREADABLE: Final = 'File "'
"""How the message about a script that Python cannot parse begins: it has no head."""
_UNREADABLE: Final = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?P<function>)$')
_CHAINED: Final = (
    "During handling of the above exception, another exception occurred",
    "The above exception was the direct cause of the following exception",
)
_FRAME: Final = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
# A class, perhaps with its module, and a message. `INFO: x` or `Epoch: 3`, of another writer, is none.
_EXCEPTION: Final = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?: ?:(?: (?P<message>.*))?)?$")
_ENDS_OF_NAMES: Final = ("Error", "error", "Exception", "Timeout", "timeout")
_CAPITALS: Final = re.compile(r"[^A-Z]*[A-Z][^a-z]*[a-z][^A-Z]*[A-Z]")
_LIBRARIES: Final = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|<frozen |[/\\]bin[/\\]"
)
_PLAIN: Final = (
    *("AttributeError", "NameError", "TypeError", "KeyError", "IndexError", "ZeroDivisionError"),
    *("UnboundLocalError", "AssertionError", "FileNotFoundError"),
)
_WAITED: Final = ("Empty", "TimeoutError")
_MOST_LINES: Final = 400
_FOREIGN_LINES: Final = 50
_AFTER_LINES: Final = 60  # torch's messages may hold a backtrace of C++


@dataclass(frozen=True)
class Frame:
    """A frame of a traceback."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        where = f"{self.file}, line {self.line}"
        return f"{where}, in {self.function}" if self.function else where


@dataclass(frozen=True)
class Raised:
    """The exception at the end of a traceback."""

    kind: str
    message: str
    place: Frame | None
    """The innermost frame outside of libraries; if there is none, the innermost one."""
    chained: bool
    """Whether it is the consequence of an exception before it."""

    @property
    def name(self) -> str:
        """The class without its module."""
        return self.kind.rpartition(".")[2]

    @property
    def is_plain(self) -> bool:
        """Whether errors of this kind mostly come from the script itself."""
        return self.kind in _PLAIN

    @property
    def only_waited(self) -> bool:
        """Whether it says no more than that nothing came in time: what it became says why."""
        return self.name in _WAITED and not self.message


class Traceback:
    """The traceback that one writer is writing, if it is writing one (else it is `idle`)."""

    def __init__(self) -> None:
        self.frame = False
        """Whether the last line was one of the frames, or the head of a traceback."""
        self._body = False
        self._indent = 0
        self._lines = 0
        self._foreign = 0
        self._after = 0
        self._chained = False
        self._place: Frame | None = None
        self._own_place: Frame | None = None

    @property
    def idle(self) -> bool:
        return not self._body and not self._after

    @property
    def chained(self) -> bool:
        """Whether the traceback being read follows from the exception before it."""
        return self._chained

    def take(self, text: str) -> Raised | None:
        """Read the next line of this writer; return the exception if the line names it."""
        unreadable = None if self._body else _UNREADABLE.match(text)
        self.frame = BEGIN in text or unreadable is not None
        if self.frame:
            self._begin(text)
            if unreadable is not None:
                self._take_frame(unreadable)
            return None
        if self._body:
            return self._take_body(text)
        if self._after:
            self._after -= 1
            if text.startswith(_CHAINED):
                self._chained, self._after = True, _AFTER_LINES
        return None

    def _begin(self, text: str) -> None:
        if not self._after:
            self._chained = False
        # Some print a traceback as part of a message, further in.
        self._indent = len(text) - len(text.lstrip()) if text.lstrip().startswith(BEGIN) else 0
        self._body, self._after = True, 0
        self._lines = self._foreign = 0
        self._place = self._own_place = None

    def _take_body(self, text: str) -> Raised | None:
        self._lines += 1
        if self._lines > _MOST_LINES or self._foreign > _FOREIGN_LINES:
            self._body = False
            return None
        if not text[: self._indent].strip():
            text = text[self._indent :]
        frame = _FRAME.match(text)
        if frame:
            self._take_frame(frame)
        self.frame = frame is not None or text[:1] in ("", " ", "\t")
        return None if self.frame else self._take_end(text)

    def _take_frame(self, frame: re.Match[str]) -> None:
        place = Frame(frame["file"], int(frame["line"]), frame["function"] or "")
        self._place = place
        if not _LIBRARIES.search(place.file):
            self._own_place = place

    def _take_end(self, text: str) -> Raised | None:
        found = _EXCEPTION.match(text)
        if found is None or not _is_class(found["kind"]):
            self._foreign += 1  # another writer's line that does not say whose it is
            return None
        place = self._own_place or self._place
        raised = Raised(found["kind"], found["message"] or "", place, self._chained)
        self._body, self._after, self._chained = False, _AFTER_LINES, False
        return raised


def _is_class(kind: str) -> bool:
    """Whether a name looks like that of an exception: `KeyError`, `queue.Empty`, `StopIteration`."""
    _, dot, name = kind.rpartition(".")
    is_of_module = bool(dot) and "A" <= name[:1] <= "Z"
    return kind.endswith(_ENDS_OF_NAMES) or is_of_module or _CAPITALS.match(name) is not None
