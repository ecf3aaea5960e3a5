"""What machines tell each other: about themselves, and about the ways between them."""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rallypoint.diagnose.doctor.interfaces import GLOO_INTERFACE
from rallypoint.diagnose.doctor.packages import versions
from rallypoint.diagnose.findings import of_known_fields
from rallypoint.server.machine.interfaces import interfaces
from rallypoint.stores.client.patience import within

_PATIENCE_S: Final = 2.0
_MOST_ADDRESSES: Final = 8
_LONGEST: Final = 300


@dataclass(frozen=True)
class Card:
    """A machine: what it calls itself, where it listens, and what is installed on it."""

    number: int
    host: str
    addresses: tuple[str, ...]
    """Where it may be reached; first the one from which it reaches the store."""
    port: int
    """Of its ear."""
    gloo: str
    """The address that gloo would publish: of its interface, or of the machine's own name; empty if none."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.host} ({self.number})"

    @staticmethod
    def from_json(content: object) -> Card:
        """What came over the network; ValueError if it is no card."""
        told = of_known_fields(Card, _as_dict(content))
        card = Card(**{**told, "addresses": tuple(told.get("addresses", ()))[:_MOST_ADDRESSES]})
        versions = _as_dict(card.versions)
        for address in (*card.addresses, *([card.gloo] if card.gloo else [])):
            ipaddress.ip_address(str(address).partition("%")[0])
        texts = (card.host, *versions, *versions.values())
        if not card.addresses or not all(isinstance(each, str) and len(each) < _LONGEST for each in texts):
            raise ValueError("a card without addresses, or with something else for a text")
        if not isinstance(card.number, int) or not isinstance(card.port, int) or not 0 < card.port < 65_536:
            raise ValueError("a card without a number or a port")
        return card


@dataclass(frozen=True)
class Way:
    """From one machine to another, as tried by the first."""

    start: int
    goal: int
    address: str
    """At which it was reached, or the first that was tried."""
    error: str = ""
    """Why it was not reached; empty if it was."""
    round_trip: float = 0.0
    seen_as: str = ""
    """The start's address, as the goal sees it."""
    resolved: tuple[str, ...] = ()
    """What the goal's name resolves to at the start."""
    clock: float = 0.0
    """How many seconds the goal's clock is ahead of the start's; right to within the round trip."""

    def as_json(self) -> dict[str, Any]:
        return {
            "from": self.start,
            "to": self.goal,
            **{k: v for k, v in asdict(self).items() if k not in ("start", "goal")},
        }

    @staticmethod
    def from_json(content: object) -> Way:
        """What came over the network; ValueError if it is no way."""
        found = _as_dict(content)
        told = of_known_fields(Way, {**found, "start": found.get("from"), "goal": found.get("to")})
        way = Way(**{**told, "resolved": tuple(map(str, told.get("resolved", ())))})
        numbers = (way.start, way.goal, way.round_trip, way.clock)
        if not all(isinstance(each, int | float) and math.isfinite(each) for each in numbers):
            raise ValueError("a way without numbers")
        if not all(isinstance(each, str) for each in (way.address, way.error, way.seen_as)):
            raise ValueError("a way without texts")
        if way.seen_as:
            ipaddress.ip_address(way.seen_as.partition("%")[0])
        return way


def _as_dict(content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError("something else than an object")
    return content


def own_card(number: int, first_address: str, port: int) -> Card:
    """This machine's card; `first_address` is the one from which it reaches the store."""
    host = socket.gethostname()
    gloo = _address_on(os.environ.get(GLOO_INTERFACE, "")) or _address_of(host)
    return Card(number, host, _own_addresses(first_address), port, gloo, versions())


def _address_on(name: str) -> str:
    """The first address of an interface; empty if there is none."""
    try:
        return next((each.addresses[0] for each in interfaces() if each.name == name and each.addresses), "")
    except OSError:
        return ""


def _own_addresses(first: str) -> tuple[str, ...]:
    try:
        out = [address for each in interfaces() if each.leads_out for address in each.addresses]
    except OSError:
        out = []
    return tuple(dict.fromkeys([first, *out]))[:_MOST_ADDRESSES]


def _address_of(host: str) -> str:
    try:
        found = within(_PATIENCE_S, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return ""
    return str(found[0][4][0])
