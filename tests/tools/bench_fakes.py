"""Stores for tests of loads: real ones, and fakes in threads.

A fake answers as a test wants: rightly, wrongly, in pieces, too much, or not at all. Fakes know just enough
of the protocols of torch and redis for the loads of `rallypoint bench`. They are written apart from the
dialects there, so that a mistake in one does not hide in the other.
"""

from __future__ import annotations

import shutil
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import pytest

from benchmarks.targets import RedisTarget
from processes import torch_serving
from rallypoint.store.server.loops.backend import Choice
from rallypoint.store.server.process.hosting import host_server
from raw import SECONDS, until

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis is not installed")


@contextmanager
def serving(store: str) -> Iterator[int]:
    """The port of a real store, with nothing in it: torch's, redis, or a backend of ours."""
    if store.startswith("torch"):
        with torch_serving(store == "torch-libuv") as port:
            yield port
        return
    if store == "redis":
        target = RedisTarget("redis")
        try:
            target.start()
            yield target.port
        finally:
            target.stop()
        return
    server = host_server("127.0.0.1", 0, backend=Choice(store))
    try:
        yield server.port
    finally:
        server.release()


Twist = Callable[[str, int, bytes], Sequence[bytes]]
"""From an operation, how often it was answered, and the right answer, to the pieces to send.

None of them, or an empty one: the connection is closed.
"""


def honest(_: str, __: int, reply: bytes) -> Sequence[bytes]:
    """The right answer in one piece."""
    return [reply]


def in_pieces(_: str, __: int, reply: bytes) -> Sequence[bytes]:
    """The right answer, byte by byte."""
    return [reply[at : at + 1] for at in range(len(reply))]


def twist_one(operation: str, number: int, make: Callable[[bytes], Sequence[bytes]]) -> Twist:
    """One answer is not as it should be, all others are."""

    def twist(name: str, count: int, reply: bytes) -> Sequence[bytes]:
        return make(reply) if (name, count) == (operation, number) else [reply]

    return twist


class FakeStore:
    """A store that speaks torch's protocol; `wakes_early`: it does not wait for keys."""

    def __init__(self, twist: Twist = honest, *, wakes_early: bool = False) -> None:
        self._twist = twist
        self._wakes_early = wakes_early
        self._changed = threading.Condition()
        self._values: dict[bytes, bytes] = {}
        self._answered: Counter[str] = Counter()
        self._closed = False
        self._clients: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._spawn(self._accept)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._join(self._threads[0])  # after that, nobody comes any more
        for client in self._clients:
            _hang_up(client)
        for thread in self._threads:
            self._join(thread)
        for each in (self._listener, *self._clients):
            each.close()

    @staticmethod
    def _join(thread: threading.Thread) -> None:
        thread.join(SECONDS)
        assert not thread.is_alive()

    def _spawn(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._clients.append(client)
            self._spawn(lambda client=client: self._serve(client))  # type: ignore[misc]

    def _serve(self, client: socket.socket) -> None:
        try:
            with client.makefile("rb") as stream:
                while self.carry_out(client, stream):
                    pass
        except (OSError, EOFError):
            pass  # the client has gone
        finally:
            _hang_up(client)

    def carry_out(self, client: socket.socket, stream: BinaryIO) -> bool:
        """Answer one request; False if that was the last."""
        operation = read(stream, 1)[0]
        if operation == 0:
            return bool(read(stream, 4))
        if operation == 13:
            return self.answer(client, "ping", read(stream, 4))
        if operation == 1:
            return self.store(_blob(stream), _blob(stream))
        if operation == 3:
            value = self._values[_blob(stream)]
            return self.answer(client, "get", struct.pack("<Q", len(value)) + value)
        if operation == 4:
            key, amount = _blob(stream), struct.unpack("<q", read(stream, 8))[0]
            return self.answer(client, "add" if amount else "look", struct.pack("<q", self.add(key, amount)))
        assert operation == 6, operation
        keys = [_blob(stream) for _ in range(struct.unpack("<Q", read(stream, 8))[0])]
        return self.await_keys(keys) and self.answer(client, "wait", b"\0")

    def store(self, key: bytes, value: bytes) -> bool:
        with self._changed:
            self._values.setdefault(key, value)
            self._changed.notify_all()
        return True

    def add(self, key: bytes, amount: int) -> int:
        with self._changed:
            count = int(self._values.get(key, b"0")) + amount
            self._values[key] = b"%d" % count
        return count

    def await_keys(self, keys: Sequence[bytes]) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._wakes_early or all(key in self._values for key in keys), SECONDS
            )
        return not self._closed

    def answer(self, client: socket.socket, operation: str, reply: bytes) -> bool:
        with self._changed:
            self._answered[operation] += 1
            number = self._answered[operation]
        pieces = self._twist(operation, number, reply)
        for piece in pieces[:-1]:
            client.sendall(piece)
            # Until the other side has read it: else the pieces could come there as one.
            until(lambda: self._closed or not _unread(client), "a piece of a reply is read")
        client.sendall(b"".join(pieces[-1:]))
        return all(pieces) and bool(pieces)


class FakeRedis(FakeStore):
    """The same, as redis says it."""

    def carry_out(self, client: socket.socket, stream: BinaryIO) -> bool:
        words = [_bulk(stream) for _ in range(int(_line(stream, b"*")))]
        name = words[0]
        if name == b"CLIENT":
            return True  # its reply is skipped, and that of the XADD which follows
        if name == b"XADD":
            return self.store(words[1], words[4])
        if name == b"PING":
            return self.answer(client, "ping", b"+PONG\r\n")
        if name == b"INCRBY":
            amount = int(words[2])
            return self.answer(client, "add" if amount else "look", b":%d\r\n" % self.add(words[1], amount))
        assert name == b"XREAD", words
        key = words[6]
        entry = b"*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nv\r\n$1\r\n1\r\n"
        reply = b"*1\r\n*2\r\n$%d\r\n%b\r\n%b" % (len(key), key, entry)
        return self.await_keys([key]) and self.answer(client, "wait", reply)


FAKES: dict[str, type[FakeStore]] = {"torch": FakeStore, "redis": FakeRedis}


@contextmanager
def faking(dialect: str, twist: Twist = honest, *, wakes_early: bool = False) -> Iterator[int]:
    """The port of a fake store."""
    store = FAKES[dialect](twist, wakes_early=wakes_early)
    try:
        yield store.port
    finally:
        store.close()


def read(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _blob(stream: BinaryIO) -> bytes:
    return read(stream, struct.unpack("<Q", read(stream, 8))[0])


def _line(stream: BinaryIO, mark: bytes) -> bytes:
    line = stream.readline()
    if not line:
        raise EOFError
    assert line[:1] == mark, line
    return line[1:-2]


def _bulk(stream: BinaryIO) -> bytes:
    return read(stream, int(_line(stream, b"$")) + 2)[:-2]


def _hang_up(client: socket.socket) -> None:
    try:
        client.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the client was first


def _unread(client: socket.socket) -> int:
    """How many bytes the other side of a connection has not read yet; 0 if it has gone. For Linux."""
    names = client.getpeername(), client.getsockname()
    ports = struct.pack(">HH", *(port for _, port in names))
    hosts = b"".join(socket.inet_aton(host).ljust(16, b"\0") for host, _ in names)
    asked = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
    text = asked + ports + hosts + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    head = struct.pack("=IHHII", 16 + len(text), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(head + text)
        said = kernel.recv(4096)
    kind = struct.unpack_from("=H", said, 4)[0]
    return int(struct.unpack_from("=I", said, 72)[0]) if kind == _SOCK_DIAG_BY_FAMILY else 0
