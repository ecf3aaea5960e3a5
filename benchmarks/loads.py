"""More loads: waits, restarts, new clients, requests with very many keys, and real clients of torch."""

from __future__ import annotations

import select
import socket
import statistics
import time
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.dialects import TORCH, WideDialect
from benchmarks.swarm import WideSwarm
from benchmarks.targets import renew
from rallypoint.bench.clients import ANSWER_LIMIT_S, KEY, VALUE, Exchange, connect, get
from rallypoint.bench.contest import Measurement, Session
from rallypoint.bench.loads import RUN_LIMIT_S, Busy, Steady, WithRanks, ask_once
from rallypoint.bench.results import BenchError, Sample
from rallypoint.bench.swarm import Answer, load_of
from rallypoint.bench.targets import Target, start_with_torch
from rallypoint.bench.workers import Load, Stopwatch, Worker, ask_all, start

BUSY_CLIENTS: Final = 500
BUSY_PIPELINED: Final = 4
NEW_CLIENTS: Final = 1_000
STORM_PROCESSES: Final = 2
STORM_CLIENTS: Final = 15_000
"""Two processes of 7,500: a process may often open 20,000 files, and one address has about 28,000 ports."""
MANY_KEYS: Final = 100_000


SWARM: Final = "benchmarks.swarm:WideSwarm"

TUTORIAL_LIMIT_S: Final = 120.0
TUTORIAL_BARRIERS: Final = 5
TUTORIAL_TARGETS: Final = ("rallypoint-libuv", "rallypoint-legacy", "torch-libuv", "torch-legacy")
"""Servers that torch's constructor can start: rank 0 is the master, so there is no server beforehand."""


class Wakeups(WithRanks):
    """All ranks wait for one key; then it is set."""

    swarm_class = SWARM

    def open(self) -> None:
        super().open()
        self.come_up()
        self.rounds = 0
        self.round()

    def round(self) -> Sample:
        self.rounds += 1
        key = f"/bench/wake/{self.rounds}"
        self.everyone(do="wait", key=key)
        self.target.settle()
        self.target.await_quiet()
        self.everyone(do="check_asleep")
        order = {"do": "wake", "key": key, "since": time.monotonic(), "limit_s": RUN_LIMIT_S}
        # One of the processes sets it.
        return self.phase([{**order, "release": number == 0} for number in range(len(self.swarm))])


class Restarts(WithRanks):
    """A job that is up is started again: its ranks leave, the store is made anew, and they come back.

    It is over when they have passed their first barrier. A store that still had the counts of the try
    before would be found out.
    """

    def open(self) -> None:
        super().open()
        self.come_up()
        self.barrier(at_once=True)

    def round(self) -> Sample:
        begun = time.monotonic()
        self.everyone(do="leave")
        renew(self.target)
        self.joined = 0
        renewed = time.monotonic()
        self.come_up()
        self.barrier(at_once=True)
        ended = time.monotonic()
        return Sample(ended - begun, extras={"renew_seconds": renewed - begun})


class BesideWait(Steady):
    """The same, while another client waits for very many keys."""

    def connect(self) -> None:
        waiter = self.resources.enter_context(connect(self.target.port, TORCH))
        converse(waiter, TORCH.wait_for_missing(keys_of(MANY_KEYS, "absent")))
        super().connect()


# New clients: beside others that are busy, and very many at the same moment


class Accepts(Session):
    """New clients that arrive while others are busy, with `per_request` requests in flight each.

    On a machine of two cores the new clients take time from the process of the busy ones. If each of those
    has only one request in flight, the server may then be idle for a moment, and accept at its leisure: torch
    takes anything from 0.05 to 2 seconds. With a few requests each, the server stays busy throughout.
    """

    def __init__(self, target: Target, measurement: Measurement, per_request: int) -> None:
        super().__init__(target, measurement)
        self.per_request = per_request

    def open(self) -> None:
        ask_once(self.target, self.target.dialect.store(KEY, VALUE))
        self.busy = Busy(self.resources, self.target, BUSY_CLIENTS)
        self.crowd = WideSwarm()
        self.resources.callback(self.crowd.leave)
        self.measure(NEW_CLIENTS // 10)

    def round(self) -> Sample:
        return self.measure(NEW_CLIENTS)

    def measure(self, count: int) -> Sample:
        """Let that many new clients arrive, and leave again."""
        files = self.target.open_files()
        self.crowd.gather(self.target.dialect, self.target.port, count)
        self.busy.begin(get, self.per_request)
        time.sleep(0.2)  # all of the busy clients are in full swing by then
        sample = self.metered(lambda: load_of([self.crowd.arrive(ANSWER_LIMIT_S)]))
        busy = self.busy.end()
        self.crowd.leave()
        self.target.await_open_files(files)
        return replace(sample, load_share=max(sample.load_share or 0.0, busy.share))


class Storm(Session):
    """Very many clients that connect at the same moment.

    More than the backlog holds: the kernel drops the rest, and they try again after 1, 2, 3 and more seconds.
    So the time comes in whole seconds, and differs much from round to round.
    """

    def open(self) -> None:
        self.crowds = [start(self.resources, SWARM, "a crowd") for _ in range(STORM_PROCESSES)]
        self.measure(NEW_CLIENTS)

    def round(self) -> Sample:
        return self.measure(STORM_CLIENTS)

    def measure(self, count: int) -> Sample:
        """Let that many clients arrive, and leave again."""
        target = self.target
        files, resident = target.open_files(), target.resident_bytes()
        order: dict[str, Any] = {"port": target.port, "dialect": target.dialect}
        ask_all(self.crowds, ANSWER_LIMIT_S, do="gather", count=count // STORM_PROCESSES, **order)
        dropped = dropped_connects()
        answers: list[Answer] = []

        def arrive() -> Load:
            answers.extend(ask_all(self.crowds, ANSWER_LIMIT_S, do="arrive", limit_s=ANSWER_LIMIT_S))
            return load_of(answers)

        sample = self.metered(arrive)
        sample.extras["dropped"] = dropped_connects() - dropped
        sample.extras["turned_away"] = sum(answer["turned_away"] for answer in answers)
        memory = (target.resident_bytes() - resident) / count
        ask_all(self.crowds, ANSWER_LIMIT_S, do="leave")
        target.await_open_files(files)
        return replace(sample, memory=memory)


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

    @property
    def dialect(self) -> WideDialect:
        """With requests of many keys."""
        assert isinstance(self.target.dialect, WideDialect)
        return self.target.dialect

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
            watch = Stopwatch()
            converse(self.client, exchange)
            return watch.stop(1)

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
    size = len(exchange.reply)
    unsent = memoryview(exchange.request)
    client.setblocking(False)
    poll = select.poll()
    poll.register(client, select.POLLIN | select.POLLOUT)
    while unsent or len(reply) < size:
        ready = poll.poll(ANSWER_LIMIT_S * 1000)
        if not ready:
            raise BenchError("a big request got no answer in time")
        try:
            if ready[0][1] & select.POLLOUT and unsent:
                unsent = unsent[client.send(unsent[:CHUNK]) :]
                if not unsent:
                    poll.modify(client, select.POLLIN)
            if ready[0][1] & ~select.POLLOUT:
                _take(client, reply)
        except OSError as error:
            raise BenchError(f"a big request lost its connection: {error}") from error
    if reply != exchange.reply:
        raise BenchError(f"a request of {len(exchange.request):,} bytes got a wrong answer")


def _take(client: socket.socket, reply: bytearray) -> None:
    """Add what has arrived to the reply."""
    piece = client.recv(CHUNK)
    if not piece:
        raise BenchError("a connection was closed before its reply was complete")
    reply += piece


# With real clients of torch


class Tutorial(Session):
    """Ranks with real clients of torch. Rank 0 makes the server itself, so there is none beforehand."""

    host: Worker | None = None

    def start(self) -> None:
        """Nothing to do."""

    def open(self) -> None:
        """Nothing to do: all happens in a round."""

    def time(self, barriers: int) -> dict[str, Any]:
        """The times of the constructor, `init`, and of each `barrier`, as rank 0 sees them."""
        order = {"target": self.target.name, "ranks": self.measurement.ranks, "barriers": barriers}
        if not self.host:
            self.host = start_with_torch(
                self.resources, "benchmarks.torch_processes:TutorialHost", "torch's host"
            )
        times: dict[str, Any] = self.host.ask(
            TUTORIAL_LIMIT_S, do="tutorial", **order, limit_s=TUTORIAL_LIMIT_S
        )
        return times


class TutorialInit(Tutorial):
    """The constructor on rank 0, which returns when all have joined."""

    def round(self) -> Sample:
        return Sample(self.time(0)["init"])


class TutorialBarrier(Tutorial):
    """Barriers on that store: the median of some in a row."""

    def round(self) -> Sample:
        return Sample(statistics.median(self.time(TUTORIAL_BARRIERS)["barrier"]))
