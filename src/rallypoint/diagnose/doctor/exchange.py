"""Machines that examine the ways between them: they find each other through a store, and try every pair.

Each publishes its card, waits for those of the others, tries to reach them, and publishes what came of it.
The first one collects all that and tells everybody what it comes to; until then all keep listening.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rallypoint.codec import from_text, to_json, to_text
from rallypoint.diagnose.doctor.machine_card import Card, Way, own_card
from rallypoint.diagnose.doctor.reachability import Ear, reach
from rallypoint.diagnose.findings import Finding
from rallypoint.errors import StoreTimeoutError
from rallypoint.stores.base import Store

_AT_A_TIME: Final = 16
_FAREWELL_S: Final = 5.0
_LONGEST: Final = 8 << 20
_MOST_TO_TELL: Final = 16
"""Machines among which all hear of all; among more, the pairs would be too many for one value."""


@dataclass(frozen=True)
class Place:
    """A machine's place in a gathering."""

    number: int
    count: int
    address: str
    """From which it reaches the store."""
    seconds: float
    """How long it waits for the others, each time."""


@dataclass(frozen=True)
class MachineRow:
    """What one machine tells: of its ways, and of itself."""

    ways: tuple[Way, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Told:
    """What the first one tells everybody: `Gathered.as_json`."""

    count: int
    cards: tuple[Card, ...]
    ways: tuple[Way, ...]
    findings: dict[str, tuple[Finding, ...]]


@dataclass(frozen=True)
class Gathered:
    """What a gathering comes to: who came, all ways that were tried, what each found on its machine."""

    count: int
    cards: dict[int, Card]
    ways: tuple[Way, ...]
    findings: dict[int, tuple[Finding, ...]]

    def name(self, number: int) -> str:
        """Of a machine that came."""
        return self.cards[number].name

    @property
    def missing(self) -> list[int]:
        """Who has not come."""
        return [number for number in range(self.count) if number not in self.cards]

    def as_json(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "missing": self.missing,
            "cards": to_json(list(self.cards.values())),
            "ways": to_json(self.ways),
            "findings": {
                str(number): [each.as_json() for each in found] for number, found in self.findings.items()
            },
        }

    def to_text(self) -> str:
        return to_text(self.as_json())

    @staticmethod
    def from_text(text: bytes) -> Gathered:
        """What came over the network; ValueError if it is no such thing."""
        told = from_text(_Told, text)
        findings = {int(number): found for number, found in told.findings.items()}
        return Gathered(told.count, {card.number: card for card in told.cards}, told.ways, findings)

    @property
    def silent(self) -> list[int]:
        """Who has come, but has not said what it reached."""
        told = {way.start for way in self.ways} | set(self.findings)
        return [number for number in self.cards if number not in told]


def gather(store: Store, place: Place, findings: Sequence[Finding]) -> Gathered:
    """Take part, and return what it came to: what is missing there did not come in time.

    In large gatherings only the first one hears of all, and the others know what they tried themselves.
    `findings` are about this machine itself, for the others to know.
    """
    with Ear(place.number) as ear:
        card = own_card(place.number, place.address, ear.port)
        store.set(_card_key(place.number), to_text(card))
        cards = {place.number: card, **_cards_of_others(store, place)}
        ways = _try_all(place.number, cards)
        own = Gathered(place.count, cards, tuple(ways), {place.number: tuple(findings)})
        store.set(_row_key(place.number), to_text(MachineRow(own.ways, tuple(findings))))
        if place.number == 0:
            gathered = _collect(store, place, own)
            store.set(_END, gathered.to_text() if place.count <= _MOST_TO_TELL else b"")
            _await_farewells(store, gathered)
            return gathered
        told = _await(store, _END, 2 * place.seconds)  # who is first waits twice
        store.set(_left_key(place.number), b"")
        try:
            outcome = own if told is None else Gathered.from_text(told)
        except ValueError:
            return own
        return outcome if outcome.count == place.count else own


def _cards_of_others(store: Store, place: Place) -> dict[int, Card]:
    """The cards of those who have come in time; one that cannot be read is as good as none."""
    found = {}
    deadline = time.monotonic() + place.seconds
    for number in range(place.count):
        if number != place.number:
            text = _await(store, _card_key(number), max(deadline - time.monotonic(), 0.1))
            try:
                card = from_text(Card, text[:_LONGEST]) if text is not None else None
            except ValueError:
                continue
            if card is not None and card.number == number:
                found[number] = card
    return found


def _try_all(start: int, cards: dict[int, Card]) -> list[Way]:
    """All ways from here, some at a time, in threads that nobody waits for if they take too long."""
    others = [card for number, card in cards.items() if number != start]
    # Each begins with the one behind it, so that not all knock at the same door.
    others.sort(key=lambda card: (card.number < start, card.number))
    todo: queue.SimpleQueue[Card] = queue.SimpleQueue()
    done: queue.SimpleQueue[Way] = queue.SimpleQueue()
    for card in others:
        todo.put(card)
    for _ in range(min(_AT_A_TIME, len(others))):
        threading.Thread(target=_try_next, args=(start, todo, done), daemon=True, name="doctor-ways").start()
    return sorted((done.get() for _ in others), key=lambda way: way.goal)


def _try_next(start: int, todo: queue.SimpleQueue[Card], done: queue.SimpleQueue[Way]) -> None:
    while True:
        try:
            card = todo.get_nowait()
        except queue.Empty:
            return
        done.put(reach(start, card))


def _collect(store: Store, place: Place, own: Gathered) -> Gathered:
    ways, findings = list(own.ways), dict(own.findings)
    deadline = time.monotonic() + place.seconds
    for number in own.cards:
        if number != place.number:
            text = _await(store, _row_key(number), max(deadline - time.monotonic(), 0.1))
            try:
                row = from_text(MachineRow, text[:_LONGEST]) if text is not None else None
            except ValueError:
                continue
            if row is not None:
                # Some may have met who came late; and nobody speaks for another.
                ways += [way for way in row.ways if way.start == number and way.goal in own.cards]
                findings[number] = row.findings
    return Gathered(place.count, own.cards, tuple(ways), findings)


def _await_farewells(store: Store, gathered: Gathered) -> None:
    """The store may end with the first one: it stays until the others have read what is in it."""
    keys = [_left_key(number) for number in gathered.cards if number and number not in gathered.silent]
    if keys:
        try:
            store.wait(keys, _FAREWELL_S)
        except StoreTimeoutError:
            pass


def _await(store: Store, key: str, seconds: float) -> bytes | None:
    """The value of a key, or None if it does not come in time."""
    try:
        store.wait([key], seconds)
        return store.get(key)
    except StoreTimeoutError:
        return None


_END: Final = "end"


def _card_key(number: int) -> str:
    return f"card/{number}"


def _left_key(number: int) -> str:
    return f"left/{number}"


def _row_key(number: int) -> str:
    return f"row/{number}"
