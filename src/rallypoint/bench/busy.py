"""Clients that always have a request in flight: a steady load, at as little cost to itself as may be.

What it spends per operation must be less than what any server spends, else one measures the load. So it polls
nothing: a blocking read and a write per client, round and round, are all there is.
"""

from __future__ import annotations

import socket
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Sequence

from rallypoint.bench.dialects import DIALECTS, Dialect, Exchange
from rallypoint.bench.faults import BenchError
from rallypoint.bench.load import Load, Stopwatch
from rallypoint.bench.sockets import check, check_silent, connect, leave
from rallypoint.bench.workers import Message, Orders, end_with_parent, obey


def until(deadline: float) -> Callable[[], bool]:
    """Whether that time has come."""
    return lambda: time.monotonic() >= deadline


class RoundRobin:
    """Clients that each always have one request in flight, of which each may be several operations."""

    def __init__(self, port: int, dialect: Dialect, count: int) -> None:
        self.clients: list[socket.socket] = []
        try:
            for _ in range(count):
                self.clients.append(connect(port, dialect))
        except BaseException:
            self.close()
            raise

    def run(self, is_over: Callable[[], bool], exchange: Exchange, per_request: int = 1) -> Load:
        """Keep all clients busy until it is over; then no request is in flight any more."""
        requests = [exchange.request] * len(self.clients)
        return self._run(is_over, requests, lambda _: exchange.reply, per_request)

    def count(
        self, is_over: Callable[[], bool], requests: Sequence[bytes], reply: Callable[[int], bytes]
    ) -> Load:
        """The same, with a request of its own for each; the reply depends on how often it was asked."""
        return self._run(is_over, requests, reply, 1)

    def _run(
        self,
        is_over: Callable[[], bool],
        requests: Sequence[bytes],
        reply: Callable[[int], bytes],
        per_request: int,
    ) -> Load:
        watch, taken = Stopwatch(), list[float]()
        try:
            self._turn(is_over, requests, reply, taken)
        except OSError as error:
            raise BenchError(f"a client lost its server: {error}") from error
        return watch.stop((len(taken) + 1) * len(self.clients) * per_request, taken or [0.0])

    def _turn(
        self,
        is_over: Callable[[], bool],
        requests: Sequence[bytes],
        reply: Callable[[int], bytes],
        taken: list[float],
    ) -> None:
        """Turn after turn. A request is sent in one and answered in the next, so it takes as long as that."""
        # MSG_WAITALL: a server may send a reply in pieces. Comparing all of it costs less than its length.
        calls = [(each.recv, each.send, text) for each, text in zip(self.clients, requests, strict=True)]
        whole, clock = socket.MSG_WAITALL, time.monotonic
        for _, send, request in calls:
            send(request)
        turn, begun = 1, clock()
        while not is_over():
            wanted = reply(turn)
            size = len(wanted)
            for receive, send, request in calls:
                got = receive(size, whole)
                if got != wanted:
                    check(got, wanted)
                send(request)
            turn, ended = turn + 1, clock()
            taken.append(ended - begun)
            begun = ended
        wanted = reply(turn)
        for receive, _, _ in calls:
            check(receive(len(wanted), whole), wanted)
        for client in self.clients:
            check_silent(client)

    def close(self) -> None:
        """Disconnect them all."""
        leave(self.clients)


class BusyWorker:
    """The clients, led by orders."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def connect(self, port: int, dialect: str, count: int) -> Message:
        self._clients = RoundRobin(port, DIALECTS[dialect], count)
        return {}

    def run(self, request: str, reply: str, per_request: int) -> Message:
        """Keep busy until the next order, which is but that: then the answer is what was done."""
        exchange = Exchange(b64decode(request), b64decode(reply))
        load = self._clients.run(lambda: self._orders.are_waiting, exchange, per_request)
        if self._orders.take() is None:
            sys.exit(1)  # whoever gave the orders has ended
        return load.message()


def main() -> None:
    """Carry out orders."""
    end_with_parent()
    orders = Orders()
    worker = BusyWorker(orders)
    obey({"connect": worker.connect, "run": worker.run}, orders)


if __name__ == "__main__":
    main()
