"""What is measured: each scenario is a load, the unit of its result and the ratio to torch that is wanted."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from benchmarks import frames
from benchmarks.generators import END, GO, Generator, arrive, keep_busy
from benchmarks.load import Crowd, Load, RoundRobin, connect, exchange, until
from benchmarks.servers import Server, ServerError

CLIENTS = 100
PIPELINED = 32
BUSY_CLIENTS = 500
NEW_CLIENTS = 1_000
MANY_KEYS = 100_000
STORM_GENERATORS = 2
STORM_CLIENTS = 15_000
"""Two processes of 7,500: a process may often open 20,000 files, and one address has about 28,000 ports."""

KEY = b"/bench/key"
VALUE = b"sixteen bytes...".ljust(16)
REQUEST = frames.get(KEY)
REPLY = frames.blob(VALUE)


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    rounds: int
    seconds: float
    """Of a round of a steady load."""
    rounds_of_slow: int
    """The most rounds of the scenarios where torch takes many seconds for each."""


@dataclass(frozen=True)
class Sample:
    """The result of one round with one server."""

    value: float
    """Operations per second, or seconds per operation."""
    cpu: float
    """Of the server, in seconds per operation."""
    share: float
    """How much of a core the busiest generator process took."""
    memory: float | None = None
    """By how many bytes the server grew per connection."""


class Session(ABC):
    """A scenario in progress with one server."""

    def __init__(self, server: Server, plan: Plan) -> None:
        self.server = server
        self.plan = plan
        self.resources = ExitStack()

    @abstractmethod
    def open(self) -> None:
        """Connect, store what has to be there, and warm up."""

    @abstractmethod
    def round(self) -> Sample:
        """Measure once."""

    def close(self) -> None:
        """Let go of everything, however much of it there is."""
        self.resources.close()

    def metered(self, work: Callable[[], Load]) -> tuple[Load, float]:
        """Do some work; return also the CPU time that the server spent meanwhile."""
        before = self.server.cpu_seconds()
        load = work()
        return load, self.server.cpu_seconds() - before


@dataclass(frozen=True)
class Scenario:
    """One row of the table."""

    name: str
    load: str
    operation: str
    kind: Literal["rate", "time"]
    wanted: float
    session: Callable[[Server, Plan], Session]
    is_slow: bool = False

    def rounds(self, plan: Plan) -> int:
        """How many rounds the plan has for this scenario."""
        return min(plan.rounds, plan.rounds_of_slow) if self.is_slow else plan.rounds

    def ratio(self, torch: float, ours: float) -> float:
        """How many times better ours is."""
        return ours / torch if self.kind == "rate" else torch / ours


def store_one(port: int) -> None:
    """Store the key that GETs ask for."""
    with connect(port) as client:
        exchange(client, frames.store(KEY, VALUE) + frames.PING, len(frames.PONG))


class Gets(Session):
    """Clients that each GET one key again and again, some requests to a write."""

    per_request = 1

    def open(self) -> None:
        store_one(self.server.port)
        many = self.per_request
        self.clients = RoundRobin(self.server.port, CLIENTS, REQUEST * many, REPLY * many)
        self.resources.callback(self.clients.close)
        self.run(self.plan.seconds / 2)

    def round(self) -> Sample:
        load, cpu = self.metered(lambda: self.run(self.plan.seconds))
        return Sample(load.operations / load.seconds, cpu / load.operations, load.share)

    def run(self, seconds: float) -> Load:
        return self.clients.run(until(time.perf_counter() + seconds), self.per_request)


class PipelinedGets(Gets):
    """The same, with many requests in flight per client."""

    per_request = PIPELINED


class Accepts(Session):
    """New clients that arrive while others are busy."""

    def open(self) -> None:
        store_one(self.server.port)
        self.crowd = Crowd(self.server.port, NEW_CLIENTS)
        self.resources.callback(self.crowd.leave)
        self.busy = Generator(keep_busy, self.server.port, BUSY_CLIENTS, REQUEST, REPLY)
        self.resources.callback(self.busy.close)
        self.busy.hear()
        self.round()

    def round(self) -> Sample:
        files = self.server.open_files()
        self.busy.say(GO)
        time.sleep(0.2)  # all of the busy clients are in full swing by then
        load, cpu = self.metered(self.crowd.arrive)
        self.busy.say(END)
        busy = self.busy.hear_load()
        self.crowd.leave()
        self.server.await_open_files(files)
        return Sample(load.seconds, cpu / load.operations, max(load.share, busy.share))


class Bulk(Session):
    """One request with very many keys, from one client."""

    def open(self) -> None:
        self.keys = frames.bench_keys(MANY_KEYS)
        self.generation = 0
        self.client = self.resources.enter_context(connect(self.server.port))
        self.seed()
        self.measure(1_000)

    def seed(self) -> None:
        """Store what has to be there."""

    @abstractmethod
    def measure(self, count: int) -> Sample:
        """The request with that many of the keys."""

    def round(self) -> Sample:
        return self.measure(MANY_KEYS)

    def timed(self, request: bytes, reply: bytes) -> Sample:
        """Send the request and check its reply."""
        load, cpu = self.metered(lambda: self.ask(request, reply))
        return Sample(load.seconds, cpu, load.share)

    def ask(self, request: bytes, reply: bytes) -> Load:
        cpu, start = time.process_time(), time.perf_counter()
        got = exchange(self.client, request, len(reply))
        load = Load(1, start, time.perf_counter(), time.process_time() - cpu)
        if got != reply:
            raise ServerError(f"a request of {len(request):,} bytes got a wrong answer")
        return load


class MultiGet(Bulk):
    """A MULTI_GET."""

    def seed(self) -> None:
        self.values = frames.bench_values(MANY_KEYS)
        pairs = zip(self.keys, self.values, strict=True)
        # SETs in a row: torch takes ten seconds for the MULTI_SET that would do the same.
        self.ask(b"".join(frames.store(key, value) for key, value in pairs) + frames.PING, frames.PONG)

    def measure(self, count: int) -> Sample:
        reply = b"".join(map(frames.blob, self.values[:count]))
        return self.timed(frames.multi_get(self.keys[:count]), reply)


class MultiSet(Bulk):
    """A MULTI_SET, with other values each time, and a PING to see it done."""

    def measure(self, count: int) -> Sample:
        self.generation += 1
        values = frames.bench_values(count, self.generation)
        request = frames.multi_set(zip(self.keys[:count], values, strict=True))
        sample = self.timed(request + frames.PING, frames.PONG)
        some = range(0, count, max(1, count // 1_000))
        reply = b"".join(frames.blob(values[number]) for number in some)
        self.ask(b"".join(frames.get(self.keys[number]) for number in some), reply)
        return sample


class Cancels(Session):
    """A client that waits and gives up, again and again, while another waits on very many keys."""

    def open(self) -> None:
        absent = frames.bench_keys(MANY_KEYS, "absent")
        waiter = self.resources.enter_context(connect(self.server.port))
        # The PING's answer tells that the server has taken in the whole WAIT before it.
        if exchange(waiter, frames.wait(absent) + frames.PING, len(frames.PONG)) != frames.PONG:
            raise ServerError("a WAIT on missing keys got a wrong answer")
        request = frames.wait([b"/bench/missing"]) + frames.CANCEL_WAIT
        self.client = RoundRobin(self.server.port, 1, request, frames.WAIT_CANCELED)
        self.resources.callback(self.client.close)
        self.run(self.plan.seconds / 2)

    def round(self) -> Sample:
        load, cpu = self.metered(lambda: self.run(self.plan.seconds))
        return Sample(load.seconds / load.operations, cpu / load.operations, load.share)

    def run(self, seconds: float) -> Load:
        return self.client.run(until(time.perf_counter() + seconds))


class Storm(Session):
    """Very many clients that connect at the same moment."""

    def open(self) -> None:
        self.generators: list[Generator] = []
        warm_up = Crowd(self.server.port, NEW_CLIENTS)
        files = self.server.open_files()
        warm_up.arrive()
        warm_up.leave()
        self.server.await_open_files(files)
        for _ in range(STORM_GENERATORS):
            generator = Generator(arrive, self.server.port, STORM_CLIENTS // STORM_GENERATORS)
            self.resources.callback(generator.close)
            self.generators.append(generator)
        for generator in self.generators:
            generator.hear()

    def round(self) -> Sample:
        files, resident = self.server.open_files(), self.server.resident_bytes()
        cpu = self.server.cpu_seconds()
        loads = self.everyone(GO)
        cpu = self.server.cpu_seconds() - cpu
        memory = (self.server.resident_bytes() - resident) / STORM_CLIENTS
        self.everyone(END)
        self.server.await_open_files(files)
        seconds = max(load.end for load in loads) - min(load.start for load in loads)
        share = max(load.share for load in loads)
        return Sample(seconds, cpu / STORM_CLIENTS, share, memory)

    def everyone(self, word: str) -> list[Load]:
        """Say a word to all generators; return what they did."""
        for generator in self.generators:
            generator.say(word)
        heard = [generator.hear() for generator in self.generators]
        return [load for load in heard if load is not None]


def _scenarios() -> list[Scenario]:
    many, storm = f"{MANY_KEYS:,}", f"{STORM_CLIENTS:,}"
    return [
        Scenario("get", f"{CLIENTS} clients, one GET in flight each", "GET", "rate", 0.85, Gets),
        Scenario(
            "get-pipelined", f"{CLIENTS} clients, {PIPELINED} GETs a write", "GET", "rate", 3, PipelinedGets
        ),
        Scenario(
            "accept",
            f"{NEW_CLIENTS:,} new clients beside {BUSY_CLIENTS} busy ones",
            "new client",
            "time",
            10,
            Accepts,
        ),
        Scenario("multi-get", f"one request for {many} keys", "request", "time", 20, MultiGet, True),
        Scenario("multi-set", f"one request with {many} keys", "request", "time", 20, MultiSet, True),
        Scenario(
            "cancel", f"WAIT and CANCEL_WAIT beside a WAIT on {many} keys", "cancel", "time", 50, Cancels
        ),
        Scenario("connect-storm", f"{storm} clients connect at once", "connection", "time", 1.5, Storm, True),
    ]


SCENARIOS = {scenario.name: scenario for scenario in _scenarios()}
