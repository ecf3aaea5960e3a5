"""Clients of a store, many in a process: what they say, ranks of a job, and clients that are always busy.

The requests and replies are spelled out here, not taken from the wire package: a mistake there would then be
on both sides of the connection, where no measurement could see it.

What a load spends per operation must be less than what any server spends, else one measures the load. So
nothing is polled: a blocking read and a write per client, one client after the other, are all there is. A
server answers in about the order in which it was asked, so hardly any reply lies there until it is its turn.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import Load

HOST: Final = "127.0.0.1"
KEY: Final = b"/bench/key"
VALUE: Final = b"sixteen bytes..."
ANSWER_LIMIT_S: Final = 120
"""How long a client waits for any answer before it calls that a fault."""
BATCH: Final = 64
"""How many ranks take a step together, before the next ones take theirs."""
AHEAD: Final = 256
"""How far ranks are ahead of those a step further, unless all begin at once: less than any backlog."""

_IP_BIND_ADDRESS_NO_PORT: Final = 24  # Python has a name for it from 3.12 on

Place = tuple[str, int, int]
"""An address, a port, and how many clients connect there."""


@dataclass(frozen=True)
class Exchange:
    """A request, and the reply that is right."""

    request: bytes
    reply: bytes


class Dialect:
    """The requests of a client and the right replies; here, in the protocol of torch's TCPStore and ours."""

    _PONG = b"RALL"
    _PING = b"\x0d" + _PONG
    _ONE = struct.pack("<Q", 1)
    hello = Exchange(struct.pack("<BI", 0, 0x3C85F7CE) + _PING, _PONG)
    """The first exchange of a new client."""

    def get(self, key: bytes, value: bytes) -> Exchange:
        """Read a key that has that value."""
        return Exchange(b"\x03" + self._blob(key), self._blob(value))

    def exists(self, key: bytes) -> Exchange:
        """Ask whether a key is there. It has to be."""
        return Exchange(b"\x05" + self._ONE + self._blob(key), b"\x00")

    def store(self, key: bytes, value: bytes) -> Exchange:
        """Store a value, and see it done."""
        return self._seen_done(self._set(key, value))

    def add(self, key: bytes, amount: int) -> bytes:
        """The request that adds to a counter."""
        return b"\x04" + self._blob(key) + struct.pack("<q", amount)

    def number(self, value: int) -> bytes:
        """The reply that says what a counter has become."""
        return struct.pack("<q", value)

    def read_number(self, client: socket.socket) -> int:
        reply = client.recv(8, socket.MSG_WAITALL)
        if len(reply) < 8:
            raise BenchError("the server closed a connection")
        return int.from_bytes(reply, "little", signed=True)

    def wait(self, key: bytes) -> Exchange:
        """Wait until somebody has released a key."""
        return Exchange(b"\x06" + self._ONE + self._blob(key), b"\x00")

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


TORCH: Final = Dialect()


# Sockets


def begin(dialect: Dialect, host: str, port: int, source: str = "") -> socket.socket:
    """A client that is connected, and has sent its hello; it comes from `source`, if that is given."""
    client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The kernel's own time-outs: one of Python's would poll before each call.
    for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        client.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", ANSWER_LIMIT_S, 0))
    if source:
        client.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        client.bind((source, 0))
    try:
        client.connect((host, port))
        client.send(dialect.hello.request)
    except OSError:
        client.close()
        raise
    return client


def receive(client: socket.socket, reply: bytes) -> None:
    """Read a reply; it has to be this one."""
    check(client.recv(len(reply), socket.MSG_WAITALL), reply)


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


def leave(clients: Iterable[socket.socket]) -> None:
    """Disconnect at once, with a reset: an orderly close would keep each client's port for a minute."""
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()


# Clients

Ask = Callable[[Dialect, int, int], Exchange]
"""From a dialect, the number of a key, and how often it was asked for with this request included."""

ASKED: Final[Mapping[str, Ask]] = {
    "store": lambda dialect, _, __: dialect.store(KEY, VALUE),
    "GET": lambda dialect, _, __: dialect.get(KEY, VALUE),
    "SET": lambda dialect, number, _: dialect.store(b"/bench/own/%d" % number, VALUE),
    "ADD": lambda dialect, number, turn: Exchange(
        dialect.add(b"/bench/counter/%d" % number, 1), dialect.number(turn)
    ),
    "CHECK": lambda dialect, _, __: dialect.exists(KEY),
}
"""What busy clients ask again and again. The counters are each one's own: so the right reply is known."""


class Clients:
    """The clients of one process: ranks of a job, or clients that are always busy."""

    asked = ASKED

    def __init__(self) -> None:
        self.dialect = TORCH
        self.sockets: list[socket.socket] = []
        self._process = 0
        self._asked: Counter[tuple[Ask, int]] = Counter()

    def leave(self) -> None:
        """Disconnect all."""
        leave(self.sockets)
        self.sockets = []

    def come_up(self, dialect: Dialect, places: Sequence[Place], process: int = 0) -> Load:
        """Connect ranks, each of which counts itself at `init/`; `process` is the number of this process.

        The ranks of one machine stand next to each other, and so come a few microseconds apart.
        """
        self.dialect, self._process = dialect, process
        load, add = Load(), dialect.add(b"init/", 1)
        source = f"127.1.{process // 250}.{process % 250 + 1}" if process else ""  # each has all ports

        def rank(host: str, port: int) -> Iterator[None]:
            begun = time.monotonic()
            client = begin(dialect, host, port, source)
            self.sockets.append(client)
            yield
            receive(client, dialect.hello.reply)
            client.send(add)
            yield
            load.counted.append(dialect.read_number(client))
            load.taken.append(time.monotonic() - begun)

        addresses = [(host, port) for host, port, count in places for _ in range(count)]
        return self._see_through(load, [rank(*each) for each in addresses], AHEAD)

    def barrier(self, name: str, ranks: int, at_once: bool) -> Load:
        """All ranks of this process pass a barrier of that many ranks, as `init_process_group` has one.

        A rank ADDs 1 and then 0 to a key, SETs a second one if the count is full, and WAITs for that. Either
        all begin before any goes on, or the next ones begin when most of those before them have been counted:
        as in a job whose ranks do not come all at the same moment, only the last ones then find it full.
        """
        key = f"/default_pg/0//store_based_barrier_key:{name}".encode()
        load, dialect, ahead = Load(), self.dialect, len(self.sockets) if at_once else AHEAD
        one, none, wait = dialect.add(key, 1), dialect.add(key, 0), dialect.wait(key + b":last_worker")

        def rank(number: int, client: socket.socket) -> Iterator[None]:
            if number >= 3 * ahead and number % BATCH == 0:
                check_silent(self.sockets[number - 3 * ahead])  # it waits for this one
            begun = time.monotonic()
            client.send(one)
            yield
            load.counted.append(dialect.read_number(client))
            client.send(none)
            yield
            load.seen.append(dialect.read_number(client))
            if load.seen[-1] == ranks:
                client.send(dialect.release(key + b":last_worker"))
            client.send(wait.request)
            yield
            receive(client, wait.reply)
            load.taken.append(time.monotonic() - begun)

        return self._see_through(load, [rank(n, each) for n, each in enumerate(self.sockets)], ahead)

    def _see_through(self, load: Load, ranks: Sequence[Iterator[None]], ahead: int) -> Load:
        """Let ranks take their steps, the same one of a batch at a time; the last when all have come so far.

        The others are `ahead` ranks behind each other.
        """
        for start in range(0, len(ranks) + 2 * ahead, BATCH):
            for first in (start, start - ahead, start - 2 * ahead):
                for rank in ranks[max(0, first) : max(0, first + BATCH)]:
                    next(rank, None)
        for rank in ranks:
            next(rank, None)
        load.stop(len(ranks))
        for client in self.sockets:
            check_silent(client)
        return load

    def ask_for(self, seconds: float, operation: str, per_request: int) -> Load:
        """Keep all clients busy for so long."""
        end = time.monotonic() + seconds
        return self.ask(lambda: time.monotonic() >= end, self.asked[operation], per_request)

    def ask(self, is_over: Callable[[], bool], ask: Ask, per_request: int = 1) -> Load:
        """Keep all clients busy until it is over; then none has a request in flight any more.

        Each has one in flight, of that many operations, which is sent in one turn and answered in the next,
        so it takes as long as that. Each has two keys, in turn: a server may know a request that stays the
        same, and no job does that.
        """
        # MSG_WAITALL: a server may send a reply in pieces. Comparing all of it costs less than its length.
        dialect, whole, clock, first = self.dialect, socket.MSG_WAITALL, time.monotonic, self._process << 20
        calls = [
            [
                (client.recv, client.send, ask(dialect, 2 * number + key, 1).request * per_request)
                for number, client in enumerate(self.sockets, first)
            ]
            for key in (0, 1)
        ]
        load, turn = Load(), 0
        for _, send, request in calls[0]:
            send(request)
        begun = clock()
        while not is_over():
            wanted = self._next_replies(turn % 2, ask, per_request)
            turn += 1
            size = len(wanted)
            for read, send, request in calls[turn % 2]:
                got = read(size, whole)
                if got != wanted:
                    check(got, wanted)
                send(request)
            ended = clock()
            load.taken.append(ended - begun)
            begun = ended
        wanted = self._next_replies(turn % 2, ask, per_request)
        for client in self.sockets:
            receive(client, wanted)
        load.taken.append(clock() - begun)
        load.stop(len(load.taken) * len(self.sockets) * per_request)
        for client in self.sockets:
            check_silent(client)
        return load

    def _next_replies(self, key: int, ask: Ask, per_request: int) -> bytes:
        """What each client has to get next, for one of its keys."""
        first = self._asked[ask, key] + 1
        self._asked[ask, key] += per_request
        return b"".join([ask(self.dialect, 0, number).reply for number in range(first, first + per_request)])
