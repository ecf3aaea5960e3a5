"""Several runs of a job in one log, one behind the other: `nohup`, `>>`, or a script that tries again. Pure.

A program begins with the same words each time. So where the first two lines of a log come again right behind
a failure, a further run begins. Numbers may differ, such as dates and ports. What comes again elsewhere is no
run: ranks and loops say the same again and again. A log that begins in the midst of a run has no such lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rallypoint.diagnose.explain.prefixes import Line
from rallypoint.diagnose.explain.sieve import reduce
from rallypoint.diagnose.explain.signs import STEP, read_signs
from rallypoint.diagnose.explain.tracebacks import MARKS

NEAR: Final = 15
"""A further run begins at most so many lines behind the failure of the one before."""
_SHORTEST: Final = 8


class Opening:
    """The first two lines of a log, and whether they have come again."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, Line]] = []
        self._forms: list[bytes] = []
        self._candidate = 0

    @property
    def is_known(self) -> bool:
        return len(self._lines) == 2

    @property
    def end(self) -> int:
        """The number of the second line; a failure up to there means that the log has no such lines."""
        return self._lines[-1][0] if self._lines else 0

    def learn(self, line: Line, number: int) -> None:
        """Take a line of the beginning, until both are known."""
        if form := _form_of(line):
            self._lines.append((number, line))
            self._forms.append(form)
        if self.is_known and not self._tells():
            self._forms = []

    def _tells(self) -> bool:
        if len(set(self._forms)) < 2 or min(map(len, self._forms)) < _SHORTEST:
            return False
        failed = any(mark in line.text for _, line in self._lines for mark in MARKS)
        return not failed and not any(STEP in sign.kinds for sign in read_signs(self._lines))

    def begins_at(self, text: bytes, number: int, split: Callable[[bytes], Line]) -> int:
        """The line at which a run begins, if this is the second line of one; else 0.

        The line is given as it was written; it is split only if it may be one of the two.
        """
        if not text.strip():
            return 0
        candidate, self._candidate = self._candidate, 0
        reduced = reduce(text)
        if not any(form in reduced for form in self._forms):
            return 0
        line = split(text)
        if line.process != self._lines[1][1].process or line.host != self._lines[1][1].host:
            return 0
        self._candidate = number if _form_of(line) == self._forms[0] else 0
        return candidate if _form_of(line) == self._forms[1] else 0


def _form_of(line: Line) -> bytes:
    """A line without its numbers, and without what stands before it."""
    return reduce(line.text.encode())
