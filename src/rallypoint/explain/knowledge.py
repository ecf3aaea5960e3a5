"""The knowledge base: what the programs of a job write, what it means, and what to do about it. See causes.toml.

An entry is recognized by its patterns. Words such as "message truncated" mean one thing from NCCL and another
from anyone else, so an entry can name its speakers (`by`): the text itself, or the type and the frames of its
exception, has to show one of them. `heard` asks the same of the log as a whole. The first
entry of the file that fits is taken, so the more specific one comes first. Everything else is data.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from rallypoint.explain.events import Match
from rallypoint.explain.quick import fixed_texts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATH: Final = Path(__file__).with_name("causes.toml")
ROLES: Final = ("cause", "consequence", "wrapper", "notice")
OTHER: Final = "other"
"""The text of a remedy for a job without a known launcher."""

_PHRASE: Final = re.compile(r"(?<!\?P)<(\w+)>")
_FACT: Final = re.compile(r"\{(?P<name>\w+)(?:\|(?P<default>[^{}|]*))?\}")
_PART: Final = re.compile(r"\[(?P<text>[^\[\]]*\{\w+\}[^\[\]]*)\]")
_LONGEST_FACT: Final = 200
_NOBODY: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, eq=False)
class Entry:
    """Something that logs show, with its advice. Entries are compared by identity."""

    id: str
    title: str
    role: str
    """cause, consequence (of another failure), wrapper (the error itself is in other lines) or notice (harmless)."""
    patterns: tuple[re.Pattern[str], ...]
    example: str
    why: str
    do: tuple[str, ...]
    """A step that begins with `@` names a remedy, whose text depends on the launcher."""
    sources: tuple[str, ...]
    by: frozenset[str] = _NOBODY
    heard: frozenset[str] = _NOBODY
    unlike: tuple[str, ...] = ()
    """Lines that resemble it and mean something else."""


class _Rule:
    """A pattern that is tried only if one of its fixed texts is there."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern
        self._texts = [text.decode().lower() for text in fixed_texts(pattern) or (b"",)]

    def search(self, text: str, lower: str) -> re.Match[str] | None:
        return self.pattern.search(text) if any(each in lower for each in self._texts) else None


class Knowledge:
    """The entries of a document such as causes.toml."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        phrases = document.get("phrase", {})
        self.entries = tuple(_entry(role, each, phrases) for role, each in _in_order(document))
        self.launchers = frozenset(name for name, told in document["speaker"].items() if told["launcher"])
        self._remedies: Mapping[str, Mapping[str, str]] = document.get("remedy", {})
        self._rules = [(entry, _Rule(pattern)) for entry in self.entries for pattern in entry.patterns]
        self._voices = [
            (name, _Rule(pattern))
            for name, told in document["speaker"].items()
            for pattern in _compiled(told["patterns"], phrases)
        ]

    @property
    def patterns(self) -> list[re.Pattern[str]]:
        """All that may have to be found in a log: of the entries and of the speakers."""
        return [rule.pattern for _, rule in (*self._rules, *self._voices)]

    def speakers(self, text: str) -> frozenset[str]:
        """The programs and libraries that a text shows: a line, an exception's type, or the files of its frames."""
        lower = text.lower()
        return frozenset(name for name, rule in self._voices if rule.search(text, lower) is not None)

    def match(
        self, text: str, speakers: frozenset[str] = _NOBODY, heard: frozenset[str] | None = _NOBODY
    ) -> Match | None:
        """The first entry that fits, given the speakers of the text's exception and those of the whole log.

        With None for the latter, an entry fits whatever the rest of the log may show.
        """
        lower = text.lower()
        here: frozenset[str] | None = None
        for entry, rule in self._rules:
            found = rule.search(text, lower)
            if found is None or not (heard is None or not entry.heard or entry.heard & heard):
                continue
            here = speakers | self.speakers(text) if here is None else here
            if not entry.by or entry.by & here:
                return Match(entry, _facts(found))
        return None

    def steps(self, entry: Entry, facts: Mapping[str, str], launcher: str = "") -> list[str]:
        """What to do, in the terms of the launcher that wrote the log."""
        return [fill(self._remedy(step[1:], launcher) if step[0] == "@" else step, facts) for step in entry.do]

    def _remedy(self, name: str, launcher: str) -> str:
        texts = self._remedies[name]
        return texts.get(launcher, texts[OTHER])


@cache
def knowledge() -> Knowledge:
    """The knowledge base that comes with the package."""
    return Knowledge(tomllib.loads(PATH.read_text(encoding="utf-8")))


def fill(text: str, facts: Mapping[str, str]) -> str:
    """A text with its facts, as `{port}`, or with a default: `{port|PORT}`.

    A part in square brackets is left out if one of its facts is unknown.
    """

    def part(found: re.Match[str]) -> str:
        names = [fact["name"] for fact in _FACT.finditer(found["text"]) if fact["default"] is None]
        return found["text"] if all(name in facts for name in names) else ""

    return _FACT.sub(lambda found: facts.get(found["name"], found["default"] or "?"), _PART.sub(part, text))


def _in_order(document: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    return ((role, each) for role in ROLES for each in document.get(role, ()))


def _entry(role: str, values: Mapping[str, Any], phrases: Mapping[str, str]) -> Entry:
    names = {"not": "unlike"}
    told = {names.get(key, key): tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    told |= {key: frozenset(told.get(key, ())) for key in ("by", "heard")}
    return Entry(role=role, **{**told, "patterns": _compiled(values["patterns"], phrases)})


def _compiled(patterns: Iterable[str], phrases: Mapping[str, str]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(_PHRASE.sub(lambda name: phrases[name[1]], each)) for each in patterns)


def _facts(found: re.Match[str]) -> dict[str, str]:
    return {name: value[:_LONGEST_FACT] for name, value in found.groupdict().items() if value}
