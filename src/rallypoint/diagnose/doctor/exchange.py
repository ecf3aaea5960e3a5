"""Doctors of several machines: they meet at a store, and examine the ways between all of them.

They meet at a doctor that listens, or at the store of a launched job. There, each one publishes its card,
waits for the cards of the others, tries to reach them, and publishes the ways that it tried. The first one
collects all ways and publishes the end result; until then all of them answer probes.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeVar

from rallypoint.client.base import PrefixStore, Store
from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.codec import ReadBy, at_most, from_text, to_json, to_text
from rallypoint.diagnose.doctor.network import interfaces_out
from rallypoint.diagnose.doctor.probes import Card, Way, own_card, probe_server, reach
from rallypoint.diagnose.doctor.situation import MOST_RANKS, endpoint_of, leads_elsewhere, number_in
from rallypoint.diagnose.findings import Finding
from rallypoint.errors import RallypointError, StoreTimeoutError, UsageError
from rallypoint.launch.endpoint import Endpoint
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import is_loopback, is_this_machine, split_address
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.question import Question

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
            # The store may end with this machine, so it stays until the others have read the result.
            others = [each for each in gathered.cards if each and each not in gathered.silent]
            with suppress(StoreTimeoutError):
                store.wait([f"{_LEFT}/{each}" for each in others], _FAREWELL_S)
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
    cards = [each for each in goals if isinstance(each, Card)]
    todo, done = queue.SimpleQueue[Card](), queue.SimpleQueue[Way]()
    # Each machine begins with the one after it, so that not all of them try the same one first.
    for card in sorted(cards, key=lambda card: (card.number < start, card.number)):
        todo.put(card)

    def work() -> None:
        with suppress(queue.Empty):
            while True:
                done.put(reach(start, todo.get_nowait()))

    for _ in range(min(_AT_A_TIME, len(cards))):
        threading.Thread(target=work, daemon=True, name="doctor-ways").start()
    closed = [each for each in goals if isinstance(each, Way)]
    return sorted([*closed, *(done.get() for _ in cards)], key=lambda way: way.goal)


def _with_rows_of_others(store: Store, own: Participant, seen: Gathered) -> Gathered:
    ways, findings = list(seen.ways), dict(seen.findings)
    others = [number for number in seen.cards if number != own.number]
    for number, row in _collect(store, _ROW, others, own.seconds, MachineRow).items():
        # A machine speaks only for itself. It may have met one that came too late for this one.
        ways += [way for way in row.ways if way.start == number and way.goal in seen.cards]
        findings[number] = row.findings
    return Gathered(own.count, seen.cards, tuple(ways), findings)


def _await(store: Store, key: str, seconds: float) -> bytes | None:
    """The value of a key, or None if it does not come in time."""
    try:
        store.wait([key], seconds)
        return store.get(key)
    except StoreTimeoutError:
        return None


# One that listens -------------------------------------------------------------------------------------------

_PREFIX: Final = "rallypoint/doctor"
_OPEN: Final = "open"
_VISITS: Final = "visits"
_VISITORS: Final = "visitors"

_CONNECT_S: Final = 3.0
_VISIT_S: Final = 20.0
_JOB_S: Final = 120.0  # machines of a job do not start at the same second
_LOOK_S: Final = 1.0
_MOST_AT_ONCE: Final = 16
_KEYS_ASKED: Final = 64


@contextmanager
def open_practice(endpoint: Endpoint | None) -> Iterator[TCPStore]:
    """A store where doctors of other machines can be met; on every interface unless an endpoint is given."""
    if endpoint is not None and not is_this_machine(endpoint.host):
        raise UsageError(
            f"{endpoint.host} is not this machine, so nobody can be met there",
            hint=f"name an address of this machine, or none: rallypoint doctor --listen ({own_address()})",
        )
    host, port = endpoint if endpoint else ("", 0)
    with TCPStore(host, port, is_master=True, timeout=_VISIT_S, role=Role.TOOL) as store:
        PrefixStore(_PREFIX, store).set(_OPEN, b"")
        yield store


def receive(store: TCPStore, on_visit: Callable[[Gathered], None]) -> None:
    """Examine the ways to every visitor, each in a thread of its own, until interrupted."""
    practice = PrefixStore(_PREFIX, store)
    places = threading.Semaphore(_MOST_AT_ONCE)
    while True:
        with suppress(StoreTimeoutError):
            practice.wait([_VISITORS], _LOOK_S)
            if places.acquire(timeout=_LOOK_S):
                visitor = practice.queue_pop(_VISITORS, block=False).decode(errors="replace")
                visit = (store.clone(), visitor, on_visit, places)
                threading.Thread(target=_attend, args=visit, daemon=True, name="doctor-visit").start()


def _attend(
    store: TCPStore, visitor: str, on_visit: Callable[[Gathered], None], places: threading.Semaphore
) -> None:
    try:
        with suppress(RallypointError), store:  # it is an error if the store is closed meanwhile
            room = PrefixStore(f"{_PREFIX}/visit/{visitor}", store)
            key = f"{_PREFIX}/visit/{visitor}/{CARD}/1"
            own = Participant(0, 2, own_address(), _VISIT_S)
            on_visit(gather(room, own, (), lambda card: narrow_visitor(card, _writer_of(store, key))))
    finally:
        places.release()


def _writer_of(store: TCPStore, key: str) -> str:
    """The address of the client that wrote a key, as the server sees it; empty if that is not known."""
    question = Question(keys=_KEYS_ASKED, search=key)
    try:
        snapshot = fetch_snapshot(store.host or "localhost", store.port, question, Deadline(_CONNECT_S))
    except RallypointError:
        return ""
    writer = next((each.writer for each in snapshot.keys if each.key == key), 0)
    peer = next((each.peer for each in snapshot.clients if each.id == writer), "")
    return split_address(peer)[0].removeprefix("::ffff:")


def narrow_visitor(card: Card, origin: str) -> Card | Way:
    """The card of a visitor, with only the address from which it came: it is proven that it has that one.

    Otherwise anybody who reaches this machine could make it connect to any port of any machine, its own
    loopback included. A visitor that came over loopback is on this machine: it is dialled at an address by
    which other machines know this one.
    """
    own = [address for each in interfaces_out() for address in each.addresses]
    proven = own if is_loopback(origin) else [origin]
    addresses = tuple(each for each in card.addresses if each in proven and leads_elsewhere(each))
    if addresses:
        return replace(card, addresses=addresses)
    where = origin or "an address that is not known"
    error = f"not tried: it came from {where}, and that proves no address on its card"
    return Way(0, card.number, card.addresses[0], error)


def visit(endpoint: Endpoint, findings: Sequence[Finding]) -> Gathered | None:
    """Examine the ways to the doctor that listens at an endpoint; None if no doctor listens there.

    RallypointError if it goes away meanwhile.
    """
    try:
        store = TCPStore(endpoint.host, endpoint.port, timeout=_CONNECT_S, role=Role.TOOL)
    except RallypointError:
        return None
    with store:
        practice = PrefixStore(_PREFIX, store)
        if not practice.check([_OPEN]):
            return None
        number = practice.add(_VISITS, 1)
        practice.queue_push(_VISITORS, str(number))
        own = Participant(1, 2, address_towards(endpoint), _VISIT_S)
        return gather(PrefixStore(f"visit/{number}", practice), own, findings)


# A job that a launcher began --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launched:
    """The job that a launcher has started, and the part of this process in it."""

    endpoint: Endpoint
    number: int
    count: int
    is_first_here: bool
    """Whether this is the first rank on its machine. One rank of each machine takes part."""
    holds_store: bool
    """Whether this rank has to hold the store: it is rank 0, and the launcher holds none at the endpoint."""
    round: str


def by_launcher(environ: Mapping[str, str]) -> Launched:
    """The job, by the variables that torchrun and other launchers set. UsageError if they are not set."""
    endpoint, rank = endpoint_of(environ), number_in(environ, "RANK")
    world = number_in(environ, "WORLD_SIZE")
    if endpoint is None or rank is None or world is None:
        raise UsageError(
            "--all is for a process that a launcher has started on every machine: RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT are not all set",
            hint="torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT "
            "--no-python rallypoint doctor --all",
        )
    per_machine = max(number_in(environ, "LOCAL_WORLD_SIZE") or 1, 1)
    group, groups = number_in(environ, "GROUP_RANK"), number_in(environ, "GROUP_WORLD_SIZE")
    number = rank // per_machine if group is None else group
    count = -(-world // per_machine) if groups is None else groups
    if not 0 <= rank < world or not 0 <= number < count <= MOST_RANKS:
        raise UsageError(
            f"rank {rank} of {world}, on machine {number} of {count}, cannot be meant",
            hint="RANK, WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE: the launcher sets them",
        )
    holds_store = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true"
    is_first_here = number_in(environ, "LOCAL_RANK") in (None, 0)
    tries = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launched(endpoint, number, count, is_first_here, holds_store, tries)


def attend_job(job: Launched, findings: Sequence[Finding]) -> Gathered:
    """Take part for this machine; `findings` are about it."""
    host, port = job.endpoint
    with TCPStore(host, port, is_master=job.holds_store, timeout=_JOB_S, role=Role.TOOL) as store:
        room = PrefixStore(f"{_PREFIX}/{job.round}", store)
        place = Participant(job.number, job.count, address_towards(job.endpoint), _JOB_S)
        return gather(room, place, findings)


def own_address() -> str:
    """The address under which other machines most likely know this one."""
    found = interfaces_out()
    return found[0].addresses[0] if found else "127.0.0.1"


def address_towards(endpoint: Endpoint) -> str:
    """The address of this machine from which it reaches an endpoint; its usual one if it does not."""
    try:
        with socket.create_connection(endpoint, _CONNECT_S) as sock:
            return str(sock.getsockname()[0]).removeprefix("::ffff:")
    except OSError:
        return own_address()
