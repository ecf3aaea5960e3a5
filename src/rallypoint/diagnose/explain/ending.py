"""Whether a log shows that a process ended badly, or only that somebody spoke of a failure. Pure.

Jobs live on after much that looks bad: a module that is missing and not needed, an error that was caught and
printed. So a log shows a bad end only if a launcher, the system or the runtime says so; if a logger calls
something known an error; or if the log ends with it, for then nothing shows that the job went on.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from rallypoint.diagnose.explain.prefixes import Line
from rallypoint.diagnose.explain.severity import MILD, SERIOUS
from rallypoint.diagnose.explain.tracebacks import Raised

MARKS: Final = (
    *("failed (exitcode:", "Root Cause (first observed failure)", "death signal, shutting down"),
    *("terminated with signal", "terminated with exit code", "died with <Signals", "exits with return code"),
    *("ended with exit code", "ended by SIG", "Fatal Python error", "terminate called", "core dumped"),
    *("segmentation fault", "Killed process", "exited with exit code", "*** JOB", "*** STEP"),
)
"""Who says one of these says that a process has ended, and not by itself."""
BACKTRACE: Final = "frame #"
_ENDED: Final = re.compile("|".join(map(re.escape, MARKS)), re.IGNORECASE)
_BACKTRACE: Final = re.compile(rf"Exception raised from |{BACKTRACE}\d")
_LAST_LINES: Final = 12
"""A log ends with what is said in so many of its last lines: other ranks may speak for a moment longer."""


@dataclass
class Ending:
    """What one log shows of the end of the processes that wrote it, line by line."""

    shown: bool = False
    """Whether a line says that a process ended badly."""
    _last: int = -_LAST_LINES - 1
    """The last line that speaks of a failure."""

    def take(self, line: Line, number: int, raised: Raised | None, roles: Collection[str]) -> None:
        """A line, with the exception that it ends, and the roles of the known causes that it speaks of."""
        known = any(role != "notice" for role in roles)
        self.shown = self.shown or (known and line.severity == SERIOUS) or bool(_ENDED.search(line.text))
        spoken = raised is not None or (known and line.severity != MILD)
        if spoken or (number <= self._last + _LAST_LINES and _BACKTRACE.match(line.text)):
            self._last = number

    def is_bad(self, lines: int) -> bool:
        """Whether it is, in a log of so many lines."""
        return self.shown or lines - self._last <= _LAST_LINES
