"""Requests for many keys at once, and waits that are given up; and all requests in the protocol of redis."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Final

from rallypoint.bench.clients import Dialect, Exchange
from rallypoint.bench.results import BenchError


class WideDialect(Dialect):
    """More operations of torch's protocol."""

    def multi_get(self, keys: Sequence[bytes], values: Sequence[bytes]) -> Exchange:
        """Read many keys at once."""
        return Exchange(b"\x0a" + self._counted(map(self._blob, keys)), b"".join(map(self._blob, values)))

    def multi_set(self, keys: Sequence[bytes], values: Sequence[bytes]) -> Exchange:
        """Store many values at once, and see it done."""
        pairs = zip(keys, values, strict=True)
        blobs = [self._blob(key) + self._blob(value) for key, value in pairs]
        return self._seen_done(b"\x0b" + self._counted(blobs))

    def wait_for_missing(self, keys: Iterable[bytes]) -> Exchange:
        """Wait for keys that nobody sets; the reply is to a PING behind it, and tells that it is taken in."""
        return self._seen_done(b"\x06" + self._counted(map(self._blob, keys)))

    @staticmethod
    def _counted(items: Iterable[bytes]) -> bytes:
        whole = list(items)
        return struct.pack("<Q", len(whole)) + b"".join(whole)

    def give_up(self, key: bytes) -> Exchange:
        """Wait for a key that nobody sets, and give up."""
        return Exchange(self.wait(key).request + b"\x0c", b"\x01")


class RedisDialect(WideDialect):
    """The same with redis, as near as it comes; it cannot give up a wait.

    A wait is a blocking read of a stream, from its beginning: like a WAIT it ends at once if there is
    something, and a writer wakes all. A second writer must not add to what is read, so the one entry has an
    id of its own; that it is refused the second time nobody is told, as with a SET of torch's.
    """

    hello = Exchange(b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n")

    def get(self, key: bytes, value: bytes) -> Exchange:
        return Exchange(self._command(b"GET", key), self._bulk(value))

    def exists(self, key: bytes) -> Exchange:
        return Exchange(self._command(b"EXISTS", key), b":1\r\n")

    def store(self, key: bytes, value: bytes) -> Exchange:
        return Exchange(self._command(b"SET", key, value), b"+OK\r\n")

    def add(self, key: bytes, amount: int) -> bytes:
        return self._command(b"INCRBY", key, b"%d" % amount)

    def number(self, value: int) -> bytes:
        return b":%d\r\n" % value

    def read_number(self, client: socket.socket) -> int:
        reply = piece = client.recv(80)
        while piece and b"\n" not in reply:
            piece = client.recv(80)
            reply += piece
        digits = reply[1:-2]
        if reply != b":%b\r\n" % digits or not digits.removeprefix(b"-").isdigit():
            raise BenchError(f"a client got {reply[:80]!r}, which is no number")
        return int(digits)

    def wait(self, key: bytes) -> Exchange:
        words = (b"XREAD", b"COUNT", b"1", b"BLOCK", b"0", b"STREAMS", key, b"0-0")
        field = b"*2\r\n" + self._bulk(b"v") + self._bulk(b"1")
        entry = b"*1\r\n*2\r\n" + self._bulk(b"1-1") + field
        return Exchange(self._command(*words), b"*1\r\n*2\r\n" + self._bulk(key) + entry)

    def release(self, key: bytes) -> bytes:
        quietly = self._command(b"CLIENT", b"REPLY", b"SKIP")
        return quietly + self._command(b"XADD", key, b"1-1", b"v", b"1")

    def multi_get(self, keys: Sequence[bytes], values: Sequence[bytes]) -> Exchange:
        reply = b"*%d\r\n" % len(values) + b"".join(map(self._bulk, values))
        return Exchange(self._command(b"MGET", *keys), reply)

    def multi_set(self, keys: Sequence[bytes], values: Sequence[bytes]) -> Exchange:
        words = [word for pair in zip(keys, values, strict=True) for word in pair]
        return Exchange(self._command(b"MSET", *words), b"+OK\r\n")

    def _command(self, *words: bytes) -> bytes:
        return b"*%d\r\n" % len(words) + b"".join(map(self._bulk, words))

    @staticmethod
    def _bulk(data: bytes) -> bytes:
        return b"$%d\r\n%b\r\n" % (len(data), data)


TORCH: Final = WideDialect()
REDIS: Final = RedisDialect()
