"""What of the known some logs hold: lines are matched here, and what is found is summed up. Pure.

Memory does not grow with the logs: of each cause, and of each exception that nobody knows, the first sighting
of each rank is kept, and a count of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rallypoint.diagnose.explain import ending, suspects, torchrun, tracebacks
from rallypoint.diagnose.explain.ending import Ending
from rallypoint.diagnose.explain.knowledge import Cause
from rallypoint.diagnose.explain.literals import reduce, required_literals
from rallypoint.diagnose.explain.stamps import Stamp
from rallypoint.diagnose.explain.suspects import Suspects
from rallypoint.diagnose.explain.torchrun import Table, Tries
from rallypoint.diagnose.explain.tracebacks import Raised
from rallypoint.text import excerpt

_MOST_FORMS: Final = 10_000
_MOST_UNKNOWN: Final = 200
_MOST_SIGHTINGS: Final = 200_000
_EXCERPTS: Final = 3
_LONGEST_EXCERPT: Final = 500
_NUMBERS: Final = re.compile(r"0x[0-9a-f]+|\d+")

# Exceptions that say that another process is gone, or that somebody wanted this one to end.
_FOLLOWERS: Final = (
    *("BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError"),
    *("EOFError", "KeyboardInterrupt", "SystemExit", "CancelledError", "SignalException"),
)


@dataclass(frozen=True)
class Sighting:
    """The first time that a writer said it in a log."""

    log: int
    line: int
    rank: int | None
    host: str | None
    stamp: Stamp | None
    exact: bool
    """The stamp is the line's own; if not, that of a line before it in the same log."""
    tries: int
    """How many tries of the job had failed before, as its log tells."""
    text: str
    mild: bool = False
    """Whether the writer has said it in warnings only."""

    @property
    def writer(self) -> tuple[object, ...]:
        return (self.log, self.rank, self.host, self.tries)


@dataclass
class Finding:
    """A known cause, or an exception that is not known, with all who said it."""

    cause: Cause | None
    facts: dict[str, str]
    raised: Raised | None = None
    became: Raised | None = None
    """The last exception of a chain that began with this one."""
    sightings: dict[tuple[object, ...], Sighting] = field(default_factory=dict)
    count: int = 0

    @property
    def role(self) -> str:
        """That of the cause. An unknown exception is a cause, or a symptom if its kind says so."""
        if self.cause is not None:
            return self.cause.role
        return "symptom" if self.raised is not None and self.raised.name in _FOLLOWERS else "cause"


@dataclass
class Source:
    """A log that has been read, and what it told beside the findings."""

    name: str
    modified: float | None = None
    attempt: int | None = None
    """The try that all of it belongs to, where its name says so."""
    table: Table = field(default_factory=Table)
    tries: Tries = field(default_factory=Tries)
    ending: Ending = field(default_factory=Ending)
    lines: int = 0

    def attempt_of(self, tries: int) -> int | None:
        """The try of a line before which so many had failed; what follows the last belongs to it."""
        if self.attempt is not None or not self.tries.count:
            return self.attempt
        return min(tries, self.tries.count - 1)


class Findings:
    """All that was found in some logs."""

    def __init__(self, causes: Sequence[Cause]) -> None:
        self.sources: list[Source] = []
        self.known: dict[str, Finding] = {}
        self.unknown: dict[str, Finding] = {}
        self.suspects = Suspects()
        self.contexts: set[str] = set()
        self._room = _MOST_SIGHTINGS
        self._literals = {cause: _literals_of(cause) for cause in causes}
        self._candidates: dict[bytes, tuple[Cause, ...]] = {}
        """By the reduced form of a line, which causes it may speak of: what is said once is said often."""
        self._contexts = {pattern.pattern: pattern for cause in causes for pattern in cause.context}

    def texts(self) -> Iterator[bytes]:
        """One of these, in reduced form, is in every line that means anything here."""
        begins = (tracebacks.BEGIN, tracebacks.UNREADABLE, ending.BACKTRACE)
        for mark in (*begins, *torchrun.MARKS, *ending.MARKS, *suspects.MARKS):
            yield reduce(mark.encode())
        for literals in self._literals.values():
            yield from literals
        for pattern in self._contexts.values():
            yield from required_literals(pattern)

    def match(self, text: str) -> list[tuple[Cause, dict[str, str]]]:
        """The causes that a line speaks of, each once, and the facts that it tells of them."""
        facts = ((cause, cause.match(text)) for cause in self._candidates_for(text))
        return [(cause, told) for cause, told in facts if told is not None]

    def _candidates_for(self, text: str) -> tuple[Cause, ...]:
        reduced = reduce(text.encode(errors="replace"))
        found = self._candidates.get(reduced)
        if found is None:
            if len(self._candidates) >= _MOST_FORMS:
                self._candidates.clear()
            found = tuple(
                cause
                for cause, literals in self._literals.items()
                if any(literal in reduced for literal in literals)
            )
            self._candidates[reduced] = found
        return found

    def note_contexts(self, text: str) -> None:
        """Remember what entries want to see somewhere in the logs."""
        for name, pattern in list(self._contexts.items()):
            if pattern.search(text):
                self.contexts.add(name)
                del self._contexts[name]

    def add_known(self, cause: Cause, facts: dict[str, str], raised: Raised | None, seen: Sighting) -> None:
        """A line that speaks of a cause; what the first of them leaves open, a later one may tell."""
        finding = self.known.setdefault(cause.id, Finding(cause, {}))
        finding.facts = {**facts, **finding.facts}
        finding.raised = finding.raised or raised
        self._add(finding, seen)

    def is_news(self, what: Cause | Raised, writer: tuple[object, ...]) -> bool:
        """Whether this writer has not said it before."""
        finding = self.unknown.get(_form_of(what)) if isinstance(what, Raised) else self.known.get(what.id)
        return finding is None or writer not in finding.sightings

    def add_unknown(self, raised: Raised, became: Raised | None, seen: Sighting) -> None:
        """An exception that no entry knows, and the last one of its chain."""
        name = _form_of(raised)
        if name in self.unknown or len(self.unknown) < _MOST_UNKNOWN:
            finding = self.unknown.setdefault(name, Finding(None, {}, raised, became))
            self._add(finding, seen)

    def _add(self, finding: Finding, seen: Sighting) -> None:
        """Of thousands of ranks that say the same, the words of the first few are kept."""
        finding.count += 1
        known = finding.sightings.get(seen.writer)
        if known is not None and known.mild and not seen.mild:
            finding.sightings[seen.writer] = replace(known, mild=False)
        if seen.writer not in finding.sightings and (not finding.sightings or self._room > 0):
            self._room -= 1
            text = excerpt(seen.text, _LONGEST_EXCERPT) if len(finding.sightings) < _EXCERPTS else ""
            finding.sightings[seen.writer] = replace(seen, text=text)


def _form_of(raised: Raised) -> str:
    """What exceptions have in common that differ in numbers only."""
    return _NUMBERS.sub("", f"{raised.kind}: {raised.message[:_LONGEST_EXCERPT]}")


def _literals_of(cause: Cause) -> frozenset[bytes]:
    return frozenset().union(*(required_literals(pattern) for pattern in cause.patterns))
