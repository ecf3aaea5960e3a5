"""Connections of a load: opened with as little cost as may be, and closed so that their ports are free."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterable
from typing import Final

from rallypoint.bench.dialects import Dialect, Exchange
from rallypoint.bench.faults import BenchError
from rallypoint.server.machine.ports import client_ports

HOST: Final = "127.0.0.1"
ANSWER_LIMIT_S: Final = 120
"""How long a client waits for any answer before it calls that a fault."""

_CHUNK: Final = 1 << 20
_IP_LOCAL_PORT_RANGE: Final = 51  # Linux 6.3; Python has no name for it
_IP_BIND_ADDRESS_NO_PORT: Final = 24  # Python has a name for it from 3.12 on


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
                unsent = unsent[client.send(unsent[:_CHUNK]) :]
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
    piece = client.recv(_CHUNK)
    if not piece:
        raise BenchError("a connection was closed before its reply was complete")
    reply += piece
