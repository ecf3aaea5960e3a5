"""The requests that the measurements send, as bytes.

They are spelled out here, not taken from rallypoint.wire: a mistake there would otherwise be on both sides
of the connection, where no measurement could see it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

NONCE = 0x52414C4C
PONG = struct.pack("<I", NONCE)
PING = struct.pack("<BI", 13, NONCE)
HELLO = struct.pack("<BI", 0, 0x3C85F7CE) + PING
CANCEL_WAIT = b"\x0c"
WAIT_CANCELED = b"\x01"


def blob(data: bytes) -> bytes:
    """A key or a value as it travels: its length, then itself."""
    return struct.pack("<Q", len(data)) + data


def store(key: bytes, value: bytes) -> bytes:
    """The request that SETs one key."""
    return b"\x01" + blob(key) + blob(value)


def get(key: bytes) -> bytes:
    """The request that GETs one key."""
    return b"\x03" + blob(key)


def add(key: bytes, amount: int) -> bytes:
    """The request that ADDs to one key."""
    return b"\x04" + blob(key) + struct.pack("<q", amount)


def wait(keys: Iterable[bytes]) -> bytes:
    """The request that WAITs for all of these keys."""
    return b"\x06" + counted([blob(key) for key in keys])


def multi_get(keys: Iterable[bytes]) -> bytes:
    """The request that GETs all of these keys at once."""
    return b"\x0a" + counted([blob(key) for key in keys])


def multi_set(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The request that SETs all of these keys at once."""
    return b"\x0b" + counted([blob(key) + blob(value) for key, value in pairs])


def counted(items: list[bytes]) -> bytes:
    """What a request with many keys carries: how many, then each."""
    return struct.pack("<Q", len(items)) + b"".join(items)


def bench_keys(count: int, name: str = "key") -> list[bytes]:
    """Keys that look like those of a job: a prefix and a number."""
    return [b"/bench/%s-%06d" % (name.encode(), number) for number in range(count)]


def bench_values(count: int, generation: int = 0) -> list[bytes]:
    """Values of 16 bytes, a different one for every key and every generation."""
    return [b"%04d-%011d" % (generation, number) for number in range(count)]
