"""The load generators: as little work as will keep a server busy.

What a generator spends per operation must be less than what any server spends, else one measures the
generator. So the steady loads poll nothing: each client has one request in flight, and a blocking read and a
write per client, round and round, are all there is.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from frames import HELLO, PONG
from servers import HOST, ServerError

ANSWER_LIMIT_S = 120
"""How long a client waits for any answer before it calls that a fault."""

CHUNK = 1 << 20
IP_LOCAL_PORT_RANGE = 51  # Linux 6.3; Python has no name for it


@dataclass(frozen=True)
class Load:
    """What a generator did: how many operations, from when to when, and at which cost to itself."""

    operations: int
    start: float
    end: float
    cpu: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def share(self) -> float:
        """How much of one core the generator took: near 1, it may have been the bottleneck."""
        return self.cpu / self.seconds


def connect(port: int) -> socket.socket:
    """A client that is connected and has said hello."""
    client = socket.create_connection((HOST, port), timeout=ANSWER_LIMIT_S)
    # A Python timeout would poll before each call: the kernel's own timeout costs nothing.
    client.settimeout(None)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", ANSWER_LIMIT_S, 0))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.sendall(HELLO)
    check(client.recv(len(PONG), socket.MSG_WAITALL), PONG)
    return client


def check(got: bytes, wanted: bytes) -> None:
    """Raise unless an answer is the right one."""
    if not got:
        raise ServerError("the server closed a connection")
    if got != wanted:
        raise ServerError(f"a client got a wrong answer: {got[:40]!r} and not {wanted[:40]!r}")


def until(deadline: float) -> Callable[[], bool]:
    """Whether that time has come."""
    return lambda: time.perf_counter() >= deadline


class RoundRobin:
    """Clients that each always have one request in flight."""

    def __init__(self, port: int, count: int, request: bytes, reply: bytes) -> None:
        self.clients: list[socket.socket] = []
        self._request, self._reply = request, reply
        for _ in range(count):
            self.clients.append(connect(port))

    def run(self, is_over: Callable[[], bool], per_request: int = 1) -> Load:
        """Keep all clients busy until it is over; then no request is in flight any more."""
        cpu, start = time.process_time(), time.perf_counter()
        try:
            turns = self._turns(is_over)
        except OSError as error:
            raise ServerError(f"a client lost its server: {error}") from error
        end = time.perf_counter()
        operations = turns * len(self.clients) * per_request
        return Load(operations, start, end, time.process_time() - cpu)

    def _turns(self, is_over: Callable[[], bool]) -> int:
        # MSG_WAITALL: a server may send a reply in pieces. Comparing all of it costs less than its length.
        calls = [(client.recv, client.send) for client in self.clients]
        request, reply, size, whole = self._request, self._reply, len(self._reply), socket.MSG_WAITALL
        for _, send in calls:
            send(request)
        turns = 1
        while not is_over():
            for receive, send in calls:
                got = receive(size, whole)
                if got != reply:
                    check(got, reply)
                send(request)
            turns += 1
        for receive, _ in calls:
            check(receive(size, whole), reply)
        return turns

    def close(self) -> None:
        """Disconnect them all."""
        leave(self.clients)


class Crowd:
    """Clients that all connect at the same moment, say hello and await the answer."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self._count = count
        self._clients: dict[int, socket.socket] = {}

    def gather(self) -> None:
        """Make their sockets: beforehand, so that the time of it is nobody's."""
        ports = port_range()
        for _ in range(self._count):
            client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            client.setblocking(False)
            seek_port_quickly(client, ports)
            self._clients[client.fileno()] = client

    def arrive(self) -> Load:
        """Connect them all at once; return when each has its answer."""
        with select.epoll(self._count) as poll:
            cpu, start = time.process_time(), time.perf_counter()
            self._connect(poll)
            self._greet(poll, start + ANSWER_LIMIT_S)
            return Load(self._count, start, time.perf_counter(), time.process_time() - cpu)

    def close(self) -> None:
        """Disconnect them all."""
        leave(list(self._clients.values()))
        self._clients = {}

    def _connect(self, poll: select.epoll) -> None:
        # Edge-triggered: one registration serves both for the connection and for the answer.
        edges = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
        address = (HOST, self._port)
        for descriptor, client in self._clients.items():
            client.connect_ex(address)
            poll.register(descriptor, edges)

    def _greet(self, poll: select.epoll, deadline: float) -> None:
        waiting = set(self._clients)
        greeted: set[int] = set()
        while waiting:
            events = poll.poll(1.0)
            for descriptor, event in events:
                self._advance(descriptor, event, waiting, greeted)
            if not events and time.perf_counter() > deadline:
                raise ServerError(f"{len(waiting)} of {self._count} new clients got no answer")

    def _advance(self, descriptor: int, event: int, waiting: set[int], greeted: set[int]) -> None:
        client = self._clients[descriptor]
        try:
            if descriptor not in greeted:
                greeted.add(descriptor)
                client.send(HELLO)
            elif event & select.EPOLLIN and descriptor in waiting:
                check(client.recv(len(PONG)), PONG)
                waiting.remove(descriptor)
        except OSError as error:
            raise ServerError(f"a new client was turned away: {error}") from error


def port_range() -> bytes:
    """All local ports, as a range of the socket's own.

    Without one, the kernel prefers every second port; once those are used up, after some 14,000 clients, it
    tries all of them again for every connect, which then takes 150 us and not 8.
    """
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return struct.pack("=I", int(high) << 16 | int(low))


def seek_port_quickly(client: socket.socket, ports: bytes) -> None:
    """Let the kernel choose a port without that search."""
    try:
        client.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, ports)
    except OSError:
        pass  # an older kernel: slower, but it connects


def leave(clients: list[socket.socket]) -> None:
    """Disconnect at once, with a reset.

    An orderly close would keep each client's port for a minute, and the ports run out: all clients come from
    127.0.0.1, as a second source address would not be in the hosts file, where torch looks up every client.
    """
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    clients.clear()


def exchange(client: socket.socket, request: bytes, reply_size: int) -> bytes:
    """Send a request of any size while its reply is read: neither side can block the other."""
    reply = bytearray()
    unsent = memoryview(request)
    client.setblocking(False)
    poll = select.poll()
    poll.register(client, select.POLLIN | select.POLLOUT)
    while unsent or len(reply) < reply_size:
        ready = poll.poll(ANSWER_LIMIT_S * 1000)
        if not ready:
            raise ServerError("a big request got no answer in time")
        try:
            if ready[0][1] & select.POLLOUT and unsent:
                unsent = unsent[client.send(unsent[:CHUNK]) :]
                if not unsent:
                    poll.modify(client, select.POLLIN)
            if ready[0][1] & ~select.POLLOUT:
                take(client, reply)
        except OSError as error:
            raise ServerError(f"a big request lost its connection: {error}") from error
    return bytes(reply)


def take(client: socket.socket, reply: bytearray) -> None:
    """Add what has arrived to the reply."""
    piece = client.recv(CHUNK)
    if not piece:
        raise ServerError("a connection was closed before its reply was complete")
    reply += piece
