"""What is measured: each scenario is a load, the unit of its result and the ratio to torch that is wanted."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Literal

import frames
from generators import END, GO, Generator, arrive, keep_busy
from load import Crowd, Load, RoundRobin, connect, exchange, until
from servers import Server, ServerError, dropped_connects

CLIENTS = 100
PIPELINED = 32
BUSY_CLIENTS = 500
BUSY_PIPELINED = 4
NEW_CLIENTS = 1_000
MANY_KEYS = 100_000
STORM_GENERATORS = 2
STORM_CLIENTS = 15_000
"""Two processes of 7,500: a process may often open 20,000 files, and one address has about 28,000 ports."""

KEY = b"/bench/key"
VALUE = b"sixteen bytes..."
REQUEST = frames.get(KEY)
REPLY = frames.blob(VALUE)


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    rounds: int
    seconds: float
    """Of a round of a steady load."""
    slow_rounds: int
    """The most rounds where one takes seconds."""
    slowest_rounds: int
    """The most rounds where one takes torch ten seconds or more."""


@dataclass(frozen=True)
class Sample:
    """The result of one round with one server."""

    value: float
    """Operations per second, or seconds per operation."""
    cpu: float
    """Of the server, in seconds per operation."""
    busy: float
    """How much of a core the server took."""
    share: float
    """How much of a core the busiest generator process took."""
    memory: float | None = None
    """By how many bytes the server grew per connection."""
    dropped: int | None = None
    """How many connects, first or repeated, found the backlog full."""


def sample(value: float, load: Load, cpu: float) -> Sample:
    """The result of one load, for which the server took that much CPU time."""
    return Sample(value, cpu / load.operations, cpu / load.seconds, load.share)


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
    pace: Literal["steady", "erratic", "slow", "slowest"] = "steady"

    def rounds(self, plan: Plan) -> int:
        """How many rounds the plan has for this scenario."""
        if self.pace == "erratic":
            return plan.rounds * 3  # short ones, that differ so much that a median needs more of them
        most = {"steady": plan.rounds, "slow": plan.slow_rounds, "slowest": plan.slowest_rounds}
        return min(plan.rounds, most[self.pace])

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
        return sample(load.operations / load.seconds, load, cpu)

    def run(self, seconds: float) -> Load:
        return self.clients.run(until(time.perf_counter() + seconds), self.per_request)


class PipelinedGets(Gets):
    """The same, with many requests in flight per client."""

    per_request = PIPELINED


class Accepts(Session):
    """New clients that arrive while others are busy."""

    per_request = 1

    def open(self) -> None:
        store_one(self.server.port)
        request, reply = REQUEST * self.per_request, REPLY * self.per_request
        self.busy = Generator(keep_busy, self.server.port, BUSY_CLIENTS, request, reply)
        self.resources.callback(self.busy.close)
        self.busy.hear()
        self.measure(NEW_CLIENTS // 10)

    def round(self) -> Sample:
        return self.measure(NEW_CLIENTS)

    def measure(self, count: int) -> Sample:
        """Let that many new clients arrive, and leave again."""
        files = self.server.open_files()
        crowd = Crowd(self.server.port, count)
        with closing(crowd):
            crowd.gather()
            self.busy.say(GO)
            time.sleep(0.2)  # all of the busy clients are in full swing by then
            load, cpu = self.metered(crowd.arrive)
            self.busy.say(END)
            busy = self.busy.hear_load()
        self.server.await_open_files(files)
        return replace(sample(load.seconds, load, cpu), share=max(load.share, busy.share))


class AcceptsBesidePipelining(Accepts):
    """The same, beside clients with some requests in flight each.

    On a machine of two cores the new clients take time from the generator of the busy ones. If each of those
    has but one request in flight, the server may then be idle for a moment, and accept at its leisure: torch
    takes anything from 0.05 to 2 seconds. With a few requests each, the server stays busy throughout.
    """

    per_request = BUSY_PIPELINED


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
        return sample(load.seconds, load, cpu)

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
        return sample(load.seconds / load.operations, load, cpu)

    def run(self, seconds: float) -> Load:
        return self.client.run(until(time.perf_counter() + seconds))


class Storm(Session):
    """Very many clients that connect at the same moment.

    More than the backlog holds: the kernel drops the rest, and they try again after 1, 2, 3 and more seconds.
    So the time comes in whole seconds, and differs much from round to round.
    """

    def open(self) -> None:
        self.generators: list[Generator] = []
        self.warm_up()
        for _ in range(STORM_GENERATORS):
            generator = Generator(arrive, self.server.port, STORM_CLIENTS // STORM_GENERATORS)
            self.resources.callback(generator.close)
            self.generators.append(generator)
        for generator in self.generators:
            generator.hear()

    def round(self) -> Sample:
        files, resident = self.server.open_files(), self.server.resident_bytes()
        cpu, dropped = self.server.cpu_seconds(), dropped_connects()
        loads = self.everyone(GO)
        cpu, dropped = self.server.cpu_seconds() - cpu, dropped_connects() - dropped
        memory = (self.server.resident_bytes() - resident) / STORM_CLIENTS
        self.everyone(END)
        self.server.await_open_files(files)
        seconds = max(load.end for load in loads) - min(load.start for load in loads)
        share = max(load.share for load in loads)
        return Sample(seconds, cpu / STORM_CLIENTS, cpu / seconds, share, memory, dropped)

    def warm_up(self) -> None:
        files = self.server.open_files()
        with closing(Crowd(self.server.port, NEW_CLIENTS)) as crowd:
            crowd.gather()
            crowd.arrive()
        self.server.await_open_files(files)

    def everyone(self, word: str) -> list[Load]:
        """Say a word to all generators; return what they did."""
        for generator in self.generators:
            generator.say(word)
        heard = [generator.hear() for generator in self.generators]
        return [load for load in heard if load is not None]


def scenario_list() -> list[Scenario]:
    """All scenarios, in the order of the table."""
    keys, new = f"{MANY_KEYS:,} keys", f"{NEW_CLIENTS:,} new clients"
    gets = f"{CLIENTS} clients, one GET in flight each"
    pipelined = f"{CLIENTS} clients, {PIPELINED} GETs in flight each"
    busy = f"{new} beside {BUSY_CLIENTS} with one GET in flight"
    busier = f"{new} beside {BUSY_CLIENTS} with {BUSY_PIPELINED} GETs in flight"
    cancels = f"WAIT, CANCEL_WAIT beside a WAIT on {keys}"
    storm = f"{STORM_CLIENTS:,} clients connect at once"
    return [
        Scenario("get", gets, "GET", "rate", 0.85, Gets),
        Scenario("get-pipelined", pipelined, "GET", "rate", 3, PipelinedGets),
        Scenario("accept", busy, "new client", "time", 10, Accepts, "erratic"),
        Scenario("accept-pipelined", busier, "new client", "time", 10, AcceptsBesidePipelining, "slow"),
        Scenario("multi-get", f"one request for {keys}", "request", "time", 20, MultiGet, "slowest"),
        Scenario("multi-set", f"one request with {keys}", "request", "time", 20, MultiSet, "slowest"),
        Scenario("cancel", cancels, "cancel", "time", 50, Cancels),
        Scenario("connect-storm", storm, "connection", "time", 1.5, Storm),
    ]


SCENARIOS = {scenario.name: scenario for scenario in scenario_list()}
