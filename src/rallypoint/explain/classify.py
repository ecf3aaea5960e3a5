"""What a line says by its own text: at most one class, from the table in classes.toml. Pure.

The first class that fits is taken. Each pattern stands in the table next to lines that it matches and lines
that it must not match. A class without a kind is for lines that look like events and are none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from rallypoint.exits import signal_number
from rallypoint.explain.events import FAILURES, Kind, Raised
from rallypoint.explain.lines import load

LONGEST: Final = 2_000
"""Characters of a line that are compared with patterns."""
_FATAL: Final = re.compile(
    r"^(?:\[[\w. -]{1,30}\] ?){0,3}[\w./@ :-]{0,40}?"
    r"\[?(?:FATAL\b|CRITICAL\b|(?<![Nn]on-)[Ff]atal error\b|[Ff]atal:)"
)
# What a shell or the C library says of a signal. SIGKILL has no words that are its alone.
_SIGNALS: Final = (
    (re.compile(r"(?i)seg(?:mentation )?fault|core dumped|段错误|speicherzugriff|violación"), -11),
    (re.compile(r"(?i)abort|free\(\)|double free|malloc|corrupted|munmap|已放弃"), -6),
    (re.compile(r"(?i)bus error|总线错误"), -7),
    (re.compile(r"(?i)illegal|非法指令"), -4),
    (re.compile(r"(?i)floating point"), -8),
)


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
    reason: bool = False
    """Whether it states the operating system's reason."""


class Class:
    """A row of the table."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.name: str = row["name"]
        self.kind = Kind(row["kind"]) if "kind" in row else None
        self.loud: bool = row.get("loud", True)
        self.patterns = [re.compile(each) for each in row["patterns"]]
        self._unless = [re.compile(each) for each in row.get("unless", ())]

    def search(self, text: str) -> re.Match[str] | None:
        found = next((found for each in self.patterns if (found := each.search(text))), None)
        return None if found is None or any(each.search(text) for each in self._unless) else found


_CLASSES: Final = [Class(row) for row in load("classes.toml")["class"]]
_EXCEPTIONS: Final = [Class(row) for row in load("classes.toml")["exceptions"]]
_REASONS: Final = [re.compile(each) for each in load("classes.toml")["reasons"]["patterns"]]
_DENIALS: Final = [re.compile(each) for each in load("classes.toml")["denials"]["patterns"]]
FAILURE_PATTERNS: Final = [
    pattern for each in _CLASSES if each.kind in (*FAILURES, Kind.RESTART) for pattern in each.patterns
]
"""Those of lines that may speak of a failure or of a new start."""


def classify(text: str) -> Found | None:
    """The class of a line without its prefixes; None for an ordinary line."""
    text = without_denials(text[:LONGEST])
    for each in _CLASSES:
        if found := each.search(text):
            code = _code_of(found, each.kind)
            has_reason = any(reason.search(text) for reason in _REASONS)
            return Found(each.name, each.kind, code, _FATAL.match(text) is not None, each.loud, has_reason)
    return None


def without_denials(text: str) -> str:
    """A line without words of failure that deny one or only name one."""
    for pattern in _DENIALS:
        text = pattern.sub("_", text)
    return text


def class_of(raised: Raised) -> str:
    """wrapper or follower, where an exception's own text shows that; otherwise empty."""
    text = f"{raised.name}: {raised.message}"[:LONGEST]
    return next((each.name for each in _EXCEPTIONS if each.search(text)), "")


def _code_of(found: re.Match[str], kind: Kind | None) -> int | None:
    """What the pattern captured, or else the signal that the words mean."""
    for name, value in found.groupdict().items():
        if value is not None and name.startswith("code"):
            return normal_code(int(value))
        if value is not None:
            return -(signal_number(value) if value.startswith("SIG") else int(value))
    words = found[0] if kind is Kind.KILLED else ""
    return next((code for pattern, code in _SIGNALS if pattern.search(words)), None)


def normal_code(code: int) -> int:
    """A code as Python gives it, negative for a signal: shells and Windows write others."""
    if code < -255:
        return code + 2**32
    return 128 - code if 128 < code < 193 else code
