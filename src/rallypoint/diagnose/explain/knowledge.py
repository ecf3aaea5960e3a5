"""The known causes of failed jobs: data from `causes.toml`, checked when it is loaded.

An entry says by which lines it is known, what happened, why, and what to do. The file is data, so an entry
can be added without code. Everything in it is checked here: the names of keys, the regular expressions, the
facts that texts ask for, the entries that others refer to. Every pattern must contain some fixed text, since
that is how a log of gigabytes is searched (see `sieve`).
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from rallypoint.diagnose.explain.sieve import required_literals

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATH: Final = Path(__file__).with_name("causes.toml")

PARTS: Final = (
    *("store", "rendezvous", "launcher", "names", "network", "gloo", "nccl"),
    *("memory", "process", "build", "file", "script"),
)
ROLES: Final = ("cause", "symptom", "wrapper", "notice")
SURENESS: Final = ("possible", "likely", "certain")
PLATFORMS: Final = ("linux", "windows", "macos")

_ID: Final = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_SOURCE: Final = re.compile(r"[\w.-]+/[\w.-]+#\d+|reproduced with torch \d+\.\d+\.\d+")
_COMPARISON: Final = re.compile(r"(?P<fact>[a-z_]\w*) (?P<op><=|>=|==|!=|<|>) (?P<other>[a-z_]\w*|-?\d+)")
_BOUND: Final = re.compile(r"(?P<op><=|>=|==|!=|<|>)(?P<version>\d+(?:\.\d+)*)")
_FACT: Final = re.compile(r"\{(?P<name>[^{}|]*)(?:\|(?P<default>[^{}|]*))?\}")
_SEGMENT: Final = re.compile(r"\[(?P<text>[^\[\]]*\{[^\[\]]*)\]")
_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_LONGEST_FACT: Final = 200

Facts = Mapping[str, str]


class KnowledgeError(ValueError):
    """An entry is wrong. The message names the entry and the key."""


@dataclass(frozen=True)
class Comparison:
    """One line of `where`: a fact against another, or against a number."""

    fact: str
    op: str
    other: str

    def holds(self, facts: Facts) -> bool:
        """Whether it is true of these facts; never if a fact is unknown, or no number."""
        try:
            left = int(facts[self.fact])
            right = int(facts.get(self.other, self.other))
        except (KeyError, ValueError):
            return False
        return _OPERATORS[self.op](left, right)

    def __str__(self) -> str:
        return f"{self.fact} {self.op} {self.other}"


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
    where: tuple[Comparison, ...] = ()
    context: tuple[re.Pattern[str], ...] = ()
    over: tuple[str, ...] = ()
    versions: str = ""
    platforms: tuple[str, ...] = ()
    defect: str = ""

    def match(self, text: str) -> dict[str, str] | None:
        """The facts that a line tells, if it means this cause; None if not."""
        for pattern in self.patterns:
            found = pattern.search(text)
            if found is not None:
                facts = {name: value[:_LONGEST_FACT] for name, value in found.groupdict().items() if value}
                if all(each.holds(facts) for each in self.where):
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
        values["where"] = list(map(str, self.where))
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


_LISTS: Final = {each.name for each in fields(Cause) if str(each.type).startswith("tuple")}
_NEEDED: Final = {each.name for each in fields(Cause) if each.default is MISSING}
_OPTIONAL: Final = {each.name for each in fields(Cause)} - _NEEDED


@cache
def causes() -> tuple[Cause, ...]:
    """All known causes, in the order of the file."""
    return load(PATH)


def fill(text: str, facts: Facts) -> str:
    """A text with its facts, as `{port}`, or with the default of one that is unknown: `{port|PORT}`.

    A part in square brackets is left out if one of its facts is unknown and has no default.
    """

    def fill_segment(segment: re.Match[str]) -> str:
        return segment["text"] if all(name in facts for name in _needed(segment["text"])) else ""

    return _FACT.sub(
        lambda found: facts.get(found["name"], found["default"] or "?"), _SEGMENT.sub(fill_segment, text)
    )


def _needed(text: str) -> set[str]:
    """The facts in a text that have no default."""
    return {found["name"] for found in _FACT.finditer(text) if found["default"] is None}


def in_versions(version: str, bounds: str) -> bool:
    """Whether a version is within all bounds, such as `>=1.13,<2.2`; local parts (`+cpu`) are ignored."""
    numbers = _numbers(version)
    return all(
        _OPERATORS[bound["op"]](numbers, _numbers(bound["version"])) for bound in _BOUND.finditer(bounds)
    )


def _numbers(version: str) -> tuple[int, ...]:
    plain = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in plain[0].split(".")] if plain else []
    while numbers and numbers[-1] == 0:  # 2.2 is 2.2.0
        numbers.pop()
    return tuple(numbers)


# Loading ---------------------------------------------------------------------------------------------------


def load(path: Path) -> tuple[Cause, ...]:
    """The entries of a file; KnowledgeError says what is wrong with it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise KnowledgeError(f"{path.name}: {error}") from error
    found = tuple(_cause_of(entry) for entry in content.get("cause", []))
    _check_references(found)
    return found


def _cause_of(entry: dict[str, Any]) -> Cause:
    name = str(entry.get("id", "an entry without id"))
    _check_keys(name, entry)
    _check_values(name, entry)
    patterns = _compile(name, "patterns", entry["patterns"])
    values: dict[str, Any] = {
        **{key: tuple(value) if key in _LISTS else value for key, value in entry.items()},
        "patterns": patterns,
        "context": _compile(name, "context", entry.get("context", [])),
        "where": tuple(_comparison_of(name, text) for text in entry.get("where", [])),
    }
    cause = Cause(**values)
    _check_facts(cause)
    if cause.match(cause.example) is None:
        raise KnowledgeError(f"{cause.id}: its example is not found by its own patterns")
    return cause


def _check_keys(name: str, entry: Mapping[str, Any]) -> None:
    missing, foreign = _NEEDED - entry.keys(), entry.keys() - _NEEDED - _OPTIONAL
    if missing or foreign:
        told = [f"no {key}" for key in sorted(missing)] + [f"unknown key {key}" for key in sorted(foreign)]
        raise KnowledgeError(f"{name}: {', '.join(told)}")
    for key, value in entry.items():
        texts = value if key in _LISTS else [value]
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            wanted = "a list of texts" if key in _LISTS else "a text"
            raise KnowledgeError(f"{name}: {key} is not {wanted}")


def _check_values(name: str, entry: Mapping[str, Any]) -> None:
    for key, legal in (("part", PARTS), ("role", ROLES), ("sure", SURENESS)):
        if entry[key] not in legal:
            raise KnowledgeError(f"{name}: {key} is {entry[key]!r}, not one of {', '.join(legal)}")
    for key in ("patterns", "do", "sources"):
        if not entry[key]:
            raise KnowledgeError(f"{name}: {key} is empty")
    bounds = entry["versions"].split(",") if "versions" in entry else []
    faults = [
        *(["id is not in kebab-case"] if not _ID.fullmatch(entry["id"]) else []),
        *(["title ends with a full stop"] if entry["title"].endswith(".") else []),
        *(f"platform {each!r} is unknown" for each in entry.get("platforms", []) if each not in PLATFORMS),
        *(f"{each!r} is no source" for each in entry["sources"] if not _SOURCE.fullmatch(each)),
        *(f"{each!r} is no bound" for each in bounds if not _BOUND.fullmatch(each.strip())),
    ]
    if faults:
        raise KnowledgeError(f"{name}: {faults[0]}")


def _compile(name: str, key: str, texts: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    patterns = []
    for text in texts:
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise KnowledgeError(f"{name}: {key}: {text!r} is no regular expression: {error}") from error
        if not required_literals(pattern):
            raise KnowledgeError(f"{name}: {key}: {text!r} has no fixed text of four letters or more")
        patterns.append(pattern)
    return tuple(patterns)


def _comparison_of(name: str, text: str) -> Comparison:
    found = _COMPARISON.fullmatch(text)
    if found is None:
        raise KnowledgeError(f"{name}: where: {text!r} is not FACT OP FACT or FACT OP NUMBER")
    return Comparison(found["fact"], found["op"], found["other"])


def _check_facts(cause: Cause) -> None:
    """Every fact in a text must come from a pattern; if not all patterns give it, it needs brackets."""
    told = [set(pattern.groupindex) for pattern in cause.patterns]
    asked = {each.fact for each in cause.where} | {
        each.other for each in cause.where if not each.other.lstrip("-").isdigit()
    }
    texts = (cause.what, cause.why, *cause.do)
    asked |= {found["name"] for text in texts for found in _FACT.finditer(text)}
    if unknown := asked - set().union(*told):
        raise KnowledgeError(f"{cause.id}: no pattern tells {', '.join(sorted(unknown))}")
    always = set.intersection(*told)
    for text in texts:
        bare = _needed(_SEGMENT.sub("", text))
        if bare - always:
            raise KnowledgeError(f"{cause.id}: {sorted(bare - always)[0]} may be unknown: put it in brackets")


def _check_references(found: Sequence[Cause]) -> None:
    ids = [cause.id for cause in found]
    for cause in found:
        if ids.count(cause.id) > 1:
            raise KnowledgeError(f"{cause.id}: there are two of that id")
        for other in cause.over:
            if other not in ids or other == cause.id:
                raise KnowledgeError(f"{cause.id}: over: there is no other entry {other!r}")
