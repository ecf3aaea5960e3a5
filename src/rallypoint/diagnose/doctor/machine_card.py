"""What machines tell each other: about themselves, and about the ways between them."""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rallypoint.diagnose.doctor.machine import versions
from rallypoint.diagnose.doctor.network import GLOO_INTERFACE, addresses_of, addresses_on, interfaces_out
from rallypoint.diagnose.findings import of_known_fields

_MOST_ADDRESSES: Final = 8
_LONGEST: Final = 300


@dataclass(frozen=True)
class Card:
    """A machine: its name, where it listens, and what is installed on it."""

    number: int
    host: str
    addresses: tuple[str, ...]
    """Where others may reach it; the first one is the address from which it reaches the store."""
    port: int
    """Of its probe server."""
    gloo: str
    """The address that gloo would publish: its interface's, or the host name's; empty if there is none."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name that people read: host and number."""
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
    """The way from one machine to another, as the first one tried it."""

    start: int
    goal: int
    address: str
    """The address that answered, or the first that was tried."""
    error: str = ""
    """Why the goal was not reached; empty if it was."""
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
    out = [address for each in interfaces_out() for address in each.addresses]
    addresses = tuple(dict.fromkeys([first_address, *out]))[:_MOST_ADDRESSES]
    gloo = addresses_on(os.environ.get(GLOO_INTERFACE, "")) or addresses_of(host) or ("",)
    return Card(number, host, addresses, port, gloo[0], versions())
