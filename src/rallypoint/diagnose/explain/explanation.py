"""The explanation of some logs: incidents, the verdict about the first of them, and all the rest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from rallypoint.diagnose.explain.evidence import Sighting
from rallypoint.diagnose.explain.knowledge import SURENESS, Cause, fill
from rallypoint.diagnose.explain.ordering import first_first
from rallypoint.diagnose.explain.suspects import Suspect
from rallypoint.diagnose.explain.tracebacks import Raised

TIERS: Final = {"cause": 0, "symptom": 1, "wrapper": 2, "notice": 3}
"""By role, how far an incident is from being a first cause."""


@dataclass(frozen=True)
class Incident:
    """A known cause, or an unknown exception: who wrote of it, and what the knowledge base says of it."""

    cause: Cause | None
    role: str
    facts: dict[str, str]
    raised: Raised | None
    became: Raised | None
    seen: tuple[Sighting, ...]
    """One for each writer; none is known to come before the first."""
    count: int

    @property
    def first(self) -> Sighting:
        return self.seen[0]

    def only(self, seen: Sequence[Sighting]) -> Incident:
        """The same incident with some of its sightings."""
        return replace(self, seen=first_first(seen))

    def is_same(self, other: Incident) -> bool:
        """Whether it is about the same cause, or the same exception."""
        return self.cause is other.cause and self.raised == other.raised

    @property
    def mild(self) -> bool:
        """Whether it was written in warnings only."""
        return all(each.mild for each in self.seen)

    @property
    def ranks(self) -> list[int]:
        return sorted({each.rank for each in self.seen if each.rank is not None})

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
        """The exception as it was raised, or the line that was found."""
        if self.cause is not None or self.raised is None:
            return self.text
        return f"{self.raised.kind}: {self.raised.message}" if self.raised.message else self.raised.kind

    @property
    def what(self) -> str:
        return fill(self.cause.what, self.facts) if self.cause is not None else ""

    @property
    def why(self) -> str:
        return fill(self.cause.why, self.facts) if self.cause is not None else ""

    @property
    def do(self) -> list[str]:
        return [fill(text, self.facts) for text in self.cause.do] if self.cause is not None else []


@dataclass(frozen=True)
class Verdict:
    """The first cause, and how sure that is."""

    incident: Incident
    order: str
    """How it is known to be the first: alone, time, clocks (of several machines), lines, torchrun, none."""
    attempt: int
    shown: bool
    """Whether the logs show that a process ended badly."""

    @property
    def sure(self) -> str:
        """certain, likely or possible."""
        if not self.shown:
            return SURENESS[0]
        level = SURENESS.index(self.incident.cause.sure if self.incident.cause is not None else "likely")
        less = 0 if self.order == "torchrun" else TIERS[self.incident.role] + _LESS_SURE.get(self.order, 0)
        return SURENESS[max(level - less, 0)]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is as sure as that."""
        cause = self.incident.cause
        meaning = MEANINGS[cause.sure] if cause is not None else "this error is not in the knowledge base"
        order = _ORDERS[self.order]
        place = order if self.order == "torchrun" else _ROLES.get(self.incident.role, order)
        return (meaning, place) if self.shown else (meaning, place, _NOT_SHOWN)


_LESS_SURE: Final = {"clocks": 1, "none": 1}
MEANINGS: Final = {
    "certain": "these words mean this and nothing else",
    "likely": "these words mostly mean this",
    "possible": "these words can mean other things as well",
}
_ROLES: Final = {
    "symptom": "it is the consequence of something that the log does not tell",
    "wrapper": "it only says that something failed, and not what",
}
_NOT_SHOWN: Final = "nothing shows that a process ended badly, so it may have been of no consequence"
_ORDERS: Final = {
    "alone": "nothing else in the log can be the cause",
    "time": "it came first by the times in the log",
    "clocks": "it came first, but by the clocks of different machines",
    "lines": "it stands first in the log",
    "torchrun": "torchrun saw this rank fail first",
    "none": "other errors were found, and nothing tells which came first",
}


@dataclass(frozen=True)
class Explanation:
    """The first cause of a failed job, and everything else that its logs tell."""

    verdict: Verdict | None
    consequences: tuple[Incident, ...]
    others: tuple[Incident, ...]
    """Incidents that are not known to have followed from the first cause."""
    notices: tuple[Incident, ...]
    other_tries: tuple[Verdict, ...]
    """The first causes of other tries, where they differ."""
    attempts: int
    suspects: tuple[Suspect, ...]
    """Lines that look like a cause, if no cause was found."""
    logs: tuple[str, ...]
    lines: int

    @property
    def found(self) -> bool:
        """Whether anything seems to be wrong; what is mostly harmless does not count."""
        return self.verdict is not None or bool(self.suspects)
