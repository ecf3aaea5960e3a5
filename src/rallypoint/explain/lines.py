"""Lines without their prefixes, and what these tell: the process, the time and the severity. Pure.

Prefixes nest, so they are taken off one after the other; `prefixes.toml` lists them. Of two times the outer
one counts, since the same clock wrote it for all lines of a log; of two levels the inner one counts.
Healthy jobs warn of what fails for a while, in the words of a failure: only the level tells the two apart.
`Prefixes` remembers what one line tells about later ones: names that stand before lines, and the date.
"""

from __future__ import annotations

import re
import sys
from calendar import timegm
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from rallypoint.explain.events import NOBODY, Process
from rallypoint.explain.quick import ESCAPE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LONGEST_TEXT: Final = 4096
_TABLE: Final = "prefixes.toml"
_MOST_PREFIXES: Final = 8
_MOST_NAMES: Final = 100_000
_DAY: Final = 86_400
_SOME_DAY: Final = timegm((2000, 7, 1, 0, 0, 0))
"""The day of a log that names none, in a leap year."""
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# Ray writes once what many processes say.
_REPEATED: Final = re.compile(r" \[repeated \d+x across cluster\].{0,200}$")
# Colours whose escape character was lost when the log was copied.
_LOST_ESCAPE: Final = re.compile(rb"(?:\xef\xbf\xbd|\^\[)?\[\d{1,3}(?:;\d{1,3}){0,4}m")
_CONTINUED: Final = re.compile(r"\\\n *")


def decode(raw: bytes) -> str:
    """A line as text: without colours, cut if it is very long; bytes that are not UTF-8 become U+FFFD."""
    plain = _LOST_ESCAPE.sub(b"", ESCAPE.sub(b"", raw))
    return plain[: 4 * LONGEST_TEXT].decode(errors="replace")[:LONGEST_TEXT].rstrip()


@dataclass(frozen=True, slots=True)
class Line:
    """A line without its prefixes, and what they tell."""

    text: str
    process: Process = NOBODY
    time: float | None = None
    """Seconds since the epoch, or since some midnight where the log has no dates."""
    level: str = ""
    """debug, info, warning, error or fatal, by the words of the line or else by its logger."""
    record: bool = False
    """Whether a logger's message begins here; if not, the line may belong to the one before."""
    marked: bool = False
    """Whether torch put the rank before it, as it does with exceptions that nobody caught."""


@cache
def load(name: str) -> dict[str, Any]:
    """One of the tables that come with this package."""
    return dict(tomllib.loads(Path(__file__).with_name(name).read_text("utf-8")))


class Row:
    """A prefix, or words at the beginning of a line that tell a level; `prefixes.toml` says more."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.pattern = compiled(row["pattern"])
        self.follows = compiled(row["follows"]) if "follows" in row else None
        self.record: bool = row.get("record", False)
        self.marked: bool = row.get("marked", False)
        self._level: str = row.get("level", "")

    def level_of(self, text: str) -> str:
        match = self.pattern.match(text)
        return "" if match is None else self._level or _level(match["level"])


@cache
def rows(kind: str) -> list[Row]:
    """All of a kind, prefix or severity, in the order in which they are tried."""
    return [Row(row) for row in load(_TABLE)[kind]]


def _level(word: str) -> str:
    """The level that a logger's word for it means; empty for another word."""
    return str(load(_TABLE)["levels"].get(word.upper(), ""))


def compiled(pattern: str, table: str = _TABLE) -> re.Pattern[str]:
    """A pattern of a table, with the pieces that the table names."""
    pattern = _CONTINUED.sub("", pattern)
    for name, piece in reversed(load(table)["pieces"].items()):  # a piece may have those before it
        pattern = pattern.replace(f"{{{name}}}", piece)
    return re.compile(pattern)


class Prefixes:
    """Splits the lines of one log."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._last: float = _SOME_DAY

    def split(self, text: str) -> Line:
        """A line, without its prefixes."""
        text = _REPEATED.sub("", text)
        found: list[tuple[Row, dict[str, str]]] = []
        while len(found) < _MOST_PREFIXES and (new := self._find(text)):
            prefix, match = new
            groups = {name.rstrip("0123456789"): each for name, each in match.groupdict().items() if each}
            found.append((prefix, groups))
            text = text[match.end() :]
        return self._line(text, found)

    def _line(self, text: str, found: list[tuple[Row, dict[str, str]]]) -> Line:
        told = {name: each for _, groups in reversed(found) for name, each in groups.items()}
        dated = next((groups for _, groups in found if "clock" in groups), None)
        level = ""
        for prefix, groups in found:  # whoever passes on what a rank wrote does not know how serious it is
            level = "" if prefix.marked else _level(groups.get("level", "")) or level
        return Line(
            text,
            _process(told),
            self._time(dated) if dated else None,
            next((said for row in rows("severity") if (said := row.level_of(text))), level),
            any(prefix.record for prefix, _ in found),
            any(prefix.marked for prefix, _ in found),
        )

    def _find(self, text: str) -> tuple[Row, re.Match[str]] | None:
        for prefix in rows("prefix"):
            match = prefix.pattern.match(text)
            if match and (prefix.follows is None or self._knows(match, prefix.follows)):
                return prefix, match
        return None

    def _knows(self, name: re.Match[str], follows: re.Pattern[str]) -> bool:
        """Whether a name has ever stood before what can only follow a prefix."""
        if name[0] not in self._names and len(self._names) < _MOST_NAMES:
            rest = name.string[name.end() :]
            others = (each.pattern for each in rows("prefix") if each.follows is None)
            if any(pattern.match(rest) for pattern in (follows, *others)):
                self._names.add(name[0])
        return name[0] in self._names

    def _time(self, parts: dict[str, str]) -> float:
        """What a time leaves out, its day or its year, is chosen so that the times of a log do not jump."""
        hours, minutes, seconds = parts["clock"].replace(",", ".").split(":")
        clock = int(hours) * 3600 + int(minutes) * 60 + float(seconds) - _zone(parts.get("zone", ""))
        last = self._last
        self._last = min((day + clock for day in _days(parts, last)), key=lambda time: abs(time - last))
        return self._last


def _days(parts: dict[str, str], last: float) -> list[float]:
    """When the days begin that a time may mean, given the time before it."""
    if "day" not in parts:
        today = last // _DAY * _DAY
        return [today - _DAY, today, today + _DAY]
    month = int(parts["month"]) if parts["month"].isdigit() else _MONTHS.index(parts["month"]) + 1
    year = 1970 + int(last // (365.2425 * _DAY))
    years = [int(parts["year"])] if "year" in parts else [year - 1, year, year + 1]
    return [timegm((each, month, int(parts["day"]), 0, 0, 0)) for each in years]


def _zone(text: str) -> int:
    """Seconds that a zone is ahead of UTC."""
    digits = text[1:].replace(":", "")
    ahead = int(digits[:2]) * 3600 + int(digits[2:]) * 60 if digits else 0
    return -ahead if text[:1] == "-" else ahead


def _process(told: dict[str, str]) -> Process:
    """Who wrote a line. The rank that a process gives itself is better than its launcher's number for it."""
    numbers = {name: int(told[name]) for name in ("rank", "task", "local", "pid") if name in told}
    rank = numbers.get("rank", numbers.get("task"))
    return Process(rank, numbers.get("local") if rank is None else None, told.get("host"), numbers.get("pid"))
