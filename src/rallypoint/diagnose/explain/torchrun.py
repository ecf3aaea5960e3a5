"""What torchrun itself says of a failed job: its table of failures, and where one try ends. Pure.

The table names the rank that torchrun saw failing first. torchrun looks at its ranks now and then, and
several may have failed by then: its word is proof only if the others still ran, so that it had to end them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Final

from rallypoint.diagnose.explain.prefixes import Line
from rallypoint.diagnose.explain.stamps import read_stamp

MARKS: Final = ("Failures:", "Root Cause (first observed failure)", "failed (exitcode:")
_HEADINGS: Final = re.compile(r"(?:Other )?Failures:$|(?P<root>Root Cause \(first observed failure\):)")
_ROW: Final = re.compile(r"\[\d+\]:$")
_FIELD: Final = re.compile(r" *(?P<name>time|host|rank|exitcode|error_file|traceback) *: (?P<value>.*)")
_TIME: Final = re.compile(r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)_(?P<clock>\d\d:\d\d:\d\d)")
_RANK: Final = re.compile(r"\d+")
_ENDED: Final = re.compile(r"failed \(exitcode: -?\d+\) local_rank: (?P<rank>\d+) \(pid: \d+\) of binary")
_MOST_LINES: Final = 100
_MOST_AGENTS: Final = 100_000
_INDENT: Final = "  "


@dataclass
class Table:
    """The table of failures of one log, read line by line."""

    roots: set[int] = field(default_factory=set)
    """Ranks that torchrun says failed first."""
    others_failed: bool = False
    """Whether another rank had failed as well, by itself, before torchrun looked."""
    _row: Line | None = None
    _root: bool = False
    _left: int = 0
    _traceback: bool = False

    @property
    def idle(self) -> bool:
        return self._left == 0

    def take(self, line: Line) -> Line:
        """The line, with the rank, the host and the time of its row."""
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
    """How often the job of one log was started: its agents say when a try has failed."""

    count: int = 0
    """Tries that have failed so far."""
    _by_agent: dict[tuple[str | None, int | None], int] = field(default_factory=dict)

    def take(self, line: Line) -> Line:
        """The line, with the rank that it speaks of if it says that a try has failed."""
        found = _ENDED.search(line.text)
        if found is None:
            return line
        agent = (line.host, line.pid)
        if agent in self._by_agent or len(self._by_agent) < _MOST_AGENTS:
            self._by_agent[agent] = self._by_agent.get(agent, 0) + 1
            self.count = max(self.count, self._by_agent[agent])
        return line if line.rank is not None else replace(line, rank=int(found["rank"]))
