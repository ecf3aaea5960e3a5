"""Writing requests and replies, and the integers that both are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final

from rallypoint.store.wire.opcodes import MAGIC, OPERATIONS, Op

try:
    from rallypoint.store.wire import native
except ImportError:  # it is not compiled
    native = None  # type: ignore[assignment]

_U32: Final = Struct("<I")
_U64: Final = Struct("<Q")
_I64: Final = Struct("<q")

pack_u32: Final = _U32.pack
pack_u64: Final = _U64.pack
pack_i64: Final = _I64.pack if native is None else native.pack_i64
unpack_u32: Final = _U32.unpack_from
unpack_u64: Final = _U64.unpack_from
unpack_i64: Final = _I64.unpack_from

I64_MIN: Final = -(1 << 63)
I64_MAX: Final = (1 << 63) - 1

# The packed lengths of short blobs, which nearly all are: a lookup is a third of the price of a pack.
SHORT: Final = 1024
SHORT_LENGTHS: Final = tuple(pack_u64(length) for length in range(SHORT))

EMPTY_BLOB: Final = SHORT_LENGTHS[0]

VALIDATE: Final = bytes([Op.VALIDATE]) + pack_u32(MAGIC)
"""The first request of every connection."""


def blob(content: bytes | bytearray) -> bytes:
    """`content` behind its length."""
    length = len(content)
    return (SHORT_LENGTHS[length] if length < SHORT else pack_u64(length)) + content


def blobs(contents: Iterable[bytes | bytearray]) -> bytes:
    """Several blobs, one behind the other."""
    parts: list[bytes | bytearray] = []
    for content in contents:
        parts.append(pack_u64(len(content)))
        parts.append(content)
    return b"".join(parts)


def request(op: Op, *contents: bytes, tail: bytes = b"") -> bytes:
    """A request whose blobs are not counted."""
    return b"%c%b%b" % (op, blobs(contents), tail)


def counted_request(op: Op, contents: Sequence[bytes], *, blobs_each: int = 1) -> bytes:
    """A request of `len(contents) / blobs_each` repetitions of its blobs."""
    return b"%c%b%b" % (op, pack_u64(len(contents) // blobs_each), blobs(contents))


def encode(op: Op, contents: Sequence[bytes], tail: bytes) -> bytes:
    """A request from its parts."""
    row = OPERATIONS[op]
    if row.counted:
        return counted_request(op, contents, blobs_each=len(row.blobs))
    return request(op, *contents, tail=tail)
