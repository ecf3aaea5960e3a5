"""Machines that examine the ways between them: they find each other through a store, and try every pair.

Each one publishes its card, waits for the cards of the others, tries to reach them, and publishes the ways
that it tried. The first one collects all ways and publishes the end result; until then all of them answer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from rallypoint.client.base import Store
from rallypoint.codec import ReadBy, at_most, from_text, to_json, to_text
from rallypoint.diagnose.doctor.reachability import Card, Way, own_card, probe_server, reach
from rallypoint.diagnose.findings import Finding
from rallypoint.errors import StoreTimeoutError

_AT_A_TIME: Final = 16
_FAREWELL_S: Final = 5.0
_LONGEST: Final = 8 << 20
_MOST_FINDINGS: Final = 256
_MOST_TO_TELL: Final = 16
"""Up to this many machines, all get the whole result. Among more, it would be too large for one value."""

# Keys of the store. All but the last one are followed by a slash and the machine's number.
CARD: Final = "card"
_ROW: Final = "row"
_LEFT: Final = "left"
_END: Final = "end"

T = TypeVar("T")
_Number = Annotated[int, ReadBy(int)]  # names in a JSON object are texts


@dataclass(frozen=True)
class Participant:
    """A machine that takes part in an exchange."""

    number: int
    count: int
    """How many machines take part."""
    address: str
    """The address from which it reaches the store."""
    seconds: float
    """How long it waits for the others, each time."""


@dataclass(frozen=True)
class MachineRow:
    """The ways that one machine has tried, and its findings about itself."""

    ways: tuple[Way, ...]
    findings: Annotated[tuple[Finding, ...], at_most(_MOST_FINDINGS)]


@dataclass(frozen=True)
class Gathered:
    """The result: the machines that came, all ways that were tried, and what each found on itself."""

    count: int
    cards: dict[_Number, Card]
    ways: tuple[Way, ...]
    findings: dict[_Number, tuple[Finding, ...]]

    def name(self, number: int) -> str:
        """The name of a machine that came."""
        return self.cards[number].name

    @property
    def missing(self) -> list[int]:
        """The machines that have not come."""
        return [number for number in range(self.count) if number not in self.cards]

    def as_json(self) -> dict[str, Any]:
        """The exchange as `--json` prints it."""
        return {**to_json(self), "cards": to_json(list(self.cards.values())), "missing": self.missing}

    @property
    def silent(self) -> list[int]:
        """The machines that came, but have not said what they reached."""
        told = {way.start for way in self.ways} | set(self.findings)
        return [number for number in self.cards if number not in told]


Narrow = Callable[[Card], Card | Way]
"""Leaves those addresses on a card that may be dialled; if there are none, a way that says so."""


def gather(
    store: Store, own: Participant, findings: Sequence[Finding], narrow: Narrow = lambda card: card
) -> Gathered:
    """Take part in an exchange. Machines that do not come in time are missing in the result.

    In large exchanges only the first one gets the whole result; the others get what they tried themselves.
    `findings` are about this machine; all participants get them. `narrow` is for machines that others have
    not called together: it keeps this one from dialling whatever a card says.
    """
    with probe_server(own.number) as port:
        card = own_card(own.number, own.address, port)
        store.set(f"{CARD}/{own.number}", to_text(card))
        others = [number for number in range(own.count) if number != own.number]
        came = _collect(store, CARD, others, own.seconds, Card)
        cards = {own.number: card} | {
            each.number: each for number, each in came.items() if each.number == number
        }
        goals = [narrow(each) for number, each in cards.items() if number != own.number]
        seen = Gathered(own.count, cards, tuple(_try_all(own.number, goals)), {own.number: tuple(findings)})
        store.set(f"{_ROW}/{own.number}", to_text(MachineRow(seen.ways, tuple(findings))))
        if own.number == 0:
            gathered = _with_rows_of_others(store, own, seen)
            store.set(_END, to_text(gathered) if own.count <= _MOST_TO_TELL else b"")
            _await_farewells(store, gathered)
            return gathered
        told = _await(store, _END, 2 * own.seconds)  # the first one waits twice
        store.set(f"{_LEFT}/{own.number}", b"")
        try:
            outcome = from_text(Gathered, told or b"")
        except ValueError:
            return seen
        return outcome if outcome.count == own.count else seen


def _collect(store: Store, key: str, numbers: Iterable[int], seconds: float, kind: type[T]) -> dict[int, T]:
    """The values that these machines publish in time under a key, by number; unreadable ones are left out."""
    found = {}
    deadline = time.monotonic() + seconds
    for number in numbers:
        text = _await(store, f"{key}/{number}", max(deadline - time.monotonic(), 0.1))
        with suppress(ValueError):
            found[number] = from_text(kind, (text or b"")[:_LONGEST])
    return found


def _try_all(start: int, goals: Sequence[Card | Way]) -> list[Way]:
    """All ways from here, several at a time, in daemon threads; those that may not be tried as they are."""
    closed = [each for each in goals if isinstance(each, Way)]
    others = [each for each in goals if isinstance(each, Card)]
    # Each machine begins with the one behind it, so that not all of them try the same one first.
    others.sort(key=lambda card: (card.number < start, card.number))
    todo: queue.SimpleQueue[Card] = queue.SimpleQueue()
    done: queue.SimpleQueue[Way] = queue.SimpleQueue()
    for card in others:
        todo.put(card)

    def work() -> None:
        with suppress(queue.Empty):
            while True:
                done.put(reach(start, todo.get_nowait()))

    for _ in range(min(_AT_A_TIME, len(others))):
        threading.Thread(target=work, daemon=True, name="doctor-ways").start()
    return sorted([*closed, *(done.get() for _ in others)], key=lambda way: way.goal)


def _with_rows_of_others(store: Store, own: Participant, seen: Gathered) -> Gathered:
    ways, findings = list(seen.ways), dict(seen.findings)
    others = [number for number in seen.cards if number != own.number]
    for number, row in _collect(store, _ROW, others, own.seconds, MachineRow).items():
        # A machine speaks only for itself. It may have met one that came too late for this one.
        ways += [way for way in row.ways if way.start == number and way.goal in seen.cards]
        findings[number] = row.findings
    return Gathered(own.count, seen.cards, tuple(ways), findings)


def _await_farewells(store: Store, gathered: Gathered) -> None:
    """The store may end with the first machine, so it stays until the others have read the result."""
    keys = [f"{_LEFT}/{number}" for number in gathered.cards if number and number not in gathered.silent]
    with suppress(StoreTimeoutError):
        store.wait(keys, _FAREWELL_S)


def _await(store: Store, key: str, seconds: float) -> bytes | None:
    """The value of a key, or None if it does not come in time."""
    try:
        store.wait([key], seconds)
        return store.get(key)
    except StoreTimeoutError:
        return None
