"""Operations of clients that are connected: as many as the server can do, and one at a time."""

from __future__ import annotations

import time
from socket import MSG_WAITALL
from typing import Final

from rallypoint.bench.busy import RoundRobin, until
from rallypoint.bench.dialects import Exchange
from rallypoint.bench.load import Load, Stopwatch, sample
from rallypoint.bench.results import Sample
from rallypoint.bench.session import Session
from rallypoint.bench.sockets import check, check_silent, connect, converse

CLIENTS: Final = 100
PIPELINED: Final = 32

KEY: Final = b"/bench/key"
VALUE: Final = b"sixteen bytes..."


class Steady(Session):
    """Clients that ask again and again, for as long as a round lasts."""

    def open(self) -> None:
        with connect(self.target.port, self.target.dialect) as client:
            converse(client, self.target.dialect.store(KEY, VALUE))
        self.clients = RoundRobin(self.target.port, self.target.dialect, CLIENTS)
        self.resources.callback(self.clients.close)
        self.run(self.measurement.seconds / 2)

    def round(self) -> Sample:
        load, cpu = self.metered(lambda: self.run(self.measurement.seconds))
        return sample(load.operations / load.seconds, [load], cpu)

    def run(self, seconds: float) -> Load:
        """Keep busy for so long."""
        raise NotImplementedError


class Gets(Steady):
    """Each reads one key."""

    per_request = 1

    def run(self, seconds: float) -> Load:
        exchange = self.target.dialect.get(KEY, VALUE).times(self.per_request)
        return self.clients.run(until(time.monotonic() + seconds), exchange, self.per_request)


class PipelinedGets(Gets):
    """The same, with many requests in flight per client."""

    per_request = PIPELINED


class Sets(Steady):
    """Each stores under a key of its own, and sees it done."""

    def run(self, seconds: float) -> Load:
        exchanges = [self.target.dialect.store(b"/bench/own/%d" % number, VALUE) for number in range(CLIENTS)]
        requests, reply = [each.request for each in exchanges], exchanges[0].reply
        return self.clients.count(until(time.monotonic() + seconds), requests, lambda _: reply)


class Adds(Steady):
    """Each adds to a counter of its own: so it is known what each has to hear."""

    counted = 0

    def run(self, seconds: float) -> Load:
        dialect, before = self.target.dialect, self.counted
        requests = [dialect.add(b"/bench/counter/%d" % number, 1) for number in range(CLIENTS)]
        load = self.clients.count(
            until(time.monotonic() + seconds), requests, lambda turn: dialect.number(before + turn)
        )
        self.counted += load.operations // CLIENTS
        return load


class OneAtATime(Session):
    """One client, one operation at a time."""

    def open(self) -> None:
        self.client = self.resources.enter_context(connect(self.target.port, self.target.dialect))
        self.counted = 0
        converse(self.client, self.target.dialect.store(KEY, VALUE))
        self.client.setblocking(True)
        self.run(self.measurement.seconds / 2)

    def round(self) -> Sample:
        load, cpu = self.metered(lambda: self.run(self.measurement.seconds))
        assert load.p50 is not None
        return sample(load.p50, [load], cpu)

    def run(self, seconds: float) -> Load:
        """The times of operations, one after the other, for so long."""
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

    def exchange(self) -> Exchange:
        """What is asked next."""
        raise NotImplementedError


class OneGet(OneAtATime):
    def exchange(self) -> Exchange:
        return self.target.dialect.get(KEY, VALUE)


class OneSet(OneAtATime):
    """Under two keys in turn: what is the same each time may be known to a server, and no job does that."""

    def exchange(self) -> Exchange:
        self.counted += 1
        return self.target.dialect.store(b"/bench/kept/%d" % (self.counted % 2), VALUE)


class OneAdd(OneAtATime):
    """To two counters in turn, for the same reason."""

    def exchange(self) -> Exchange:
        number, self.counted = self.counted, self.counted + 1
        dialect = self.target.dialect
        return Exchange(dialect.add(b"/bench/one/%d" % (number % 2), 1), dialect.number(number // 2 + 1))
