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
_MOST_PREFIXES: Final = 8
_MOST_NAMES: Final = 100_000
_HOUR: Final = 3600
_DAY: Final = 24 * _HOUR
_SOME_YEAR: Final = 2000
"""The year of a log that names none. It is a leap year."""
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_LEVELS: Final = {
    **dict.fromkeys(("D", "V", "DEBUG", "TRACE"), "debug"),
    **dict.fromkeys(("I", "INFO", "NOTICE"), "info"),
    **dict.fromkeys(("W", "WARN", "WARNING"), "warning"),
    **dict.fromkeys(("E", "ERROR", "FAILED"), "error"),
    **dict.fromkeys(("C", "F", "CRITICAL", "FATAL", "PANIC"), "fatal"),
}
# A progress bar does not end its line: the next message stands right behind it.
_BAR: Final = re.compile(
    r"[^|]{0,200}?\d{1,3}%\|[^|]*\|[^\[]{0,80}\[[^\]]{0,200}(?:it/s|s/it)[^\]]{0,200}\](?=\S)"
)
# Ray writes once what many processes say.
_REPEATED: Final = re.compile(r" \[repeated \d+x across cluster\].{0,200}$")
# Colours whose escape character was lost when the log was copied.
_LOST_ESCAPE: Final = re.compile(rb"(?:\xef\xbf\xbd|\^\[)?\[\d{1,3}(?:;\d{1,3}){0,4}m")
_CONTINUED: Final = re.compile(r"\\\n *")


def decode(raw: bytes) -> str:
    """A line as text: without colours, cut if it is very long; bytes that are not UTF-8 become U+FFFD."""
    plain = ESCAPE.sub(b"", raw) if b"\x1b" in raw else raw
    plain = _LOST_ESCAPE.sub(b"", plain) if b"m" in plain and b"[" in plain else plain
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
    logged: bool = False
    """Whether one of torch's Python loggers wrote it: an exception there was caught."""


# The tables ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prefix:
    """One kind of prefix; `prefixes.toml` says what each field means."""

    pattern: re.Pattern[str]
    record: bool = False
    marked: bool = False
    logged: bool = False
    weak: bool = False
    follows: re.Pattern[str] | None = None
    """What can only follow a prefix, if this one must be learnt."""


@dataclass(frozen=True, slots=True)
class Severity:
    """Words that tell a level: always the same one, or the one that they name."""

    pattern: re.Pattern[str]
    level: str
    anywhere: bool

    def level_of(self, text: str) -> str:
        match = (self.pattern.search if self.anywhere else self.pattern.match)(text)
        return "" if match is None else self.level or _LEVELS[match["level"].upper()]


@cache
def table() -> dict[str, Any]:
    """The contents of prefixes.toml."""
    contents: dict[str, Any] = tomllib.loads(
        Path(__file__).with_name("prefixes.toml").read_text(encoding="utf-8")
    )
    return contents


@cache
def prefixes() -> tuple[Prefix, ...]:
    """All kinds of prefixes, in the order in which they are tried."""
    return tuple(_prefix(each) for each in table()["prefix"])


@cache
def severities() -> tuple[Severity, ...]:
    """All words that tell a level; the first that a line has counts."""
    return tuple(
        Severity(_compile(each["pattern"]), each.get("level", ""), each.get("anywhere", False))
        for each in table()["severity"]
    )


@cache
def _candidates(bracket: bool) -> tuple[Prefix, ...]:
    """The prefixes of lines that begin with a bracket, or of all others; their examples show which."""
    return tuple(
        prefix
        for prefix, entry in zip(prefixes(), table()["prefix"], strict=True)
        if any(line.startswith("[") == bracket for line, _ in entry["examples"])
    )


def _prefix(entry: dict[str, Any]) -> Prefix:
    flags = {name: entry.get(name, False) for name in ("record", "marked", "logged", "weak")}
    follows = re.compile(entry["follows"]) if "follows" in entry else None
    return Prefix(_compile(entry["pattern"]), follows=follows, **flags)


def _compile(pattern: str) -> re.Pattern[str]:
    pattern = _CONTINUED.sub("", pattern)
    for name, piece in reversed(table()["pieces"].items()):  # a piece may have those before it
        pattern = pattern.replace(f"{{{name}}}", piece)
    return re.compile(pattern)


# One log ---------------------------------------------------------------------------------------------------


class Prefixes:
    """Splits the lines of one log. `near` is a time close to the log's own: it tells the year."""

    def __init__(self, near: float | None = None) -> None:
        self._names: set[str] = set()
        self._clock = _Clock(near)

    def split(self, text: str) -> Line:
        """A line, without its prefixes."""
        bar = _BAR.match(text) if "%|" in text else None
        rest = text[bar.end() :] if bar else text
        rest = _REPEATED.sub("", rest) if "[repeated " in rest else rest
        told = _Told()
        for _ in range(_MOST_PREFIXES):
            found = self._find(rest, learnt=not told.record)
            if found is None:
                break
            prefix, match = found
            told.add(prefix, match)
            rest = rest[match.end() :]
        return self._line(rest, told)

    def _line(self, text: str, told: _Told) -> Line:
        return Line(
            text,
            told.process,
            self._clock.read(told.time) if told.time else None,
            _level(text) or told.level,
            told.record,
            told.marked,
            told.logged,
        )

    def _find(self, text: str, *, learnt: bool = False) -> tuple[Prefix, re.Match[str]] | None:
        for prefix in _candidates(text.startswith("[")):
            match = prefix.pattern.match(text) if learnt or prefix.follows is None else None
            if match is not None and (prefix.follows is None or self._knows(prefix.follows, match)):
                return prefix, match
        return None

    def _knows(self, follows: re.Pattern[str], match: re.Match[str]) -> bool:
        if match[0] not in self._names and len(self._names) < _MOST_NAMES:
            rest = match.string[match.end() :]
            if follows.match(rest) or self._find(rest):
                self._names.add(match[0])
        return match[0] in self._names


class _Told:
    """What the prefixes of one line tell, from the outermost on."""

    def __init__(self) -> None:
        self.time: dict[str, str] = {}
        self.level = ""
        self.record = self.marked = self.logged = False
        self._names: dict[str, str] = {}
        self._own_rank = False

    def add(self, prefix: Prefix, match: re.Match[str]) -> None:
        groups = {name.rstrip("0123456789"): text for name, text in match.groupdict().items() if text}
        if "clock" in groups and not self.time:
            self.time = groups
        # Whoever passes on what a rank wrote does not know how serious it is.
        self.level = "" if prefix.marked else _LEVELS.get(groups.get("level", "").upper(), self.level)
        self.record |= prefix.record
        self.marked |= prefix.marked
        self.logged |= prefix.logged
        self._add_names(groups, own_rank=not prefix.weak)

    def _add_names(self, groups: dict[str, str], *, own_rank: bool) -> None:
        if "rank" in groups and own_rank and not self._own_rank:
            self._own_rank = True
            self._names.pop("rank", None)
        for name in ("rank", "local", "host", "pid"):
            if name in groups:
                self._names.setdefault(name, groups[name])

    @property
    def process(self) -> Process:
        if not self._names:
            return NOBODY
        rank, local, pid = (self._number(name) for name in ("rank", "local", "pid"))
        return Process(rank, local if rank is None else None, self._names.get("host"), pid)

    def _number(self, name: str) -> int | None:
        return int(self._names[name]) if name in self._names else None


def _level(text: str) -> str:
    """The level that the words of a line tell."""
    return next((level for each in severities() if (level := each.level_of(text))), "")


class _Clock:
    """Reads times. What they leave out is chosen so that the times of a log do not jump."""

    def __init__(self, near: float | None) -> None:
        self._near = timegm((_SOME_YEAR, 7, 1, 0, 0, 0)) if near is None else near
        """The last time with a date."""
        self._last: float | None = None

    def read(self, parts: dict[str, str]) -> float:
        hours, minutes, seconds = parts["clock"].replace(",", ".").split(":")
        clock = int(hours) * _HOUR + int(minutes) * 60 + float(seconds) - _zone(parts.get("zone", ""))
        if "day" in parts:
            self._last = self._near = self._date(parts) + clock
        else:
            self._last = self._on_some_day(clock)
        return self._last

    def _date(self, parts: dict[str, str]) -> float:
        month = parts["month"]
        number = int(month) if month.isdigit() else _MONTHS.index(month) + 1
        year = int(parts.get("year", 0))
        near = 1970 + int(self._near // (365.2425 * _DAY))
        years = (year,) if year else range(near - 1, near + 2)
        dates = [timegm((each, number, int(parts["day"]), 0, 0, 0)) for each in years]
        return min(dates, key=lambda date: abs(date - self._near))

    def _on_some_day(self, clock: float) -> float:
        """Midnight takes the clock back by nearly a day; lines of two processes may be mixed there."""
        if self._last is None:
            return clock
        late = clock - self._last % _DAY
        if late < -12 * _HOUR:
            late += _DAY
        elif late > 23 * _HOUR:
            late -= _DAY
        return self._last + late


def _zone(text: str) -> int:
    """Seconds that a zone is ahead of UTC."""
    digits = text[1:].replace(":", "")
    if not digits:
        return 0
    ahead = int(digits[:2]) * _HOUR + int(digits[2:4]) * 60
    return -ahead if text[0] == "-" else ahead
