"""A server and its workers as one server. Pure.

A server that has workers tells of them as it does of relays. But their clients are its own: they have come to
its address, and are on any machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Final

from rallypoint.codec import from_text
from rallypoint.store.rollcall.clients import aged, is_heard
from rallypoint.store.rollcall.identity import WORKER
from rallypoint.store.rollcall.snapshot import (
    Barrier,
    Client,
    Counters,
    Operation,
    Relay,
    Second,
    Snapshot,
    Worker,
)

_NUMBERS: Final = 1 << 32
"""A client of a worker gets a number beyond all that the server itself has given."""


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
    """What workers that have ended had counted, with what one more of them has told last, if anything."""
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


def _worker(each: Relay) -> Worker:
    clients = len(each.part.clients) if each.part is not None else -1
    return Worker(each.id, each.peer, each.seconds, clients)


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
