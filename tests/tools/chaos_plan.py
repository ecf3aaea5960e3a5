"""The faults of `chaos.py`, and which of them meets which job when: pure, and made by a seed alone.

A job lives through some faults that it has to survive; the last one may end it. Faults are dealt like cards
from shuffled decks, so that none comes twice before all have come once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

TIMEOUT: Final = 15.0
"""How long a rank waits for an answer of its store, in seconds."""

SESSION_SECONDS: Final = 8.0
"""The limit session_seconds of the jobs: how long a relay may be without its store."""

RANKS_PER_MACHINE: Final = 4
MACHINES: Final = ("a", "b")
"""The first has the job's store, at which the machines meet, too."""
RANKS: Final = tuple(f"rank-{rank}" for rank in range(len(MACHINES) * RANKS_PER_MACHINE))

_FAULTS_BEFORE_THE_LAST: Final = 3
_SOON: Final = (0.2, 1.5)
_SHORT: Final = (0.5, TIMEOUT / 3)
_STALL: Final = (0.5, 3.5)
"""Of an agent, whose machine counts as lost after 5 s without a heartbeat; there is one every second."""
_OUTAGE: Final = (0.5, 2.5)
"""Of the network. A machine is lost after 5 s, and TCP sends again after 3.0 s, and then after 6.2 s."""
_LONG: Final = (TIMEOUT + 2, TIMEOUT + 6)
_A_WHILE: Final = (1.0, 4.0)
_FOR_GOOD: Final = (0.0, 0.0)


class Verdict(Enum):
    """What may become of a job."""

    GOES_ON = "goes on"
    ENDS = "ends"
    EITHER = "goes on or ends"


@dataclass(frozen=True)
class Card:
    """What happens, to which part of a job, for how long at least and at most, and what may come of it."""

    kind: str
    victim: str
    seconds: tuple[float, float]
    verdict: Verdict


@dataclass(frozen=True)
class Fault:
    """A card that was dealt."""

    kind: str
    victim: str
    verdict: Verdict
    after: float
    """Seconds of undisturbed work before it."""
    seconds: float
    """How long it lasts; 0: for good."""
    strength: float
    """Between 0 and 1: how long a delay is, how much is lost, how little memory is left."""

    @property
    def machine(self) -> str:
        """The machine of the victim; empty for the link between them."""
        return machine_of(self.victim)

    @property
    def group(self) -> str:
        """The kind of the fault and of its victim."""
        long = ", longer than the time-out" if self.seconds > TIMEOUT else ""
        return f"{self.kind} {self.victim.partition('-')[0]}{long}"

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} {self.victim}{lasts}"


def machine_of(part: str) -> str:
    """The machine on which a part of the job runs; empty for the link between them."""
    name, _, which = part.partition("-")
    if name == "rank":
        return MACHINES[int(which) // RANKS_PER_MACHINE]
    return {"store": "a", "link": ""}.get(name, which)


_SERVERS: Final = ("store", "relay-a", "relay-b")
_LAUNCHERS: Final = ("launcher-a", "launcher-b", "agent-a", "agent-b")
_ANY_RANK: Final = "rank"
"""On a card: which one is drawn when the card is dealt."""


def _cards(kind: str, victims: Sequence[str], seconds: tuple[float, float], verdict: Verdict) -> list[Card]:
    return [Card(kind, victim, seconds, verdict) for victim in victims]


PASSING: Final = (
    *_cards("stop", (*_SERVERS, "launcher-a", "launcher-b", _ANY_RANK), _SHORT, Verdict.GOES_ON),
    *_cards("stop", ("agent-a", "agent-b"), _STALL, Verdict.GOES_ON),
    *_cards("cut", ("link",), _OUTAGE, Verdict.GOES_ON),
    *_cards("unplug", ("link",), _OUTAGE, Verdict.GOES_ON),
    *_cards("reset", ("link",), _FOR_GOOD, Verdict.GOES_ON),
    *_cards("delay", ("link",), _A_WHILE, Verdict.GOES_ON),
    *_cards("loss", ("link",), _A_WHILE, Verdict.GOES_ON),
    *_cards("fill", ("disk-a", "disk-b"), _A_WHILE, Verdict.GOES_ON),
)
"""What a job has to live through."""

LAST: Final = (
    *_cards("kill", (*_SERVERS, *_LAUNCHERS, _ANY_RANK), _FOR_GOOD, Verdict.ENDS),
    *_cards("stop", (*_SERVERS, _ANY_RANK), _LONG, Verdict.ENDS),
    *_cards("cut", ("link",), _LONG, Verdict.ENDS),
    *_cards("unplug", ("link",), _LONG, Verdict.ENDS),
    *_cards("sever", ("link",), (SESSION_SECONDS + 2, TIMEOUT), Verdict.ENDS),
    *_cards("starve", (*_SERVERS, "agent-a", "agent-b", _ANY_RANK), _A_WHILE, Verdict.EITHER),
    None,
)
"""What comes last in the life of a job, which ends in peace if it may: None is no fault at all."""


def plan(seed: int, number: int) -> list[Fault]:
    """The faults of the job of this number, in their order."""
    rng = random.Random(f"{seed} job {number}")
    first = number * _FAULTS_BEFORE_THE_LAST
    cards: list[Card | None] = [
        *(_deal(PASSING, f"{seed} passing", first + index) for index in range(_FAULTS_BEFORE_THE_LAST)),
        _deal(LAST, f"{seed} last", number),
    ]
    return [_draw(rng, card) for card in cards if card is not None]


_Dealt = TypeVar("_Dealt")


def _deal(cards: Sequence[_Dealt], name: str, position: int) -> _Dealt:
    """One card of an endless row of shuffled decks."""
    deck = list(cards)
    random.Random(f"{name} {position // len(deck)}").shuffle(deck)
    return deck[position % len(deck)]


def _draw(rng: random.Random, card: Card) -> Fault:
    victim = rng.choice(RANKS) if card.victim == _ANY_RANK else card.victim
    return Fault(
        card.kind, victim, card.verdict, rng.uniform(*_SOON), rng.uniform(*card.seconds), rng.random()
    )
