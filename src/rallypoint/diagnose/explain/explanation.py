"""The explanation of some logs: the verdict about the first cause, and all other incidents. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rallypoint.diagnose.explain.advice import Advice
from rallypoint.diagnose.explain.evidence import Incident
from rallypoint.diagnose.explain.knowledge import SURENESS
from rallypoint.diagnose.explain.suspects import Suspect

TIERS: Final = {"cause": 0, "symptom": 1, "wrapper": 2, "notice": 3}
"""By role, how far an incident is from being a first cause."""


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
        incident = self.incident
        if not self.shown or incident.guessed or incident.role == "wrapper":
            return SURENESS[0]
        level = SURENESS.index(incident.cause.sure if incident.cause is not None else "likely")
        less = 0 if self.order == "torchrun" else TIERS[incident.role] + _LESS_SURE.get(self.order, 0)
        return SURENESS[max(level - less, 0)]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is as sure as that."""
        order = _ORDERS[self.order]
        place = order if self.order == "torchrun" else _ROLES.get(self.incident.role, order)
        reasons = (_GUESSED,) if self.incident.guessed else (self._meaning, place)
        return reasons if self.shown else (*reasons, _NOT_SHOWN)

    @property
    def _meaning(self) -> str:
        cause = self.incident.cause
        if cause is None:
            return "this error is not in the knowledge base"
        # What a line means can be clear, though it is no cause.
        return _CLEAR if self.incident.role == "wrapper" else MEANINGS[cause.sure]


_LESS_SURE: Final = {"clocks": 1, "none": 1}
MEANINGS: Final = {
    "certain": "these words mean this and nothing else",
    "likely": "these words mostly mean this",
    "possible": "these words can mean other things as well",
}
_GUESSED: Final = "no error in the log is known here; this is the first line that states one"
_CLEAR: Final = "what these words mean is clear"
_ROLES: Final = {
    "symptom": "but it is the consequence of something that the log does not tell",
    "wrapper": "but they only say that something failed, and not what",
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
class Stop:
    """The last line of a log that does not show the end of its job."""

    text: str
    log: str
    line: int
    advice: Advice | None = None


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
    """By the numbers in the sightings; a log with several runs is there as often."""
    lines: int
    stop: Stop | None = None
    """Where the logs stop, if nothing was found and they show no end; or where it stood when told to end."""
    midst: Stop | None = None
    """Where the logs stop, if nothing was found and they end in the midst of steps."""

    @property
    def found(self) -> bool:
        """Whether anything seems to be wrong; what is mostly harmless does not count."""
        return self.verdict is not None or bool(self.suspects) or self.stop is not None
