"""The known causes of failed jobs, kinds of errors, and where jobs stop: data from three files.

An entry says by which lines it is known, what happened, why, and what to do. The file is data, so an entry
can be added without code. tests/test_explain_knowledge.py checks all of it: the names of keys, the regular
expressions, the facts that texts ask for, the entries that others refer to. Every pattern must contain some
fixed text, since that is how a log of gigabytes is searched (see `sieve`). And no line may make a pattern
look at the same characters over and over: so a gap is `.{0,500}` and not `.*`.

A kind (`kinds.toml`) says what to do about an error that no entry of `causes.toml` knows, and one of
`stops.toml` about a log that just ends. See `advice`.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATH: Final = Path(__file__).with_name("causes.toml")
_KINDS: Final = Path(__file__).with_name("kinds.toml")
_STOPS: Final = Path(__file__).with_name("stops.toml")

SURENESS: Final = ("possible", "likely", "certain")

_BOUND: Final = re.compile(r"(?P<op><=|>=|==|!=|<|>)(?P<version>\d+(?:\.\d+)*)")
FACT: Final = re.compile(r"\{(?P<name>[^{}|]*)(?:\|(?P<default>[^{}|]*))?\}")
SEGMENT: Final = re.compile(r"\[(?P<text>[^\[\]]*\{[^\[\]]*)\]")
OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_LONGEST_FACT: Final = 200

Facts = Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Cause:
    """One entry of the knowledge base. There is one object for each, so it is compared by identity."""

    id: str
    title: str
    part: str
    role: str
    sure: str
    example: str
    """A line by which it is known, without its prefixes; people search for it."""
    patterns: tuple[re.Pattern[str], ...]
    what: str
    why: str
    do: tuple[str, ...]
    sources: tuple[str, ...]
    where: tuple[str, ...] = ()
    """Comparisons that must hold of the facts: `FACT OP FACT` or `FACT OP NUMBER`."""
    context: tuple[re.Pattern[str], ...] = ()
    over: tuple[str, ...] = ()
    versions: str = ""
    platforms: tuple[str, ...] = ()
    defect: str = ""
    differs: str = ""
    """A fact: it is this cause only if the logs of a job tell different ones."""
    alike: str = ""
    """A fact that is the same in the lines that are compared for that."""
    passing: bool = False
    """Whether a program may go on after it: then it is a cause only if nothing more is said."""

    def match(self, text: str) -> dict[str, str] | None:
        """The facts that a line tells, if it means this cause; None if not."""
        for pattern in self.patterns:
            found = pattern.search(text)
            if found is not None:
                facts = {name: value[:_LONGEST_FACT] for name, value in found.groupdict().items() if value}
                if all(holds(each, facts) for each in self.where):
                    return facts
        return None

    def concerns(self, version: str, platform: str) -> bool:
        """Whether a torch of this version on this platform can have it, by its bounds."""
        return (not self.platforms or platform in self.platforms) and in_versions(version, self.versions)

    def as_json(self) -> dict[str, object]:
        """The entry as it stands in the file."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["patterns"] = [pattern.pattern for pattern in self.patterns]
        values["context"] = [pattern.pattern for pattern in self.context]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@cache
def causes() -> tuple[Cause, ...]:
    """All known causes, in the order of the file."""
    return tuple(map(_cause_of, tomllib.loads(PATH.read_text(encoding="utf-8"))["cause"]))


@dataclass(frozen=True, eq=False)
class Kind:
    """What errors of one kind mostly mean, and what to do about them."""

    id: str
    example: str
    patterns: tuple[re.Pattern[str], ...]
    why: str
    do: tuple[str, ...]
    general: bool = False
    """Whether it says so little that what stands beside the error may say more."""


@cache
def kinds() -> tuple[Kind, ...]:
    """All kinds of errors, in the order of the file: the first that fits is taken."""
    return _read_kinds(_KINDS, "kind")


@cache
def stops() -> tuple[Kind, ...]:
    """Where jobs stop without a word, in the order of the file; the last one fits everything."""
    return _read_kinds(_STOPS, "stop")


def _read_kinds(path: Path, table: str) -> tuple[Kind, ...]:
    entries = tomllib.loads(path.read_text(encoding="utf-8"))[table]
    return tuple(
        Kind(**{**entry, "patterns": tuple(map(re.compile, entry["patterns"])), "do": tuple(entry["do"])})
        for entry in entries
    )


def _cause_of(entry: Mapping[str, Any]) -> Cause:
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    for key in ("patterns", "context"):
        values[key] = tuple(map(re.compile, entry.get(key, ())))
    return Cause(**values)


def holds(comparison: str, facts: Facts) -> bool:
    """Whether a comparison is true of these facts; never if a fact is unknown, or no number."""
    fact, op, other = comparison.split()
    try:
        left, right = int(facts[fact]), int(facts.get(other, other))
    except (KeyError, ValueError):
        return False
    return OPERATORS[op](left, right)


def fill(text: str, facts: Facts) -> str:
    """A text with its facts, as `{port}`, or with the default of one that is unknown: `{port|PORT}`.

    A part in square brackets is left out if one of its facts is unknown and has no default.
    """

    def fill_segment(segment: re.Match[str]) -> str:
        return segment["text"] if all(name in facts for name in needed_facts(segment["text"])) else ""

    return FACT.sub(
        lambda found: facts.get(found["name"], found["default"] or "?"), SEGMENT.sub(fill_segment, text)
    )


def needed_facts(text: str) -> set[str]:
    """The facts in a text that have no default."""
    return {found["name"] for found in FACT.finditer(text) if found["default"] is None}


def in_versions(version: str, bounds: str) -> bool:
    """Whether a version is within all bounds, such as `>=1.13,<2.2`; local parts (`+cpu`) are ignored."""
    numbers = _numbers(version)
    return all(
        OPERATORS[bound["op"]](numbers, _numbers(bound["version"])) for bound in _BOUND.finditer(bounds)
    )


def _numbers(version: str) -> tuple[int, ...]:
    plain = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in plain[0].split(".")] if plain else []
    while numbers and numbers[-1] == 0:  # 2.2 is 2.2.0
        numbers.pop()
    return tuple(numbers)
