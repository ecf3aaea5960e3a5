"""What machines tell each other: about themselves, and about the ways between them."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass, field
from typing import Annotated, Final

from rallypoint.codec import Within
from rallypoint.diagnose.doctor.machine import versions
from rallypoint.diagnose.doctor.network import GLOO_INTERFACE, addresses_of, addresses_on, interfaces_out

_MOST_ADDRESSES: Final = 8
_LONGEST: Final = 300


def _short(text: str) -> str:
    if len(text) >= _LONGEST:
        raise ValueError("a text is too long")
    return text


def _address(text: str) -> str:
    ipaddress.ip_address(text.partition("%")[0])
    return text


def _address_or_nothing(text: str) -> str:
    return text and _address(text)


def _some(addresses: tuple[str, ...]) -> tuple[str, ...]:
    if not addresses:
        raise ValueError("there are none")
    return addresses[:_MOST_ADDRESSES]


_Text = Annotated[str, _short]
_Address = Annotated[str, _address]


@dataclass(frozen=True)
class Card:
    """A machine: its name, where it listens, and what is installed on it."""

    number: int
    host: _Text
    addresses: Annotated[tuple[_Address, ...], _some]
    """Where others may reach it; the first one is the address from which it reaches the store."""
    port: Annotated[int, Within(1, 65_535)]
    """Of its probe server."""
    gloo: Annotated[str, _address_or_nothing]
    """The address that gloo would publish: its interface's, or the host name's; empty if there is none."""
    versions: dict[_Text, _Text] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name that people read: host and number."""
        return f"{self.host} ({self.number})"


@dataclass(frozen=True)
class Way:
    """The way from one machine to another, as the first one tried it."""

    start: int = field(metadata={"json": "from"})
    goal: int = field(metadata={"json": "to"})
    address: str
    """The address that answered, or the first that was tried."""
    error: str = ""
    """Why the goal was not reached; empty if it was."""
    round_trip: float = 0.0
    seen_as: Annotated[str, _address_or_nothing] = ""
    """The start's address, as the goal sees it."""
    resolved: tuple[str, ...] = ()
    """What the goal's name resolves to at the start."""
    clock: float = 0.0
    """How many seconds the goal's clock is ahead of the start's; right to within the round trip."""


def own_card(number: int, first_address: str, port: int) -> Card:
    """This machine's card; `first_address` is the one from which it reaches the store."""
    host = socket.gethostname()
    out = [address for each in interfaces_out() for address in each.addresses]
    addresses = tuple(dict.fromkeys([first_address, *out]))[:_MOST_ADDRESSES]
    gloo = addresses_on(os.environ.get(GLOO_INTERFACE, "")) or addresses_of(host) or ("",)
    return Card(number, host, addresses, port, gloo[0], versions())
