"""Machines that examine the ways between them: they find each other through a store, and try every pair.

Each one publishes its card, waits for the cards of the others, tries to reach them, and publishes the ways
that it tried. The first one collects all ways and publishes the end result; until then all of them answer.

A probe server says in one line of JSON which machine it is, the caller's address as it sees it, and its time.
Then it sends back every byte, so that the caller can measure the round trip.
"""

from __future__ import annotations

import ipaddress
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated, Any, Final, TypeVar

from rallypoint.client.base import Store
from rallypoint.codec import ReadBy, Within, at_most, from_text, to_json, to_text
from rallypoint.diagnose.doctor.machine import versions
from rallypoint.diagnose.doctor.network import addresses_of, addresses_on, interfaces_out
from rallypoint.diagnose.findings import Finding
from rallypoint.errors import StoreTimeoutError
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
    while True:
        places.acquire()
        try:
            caller, address = listener.accept()
        except OSError:  # closed
            return
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
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:  # IPv6 is known, but switched off
        pass
    return socket.create_server(("", 0))


def reach(start: int, card: Card) -> Way:
    """Try the way to a machine, at each of its addresses until one answers."""
    resolved = addresses_of(card.host)
    ways: list[Way] = []
    over = time.monotonic() + _LONGEST_CALL_S
    for address in card.addresses:
        if ways and time.monotonic() > over:
            break
        way = replace(_try(start, card, address), resolved=resolved)
        if not way.error:
            return way
        ways.append(way)
    errors = "; ".join(f"{way.address}: {way.error}" for way in ways)
    return replace(ways[0], error=errors)


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


# The exchange -----------------------------------------------------------------------------------------------

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
