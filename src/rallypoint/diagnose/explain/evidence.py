"""The evidence that lines give: known causes and unknown exceptions, with the first sighting of each. Pure.

Memory does not grow with the logs: for each cause, and for each unknown exception, the first sighting of each
writer is kept, and a count of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import Final

from rallypoint.diagnose.explain import endings, local_ranks, reasons, suspects, tracebacks
from rallypoint.diagnose.explain.advice import Advice, advise
from rallypoint.diagnose.explain.endings import Ending, Table, Tries
from rallypoint.diagnose.explain.knowledge import Cause, fill
from rallypoint.diagnose.explain.layers import LAYERS, Layer
from rallypoint.diagnose.explain.life import Life
from rallypoint.diagnose.explain.sieve import Literals, asks_for_numbers, reduce, required_literals
from rallypoint.diagnose.explain.stamps import Stamp
from rallypoint.diagnose.explain.suspects import Suspects
from rallypoint.diagnose.explain.tracebacks import Raised
from rallypoint.exits import hint_for
from rallypoint.text import excerpt

_MOST_UNKNOWN: Final = 200
_MOST_SIGHTINGS: Final = 200_000
_MOST_FORMS: Final = 1_000
_MOST_TOLD: Final = 1_000
_EXCEPTIONS: Final = (b"error:", b"error(", b"exception:", b"exception(")
"""In exceptions that stand alone."""
_EXCERPTS: Final = 3
_LONGEST_EXCERPT: Final = 500
_NUMBERS: Final = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True)
class Sighting:
    """The first time that a writer wrote of something."""

    log: int
    line: int
    rank: int | None
    host: str | None
    stamp: Stamp | None
    exact: bool
    """Whether the stamp is the line's own; if not, it is that of a line shortly before."""
    tries: int
    """How many tries of the job had failed before, by its log."""
    text: str
    local: int | None = None
    """The rank within its machine, if the log does not tell the one in the whole job."""
    mild: bool = False
    """Whether the writer has written it in warnings only."""
    time: datetime | None = None
    """The moment that the stamp means. `first_cause` sets it, and the try, when all logs have been read."""
    attempt: int | None = None

    @property
    def writer(self) -> tuple[object, ...]:
        return (self.log, self.rank, self.local, self.host, self.tries)

    @property
    def zoned(self) -> bool:
        """Whether the time was written with its zone."""
        return self.stamp is not None and self.stamp.zone is not None


@dataclass
class Incident:
    """A known cause, or an unknown exception: its writers, and the texts of the knowledge base about it."""

    cause: Cause | None
    role: str
    facts: dict[str, str] = field(default_factory=dict)
    raised: Raised | None = None
    became: Raised | None = None
    """The last exception of a chain that began with this one."""
    sightings: dict[tuple[object, ...], Sighting] = field(default_factory=dict)
    """One for each writer. When `first_cause` has dated them, none is known to come before the first."""
    count: int = 0
    last: dict[int, int] = field(default_factory=dict)
    """The line of each log in which it was said last, by whomever."""
    ending: str = ""
    """How a process ended, if it is about no more than that: `SIGBUS`, `exit code 1`."""
    guessed: bool = False
    """Whether it is only a line that looks like a cause."""

    @property
    def seen(self) -> ValuesView[Sighting]:
        return self.sightings.values()

    @property
    def first(self) -> Sighting:
        return next(iter(self.seen))

    def is_same(self, other: Incident) -> bool:
        """Whether it is about the same cause, or the same exception."""
        if self.cause is None and self.raised is None:
            return other.cause is None and other.raised is None and self.text == other.text
        return self.cause is other.cause and self.raised == other.raised

    @property
    def mild(self) -> bool:
        """Whether it was written in warnings only."""
        return all(each.mild for each in self.seen)

    @property
    def ranks(self) -> list[int]:
        return sorted({each.rank for each in self.seen if each.rank is not None})

    @property
    def local_ranks(self) -> list[int]:
        """Ranks within their machines, of which no more is known."""
        return sorted({each.local for each in self.seen if each.rank is None and each.local is not None})

    @property
    def hosts(self) -> list[str]:
        return sorted({each.host for each in self.seen if each.host is not None})

    @property
    def title(self) -> str:
        """In one line: the entry's title, or the exception."""
        return self.cause.title if self.cause is not None else self.headline

    @property
    def text(self) -> str:
        """The line that was found; of the first writers, one whose text was kept."""
        return self.first.text or next((each.text for each in self.seen if each.text), "")

    @property
    def headline(self) -> str:
        """The exception as it was raised, or the line that was found; its code stands in for a message."""
        if self.cause is not None or self.raised is None:
            return self.text
        said = self.raised.message or self.raised.code
        return f"{self.raised.kind}: {said}" if said else self.raised.kind

    @property
    def what(self) -> str:
        if self.cause is not None:
            return fill(self.cause.what, self.facts)
        hint = hint_for(self.ending)
        return f"A process ended with {self.ending}{': ' if hint else ''}{hint}." if self.ending else ""

    @property
    def why(self) -> str:
        return fill(self.cause.why, self.facts) if self.cause is not None else self._advice.why

    @property
    def do(self) -> list[str]:
        if self.cause is None:
            return list(self._advice.do)
        return [fill(text, self.facts) for text in self.cause.do]

    @property
    def _advice(self) -> Advice:
        return advise(self.text, self.raised, self.became)


@dataclass
class Source:
    """A log that has been read, and what it tells besides the incidents."""

    name: str
    modified: float | None = None
    attempt: int | None = None
    """The try that all of it belongs to, if its name tells."""
    table: Table = field(default_factory=Table)
    tries: Tries = field(default_factory=Tries)
    ending: Ending = field(default_factory=Ending)
    lines: int = 0
    """The number of its last line."""
    life: Life = field(default_factory=Life)
    begin: int = 1
    """The line at which this run of several in one log begins."""
    later: Source | None = None
    """The next run in the same log."""
    earlier_tries: int = 0
    """Tries in the runs before this one."""
    first_try: int | None = None
    """The number of its first try, if a log of the job has several runs. `first_cause` sets it."""

    def next_run(self, begin: int, read: int) -> Source:
        """A further run in the same log, from a line on, of which so many lines are counted."""
        self.later = Source(self.name, self.modified, self.attempt, lines=read, begin=begin)
        self.later.earlier_tries = self.tries_so_far
        return self.later

    @cached_property
    def last_run(self) -> Source:
        source = self
        while source.later is not None:
            source = source.later
        return source

    @cached_property
    def went_on(self) -> bool:
        """Whether the job went on after all that was bad in this log, or goes well in a later run.

        Others may still begin when a rank has died that torch has named, and make some steps.
        """
        if self.later is not None and self.last_run.goes_well:
            return self.last_run.life.makes_many_steps or not self.ending.is_fatal
        return self.ending.was_outlived(self.life, self.tries.count)

    @cached_property
    def goes_well(self) -> bool:
        """Whether it ends with a job at work, or with one that is over, and nothing that it died of."""
        works = self.life.makes_many_steps or (self.life.works_after(0) and self.life.is_over_after(0))
        return not self.ended_badly and self.life.shown and works

    @property
    def ended_badly(self) -> bool:
        return self.ending.is_bad(self.lines) and not self.went_on

    def attempt_of(self, tries: int) -> int | None:
        """The try of a line, by the tries that failed before it. Lines at the end belong to the last."""
        if self.attempt is not None or (self.first_try is None and not self.tries.count):
            return self.attempt
        return (self.first_try or 0) + min(tries, max(self.tries.count - 1, 0))

    @property
    def tries_so_far(self) -> int:
        """Tries up to the end of this run; one that did not say that it failed is one, too."""
        return self.earlier_tries + max(self.tries.count, 1)

    def has_attempt(self, number: int) -> bool:
        """Whether a try may be told of here."""
        if self.attempt is not None or self.first_try is None:
            return self.attempt in (None, number)
        return self.first_try <= number < self.first_try + max(self.tries.count, 1)


class Evidence:
    """All incidents of some logs."""

    def __init__(self, causes: Sequence[Cause]) -> None:
        self.sources: list[Source] = []
        self.known: dict[str, Incident] = {}
        self.unknown: dict[str, Incident] = {}
        self.said: dict[Layer, dict[int, Sighting]] = {}
        """For each library and log, the first line in which it says what happened."""
        self.reasons: dict[tuple[int, frozenset[str]], Sighting] = {}
        """For each log and what could not be had there, the first line that says why."""
        self.told: dict[tuple[Cause, str], dict[str, Sighting]] = {}
        """For causes that are differences: what was told, and where first."""
        self.suspects = Suspects()
        self.contexts: set[str] = set()
        self._room = _MOST_SIGHTINGS
        self._causes = tuple(causes)
        self._with: dict[bytes, list[int]] = {}
        """For each text, the numbers of the causes that have it."""
        for number, cause in enumerate(self._causes):
            for text in _literals_of(cause):
                self._with.setdefault(text, []).append(number)
        self._literals = Literals(self._with)
        self._by_form: dict[bytes, list[Cause]] = {}
        self._contexts = {pattern.pattern: pattern for cause in causes for pattern in cause.context}

    def texts(self) -> Iterator[bytes]:
        """Texts in reduced form: a line with one of them matters, or may by its numbers alone."""
        marks = (mark for layer in LAYERS for mark in layer.marks)
        for mark in (*tracebacks.MARKS, *endings.SELECTED, *local_ranks.MARKS, *reasons.MARKS, *marks):
            yield reduce(mark.encode())
        for pattern in self._patterns(by_numbers=True):
            yield from required_literals(pattern)

    def texts_to_try(self) -> Iterator[bytes]:
        """Of lines that have only these, and differ in numbers only, none matters if the first few do not.

        Every other line that matters has one of `texts`.
        """
        for pattern in (*self._patterns(by_numbers=False), *suspects.PATTERNS):
            yield from required_literals(pattern)
        yield from _EXCEPTIONS

    def _patterns(self, *, by_numbers: bool) -> Iterator[re.Pattern[str]]:
        """The patterns for which the numbers of a line may decide, or those for which they do not."""
        for cause in self._causes:
            for pattern in (*cause.patterns, *cause.context):
                if by_numbers == (bool(cause.differs or cause.where) or asks_for_numbers(pattern)):
                    yield pattern

    def cause(self, name: str) -> Cause | None:
        """The entry with an id, if there is one."""
        return next((cause for cause in self._causes if cause.id == name), None)

    def match(self, text: str) -> list[tuple[Cause, dict[str, str]]]:
        """The causes that a line means, each with the facts that the line tells."""
        found = (
            (cause, cause.match(text)) for cause in self._candidates(reduce(text.encode(errors="replace")))
        )
        return [(cause, facts) for cause, facts in found if facts is not None]

    def _candidates(self, reduced: bytes) -> list[Cause]:
        """The causes of which a line has a text. Lines that differ in numbers only have the same ones."""
        known = self._by_form.get(reduced)
        if known is None:
            if len(self._by_form) >= _MOST_FORMS:
                self._by_form.clear()
            numbers = {number for text in self._literals.found_in(reduced) for number in self._with[text]}
            known = self._by_form[reduced] = [self._causes[number] for number in sorted(numbers)]
        return known

    def note_contexts(self, text: str) -> None:
        """Remember that a line was seen which an entry asks for as its context."""
        for name, pattern in list(self._contexts.items()):
            if pattern.search(text):
                self.contexts.add(name)
                del self._contexts[name]

    def add_known(self, cause: Cause, facts: dict[str, str], raised: Raised | None, seen: Sighting) -> None:
        """Add a sighting of a cause. Facts that the first sighting leaves open may come from a later one.

        Those of a further run come before those of the runs before it.
        """
        incident = self.known.setdefault(cause.id, Incident(cause, cause.role))
        if self._is_of_a_further_run(incident, seen):
            incident.facts, incident.raised = {**incident.facts, **facts}, raised
        incident.facts = {**facts, **incident.facts}
        incident.raised = incident.raised or raised
        self._add(incident, seen)

    def add_told(self, cause: Cause, facts: dict[str, str], seen: Sighting) -> None:
        """Add a line that makes a cause only together with one that tells something else."""
        about = (cause, facts.get(cause.alike, ""))
        if about in self.told or len(self.told) < _MOST_TOLD:
            told = self.told.setdefault(about, {})
            if len(told) < _MOST_TOLD:
                told.setdefault(
                    facts[cause.differs], replace(seen, text=excerpt(seen.text, _LONGEST_EXCERPT))
                )

    def is_news(self, what: Cause | Raised, writer: tuple[object, ...]) -> bool:
        """Whether this writer has not written of it before."""
        incident = self.unknown.get(_form_of(what)) if isinstance(what, Raised) else self.known.get(what.id)
        return incident is None or writer not in incident.sightings

    def add_unknown(self, raised: Raised, became: Raised | None, seen: Sighting) -> None:
        """Add an exception that no entry knows, with the last one of its chain."""
        name = _form_of(raised)
        if name in self.unknown or len(self.unknown) < _MOST_UNKNOWN:
            role = "wrapper" if raised.is_wrapper else "symptom" if raised.is_follower else "cause"
            incident = self.unknown.setdefault(name, Incident(None, role, raised=raised, became=became))
            if self._is_of_a_further_run(incident, seen):
                incident.raised, incident.became = raised, became
            self._add(incident, seen)

    def forget_lack(self, writer: tuple[object, ...], since: int) -> None:
        """Forget that this writer could not import a module: something else was to stand in for it."""
        for incidents in (self.known, self.unknown):
            for name, incident in list(incidents.items()):
                seen = incident.sightings.get(writer)
                if seen and seen.line >= since and incident.raised and incident.raised.is_lack:
                    del incident.sightings[writer]
                    if not incident.sightings:
                        del incidents[name]

    def add_ending(self, seen: Sighting) -> None:
        """Add that a launcher or the system says of a bad end, which no entry knows."""
        ending, role = endings.describe_ending(seen.text)
        name = _NUMBERS.sub("", seen.text[:_LONGEST_EXCERPT])
        if name in self.unknown or len(self.unknown) < _MOST_UNKNOWN:
            self._add(self.unknown.setdefault(name, Incident(None, role, ending=ending)), seen)

    def add_said(self, layer: Layer, seen: Sighting) -> None:
        """Add a line in which a library says what happened."""
        text = excerpt(seen.text, _LONGEST_EXCERPT)
        self.said.setdefault(layer, {}).setdefault(seen.log, replace(seen, text=text))

    def add_reason(self, words: frozenset[str], seen: Sighting) -> None:
        """Add a line that says why something could not be had."""
        if len(self.reasons) < _MOST_TOLD:
            text = excerpt(seen.text, _LONGEST_EXCERPT)
            self.reasons.setdefault((seen.log, words), replace(seen, text=text))

    def _is_of_a_further_run(self, incident: Incident, seen: Sighting) -> bool:
        """Whether it is the first sighting in a run that is not the first one of its log."""
        last = next(reversed(incident.sightings.values()), None)
        return self.sources[seen.log].begin > 1 and last is not None and last.log != seen.log

    def _add(self, incident: Incident, seen: Sighting) -> None:
        """Add a sighting. If thousands of ranks write the same, only the first few texts are kept."""
        incident.count += 1
        incident.last[seen.log] = seen.line
        known = incident.sightings.get(seen.writer)
        if known is not None and known.mild and not seen.mild:  # what was warned of came to pass here
            incident.sightings[seen.writer] = replace(seen, text=excerpt(seen.text, _LONGEST_EXCERPT))
        if seen.writer not in incident.sightings and (not incident.sightings or self._room > 0):
            self._room -= 1
            before = list(islice(reversed(incident.sightings.values()), _EXCERPTS))
            enough = len(before) == _EXCERPTS and all(each.log == seen.log for each in before)
            text = "" if enough else excerpt(seen.text, _LONGEST_EXCERPT)
            incident.sightings[seen.writer] = replace(seen, text=text)


def _form_of(raised: Raised) -> str:
    """The same text for exceptions that differ in numbers only."""
    return _NUMBERS.sub("", f"{raised.kind}: {raised.message[:_LONGEST_EXCERPT]}")


def _literals_of(cause: Cause) -> frozenset[bytes]:
    return frozenset().union(*(required_literals(pattern) for pattern in cause.patterns))
