"""What machines tell each other: about themselves, and about the ways between them."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass, field
from typing import Annotated, Final

from rallypoint.codec import Within
from rallypoint.diagnose.doctor.interfaces import GLOO_INTERFACE
from rallypoint.diagnose.doctor.packages import versions
from rallypoint.server.machine.interfaces import interfaces
from rallypoint.stores.client.patience import within

_PATIENCE_S: Final = 2.0
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
    """A machine: what it calls itself, where it listens, and what is installed on it."""

    number: int
    host: _Text
    addresses: Annotated[tuple[_Address, ...], _some]
    """Where it may be reached; first the one from which it reaches the store."""
    port: Annotated[int, Within(1, 65_535)]
    """Of its ear."""
    gloo: Annotated[str, _address_or_nothing]
    """The address that gloo would publish: of its interface, or of the machine's own name; empty if none."""
    versions: dict[_Text, _Text] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.host} ({self.number})"


@dataclass(frozen=True)
class Way:
    """From one machine to another, as tried by the first."""

    start: int = field(metadata={"json": "from"})
    goal: int = field(metadata={"json": "to"})
    address: str
    """At which it was reached, or the first that was tried."""
    error: str = ""
    """Why it was not reached; empty if it was."""
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
