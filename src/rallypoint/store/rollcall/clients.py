"""All clients of a snapshot, wherever they are connected, and the rank of each where it is known. Pure.

A snapshot lists the server's own clients and, in a part for each relay, the clients of that relay, whose
relays have parts in turn. A client's rank comes from its hello or its process (`Client.who`), else from the
key that only this rank writes. A key written through a relay shows that the rank is one of that relay's
clients, but not which one.

A server lists its workers as it lists relays. But their clients are the server's own: they have connected to
its address, from any machine. `whole` merges the server and its workers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Final

from rallypoint.codec import from_text
from rallypoint.store.rollcall.identity import WORKER, Identity, Role, Source
from rallypoint.store.rollcall.snapshot import (
    Barrier,
    Client,
    Counters,
    Gone,
    Operation,
    Relay,
    Second,
    ServerWorker,
    Snapshot,
)

SILENT_SECONDS: Final = 10.0
"""A relay's report that is older may be out of date."""

_NO_RANKS: Final = (Role.TOOL, Role.AGENT)


@dataclass(frozen=True)
class KnownClient:
    """One connection, and the identity of its client."""

    client: Client
    who: Identity
    barriers: tuple[tuple[str, float], ...] = ()
    """The keys of the barriers where it waits, and for how many seconds."""


@dataclass
class Node:
    """A server or a relay, with its report."""

    told: Snapshot
    relay: Relay | None = None
    """The row of this relay in the snapshot above; None at the top."""
    below: dict[int, Node] = field(default_factory=dict)
    """Its relays that have reported, by their ids."""
    unknown: list[KnownClient] = field(default_factory=list)
    """Clients that may be ranks, but whose rank is not known."""
    settled: int = 0
    """How many of the unknown clients, here and below, are ranks in `Crowd.behind`."""

    @property
    def host(self) -> str:
        """The machine of clients that do not name their own; empty if unknown."""
        return self.told.host if self.told.kind == "relay" else ""

    @property
    def strangers(self) -> int:
        """How many processes the unknown clients are: one may have several connections."""
        named = {(each.who.host, each.who.pid) for each in self.unknown if each.who.pid}
        return len(named) + sum(not each.who.pid for each in self.unknown)

    def with_all_below(self) -> Iterator[Node]:
        yield self
        for each in reversed(self.below.values()):
            yield from each.with_all_below()


@dataclass
class Crowd:
    """All clients of a snapshot, by rank as far as possible."""

    nodes: list[Node]
    """Parents before children."""
    by_rank: dict[int, list[KnownClient]] = field(default_factory=lambda: defaultdict(list))
    behind: dict[int, str] = field(default_factory=dict)
    """Ranks that are present, by their keys, which came through a relay; with the machine, if known."""
    left: set[int] = field(default_factory=set)
    """Ranks that have written their keys but whose clients are not found."""
    gone: dict[int, Gone] = field(default_factory=dict)
    """Ranks that have left: the last connection of each."""

    @property
    def relays(self) -> Iterator[Relay]:
        return (relay for node in self.nodes for relay in node.told.relays)

    @property
    def witnesses(self) -> int:
        """How many connections belong or may belong to ranks, plus the ranks that have left."""
        known = sum(map(len, self.by_rank.values()))
        return known + sum(len(node.unknown) for node in self.nodes) + len(self.gone)

    @property
    def unknown(self) -> int:
        """How many clients may be ranks of unknown number."""
        return sum(node.strangers - node.settled for node in self.nodes)


def is_heard(relay: Relay) -> bool:
    """Whether a relay's last report is current."""
    return relay.present and relay.part is not None and relay.part_seconds <= SILENT_SECONDS


def reporting_clients(snapshot: Snapshot) -> Iterator[Client]:
    """All clients that have reported their activity (REPORT), those of relays and workers included.

    Their `told_seconds` count up to the time of the snapshot. A client that has reconnected appears twice
    until its old connection is found broken.
    """
    yield from (client for client in snapshot.clients if client.told)
    for relay in reversed(snapshot.relays):
        if relay.part is not None:
            yield from (aged(client, relay.part_seconds) for client in reporting_clients(relay.part))


def aged(client: Client, seconds: float) -> Client:
    """A client of a part that was made this many seconds before the snapshot."""
    return replace(client, told_seconds=client.told_seconds + seconds) if client.told else client


def gather(snapshot: Snapshot) -> Crowd:
    """All clients of a snapshot."""
    crowd = Crowd(list(_node(snapshot).with_all_below()))
    for node in crowd.nodes:
        _add_clients(crowd, node)
    for node in reversed(crowd.nodes):  # from below: the nearest to a client knows most of it
        _add_writers(crowd, node)
    for node in crowd.nodes:
        _add_gone(crowd, node)
    return crowd


def _node(told: Snapshot, relay: Relay | None = None) -> Node:
    below = {each.id: _node(each.part, each) for each in told.relays if each.part is not None}
    return Node(told, relay, below)


def _add_clients(crowd: Crowd, node: Node) -> None:
    barriers: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for barrier in node.told.barriers:
        for member, seconds in barrier.members:
            barriers[member].append((barrier.key, seconds))
    written: dict[int, list[int]] = defaultdict(list)
    for rank, writer in node.told.group_writers:
        written[writer].append(rank)
    for client in node.told.clients:
        if client.who.role in _NO_RANKS:
            continue
        who = client.who if client.who.host or not node.host else replace(client.who, host=node.host)
        here = KnownClient(client, who, tuple(barriers.get(client.id, ())))
        for rank in [who.rank] if who.rank >= 0 else written.get(client.id, ()):
            crowd.by_rank[rank].append(here if who.rank >= 0 else _named(here, rank))
        if who.rank < 0 and client.id not in written:
            node.unknown.append(here)


def _named(here: KnownClient, rank: int) -> KnownClient:
    return replace(here, who=replace(here.who, rank=rank, source=Source.KEYS))


def _add_writers(crowd: Crowd, node: Node) -> None:
    """Ranks whose keys were written by a relay, or by a client that is not here any more."""
    relays = {each.id for each in node.told.relays}
    workers = {each.id for each in node.told.own_workers}
    clients = {each.id for each in node.told.clients}
    behind: dict[int, list[int]] = defaultdict(list)
    for rank, writer in node.told.group_writers:
        if rank in crowd.by_rank or rank in crowd.behind or writer in clients:
            continue
        if writer in relays or writer in workers:
            behind[writer].append(rank)
        else:
            crowd.left.add(rank)
    for writer, ranks in behind.items():
        _add_behind(crowd, node if writer in workers else node.below.get(writer), ranks)


def _add_behind(crowd: Crowd, node: Node | None, ranks: list[int]) -> None:
    """Count ranks whose keys came through a relay as its unknown clients, if it has enough of them."""
    if node is None:
        crowd.behind.update(dict.fromkeys(ranks, ""))  # it has not told of its clients yet
        return
    if _unsettled(node) < len(ranks):
        crowd.left.update(ranks)  # some of them, or all, are not here any more
        return
    node.settled += len(ranks)
    crowd.behind.update(dict.fromkeys(ranks, "" if node.told.relays else node.host))


def _unsettled(node: Node) -> int:
    return sum(each.strangers - each.settled for each in node.with_all_below())


def _add_gone(crowd: Crowd, node: Node) -> None:
    for each in node.told.gone:
        rank = each.who.rank
        if not each.who.is_rank or rank in crowd.by_rank or rank in crowd.behind:
            continue
        before = crowd.gone.get(rank)
        if before is None or each.seconds < before.seconds:
            host = each.who.host or node.host
            crowd.gone[rank] = replace(each, who=replace(each.who, host=host))


def doubtful_hosts(crowd: Crowd) -> set[str]:
    """The machines of clients whose rank is unknown; an empty name stands for an unknown machine."""
    hosts = {""} if any(not is_heard(relay) for relay in crowd.relays) else set()
    waiting = crowd.nodes[:1]
    while waiting:
        node = waiting.pop()
        if _unsettled(node):
            hosts.update(each.who.host for each in node.unknown)
            waiting += node.below.values()
    return hosts


def sizes_told(crowd: Crowd) -> Counter[int]:
    """The world sizes that present ranks state (else those that ranks stated which have left).

    For each size, the result has how many ranks state it.
    """
    sizes = ({each.who.world_size for each in known} - {-1} for known in crowd.by_rank.values())
    here = Counter(size for told in sizes for size in told)
    return here or Counter(each.who.world_size for each in crowd.gone.values() if each.who.world_size >= 0)


_NUMBERS: Final = 1 << 32
"""Numbers of workers' clients lie beyond all that the server itself has given."""


def whole(snapshot: Snapshot) -> Snapshot:
    """The snapshot of a server, with the clients of its workers as clients of its own."""
    workers = [each for each in snapshot.relays if each.peer.startswith(WORKER)]
    workers.sort(key=lambda each: each.peer)
    if not workers and snapshot.ended_workers is None:
        return snapshot
    relays = tuple(each for each in snapshot.relays if not each.peer.startswith(WORKER))
    own = (each for each in snapshot.clients if not each.peer.startswith(WORKER))  # workers ask as well
    parts = [each.part for each in workers if each.part is not None]
    errors = sorted((each for told in (snapshot, *parts) for each in told.errors), key=lambda each: each.time)
    gone = (
        replace(each, id=_number(worker, each.id))
        for worker in workers
        if worker.part is not None
        for each in worker.part.gone
    )
    silent = [f"{each.peer} tells nothing of its clients" for each in workers if not is_heard(each)]
    turns = [told.turn_p99 for told in (snapshot, *parts)]
    counters = _sum([snapshot.ended_workers or Counters(), *parts])
    return replace(
        snapshot,
        clients=(*own, *_clients(workers, {each.peer for each in relays})),
        relays=relays,
        own_workers=tuple(map(_worker, workers)),
        barriers=tuple(_barrier(each, workers) for each in snapshot.barriers),
        gone=tuple(sorted((*snapshot.gone, *gone), key=lambda each: -each.seconds)),
        ended_workers=None,
        received=snapshot.received + counters.received,
        sent=snapshot.sent + counters.sent,
        accepted=counters.accepted,
        operations=_operations([snapshot, counters]),
        turn_p99=max(turns),
        history=_history(snapshot, parts),
        errors=tuple(errors),
        error_count=snapshot.error_count + counters.error_count,
        incomplete="; ".join([*filter(None, (told.incomplete for told in (snapshot, *parts))), *silent]),
    )


def with_ended(ended: Counters | None, told: bytes | None) -> Counters:
    """The counters of ended workers, including those in the last report of one more (None: it had none)."""
    try:
        last = from_text(Counters, told or b"{}")
    except ValueError:  # it is no snapshot
        last = Counters()
    operations = tuple(replace(each, per_second=0.0) for each in last.operations)
    return _sum([ended or Counters(), replace(last, operations=operations)])


def _sum(told: Sequence[Counters | Snapshot]) -> Counters:
    return Counters(
        sum(each.received for each in told),
        sum(each.sent for each in told),
        sum(each.accepted for each in told),
        _operations(told),
        sum(each.error_count for each in told),
    )


def _number(worker: Relay, number: int) -> int:
    return worker.id * _NUMBERS + number


def _worker(each: Relay) -> ServerWorker:
    clients = len(each.part.clients) if each.part is not None else -1
    return ServerWorker(each.id, each.peer, each.seconds, clients)


def _clients(workers: Iterable[Relay], relays: set[str]) -> Iterable[Client]:
    """The clients of workers. The addresses of relays are there as well: these the server knows itself."""
    for worker in workers:
        for each in worker.part.clients if worker.part is not None else ():
            if each.peer not in relays:
                yield replace(aged(each, worker.part_seconds), id=_number(worker, each.id))


def _barrier(barrier: Barrier, workers: Iterable[Relay]) -> Barrier:
    """With the clients of workers as members, instead of the workers."""
    below = {each.id: each for each in workers if each.part is not None}
    members: list[tuple[int, float]] = []
    for number, seconds in barrier.members:
        worker = below.get(number)
        if worker is None or worker.part is None:
            members.append((number, seconds))
            continue
        for each in worker.part.barriers:
            if (each.key, each.size) == (barrier.key, barrier.size):
                members += [(_number(worker, member), waited) for member, waited in each.members]
    return replace(barrier, members=tuple(members))


def _operations(told: Iterable[Counters | Snapshot]) -> tuple[Operation, ...]:
    counts: Counter[str] = Counter()
    rates: Counter[str] = Counter()
    for each in told:
        counts.update({operation.name: operation.count for operation in each.operations})
        for operation in each.operations:
            rates[operation.name] += operation.per_second  # type: ignore[assignment]
    return tuple(Operation(name, count, round(rates[name], 3)) for name, count in sorted(counts.items()))


def _history(snapshot: Snapshot, parts: Sequence[Snapshot]) -> tuple[Second, ...]:
    """The seconds of all processes side by side, the last ones together. Who waits, only workers know."""
    rows = zip_longest(
        reversed(snapshot.history), *(reversed(part.history[-len(snapshot.history) :]) for part in parts)
    )
    seconds = []
    for own, *others in rows:
        if own is None:
            break
        there = [each for each in others if each is not None]
        seconds.append(
            Second(
                own.time,
                own.operations + sum(each.operations for each in there),
                max([own.p99, *(each.p99 for each in there)]),
                sum(each.clients for each in there),
                sum(each.waiting for each in there),
            )
        )
    return tuple(reversed(seconds))
