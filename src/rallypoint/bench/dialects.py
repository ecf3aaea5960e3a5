"""The requests and the replies of a load as bytes, in the protocol that a target speaks. Pure.

They are spelled out here, not taken from the wire package: a mistake there would otherwise be on both sides
of the connection, where no measurement could see it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rallypoint.bench.results import BenchError


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

    def give_up(self, key: bytes) -> Exchange:
        """Wait for a key that nobody sets, and give up."""
        return Exchange(self.wait(key).request + b"\x0c", b"\x01")

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


class RedisDialect(Dialect):
    """The same with redis, as near as it comes; it cannot give up a wait.

    A wait is a blocking read of a stream, from its beginning: like a WAIT it ends at once if there is
    something, and a writer wakes all. A second writer must not add to what is read, so the one entry has an
    id of its own; that it is refused the second time nobody is told, as with a SET of torch's.
    """

    number_size = 0
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

    def value_of(self, reply: bytes) -> int:
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


TORCH = Dialect()
REDIS = RedisDialect()
