"""How the processes of a log ended: what launchers, the system and the runtime say of it. Pure.

Jobs live on after much that looks bad: a module that is missing and not needed, an error that was caught and
printed. So a log shows a bad end only if a launcher, the system or the runtime says so; if a logger calls
something known an error; or if the log ends with it, since then nothing shows that the job went on.

torchrun's table names the rank that it saw failing first. torchrun looks at its ranks now and then, and
several may have failed by then. So the table is proof only if the others still ran and torchrun had to end
them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final

from rallypoint.diagnose.explain.prefixes import MILD, SERIOUS, Line
from rallypoint.diagnose.explain.stamps import read_stamp
from rallypoint.diagnose.explain.tracebacks import Raised

MARKS: Final = (
    *("failed (exitcode:", "Root Cause (first observed failure)", "death signal, shutting down"),
    *("terminated with signal", "terminated with exit code", "died with <Signals", "exits with return code"),
    *("ended with exit code", "ended by SIG", "Fatal Python error", "terminate called", "core dumped"),
    *("segmentation fault", "Killed process", "exited with exit code", "*** JOB", "*** STEP"),
)
"""A line with one of these says that a process ended badly."""
BACKTRACE: Final = "frame #"
TABLE: Final = "Failures:"
_ENDED_BADLY: Final = re.compile("|".join(map(re.escape, MARKS)), re.IGNORECASE)
_BACKTRACE: Final = re.compile(rf"Exception raised from |{BACKTRACE}\d")
_LAST_LINES: Final = 12
"""How many lines count as the end of a log: other ranks may speak for a moment longer."""

_HEADINGS: Final = re.compile(r"(?:Other )?Failures:$|(?P<root>Root Cause \(first observed failure\):)")
_ROW: Final = re.compile(r"\[\d+\]:$")
_FIELD: Final = re.compile(r" *(?P<name>time|host|rank|exitcode|error_file|traceback) *: (?P<value>.*)")
_TIME: Final = re.compile(r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)_(?P<clock>\d\d:\d\d:\d\d)")
_RANK: Final = re.compile(r"\d+")
_TRY_FAILED: Final = re.compile(
    r"failed \(exitcode: -?\d+\) local_rank: (?P<rank>\d+) \(pid: \d+\) of binary"
)
_MOST_LINES: Final = 100
_MOST_AGENTS: Final = 100_000
_INDENT: Final = "  "


@dataclass
class Ending:
    """Whether one log shows a bad end, read line by line."""

    shown: bool = False
    """Whether a line says that a process ended badly."""
    _last: int = -_LAST_LINES - 1
    """The last line that speaks of a failure."""

    def take(self, line: Line, number: int, raised: Raised | None, roles: Collection[str]) -> None:
        """Read a line, with the exception that it names and the roles of the known causes in it."""
        known = any(role != "notice" for role in roles)
        self.shown = (
            self.shown or (known and line.severity == SERIOUS) or bool(_ENDED_BADLY.search(line.text))
        )
        spoken = raised is not None or (known and line.severity != MILD)
        if spoken or (number <= self._last + _LAST_LINES and _BACKTRACE.match(line.text)):
            self._last = number

    def is_bad(self, lines: int) -> bool:
        """Whether a log with this number of lines shows a bad end."""
        return self.shown or lines - self._last <= _LAST_LINES


@dataclass
class Table:
    """torchrun's table of failures in one log, read line by line."""

    roots: set[int] = field(default_factory=set)
    """Ranks that torchrun says failed first."""
    others_failed: bool = False
    """Whether another rank had failed by itself as well before torchrun looked."""
    _row: Line | None = None
    _root: bool = False
    _left: int = 0
    _traceback: bool = False

    @property
    def idle(self) -> bool:
        return self._left == 0

    def take(self, line: Line) -> Line:
        """Read a line; return it with the rank, the host and the time of its row."""
        heading = _HEADINGS.match(line.text)
        if heading:
            self._left, self._root, self._row = _MOST_LINES, heading["root"] is not None, None
            return line
        if not self._left:
            return line
        self._left = 0 if line.text.startswith("=====") else self._left - 1
        if _ROW.match(line.text):
            self._row, self._traceback = line, False
        elif self._row is not None:
            return self._take_field(line, self._row)
        return line

    def _take_field(self, line: Line, row: Line) -> Line:
        if self._traceback and line.text.startswith(_INDENT):
            text = line.text[len(_INDENT) :]
            return replace(line, text=text, rank=row.rank, host=row.host, stamp=row.stamp)
        found = _FIELD.match(line.text)
        if found is None:
            self._traceback = False
            return line
        name, value = found["name"], found["value"].strip()
        self._row = row = self._updated(row, name, value)
        self._traceback = name == "traceback"
        text = value if name == "traceback" else f"{name}: {value}"
        return replace(line, text=text, rank=row.rank, host=row.host, stamp=row.stamp, record=True)

    def _updated(self, row: Line, name: str, value: str) -> Line:
        if name == "time" and (time := _TIME.match(value)):
            return replace(row, stamp=read_stamp(time))
        if name == "host":
            return replace(row, host=value)
        if name == "rank" and (rank := _RANK.match(value)):
            if self._root and len(self.roots) < _MOST_AGENTS:
                self.roots.add(int(rank[0]))
            return replace(row, rank=int(rank[0]))
        if name == "exitcode" and not self._root and not value.startswith("-15 "):
            self.others_failed = True
        return row


@dataclass
class Tries:
    """How often the job of one log was started: torchrun's agents say when a try has failed."""

    count: int = 0
    """Tries that have failed so far."""
    _by_agent: dict[tuple[str | None, int | None], int] = field(default_factory=dict)

    def take(self, line: Line) -> Line:
        """Read a line; if it says that a try has failed, return it with the rank that failed."""
        found = _TRY_FAILED.search(line.text)
        if found is None:
            return line
        agent = (line.host, line.pid)
        if agent in self._by_agent or len(self._by_agent) < _MOST_AGENTS:
            self._by_agent[agent] = self._by_agent.get(agent, 0) + 1
            self.count = max(self.count, self._by_agent[agent])
        return line if line.rank is not None else replace(line, rank=int(found["rank"]))
