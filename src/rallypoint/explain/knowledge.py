"""The knowledge base: what the programs of a job write, what it means, and what to do. See causes.toml.

An entry is recognized by its patterns. Words such as "message truncated" mean one thing from NCCL and another
from anyone else, so an entry can name its speakers (`by`): the text itself, or the type and the frames of its
exception, has to show one of them. `heard` asks the same of the log as a whole. The first that fits is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, Generic, TypeVar

from rallypoint.explain.events import Entry, Match
from rallypoint.explain.lines import load
from rallypoint.explain.quick import fixed_texts

ROLES: Final = ("cause", "ending", "consequence", "wrapper", "notice")
OTHER: Final = "other"
"""The text of a remedy for a job without a known launcher."""

_PHRASE: Final = re.compile(r"(?<!\?P)<(\w+)>")
_FACT: Final = re.compile(r"\{(?P<name>\w+)(?:\|(?P<default>[^{}|]*))?\}")
_PART: Final = re.compile(r"\[(?P<text>[^\[\]]*\{\w+\}[^\[\]]*)\]")
_LONGEST_FACT: Final = 200
_Meaning = TypeVar("_Meaning")
_NOBODY: Final[frozenset[str]] = frozenset()


class _Index(Generic[_Meaning]):
    """Patterns with their meanings. Only those of which a fixed text is there are tried."""

    def __init__(self, patterns: Mapping[_Meaning, Iterable[re.Pattern[str]]]) -> None:
        self.patterns = [(meaning, each) for meaning, found in patterns.items() for each in found]
        self._by_text: dict[str, list[int]] = {}
        for number, (_, pattern) in enumerate(self.patterns):
            for fixed in fixed_texts(pattern) or (b"",):
                self._by_text.setdefault(fixed.decode(), []).append(number)

    def search(self, text: str) -> Iterator[tuple[_Meaning, re.Match[str]]]:
        """All that match, in their order."""
        lower = text.lower()
        tried = {number for fixed, numbers in self._by_text.items() if fixed in lower for number in numbers}
        for number in sorted(tried):
            meaning, pattern = self.patterns[number]
            if (found := pattern.search(text)) is not None:
                yield meaning, found


class Knowledge:
    """The entries of a document such as causes.toml."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        phrases = document.get("phrase", {})
        self.entries = tuple(
            _entry(role, values, phrases) for role in ROLES for values in document.get(role, ())
        )
        speakers = document["speaker"]
        for entry in self.entries:
            if unknown := (entry.by | entry.heard) - speakers.keys():
                raise ValueError(f"{entry.id} names speakers without a table: {', '.join(sorted(unknown))}")
        self.launchers = frozenset(name for name in speakers if speakers[name].get("launcher"))
        self._remedies = {f"@{name}": texts for name, texts in document.get("remedy", {}).items()}
        self._entries = _Index({entry: entry.patterns for entry in self.entries})
        self._speakers = _Index({name: _compiled(speakers[name]["patterns"], phrases) for name in speakers})
        self.patterns = [pattern for _, pattern in self._entries.patterns]
        self.speaker_patterns = [pattern for _, pattern in self._speakers.patterns]

    def speakers(self, text: str) -> frozenset[str]:
        """The programs that show in a text: a line, an exception's type, or the files of its frames."""
        return frozenset(name for name, _ in self._speakers.search(text))

    def match(
        self, text: str, speakers: frozenset[str] = _NOBODY, heard: frozenset[str] | None = _NOBODY
    ) -> Match | None:
        """The first entry that fits, given the speakers of the text's exception and those of the whole log.

        With None for the latter, an entry fits whatever the rest of the log may show.
        """
        for entry, found in self._entries.search(text):
            fits = not entry.heard or heard is None or entry.heard & heard
            if fits and (not entry.by or entry.by & (speakers | self.speakers(text))):
                facts = {name: each[:_LONGEST_FACT] for name, each in found.groupdict().items() if each}
                return Match(entry, facts)
        return None

    def steps(self, entry: Entry, facts: Mapping[str, str], launcher: str = "") -> list[str]:
        """What to do, in the terms of the launcher that wrote the log."""
        remedies = (self._remedies.get(step, {OTHER: step}) for step in entry.do)
        return [fill(texts.get(launcher, texts[OTHER]), facts) for texts in remedies]


@cache
def knowledge() -> Knowledge:
    """The knowledge base that comes with the package."""
    return Knowledge(load("causes.toml"))


def fill(text: str, facts: Mapping[str, str]) -> str:
    """A text with its facts, as `{port}`, or with a default: `{port|PORT}`.

    A part in square brackets is left out if one of its facts is unknown.
    """

    def part(found: re.Match[str]) -> str:
        names = [fact["name"] for fact in _FACT.finditer(found["text"]) if fact["default"] is None]
        return found["text"] if all(name in facts for name in names) else ""

    return _FACT.sub(lambda found: facts.get(found["name"], found["default"] or "?"), _PART.sub(part, text))


def _entry(role: str, values: Mapping[str, Any], phrases: Mapping[str, str]) -> Entry:
    told: dict[str, Any] = {"unlike" if name == "not" else name: value for name, value in values.items()}
    told |= {name: tuple(told.get(name, ())) for name in ("do", "sources", "unlike")}
    told |= {name: frozenset(told.get(name, ())) for name in ("by", "heard")}
    return Entry(**{**told, "role": role, "patterns": _compiled(values["patterns"], phrases)})


def _compiled(patterns: Iterable[str], phrases: Mapping[str, str]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(_PHRASE.sub(lambda name: phrases[name[1]], each)) for each in patterns)
