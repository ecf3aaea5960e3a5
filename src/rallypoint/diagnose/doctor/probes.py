"""A machine's card, and the ways that it tries to others.

A probe server says in one line of JSON which machine it is, the caller's address as it sees it, and its time.
Then it sends back every byte, so that the caller can measure the round trip.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated, Any, Final

from rallypoint.codec import Within
from rallypoint.diagnose.doctor.machine import versions
from rallypoint.diagnose.doctor.network import addresses_of, addresses_on, interfaces_out
from rallypoint.store.machine.interfaces import GLOO_INTERFACE

_MOST_ADDRESSES: Final = 8
_LONGEST_NAME: Final = 300
_PROBE_SECONDS: Final = 3.0
_PINGS: Final = 10
_MOST_CALLERS: Final = 64
_LONGEST_CALL_S: Final = 10.0
_LONGEST_LINE: Final = 4096
_MARK: Final = "rallypoint doctor"
_STRANGER: Final = "another machine, or another program, answers there"


def _short(text: str) -> str:
    if len(text) >= _LONGEST_NAME:
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


# Probes ---------------------------------------------------------------------------------------------------


@contextmanager
def probe_server(number: int) -> Iterator[int]:
    """A port, on every interface, that answers probes while the block runs; `number` is this machine's."""
    listener = _listen()
    threading.Thread(target=_serve, args=(listener, number), daemon=True, name="doctor-probes").start()
    try:
        yield listener.getsockname()[1]
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        listener.close()


def _serve(listener: socket.socket, number: int) -> None:
    places = threading.Semaphore(_MOST_CALLERS)
    with suppress(OSError):  # the listener is closed
        while places.acquire():
            caller, address = listener.accept()
            work = (caller, str(address[0]), number, places)
            threading.Thread(target=_answer, args=work, daemon=True).start()


def _answer(caller: socket.socket, address: str, number: int, places: threading.Semaphore) -> None:
    with suppress(OSError), caller:  # the caller reports it, if it matters
        caller.settimeout(_PROBE_SECONDS)
        over = time.monotonic() + _LONGEST_CALL_S
        # An IPv4 address plainly, also if a socket for both families has wrapped it.
        you = address.removeprefix("::ffff:")
        hello = {"mark": _MARK, "number": number, "you": you, "time": time.time()}
        caller.sendall(json.dumps(hello).encode() + b"\n")
        while time.monotonic() < over and (data := caller.recv(64)):
            caller.sendall(data)
    places.release()


def _listen() -> socket.socket:
    """One socket on every interface, for both families if the system has both."""
    with suppress(OSError):  # IPv6 is known, but may be switched off
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def reach(start: int, card: Card) -> Way:
    """Try the way to a machine, at each of its addresses until one answers."""
    resolved, ways = addresses_of(card.host), list[Way]()
    over = time.monotonic() + _LONGEST_CALL_S
    for address in card.addresses:
        if ways and time.monotonic() > over:
            break
        ways.append(replace(_try(start, card, address), resolved=resolved))
        if not ways[-1].error:
            return ways[-1]
    return replace(ways[0], error="; ".join(f"{way.address}: {way.error}" for way in ways))


def _try(start: int, card: Card, address: str) -> Way:
    way = Way(start, card.number, address)
    try:
        with socket.create_connection((address, card.port), _PROBE_SECONDS) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(_PROBE_SECONDS)
            begun = time.time()
            hello = _read_hello(sock)
            now = time.time()
            if hello.get("mark") != _MARK or hello.get("number") != card.number:
                return replace(way, error=_STRANGER)
            seen_as, clock = str(hello["you"]), float(hello["time"]) - (begun + now) / 2
            return replace(way, round_trip=_round_trip(sock), seen_as=seen_as, clock=clock)
    except TimeoutError:
        return replace(way, error=f"no answer within {_PROBE_SECONDS:g} s")
    except OSError as error:
        return replace(way, error=error.strerror or str(error))
    except (ValueError, KeyError, TypeError, RecursionError):
        return replace(way, error=_STRANGER)


def _read_hello(sock: socket.socket) -> dict[str, Any]:
    line, over = b"", time.monotonic() + _PROBE_SECONDS
    while not line.endswith(b"\n"):
        if time.monotonic() > over:
            raise TimeoutError
        data = sock.recv(_LONGEST_LINE - len(line))
        if not data:
            raise ConnectionResetError(None, "the connection was ended before a word was said")
        line += data
    content = json.loads(line)
    if not isinstance(content, dict):
        raise TypeError(content)
    return content


def _round_trip(sock: socket.socket) -> float:
    times = []
    for number in range(_PINGS):
        begun = time.perf_counter()
        sock.sendall(bytes([number]))
        if sock.recv(64) != bytes([number]):
            raise ConnectionResetError(None, "the connection was ended")
        times.append(time.perf_counter() - begun)
    return median(times)
