"""Loads of single clients: operations, new clients, requests with very many keys, and waits given up."""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import closing
from dataclasses import replace
from socket import MSG_WAITALL
from typing import Final

from rallypoint.bench import machine
from rallypoint.bench.clients import (
    ANSWER_LIMIT_S,
    BusyClients,
    Crowd,
    after,
    check,
    check_silent,
    connect,
    converse,
)
from rallypoint.bench.contest import Session
from rallypoint.bench.dialects import TORCH, Exchange
from rallypoint.bench.results import Sample
from rallypoint.bench.workers import Load, Message, Stopwatch, ask_all, start, together

CLIENTS: Final = 100
PIPELINED: Final = 32
BUSY_CLIENTS: Final = 500
BUSY_PIPELINED: Final = 4
NEW_CLIENTS: Final = 1_000
STORM_PROCESSES: Final = 2
STORM_CLIENTS: Final = 15_000
"""Two processes of 7,500: a process may often open 20,000 files, and one address has about 28,000 ports."""
MANY_KEYS: Final = 100_000

KEY: Final = b"/bench/key"
VALUE: Final = b"sixteen bytes..."
_WORKER: Final = "rallypoint.bench.clients"


# Operations: the most that the server can do, and one at a time


class Timed(Session):
    """A load that goes on for as long as a round lasts."""

    def open(self) -> None:
        self.prepare()
        self.run(self.measurement.seconds / 2)

    def round(self) -> Sample:
        load, cost = self.metered(lambda: self.run(self.measurement.seconds))
        return cost.sample(self.value(load), load)

    @abstractmethod
    def prepare(self) -> None:
        """Connect, and store what has to be there."""

    @abstractmethod
    def run(self, seconds: float) -> Load:
        """Keep busy for that long."""

    @abstractmethod
    def value(self, load: Load) -> float:
        """What the record is about."""


class Steady(Timed):
    """Clients that ask again and again."""

    def prepare(self) -> None:
        with connect(self.target.port, self.target.dialect) as client:
            converse(client, self.target.dialect.store(KEY, VALUE))
        self.clients = BusyClients(self.target.port, self.target.dialect, CLIENTS)
        self.resources.callback(self.clients.close)

    def value(self, load: Load) -> float:
        return load.operations / load.seconds


class Gets(Steady):
    """Each reads one key."""

    per_request = 1

    def run(self, seconds: float) -> Load:
        exchange = self.target.dialect.get(KEY, VALUE).times(self.per_request)
        return self.clients.repeat(after(seconds), exchange, self.per_request)


class PipelinedGets(Gets):
    """The same, with many requests in flight per client."""

    per_request = PIPELINED


class Sets(Steady):
    """Each stores under a key of its own, and sees it done."""

    def run(self, seconds: float) -> Load:
        exchanges = [self.target.dialect.store(b"/bench/own/%d" % number, VALUE) for number in range(CLIENTS)]
        requests, reply = [each.request for each in exchanges], exchanges[0].reply
        return self.clients.run(after(seconds), requests, lambda _: reply)


class Adds(Steady):
    """Each adds to a counter of its own: so it is known what each has to hear."""

    counted = 0

    def run(self, seconds: float) -> Load:
        dialect, before = self.target.dialect, self.counted
        requests = [dialect.add(b"/bench/counter/%d" % number, 1) for number in range(CLIENTS)]
        is_over = after(seconds)
        load = self.clients.run(is_over, requests, lambda turn: dialect.number(before + turn))
        self.counted += load.operations // CLIENTS
        return load


class OneAtATime(Timed):
    """One client, one operation at a time."""

    def prepare(self) -> None:
        self.client = self.resources.enter_context(connect(self.target.port, self.target.dialect))
        self.counted = 0
        converse(self.client, self.target.dialect.store(KEY, VALUE))
        self.client.setblocking(True)

    def value(self, load: Load) -> float:
        assert load.p50 is not None
        return load.p50

    def run(self, seconds: float) -> Load:
        watch, taken = Stopwatch(), list[float]()
        clock, send, receive = time.perf_counter, self.client.send, self.client.recv
        deadline = clock() + seconds
        ended = 0.0
        while ended < deadline:
            exchange = self.exchange()
            begun = clock()
            send(exchange.request)
            reply = receive(len(exchange.reply), MSG_WAITALL)
            ended = clock()
            taken.append(ended - begun)
            check(reply, exchange.reply)
        check_silent(self.client)
        return watch.stop(len(taken), taken)

    @abstractmethod
    def exchange(self) -> Exchange:
        """What is asked next."""


class OneGet(OneAtATime):
    def exchange(self) -> Exchange:
        return self.target.dialect.get(KEY, VALUE)


class OneSet(OneAtATime):
    """Under two keys in turn: a server may know a value that stays the same, and no job does that."""

    def exchange(self) -> Exchange:
        self.counted += 1
        return self.target.dialect.store(b"/bench/kept/%d" % (self.counted % 2), VALUE)


class OneAdd(OneAtATime):
    """To two counters in turn, for the same reason."""

    def exchange(self) -> Exchange:
        number, self.counted = self.counted, self.counted + 1
        dialect = self.target.dialect
        return Exchange(dialect.add(b"/bench/one/%d" % (number % 2), 1), dialect.number(number // 2 + 1))


# New clients: beside others that are busy, and very many at the same moment


class Accepts(Session):
    """New clients that arrive while others are busy."""

    per_request = 1

    def open(self) -> None:
        dialect = self.target.dialect
        with connect(self.target.port, dialect) as client:
            converse(client, dialect.store(KEY, VALUE))
        self.busy = start(self.resources, _WORKER, "busy clients")
        place: Message = {"port": self.target.port, "dialect": dialect.name}
        self.busy.ask(ANSWER_LIMIT_S, do="connect", count=BUSY_CLIENTS, **place)
        self.measure(NEW_CLIENTS // 10)

    def round(self) -> Sample:
        return self.measure(NEW_CLIENTS)

    def measure(self, count: int) -> Sample:
        """Let that many new clients arrive, and leave again."""
        files = machine.open_files(self.target.pid)
        with closing(Crowd(self.target.port, self.target.dialect, count)) as crowd:
            self.busy.order(do="run", key=KEY.decode(), value=VALUE.decode(), per_request=self.per_request)
            time.sleep(0.2)  # all of the busy clients are in full swing by then
            load, cost = self.metered(crowd.arrive)
            busy = Load(**self.busy.ask(ANSWER_LIMIT_S, do="stop"))
        self.target.await_open_files(files)
        return replace(cost.sample(load.seconds, load), load_share=max(load.share, busy.share))


class AcceptsBesidePipelining(Accepts):
    """The same, beside clients with some requests in flight each.

    On a machine of two cores the new clients take time from the process of the busy ones. If each of those
    has only one request in flight, the server may then be idle for a moment, and accept at its leisure: torch
    takes anything from 0.05 to 2 seconds. With a few requests each, the server stays busy throughout.
    """

    per_request = BUSY_PIPELINED


class Storm(Session):
    """Very many clients that connect at the same moment.

    More than the backlog holds: the kernel drops the rest, and they try again after 1, 2, 3 and more seconds.
    So the time comes in whole seconds, and differs much from round to round.
    """

    def open(self) -> None:
        files = machine.open_files(self.target.pid)
        with closing(Crowd(self.target.port, self.target.dialect, NEW_CLIENTS)) as crowd:
            crowd.arrive()
        self.target.await_open_files(files)
        self.crowds = [start(self.resources, _WORKER, "a crowd") for _ in range(STORM_PROCESSES)]

    def round(self) -> Sample:
        target = self.target
        files, resident = machine.open_files(target.pid), machine.resident_bytes(target.pid)
        order: Message = {"port": target.port, "dialect": target.dialect.name}
        ask_all(self.crowds, ANSWER_LIMIT_S, do="gather", count=STORM_CLIENTS // STORM_PROCESSES, **order)
        dropped = machine.dropped_connects()
        answers, cost = self.metered(lambda: ask_all(self.crowds, ANSWER_LIMIT_S, do="arrive"))
        cost.extras["dropped"] = machine.dropped_connects() - dropped
        cost.extras["turned_away"] = sum(answer["turned_away"] for answer in answers)
        memory = (machine.resident_bytes(target.pid) - resident) / STORM_CLIENTS
        ask_all(self.crowds, ANSWER_LIMIT_S, do="leave")
        target.await_open_files(files)
        load = together([Load(**answer["load"]) for answer in answers])
        return replace(cost.sample(load.seconds, load), memory=memory)


# One request with very many keys


def keys_of(count: int, name: str = "key") -> list[bytes]:
    """Keys that look like those of a job: a prefix and a number."""
    return [b"/bench/%s-%06d" % (name.encode(), number) for number in range(count)]


def values_of(count: int, generation: int = 0) -> list[bytes]:
    """Values of 16 bytes, a different one for every key and every generation."""
    return [b"%04d-%011d" % (generation, number) for number in range(count)]


class Bulk(Session):
    """A request of many keys, from one client."""

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
        load, cost = self.metered(lambda: self.ask(exchange))
        return cost.sample(load.seconds, load)

    def ask(self, exchange: Exchange) -> Load:
        watch = Stopwatch()
        converse(self.client, exchange)
        return watch.stop(1)


class MultiGet(Bulk):
    """Many keys are read."""

    def open(self) -> None:
        self.values = values_of(MANY_KEYS)
        # One after the other in a row: torch takes ten seconds for the request that would store them all.
        pairs = zip(keys_of(MANY_KEYS), self.values, strict=True)
        each = [self.target.dialect.store(key, value) for key, value in pairs]
        with connect(self.target.port, self.target.dialect) as client:
            converse(client, Exchange(b"".join(x.request for x in each), b"".join(x.reply for x in each)))
        super().open()

    def measure(self, count: int) -> Sample:
        return self.timed(self.target.dialect.multi_get(self.keys[:count], self.values[:count]))


class MultiSet(Bulk):
    """Many values are stored, other ones each time; some are read afterwards."""

    generation = 0

    def measure(self, count: int) -> Sample:
        self.generation += 1
        dialect, values = self.target.dialect, values_of(count, self.generation)
        measured = self.timed(dialect.multi_set(self.keys[:count], values))
        for number in range(0, count, max(1, count // 100)):
            self.ask(dialect.get(self.keys[number], values[number]))
        return measured


class Cancels(Timed):
    """A client that waits and gives up, again and again, while another waits for very many keys."""

    def prepare(self) -> None:
        waiter = self.resources.enter_context(connect(self.target.port, TORCH))
        converse(waiter, TORCH.wait_for_missing(keys_of(MANY_KEYS, "absent")))
        self.client = BusyClients(self.target.port, TORCH, 1)
        self.resources.callback(self.client.close)

    def run(self, seconds: float) -> Load:
        return self.client.repeat(after(seconds), TORCH.give_up(b"/bench/missing"))

    def value(self, load: Load) -> float:
        return load.seconds / load.operations
