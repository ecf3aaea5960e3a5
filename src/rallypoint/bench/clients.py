"""Clients of a store: their protocol, single clients, and some that always have a request in flight.

The requests and replies are spelled out here, not taken from the wire package: a mistake there would then be
on both sides of the connection, where no measurement could see it.

What a load spends per operation must be less than what any server spends, else one measures the load. So
busy clients poll nothing: a blocking read and a write per client, round and round, are all there is.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import Load, Stopwatch
from rallypoint.store.machine.system import client_ports

HOST: Final = "127.0.0.1"
KEY: Final = b"/bench/key"
VALUE: Final = b"sixteen bytes..."
ANSWER_LIMIT_S: Final = 120
"""How long a client waits for any answer before it calls that a fault."""

_IP_LOCAL_PORT_RANGE: Final = 51  # Linux 6.3; Python has no name for it
_IP_BIND_ADDRESS_NO_PORT: Final = 24  # Python has a name for it from 3.12 on


@dataclass(frozen=True)
class Exchange:
    """A request, and the reply that is right."""

    request: bytes
    reply: bytes


class Dialect:
    """The requests of a client and the right replies; here, in the protocol of torch's TCPStore and ours."""

    number_size = 8
    """How long the reply to `add` is; 0: until the end of a line."""

    _NONCE = 0x52414C4C
    _PING = struct.pack("<BI", 13, _NONCE)
    _PONG = struct.pack("<I", _NONCE)
    hello = Exchange(struct.pack("<BI", 0, 0x3C85F7CE) + _PING, _PONG)
    """The first exchange of a new client."""

    def get(self, key: bytes, value: bytes) -> Exchange:
        """Read a key that has that value."""
        return Exchange(b"\x03" + self._blob(key), self._blob(value))

    def exists(self, key: bytes) -> Exchange:
        """Ask whether a key is there. It has to be."""
        return Exchange(b"\x05" + self._counted([self._blob(key)]), b"\x00")

    def store(self, key: bytes, value: bytes) -> Exchange:
        """Store a value, and see it done."""
        return self._seen_done(self._set(key, value))

    def add(self, key: bytes, amount: int) -> bytes:
        """The request that adds to a counter."""
        return b"\x04" + self._blob(key) + struct.pack("<q", amount)

    def number(self, value: int) -> bytes:
        """The reply that says what a counter has become."""
        return struct.pack("<q", value)

    def value_of(self, reply: bytes) -> int:
        """The value of a counter in that reply; BenchError if the reply has none."""
        return int.from_bytes(reply, "little", signed=True)

    def wait(self, key: bytes) -> Exchange:
        """Wait until somebody has released a key."""
        return Exchange(b"\x06" + self._counted([self._blob(key)]), b"\x00")

    def release(self, key: bytes) -> bytes:
        """The request that ends all waits for a key, of now and later; there is no reply."""
        return self._set(key, b"1")

    def _seen_done(self, request: bytes) -> Exchange:
        return Exchange(request + self._PING, self._PONG)

    def _set(self, key: bytes, value: bytes) -> bytes:
        return b"\x01" + self._blob(key) + self._blob(value)

    @staticmethod
    def _blob(data: bytes) -> bytes:
        return struct.pack("<Q", len(data)) + data

    @staticmethod
    def _counted(items: Iterable[bytes]) -> bytes:
        whole = list(items)
        return struct.pack("<Q", len(whole)) + b"".join(whole)


TORCH: Final = Dialect()


def connect(port: int, dialect: Dialect, host: str = HOST) -> socket.socket:
    """A client that is connected and has said hello."""
    client = socket.create_connection((host, port), timeout=ANSWER_LIMIT_S)
    try:
        # A Python timeout would poll before each call: the kernel's own timeout costs nothing.
        client.settimeout(None)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", ANSWER_LIMIT_S, 0))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(dialect.hello.request)
        check(client.recv(len(dialect.hello.reply), socket.MSG_WAITALL), dialect.hello.reply)
    except BaseException:
        client.close()
        raise
    return client


def check(got: bytes, wanted: bytes) -> None:
    """Raise unless an answer is the right one."""
    if not got:
        raise BenchError("the server closed a connection")
    if got != wanted:
        right = f"and not {wanted[:40]!r}" if wanted else "which is more than it had asked for"
        raise BenchError(f"a client got a wrong answer: {got[:40]!r}, {right}")


def check_silent(client: socket.socket) -> None:
    """Raise if there is more than was asked for."""
    try:
        more = client.recv(40, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return
    check(more, b"")


def port_range() -> bytes:
    """All local ports, as a range of the socket's own.

    Without one, the kernel prefers every second port; once those are used up, after some 14,000 clients, it
    tries all of them again for every connect, which then takes 150 us and not 8.
    """
    low, high = client_ports()
    return struct.pack("=I", high << 16 | low)


def seek_port_quickly(client: socket.socket, ports: bytes) -> None:
    """Let the kernel choose a port without that search."""
    try:
        client.setsockopt(socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, ports)
    except OSError:
        pass  # an older kernel: slower, but it connects


def come_from(client: socket.socket, host: str) -> None:
    """Let a client come from another of this machine's loopback addresses, each of which has all ports."""
    client.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
    client.bind((host, 0))


def leave(clients: Iterable[socket.socket]) -> None:
    """Disconnect at once, with a reset: an orderly close would keep each client's port for a minute."""
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()


# What clients ask again and again

Ask = Callable[[Dialect, int, int], Exchange]
"""From a dialect, the number of a client, and how often it has asked with this request included."""


def get(dialect: Dialect, _: int, __: int) -> Exchange:
    """All read one key."""
    return dialect.get(KEY, VALUE)


def store(dialect: Dialect, number: int, _: int) -> Exchange:
    """Each stores under a key of its own, and sees it done."""
    return dialect.store(b"/bench/own/%d" % number, VALUE)


def exists(dialect: Dialect, _: int, __: int) -> Exchange:
    """All ask whether one key is there."""
    return dialect.exists(KEY)


def add(dialect: Dialect, number: int, turn: int) -> Exchange:
    """Each adds to a counter of its own: so the right reply is known."""
    return Exchange(dialect.add(b"/bench/counter/%d" % number, 1), dialect.number(turn))


class BusyClients:
    """Clients that each always have one request in flight; a request may be several operations.

    `first` is the number of the first of them, where there are others in other processes.
    """

    def __init__(self, port: int, dialect: Dialect, count: int, first: int = 0) -> None:
        self._dialect, self._first = dialect, first
        self._asked = 0
        self.taken: list[float] = []
        """How long each turn of the last run took."""
        self._clients: list[socket.socket] = []
        try:
            for _ in range(count):
                self._clients.append(connect(port, dialect))
        except BaseException:
            self.close()
            raise

    def run(self, is_over: Callable[[], bool], ask: Ask, per_request: int = 1) -> Load:
        """Keep all clients busy until it is over; then none has a request in flight any more."""
        watch, self.taken = Stopwatch(), []
        try:
            self._take_turns(is_over, ask, per_request)
        except OSError as error:
            raise BenchError(f"a client lost its server: {error}") from error
        return watch.stop(len(self.taken) * len(self._clients) * per_request, self.taken)

    def _take_turns(self, is_over: Callable[[], bool], ask: Ask, per_request: int) -> None:
        """Turn after turn. A request is sent in one and answered in the next, so it takes as long as that."""
        # MSG_WAITALL: a server may send a reply in pieces. Comparing all of it costs less than its length.
        dialect, whole, clock = self._dialect, socket.MSG_WAITALL, time.monotonic
        calls = [
            (client.recv, client.send, ask(dialect, number, 1).request * per_request)
            for number, client in enumerate(self._clients, self._first)
        ]
        for _, send, request in calls:
            send(request)
        begun = clock()
        while not is_over():
            wanted = self._next_replies(ask, per_request)
            size = len(wanted)
            for receive, send, request in calls:
                got = receive(size, whole)
                if got != wanted:
                    check(got, wanted)
                send(request)
            ended = clock()
            self.taken.append(ended - begun)
            begun = ended
        wanted = self._next_replies(ask, per_request)
        for receive, _, _ in calls:
            check(receive(len(wanted), whole), wanted)
        self.taken.append(clock() - begun)
        for client in self._clients:
            check_silent(client)

    def _next_replies(self, ask: Ask, per_request: int) -> bytes:
        """What each client has to get next."""
        asked = range(self._asked + 1, self._asked + 1 + per_request)
        self._asked += per_request
        return b"".join([ask(self._dialect, 0, number).reply for number in asked])

    def close(self) -> None:
        """Disconnect them all."""
        leave(self._clients)


class BusyWorker:
    """Busy clients in a process of their own."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def connect(self, port: int, dialect: Dialect, count: int, first: int = 0) -> None:
        self._clients = BusyClients(port, dialect, count, first)

    def run(self, ask: Ask, per_request: int) -> dict[str, Any]:
        """Let them ask until the next order, which means no more than that; turns go with the load."""
        load = self._clients.run(self._line.poll, ask, per_request)
        self._line.recv()
        return {"load": load, "taken": self._clients.taken}
