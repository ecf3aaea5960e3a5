"""More loads: waits, restarts, new clients, requests with very many keys, and real clients of torch."""

from __future__ import annotations

import select
import socket
import statistics
import tempfile
import time
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.clients import connect
from benchmarks.dialects import REDIS, TORCH
from benchmarks.targets import BehindRelays, renew
from rallypoint.bench.clients import ANSWER_LIMIT_S, Exchange
from rallypoint.bench.contest import RUN_LIMIT_S, Measurement, Session
from rallypoint.bench.loads import Barriers, ComingUp, Operations
from rallypoint.bench.results import BenchError, Sample
from rallypoint.bench.targets import Target, start_with_torch
from rallypoint.bench.workers import Load, LoadProcess, outcomes, together

BUSY_CLIENTS: Final = 500
BUSY_PIPELINED: Final = 4
NEW_CLIENTS: Final = 1_000
STORM_PROCESSES: Final = 2
STORM_CLIENTS: Final = 15_000
"""Two processes of 7,500: a process may often open 20,000 files, and one address has about 28,000 ports."""
MANY_KEYS: Final = 100_000


CLIENTS: Final = "benchmarks.clients:WideClients"
CROWD: Final = "benchmarks.clients:Crowd"

TUTORIAL_LIMIT_S: Final = 120.0
TUTORIAL_BARRIERS: Final = 5
TUTORIAL_TARGETS: Final = ("rallypoint-libuv", "rallypoint-legacy", "torch-libuv", "torch-legacy")
"""Servers that torch's constructor can start: rank 0 is the master, so there is no server beforehand."""


class ComingUpBehindRelays(ComingUp):
    """All ranks come up, and what the relays take, where there are any."""

    def arrive(self) -> Sample:
        sample = super().arrive()
        if isinstance(self.target, BehindRelays):
            whole = self.target.start_seconds + sample.value
            sample.extras.update(self.target.size(), whole_seconds=whole)
        return sample


class Wakeups(Barriers):
    """All ranks wait for one key; then it is set."""

    clients_class = CLIENTS

    def open(self) -> None:
        super().open()
        self.rounds = 0
        self.round()

    def round(self) -> Sample:
        self.rounds += 1
        key = f"/bench/wake/{self.rounds}"
        self.everyone("wait", key=key)
        self.target.settle()
        self.target.await_quiet()
        self.everyone("check_asleep")
        return self.metered(lambda: self.wake(key))

    def wake(self, key: str) -> Load:
        """One of the processes sets the key."""
        since = time.monotonic()
        orders = [
            worker.order("wake", key=key, since=since, release=number == 0)
            for number, worker in enumerate(self.workers)
        ]
        return together(outcomes(orders, RUN_LIMIT_S))


class Restarts(Barriers):
    """A job that is up is started again: its ranks leave, the store is made anew, and they come back.

    It is over when they have passed their first barrier. A store that still had the counts of the try
    before would be found out.
    """

    def round(self) -> Sample:
        begun = time.monotonic()
        self.everyone("leave")
        renew(self.target)
        self.barriers = 0
        renewed = time.monotonic()
        counted = self.come_up(self.target.places()).counted
        if min(counted) != 1:
            raise BenchError(f"a new store counts from {min(counted):,} on")
        self.barrier(at_once=True)
        ended = time.monotonic()
        return Sample(ended - begun, extras={"renew_seconds": renewed - begun})


class Cancels(Operations):
    """A client that gives up waits, while another one waits for very many keys."""

    clients_class = CLIENTS

    def open(self) -> None:
        waiter = self.resources.enter_context(connect(self.target.port, TORCH))
        converse(waiter, TORCH.wait_for_missing(keys_of(MANY_KEYS, "absent")))
        super().open()


# New clients: beside others that are busy, and very many at the same moment


class Storm(Session):
    """Very many clients that connect at the same moment.

    More than the backlog holds: the kernel drops the rest, and they try again after 1, 2, 3 and more seconds.
    So the time comes in whole seconds, and differs much from round to round.
    """

    processes = STORM_PROCESSES

    def open(self) -> None:
        self.crowds = [LoadProcess(self.resources, CROWD) for _ in range(self.processes)]
        self.measure(NEW_CLIENTS)

    def round(self) -> Sample:
        return self.measure(STORM_CLIENTS)

    def measure(self, count: int) -> Sample:
        """Let that many clients arrive, and leave again."""
        resident = self.target.resident_bytes()
        self.gather(count)
        dropped = dropped_connects()
        turned_away: list[int] = []

        def arrive() -> Load:
            answers = self.crowd("arrive", limit_s=ANSWER_LIMIT_S)
            turned_away.extend(count for _, count in answers)
            return together([load for load, _ in answers])

        sample = self.metered(arrive)
        sample.extras.update(dropped=dropped_connects() - dropped, turned_away=sum(turned_away))
        memory = (self.target.resident_bytes() - resident) / count
        self.crowd("leave")
        self.target.await_quiet()
        return replace(sample, memory=memory)

    def gather(self, count: int) -> None:
        place = {"dialect": self.target.dialect, "port": self.target.port}
        self.crowd("gather", **place, count=count // len(self.crowds))

    def crowd(self, do: str, **arguments: object) -> list[Any]:
        """Give an order to all of the crowd."""
        return outcomes([each.order(do, **arguments) for each in self.crowds], ANSWER_LIMIT_S)


class Accepts(Operations):
    """New clients that arrive while others are busy, with `per_request` requests in flight each.

    On a machine of two cores the new clients take time from the process of the busy ones. If each of those
    has only one request in flight, the server may then be idle for a moment, and accept at its leisure: torch
    takes anything from 0.05 to 2 seconds. With a few requests each, the server stays busy throughout.
    """

    clients_class = CLIENTS

    def __init__(self, target: Target, measurement: Measurement, per_request: int) -> None:
        super().__init__(target, measurement, BUSY_CLIENTS, "GET", per_request)

    def open(self) -> None:
        super().open()
        self.crowd = LoadProcess(self.resources, CROWD)
        self.measure(NEW_CLIENTS // 10)

    def round(self) -> Sample:
        return self.measure(NEW_CLIENTS)

    def measure(self, count: int) -> Sample:
        """Let that many new clients arrive, and leave again."""
        place = {"dialect": self.target.dialect, "port": self.target.port}
        self.crowd.ask(ANSWER_LIMIT_S, "gather", **place, count=count)
        with tempfile.TemporaryDirectory() as folder:
            end = Path(folder, "end")
            busy = [worker.order("ask_until", path=end, **self.asked) for worker in self.workers]
            time.sleep(0.2)  # all of the busy clients are in full swing by then
            sample = self.metered(lambda: self.crowd.ask(ANSWER_LIMIT_S, "arrive", limit_s=ANSWER_LIMIT_S)[0])
            end.touch()
            share = together(outcomes(busy, ANSWER_LIMIT_S)).share
        self.crowd.ask(ANSWER_LIMIT_S, "leave")
        self.target.await_quiet()
        return replace(sample, load_share=max(sample.load_share or 0.0, share))

    def value(self, load: Load) -> float:
        return load.seconds


def dropped_connects() -> int:
    """How many connections this system has dropped so far because a backlog was full; they retry."""
    names, values = Path("/proc/net/netstat").read_text(encoding="utf-8").splitlines()[:2]
    return int(dict(zip(names.split(), values.split(), strict=True))["ListenOverflows"])


# One request with very many keys


def keys_of(count: int, name: str = "key") -> list[bytes]:
    """Keys that look like those of a job: a prefix and a number."""
    return [b"/bench/%s-%06d" % (name.encode(), number) for number in range(count)]


def values_of(count: int, generation: int = 0) -> list[bytes]:
    """Values of 16 bytes, a different one for every key and every generation."""
    return [b"%04d-%011d" % (generation, number) for number in range(count)]


class Bulk(Session):
    """One client, and a request with many keys."""

    def __init__(self, target: Target, measurement: Measurement) -> None:
        super().__init__(target, measurement)
        self.dialect = REDIS if target.dialect is REDIS else TORCH

    def open(self) -> None:
        self.keys = keys_of(MANY_KEYS)
        self.client = self.resources.enter_context(connect(self.target.port, self.target.dialect))
        self.measure(1_000)

    def round(self) -> Sample:
        return self.measure(MANY_KEYS)

    @abstractmethod
    def measure(self, count: int) -> Sample:
        """The request with that many of the keys."""

    def timed(self, exchange: Exchange) -> Sample:
        """Send the request and check its reply."""

        def ask() -> Load:
            load = Load()
            converse(self.client, exchange)
            load.stop(1)
            load.taken.append(load.seconds)
            return load

        return self.metered(ask)


class MultiGet(Bulk):
    """The keys are read."""

    def open(self) -> None:
        self.values = values_of(MANY_KEYS)
        # One after the other in a row: torch takes ten seconds for the request that would store them all.
        pairs = zip(keys_of(MANY_KEYS), self.values, strict=True)
        each = [self.target.dialect.store(key, value) for key, value in pairs]
        with connect(self.target.port, self.target.dialect) as client:
            converse(client, Exchange(b"".join(x.request for x in each), b"".join(x.reply for x in each)))
        super().open()

    def measure(self, count: int) -> Sample:
        return self.timed(self.dialect.multi_get(self.keys[:count], self.values[:count]))


class MultiSet(Bulk):
    """Values are stored, other ones each time; some are read afterwards."""

    generation = 0

    def measure(self, count: int) -> Sample:
        self.generation += 1
        dialect, keys, values = self.dialect, self.keys[:count], values_of(count, self.generation)
        measured = self.timed(dialect.multi_set(keys, values))
        step = max(1, count // 100)
        converse(self.client, dialect.multi_get(keys[::step], values[::step]))
        return measured


CHUNK: Final = 1 << 20


def converse(client: socket.socket, exchange: Exchange) -> None:
    """Send a request of any size while its reply is read and checked: neither side can block the other."""
    reply = bytearray()
    unsent = memoryview(exchange.request)
    client.setblocking(False)
    poll = select.poll()
    poll.register(client, select.POLLIN | select.POLLOUT)
    while unsent or len(reply) < len(exchange.reply):
        ready = poll.poll(ANSWER_LIMIT_S * 1000)
        if not ready:
            raise BenchError("a big request got no answer in time")
        if ready[0][1] & select.POLLOUT and unsent:
            unsent = unsent[client.send(unsent[:CHUNK]) :]
            if not unsent:
                poll.modify(client, select.POLLIN)
        if ready[0][1] & ~select.POLLOUT:
            piece = client.recv(CHUNK)
            if not piece:
                raise BenchError("a connection was closed before its reply was complete")
            reply += piece
    if reply != exchange.reply:
        raise BenchError(f"a request of {len(exchange.request):,} bytes got a wrong answer")


# With real clients of torch


class Tutorial(Session):
    """Ranks with real clients of torch. Rank 0 makes the server itself, so there is none beforehand."""

    def start(self) -> None:
        """Nothing to do."""

    def open(self) -> None:
        self.host = start_with_torch(self.resources, "benchmarks.torch_processes:TutorialHost")

    def time(self, barriers: int) -> dict[str, Any]:
        """The times of the constructor, `init`, and of each `barrier`, as rank 0 sees them."""
        order = {"target": self.target.name, "ranks": self.measurement.ranks, "barriers": barriers}
        limit = TUTORIAL_LIMIT_S
        times: dict[str, Any] = self.host.ask(2 * limit, "tutorial", **order, limit_s=limit)
        return times


class TutorialInit(Tutorial):
    """The constructor on rank 0, which returns when all have joined."""

    def round(self) -> Sample:
        return Sample(self.time(0)["init"])


class TutorialBarrier(Tutorial):
    """Barriers on that store: the median of some in a row."""

    def round(self) -> Sample:
        return Sample(statistics.median(self.time(TUTORIAL_BARRIERS)["barrier"]))
