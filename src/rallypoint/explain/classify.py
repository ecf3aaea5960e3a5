"""What a line says by its own text: at most one class, from the table in classes.toml. Pure.

The first class that fits is taken. Each pattern stands in the table next to lines that it matches and lines
that it must not match. A class without a kind is for lines that look like events and are none: source code, headings.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from rallypoint.exits import signal_number
from rallypoint.explain.events import FAILURES, Kind, Raised

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LONGEST: Final = 2_000
"""Characters of a line that are compared with patterns."""
_SHELL_SIGNAL: Final = 128


@dataclass(frozen=True)
class Class:
    """A row of the table."""

    name: str
    kind: Kind | None
    patterns: tuple[re.Pattern[str], ...]
    unless: tuple[re.Pattern[str], ...] = ()
    matches: tuple[str, ...] = ()
    not_: tuple[str, ...] = ()
    loud: bool = True

    def search(self, text: str) -> re.Match[str] | None:
        found = next((found for each in self.patterns if (found := each.search(text))), None)
        return None if found is None or any(each.search(text) for each in self.unless) else found


@dataclass(frozen=True)
class Found:
    """The class of a line, and what its pattern captured."""

    name: str
    kind: Kind | None
    code: int | None = None
    """An exit code; the negative number of a signal."""
    fatal: bool = False
    loud: bool = True
    """Whether the line states an error, and does not only have the words of one."""


@dataclass(frozen=True)
class Table:
    """The whole table."""

    classes: tuple[Class, ...]
    denials: Class
    exceptions: tuple[Class, ...]

    @property
    def failures(self) -> list[re.Pattern[str]]:
        """The patterns of lines that may speak of a failure or of a new start."""
        wanted = (*FAILURES, Kind.RESTART)
        return [pattern for each in self.classes if each.kind in wanted for pattern in each.patterns]


@cache
def table() -> Table:
    """The table of classes.toml."""
    data = tomllib.loads(files(__package__).joinpath("classes.toml").read_text(encoding="utf-8"))
    exceptions = tuple(_class(each) for each in data["exceptions"])
    return Table(
        tuple(map(_class, data["class"])), _class({"name": "denials", **data["denials"]}), exceptions
    )


def _class(row: dict[str, Any]) -> Class:
    def patterns(name: str) -> tuple[re.Pattern[str], ...]:
        return tuple(map(re.compile, row.get(name, ())))

    kind = Kind(row["kind"]) if "kind" in row else None
    examples = tuple(row.get("matches", ())), tuple(row.get("not", ()))
    return Class(
        row["name"], kind, patterns("patterns"), patterns("unless"), *examples, loud=row.get("loud", True)
    )


_FATAL: Final = re.compile(
    r"^(?:\[[\w. -]{1,30}\] ?){0,3}[\w./@ :-]{0,40}?"
    r"\[?(?:FATAL\b|CRITICAL\b|(?<![Nn]on-)[Ff]atal error\b|[Ff]atal:)"
)


def classify(text: str) -> Found | None:
    """The class of a line without its prefixes; None for an ordinary line."""
    text = without_denials(text[:LONGEST])
    for each in table().classes:
        if (found := each.search(text)) is not None:
            code = (
                _code_of(found) if each.kind is not Kind.KILLED else _code_of(found) or _signal_in(found[0])
            )
            return Found(each.name, each.kind, code, _FATAL.match(text) is not None, each.loud)
    return None


def without_denials(text: str) -> str:
    """A line without words of failure that deny one or only name one."""
    for pattern in table().denials.patterns:
        text = pattern.sub("_", text)
    return text


def class_of(raised: Raised) -> str:
    """wrapper or follower, where an exception's own text shows that; otherwise empty."""
    text = f"{raised.name}: {raised.message}"[:LONGEST]
    return next((each.name for each in table().exceptions if each.search(text)), "")


def _code_of(found: re.Match[str]) -> int | None:
    for name, value in found.groupdict().items():
        if value is None:
            continue
        if name.startswith("signame"):
            return -signal_number(value)
        if name.startswith("signal"):
            return -int(value)
        if name.startswith("code"):
            return normal_code(int(value))
    return None


_SIGNALS: Final = (
    (re.compile(r"(?i)seg(?:mentation )?fault|core dumped|段错误|speicherzugriff|violación"), -11),
    (re.compile(r"(?i)abort|free\(\)|double free|malloc|corrupted|munmap|已放弃"), -6),
    (re.compile(r"(?i)bus error|总线错误"), -7),
    (re.compile(r"(?i)illegal|非法指令"), -4),
    (re.compile(r"(?i)floating point"), -8),
)


def _signal_in(text: str) -> int | None:
    """The signal that the words of a shell or of the C library mean; SIGKILL has no words that are its alone."""
    return next((code for words, code in _SIGNALS if words.search(text)), None)


def normal_code(code: int) -> int:
    """A code as Python gives it, negative for a signal: shells and Windows write others."""
    if code < -255:
        return code + 2**32
    return _SHELL_SIGNAL - code if _SHELL_SIGNAL < code < _SHELL_SIGNAL + 65 else code
