"""Loads of single clients: operations, new clients, requests with very many keys, and waits given up."""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from socket import MSG_WAITALL
from typing import Any, Final

from rallypoint.bench import machine
from rallypoint.bench.clients import (
    ANSWER_LIMIT_S,
    KEY,
    VALUE,
    Ask,
    check,
    check_silent,
    connect,
    converse,
    get,
)
from rallypoint.bench.contest import Measurement, Session
from rallypoint.bench.dialects import TORCH, Exchange
from rallypoint.bench.results import Sample
from rallypoint.bench.swarm import Swarm, load_of
from rallypoint.bench.targets import Target
from rallypoint.bench.workers import Load, Stopwatch, ask_all, ask_each, start

CLIENTS: Final = 100
MANY_CLIENTS: Final = 1_000
PIPELINED: Final = 32
BUSY_CLIENTS: Final = 500
BUSY_PIPELINED: Final = 4
NEW_CLIENTS: Final = 1_000
STORM_PROCESSES: Final = 2
STORM_CLIENTS: Final = 15_000
"""Two processes of 7,500: a process may often open 20,000 files, and one address has about 28,000 ports."""
MANY_KEYS: Final = 100_000


class Busy:
    """Clients that always have a request in flight, in processes of their own, which the resources end.

    There are several where there are cores to spare: one cannot ask as fast as a server answers.
    """

    def __init__(self, resources: ExitStack, target: Target, count: int) -> None:
        processes = min(machine.spare_processes(), count)
        self._workers = [
            start(resources, "rallypoint.bench.clients", "busy clients") for _ in range(processes)
        ]
        place: dict[str, Any] = {"do": "connect", "port": target.port, "dialect": target.dialect}
        firsts = [count * number // processes for number in range(processes + 1)]
        shares = [{"first": first, "count": end - first} for first, end in itertools.pairwise(firsts)]
        ask_each(self._workers, ANSWER_LIMIT_S, [{**place, **share} for share in shares])

    def begin(self, ask: Ask, per_request: int) -> None:
        """Let all of them ask, until `end`."""
        for worker in self._workers:
            worker.order(do="run", ask=ask, per_request=per_request)

    def end(self) -> Load:
        """What they did."""
        return load_of(ask_all(self._workers, ANSWER_LIMIT_S, do="stop"))


def ask_once(target: Target, exchange: Exchange) -> None:
    """Let a client of its own ask something, and leave."""
    with connect(target.port, target.dialect) as client:
        converse(client, exchange)


# Operations: the most that the server can do, and one at a time


class Timed(Session):
    """A load that goes on for as long as a round lasts: the same question again and again."""

    def __init__(self, target: Target, measurement: Measurement, ask: Ask) -> None:
        super().__init__(target, measurement)
        self.ask = ask

    def open(self) -> None:
        ask_once(self.target, self.target.dialect.store(KEY, VALUE))
        self.connect()
        self.run(self.measurement.seconds / 2)

    def round(self) -> Sample:
        load, cost = self.metered(lambda: self.run(self.measurement.seconds))
        return cost.sample(self.value(load), load)

    @abstractmethod
    def connect(self) -> None:
        """Connect the clients."""

    @abstractmethod
    def run(self, seconds: float) -> Load:
        """Keep busy for that long."""

    @abstractmethod
    def value(self, load: Load) -> float:
        """The figure that the record is about."""


class Steady(Timed):
    """Many clients that always have a request in flight, each of `per_request` operations."""

    def __init__(
        self, target: Target, measurement: Measurement, ask: Ask, count: int = CLIENTS, per_request: int = 1
    ) -> None:
        super().__init__(target, measurement, ask)
        self.count, self.per_request = count, per_request

    def connect(self) -> None:
        self.busy = Busy(self.resources, self.target, self.count)

    def run(self, seconds: float) -> Load:
        self.busy.begin(self.ask, self.per_request)
        time.sleep(seconds)
        return self.busy.end()

    def value(self, load: Load) -> float:
        is_rate = self.measurement.unit == "rate"
        return load.operations / load.seconds if is_rate else load.seconds / load.operations


class BesideWait(Steady):
    """The same, while another client waits for very many keys."""

    def connect(self) -> None:
        waiter = self.resources.enter_context(connect(self.target.port, TORCH))
        converse(waiter, TORCH.wait_for_missing(keys_of(MANY_KEYS, "absent")))
        super().connect()


class OneAtATime(Timed):
    """One client, one operation at a time.

    It speaks for two clients in turn: a server may know a value that stays the same, and no job does that.
    """

    def connect(self) -> None:
        self.client = self.resources.enter_context(connect(self.target.port, self.target.dialect))
        self.counted = 0

    def value(self, load: Load) -> float:
        assert load.p50 is not None
        return load.p50

    def run(self, seconds: float) -> Load:
        watch, taken = Stopwatch(), list[float]()
        clock, send, receive = time.perf_counter, self.client.send, self.client.recv
        deadline = clock() + seconds
        ended = 0.0
        while ended < deadline:
            exchange = self.ask(self.target.dialect, self.counted % 2, self.counted // 2 + 1)
            self.counted += 1
            begun = clock()
            send(exchange.request)
            reply = receive(len(exchange.reply), MSG_WAITALL)
            ended = clock()
            taken.append(ended - begun)
            check(reply, exchange.reply)
        check_silent(self.client)
        return watch.stop(len(taken), taken)


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
        self.crowd = Swarm()
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
        answer, cost = self.metered(lambda: self.crowd.arrive(ANSWER_LIMIT_S))
        busy = self.busy.end()
        self.crowd.leave()
        self.target.await_open_files(files)
        load = load_of([answer])
        return replace(cost.sample(load.seconds, load), load_share=max(load.share, busy.share))


class Storm(Session):
    """Very many clients that connect at the same moment.

    More than the backlog holds: the kernel drops the rest, and they try again after 1, 2, 3 and more seconds.
    So the time comes in whole seconds, and differs much from round to round.
    """

    def open(self) -> None:
        self.crowds = [
            start(self.resources, "rallypoint.bench.swarm", "a crowd") for _ in range(STORM_PROCESSES)
        ]
        self.measure(NEW_CLIENTS)

    def round(self) -> Sample:
        return self.measure(STORM_CLIENTS)

    def measure(self, count: int) -> Sample:
        """Let that many clients arrive, and leave again."""
        target = self.target
        files, resident = target.open_files(), target.resident_bytes()
        order: dict[str, Any] = {"port": target.port, "dialect": target.dialect}
        ask_all(self.crowds, ANSWER_LIMIT_S, do="gather", count=count // STORM_PROCESSES, **order)
        dropped = machine.dropped_connects()
        arrive: dict[str, Any] = {"do": "arrive", "limit_s": ANSWER_LIMIT_S}
        answers, cost = self.metered(lambda: ask_all(self.crowds, ANSWER_LIMIT_S, **arrive))
        cost.extras["dropped"] = machine.dropped_connects() - dropped
        cost.extras["turned_away"] = sum(answer["turned_away"] for answer in answers)
        memory = (target.resident_bytes() - resident) / count
        ask_all(self.crowds, ANSWER_LIMIT_S, do="leave")
        target.await_open_files(files)
        load = load_of(answers)
        return replace(cost.sample(load.seconds, load), memory=memory)


# One request with very many keys


def keys_of(count: int, name: str = "key") -> list[bytes]:
    """Keys that look like those of a job: a prefix and a number."""
    return [b"/bench/%s-%06d" % (name.encode(), number) for number in range(count)]


def values_of(count: int, generation: int = 0) -> list[bytes]:
    """Values of 16 bytes, a different one for every key and every generation."""
    return [b"%04d-%011d" % (generation, number) for number in range(count)]


class Bulk(Session):
    """One client, and a request with many keys."""

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

        load, cost = self.metered(ask)
        return cost.sample(load.seconds, load)


class MultiGet(Bulk):
    """The keys are read."""

    def open(self) -> None:
        self.values = values_of(MANY_KEYS)
        # One after the other in a row: torch takes ten seconds for the request that would store them all.
        pairs = zip(keys_of(MANY_KEYS), self.values, strict=True)
        each = [self.target.dialect.store(key, value) for key, value in pairs]
        ask_once(self.target, Exchange(b"".join(x.request for x in each), b"".join(x.reply for x in each)))
        super().open()

    def measure(self, count: int) -> Sample:
        return self.timed(self.target.dialect.multi_get(self.keys[:count], self.values[:count]))


class MultiSet(Bulk):
    """Values are stored, other ones each time; some are read afterwards."""

    generation = 0

    def measure(self, count: int) -> Sample:
        self.generation += 1
        dialect, keys, values = self.target.dialect, self.keys[:count], values_of(count, self.generation)
        measured = self.timed(dialect.multi_set(keys, values))
        step = max(1, count // 100)
        converse(self.client, dialect.multi_get(keys[::step], values[::step]))
        return measured
