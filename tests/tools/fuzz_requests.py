"""Random requests, as clients and relays send them, and mutations of their bytes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from rallypoint.store.rollcall.identity import HELLO
from rallypoint.store.wire.encoding import counted_request, pack_i64, pack_u64, request
from rallypoint.store.wire.opcodes import Op

KIB, MIB = 1 << 10, 1 << 20
LIMITS: Final = {
    "stored_bytes": 32 * MIB,
    "value_bytes": 1 * MIB,
    "request_bytes": 2 * MIB,
    "unsent_bytes": 4 * MIB,
    "keys_per_request": 4096,
}
"""The limits of the servers that are fuzzed over sockets."""

BOUNDARIES = [
    *(0, 1, 2, 7, 8, 255, 256, KIB, 8192, 8193, 64 * KIB),
    *(limit + more for limit in LIMITS.values() for more in (-1, 0, 1)),
    *(2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 1),
]
"""Lengths and counts that a mutation puts in the place of others."""

LOOKS = 0.01
"""How many of the requests ask what the server knows: all of them wait for the same few looks."""

TELLS = 0.02
"""How many of them tell something, for those who look."""

QUESTIONS = [
    *(
        b"",
        b"{}",
        b'{"keys":1000}',
        b'{"search":"7","value":"fuzz/1"}',
        b'{"value":"\\ud800"}',
        b"[]",
        b"\xff",
    )
]
HELLOS = [b'{"rank":3,"role":"rank"}', b'{"role":"tool","pid":1}', b'{"rank":-9}', b"{}", b"[", b"", b"\xff"]
TOLD = [b"{}", b'{"kind":"relay","relays":[{"part":"{}"}]}', b"null", b"\xff", b"[" * 2_000]


def some_value(rng: Random) -> bytes:
    size = rng.choices([0, 4, 30, 300, 5000, 1 * MIB], [10, 30, 30, 20, 3, 0.02])[0]
    return rng.randbytes(rng.randrange(size + 1)) if size < MIB else bytes(size)


def short_value(rng: Random) -> bytes:
    """For cores whose limits are small."""
    return rng.randbytes(rng.randrange(rng.choices([1, 5, 30, 120, 310], [10, 30, 30, 10, 3])[0]))


def some_requests(rng: Random, keys: list[bytes], sizes: tuple[int, ...] = (1,)) -> list[bytes]:
    """Valid requests. ADDs go to the last of the keys, which is given no other values.

    `sizes`: of barriers. Those of more than one are for keys that clients share.
    """
    return [one_request(rng, keys, sizes) for _ in range(rng.randrange(1, 12))]


def one_request(
    rng: Random,
    keys: list[bytes],
    sizes: tuple[int, ...] = (1,),
    value: Callable[[Random], bytes] = some_value,
) -> bytes:
    drawn = rng.random()
    op = Op.SNAPSHOT if drawn < LOOKS else Op.REPORT if drawn < LOOKS + TELLS else Op(rng.randrange(1, 19))
    *words, number = keys
    if op is Op.REPORT:
        return request(op, bytes(rng.choices(range(128), k=rng.choice([0, 1, 30, 300]))))
    if op is Op.SNAPSHOT:
        return request(op, rng.choice(QUESTIONS))
    if op is Op.DELETE_KEY and rng.random() < 0.3:
        return request(op, b"/" + HELLO.encode() + rng.choice([value(rng)[:900], *HELLOS]))
    if op in (Op.SET, Op.APPEND, Op.QUEUE_PUSH):
        return request(op, rng.choice(words), value(rng))
    if op is Op.COMPARE_SET:
        return request(op, rng.choice(words), rng.choice([b"", value(rng)]), value(rng))
    if op in (Op.GET, Op.DELETE_KEY, Op.QUEUE_POP, Op.QUEUE_LEN):
        return request(op, rng.choice(keys))
    if op is Op.ADD:
        return request(op, number, tail=pack_i64(rng.randrange(-1000, 1000)))
    if op in (Op.CHECK, Op.WAIT, Op.MULTI_GET):
        return counted_request(op, rng.choices(keys, k=rng.choice([0, 1, 2, 3, 10])))
    if op is Op.MULTI_SET:
        chosen = rng.choices(words, k=rng.choice([0, 1, 2, 5]))
        return counted_request(op, [part for key in chosen for part in (key, value(rng))], blobs_each=2)
    if op is Op.BARRIER:
        return request(op, rng.choice(keys), tail=pack_i64(rng.choice(sizes)))
    return request(op, tail=rng.randbytes(4) if op is Op.PING else b"")


def relayed_requests(rng: Random, keys: list[bytes]) -> list[bytes]:
    """What a relay asks besides what its clients ask; the tags are those of its first requests."""
    key, tag = rng.choice(keys), rng.randrange(30)
    size, count = rng.randrange(-1, 5), rng.choice([0, 1, 2, 5, 1 << 60])
    some = [
        request(Op.ARRIVE, key, tail=pack_i64(size) + pack_u64(count)),
        request(Op.LEAVE, tail=pack_u64(tag) + pack_u64(rng.randrange(4))),
        counted_request(Op.WAIT_IN_TURN, rng.choices(keys, k=rng.randrange(3))),
        request(Op.RECALL, key),
        request(Op.POP_CALLED, key, tail=pack_u64(tag)),
        request(Op.RELAY_REPORT, rng.choice([b"", short_value(rng), *TOLD])),
    ]
    return rng.choices(some, k=rng.randrange(1, 4))


# Mutations of bytes, in place


def mutate_bytes(rng: Random, data: bytearray) -> None:
    rng.choice(_MUTATIONS)(rng, data)


def _flip_bits(rng: Random, data: bytearray) -> None:
    for _ in range(rng.randrange(1, 9) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _truncate(rng: Random, data: bytearray) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _duplicate(rng: Random, data: bytearray) -> None:
    part = _some_slice(rng, data)
    at = rng.randrange(len(data) + 1)
    data[at:at] = data[part] * rng.randrange(1, 4)


def _insert(rng: Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randrange(1, 30))


def _delete(rng: Random, data: bytearray) -> None:
    del data[_some_slice(rng, data)]


def _replace_length(rng: Random, data: bytearray) -> None:
    """Put a boundary number over eight bytes, mostly ones that are a length or a count: zeros behind them."""
    lengths = [at - 1 for at in range(1, len(data) - 8) if not any(data[at + 2 : at + 7])]
    at = rng.choice(lengths) if lengths and rng.random() < 0.9 else rng.randrange(len(data) + 1)
    data[at : at + 8] = pack_u64(rng.choice(BOUNDARIES))


def _some_slice(rng: Random, data: bytearray) -> slice:
    begin = rng.randrange(len(data) + 1)
    return slice(begin, begin + rng.randrange(1, 60))


_MUTATIONS: Final[list[Callable[[Random, bytearray], None]]] = [
    *(_flip_bits, _truncate, _duplicate, _insert, _delete, _replace_length, _replace_length)
]
