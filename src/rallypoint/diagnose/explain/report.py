"""What is to be said of some logs: findings as they are told, the verdict, and the report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from rallypoint.diagnose.explain.knowledge import SURENESS, Cause, fill
from rallypoint.diagnose.explain.ordering import Seen, first_first
from rallypoint.diagnose.explain.suspects import Suspect
from rallypoint.diagnose.explain.tracebacks import Raised

TIERS: Final = {"cause": 0, "symptom": 1, "wrapper": 2, "notice": 3}
"""By role, how far a finding is from being a first cause."""


@dataclass(frozen=True)
class Told:
    """A finding: what was seen, by whom, and what the knowledge base says of it."""

    cause: Cause | None
    role: str
    facts: dict[str, str]
    raised: Raised | None
    became: Raised | None
    seen: tuple[Seen, ...]
    """One for each writer; nobody is known to have said it before the first of them."""
    count: int

    @property
    def first(self) -> Seen:
        return self.seen[0]

    def only(self, seen: Sequence[Seen]) -> Told:
        """The same, as some have seen it."""
        return replace(self, seen=first_first(seen))

    def is_same(self, other: Told) -> bool:
        """Whether it is about the same cause, or the same exception."""
        return self.cause is other.cause and self.raised == other.raised

    @property
    def mild(self) -> bool:
        """Whether nobody has said it but in warnings."""
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
        """The line that was found, of one of the first who said it."""
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

    told: Told
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
        level = SURENESS.index(self.told.cause.sure if self.told.cause is not None else "likely")
        less = 0 if self.order == "torchrun" else TIERS[self.told.role] + _LESS_SURE.get(self.order, 0)
        return SURENESS[max(level - less, 0)]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why not more or less sure than that."""
        cause = self.told.cause
        meaning = _MEANINGS[cause.sure] if cause is not None else "this error is not in the knowledge base"
        order = _ORDERS[self.order]
        place = order if self.order == "torchrun" else _ROLES.get(self.told.role, order)
        return (meaning, place) if self.shown else (meaning, place, _NOT_SHOWN)


_LESS_SURE: Final = {"clocks": 1, "none": 1}
_MEANINGS: Final = {
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
class Report:
    """All that is to be said of some logs."""

    verdict: Verdict | None
    consequences: tuple[Told, ...]
    others: tuple[Told, ...]
    """Found as well, and not known to have followed from the first cause."""
    notices: tuple[Told, ...]
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
