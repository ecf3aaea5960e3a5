"""The loads: ranks that come up and pass barriers, and clients that repeat one operation; all in a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from rallypoint.bench.clients import HOST, Place
from rallypoint.bench.contest import RUN_LIMIT_S, Measurement, Session
from rallypoint.bench.results import BenchError, Sample
from rallypoint.bench.targets import Target, most_connections
from rallypoint.bench.workers import Load, LoadProcess, outcomes, together

CORES_PER_PROCESS: Final = 4
"""How many cores a process of the load takes at least, so that enough are left for the server."""
MOST_PER_PROCESS: Final = 12_000
"""The kernel prefers every second port. Once those are used up, after some 14,000 clients from one address,
it tries all of them again for every connect, which then takes 150 us and not 8."""
FEWEST_PER_PROCESS: Final = 25

RANKS: Final = (1_024, 4_096, 16_384)
FEW_CLIENTS: Final = 100
MANY_CLIENTS: Final = 1_000
PIPELINED: Final = 32


def processes_for(clients: int) -> int:
    """How many processes so many clients take: if there are cores to spare, a quick server waits for none."""
    needed = -(-clients // min(MOST_PER_PROCESS, most_connections()))
    spare = len(os.sched_getaffinity(0)) // CORES_PER_PROCESS
    return max(needed, min(spare, clients // FEWEST_PER_PROCESS))


def shares_of(places: Sequence[Place], count: int) -> list[list[Place]]:
    """The places of each process: a relay's ranks together, the ranks of a server in equal parts."""
    if len(places) >= count * 8:
        return [list(places[number::count]) for number in range(count)]
    return [
        [(host, port, ranks // count + (number < ranks % count)) for host, port, ranks in places]
        for number in range(count)
    ]


class WithRanks(Session):
    """A session whose clients are in processes of their own, and count themselves."""

    clients_class = "rallypoint.bench.clients:Clients"

    def start_clients(self, count: int) -> None:
        """Start processes for so many; nobody is connected yet."""
        self.workers = [LoadProcess(self.resources, self.clients_class) for _ in range(processes_for(count))]

    def come_up(self, places: Sequence[Place]) -> Load:
        """Connect all clients."""
        shares = enumerate(zip(self.workers, shares_of(places, len(self.workers)), strict=True))
        orders = [
            worker.order("come_up", dialect=self.target.dialect, places=share, process=number)
            for number, (worker, share) in shares
        ]
        load = together(outcomes(orders, RUN_LIMIT_S))
        check_counts(load)
        return load


class ComingUp(WithRanks):
    """All ranks connect, and count themselves; then they leave again."""

    def open(self) -> None:
        self.start_clients(self.target.ranks)

    def round(self) -> Sample:
        sample = self.arrive()
        self.everyone("leave")
        self.target.await_quiet()
        return sample

    def arrive(self) -> Sample:
        """Measure until all are there."""
        resident = self.target.resident_bytes()
        sample = self.metered(lambda: self.come_up(self.target.places()))
        return replace(sample, memory=(self.target.resident_bytes() - resident) / self.target.ranks)


class Barriers(WithRanks):
    """All ranks are connected, and pass barriers, to which they come at once or one after the other."""

    def __init__(self, target: Target, measurement: Measurement, at_once: bool = True) -> None:
        super().__init__(target, measurement)
        self.at_once = at_once
        self.barriers = 0

    def open(self) -> None:
        self.start_clients(self.target.ranks)
        self.come_up(self.target.places())
        self.barrier(at_once=False)  # to warm up

    def round(self) -> Sample:
        self.target.await_quiet()
        return self.metered(lambda: self.barrier(at_once=self.at_once))

    def barrier(self, *, at_once: bool) -> Load:
        """All ranks pass a barrier, with keys of its own."""
        self.barriers += 1
        ranks = self.target.ranks
        load = together(self.everyone("barrier", name=str(self.barriers), ranks=ranks, at_once=at_once))
        check_counts(load)
        return load


def check_counts(load: Load) -> None:
    """Raise unless each count was given once, and those that ranks saw later are not lower."""
    ranks, first = len(load.counted), min(load.counted)
    if sorted(load.counted) != list(range(first, first + ranks)):
        raise BenchError(f"{ranks:,} ADDs did not give each number from {first} on once")
    if any(now < then for then, now in zip(load.counted, load.seen, strict=False)):
        raise BenchError("a count was lower than it had been before")
    if load.seen and (first, max(load.seen)) != (1, ranks):
        raise BenchError(f"ranks counted from {first} to {max(load.seen):,}, and they are {ranks:,}")


class Operations(WithRanks):
    """Clients that ask the same again and again; each has one request in flight, of some operations."""

    def __init__(
        self, target: Target, measurement: Measurement, count: int, operation: str, per_request: int = 1
    ) -> None:
        super().__init__(target, measurement)
        self.count = count
        self.asked = {"operation": operation, "per_request": per_request}

    def open(self) -> None:
        self.start_clients(self.count)
        self.come_up([(HOST, self.target.port, self.count)])
        self.everyone("ask_for", seconds=0, operation="store", per_request=1)
        self.ask_for(self.measurement.seconds / 2)

    def round(self) -> Sample:
        return self.metered(lambda: self.ask_for(self.measurement.seconds))

    def ask_for(self, seconds: float) -> Load:
        """Keep all clients busy for that long."""
        return together(self.everyone("ask_for", seconds=seconds, **self.asked))

    def value(self, load: Load) -> float:
        return load.operations / load.seconds if self.measurement.unit == "rate" else load.percentile(0.5)


def _with_ranks(command: str, name: str, load: str, session: Any) -> Measurement:
    return Measurement(command, name, load, session, sizes=RANKS)


def _many(operation: str, count: int = FEW_CLIENTS, per_request: int = 1) -> Measurement:
    name = operation.lower() + ("-pipelined" if per_request > 1 else f"-{count}" * (count > FEW_CLIENTS))
    each = f"{per_request} {operation}s" if per_request > 1 else f"one {operation}"
    session = partial(Operations, count=count, operation=operation, per_request=per_request)
    load = f"{count:,} clients, {each} in flight each"
    return Measurement("ops", name, load, session, operation, "rate", connections=count, seconds=0.8)


def _one(operation: str) -> Measurement:
    load = f"one client, one {operation} at a time"
    session = partial(Operations, count=1, operation=operation)
    return Measurement("ops", f"one-{operation.lower()}", load, session, operation, seconds=0.4)


MEASUREMENTS: Final = (
    _with_ranks("init", "init", "ranks connect, and are counted", ComingUp),
    _with_ranks("barrier", "barrier", "ranks come to a barrier all at once", Barriers),
    _with_ranks(
        *("barrier", "barrier-trickle", "ranks come to a barrier one after the other"),
        partial(Barriers, at_once=False),
    ),
    *(_many(operation) for operation in ("GET", "SET", "ADD", "CHECK")),
    *(_many(operation, MANY_CLIENTS) for operation in ("GET", "SET", "ADD", "CHECK")),
    *(_many(operation, per_request=PIPELINED) for operation in ("GET", "ADD")),
    *(_one(operation) for operation in ("GET", "SET", "ADD")),
)
"""In the order of the tables. The number of ranks goes in front of the words of a load that has any."""
