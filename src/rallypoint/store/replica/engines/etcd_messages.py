"""The messages of etcd's API, version 3, that a log needs: requests as bytes, and answers from bytes.

The numbers are those of the fields in etcd's `rpc.proto` and `kv.proto`. Whatever reads or writes keys is a
transaction (`transaction`): comparisons, and what is done if all of them hold, or else.

Of protocol buffers, this has what these messages need (`encode`, `decode`): a message is a list of fields,
each a number and an integer or bytes. Text and messages within a message are bytes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rallypoint.errors import ProtocolError

_VARINT: Final = 0
_EIGHT_BYTES: Final = 1
_BYTES: Final = 2
_FOUR_BYTES: Final = 5
_FIXED: Final = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}


@dataclass(frozen=True)
class KeyValue:
    """A key, as a read finds it. Revisions count all changes of the cluster."""

    key: bytes
    value: bytes
    changed: int
    """The revision of its last change."""


@dataclass(frozen=True)
class Outcome:
    """What a transaction has done."""

    succeeded: bool
    """Whether all comparisons held."""
    revision: int
    found: Sequence[Sequence[KeyValue]]
    """What each of its operations has read; nothing where it wrote."""
    counts: Sequence[int]
    """How many keys the range of each has, whatever its limit."""


@dataclass(frozen=True)
class Status:
    """What one node of a cluster says about itself."""

    version: str
    size: int
    """Bytes of its file, also those that are free in it."""
    size_in_use: int
    quota: int
    """0: it does not say (before 3.6)."""
    member: int
    """Its own identity."""
    leader: int
    """Of the node that it takes for the leader; 0: it knows none."""
    revision: int
    errors: Sequence[str]
    """Alarms are among them."""


# Operations -------------------------------------------------------------------------------------------------


def get(key: bytes, end: bytes = b"", *, limit: int = 0, keys_only: bool = False) -> bytes:
    """Read a key, or those from it to before `end`, in their order. All reads are linearizable."""
    return encode((1, _range(key, end) + encode((3, limit), (8, int(keys_only)))))


def put(key: bytes, value: bytes, *, lease: int = 0) -> bytes:
    return encode((2, encode((1, key), (2, value), (3, lease))))


def delete(key: bytes, end: bytes = b"") -> bytes:
    return encode((3, _range(key, end)))


def _range(key: bytes, end: bytes) -> bytes:
    """A range without an end is one key. One with an empty end, for etcd, is that key and all behind it."""
    return encode((1, key), (2, end)) if end else encode((1, key))


# Comparisons: result (0: equal, 1: greater), what is compared (0: version, 2: revision, 3: value), key -----


def absent(key: bytes) -> bytes:
    return encode((1, 0), (2, 0), (3, key), (4, 0))


def present(key: bytes) -> bytes:
    return encode((1, 1), (2, 0), (3, key), (4, 0))


def changed_at(key: bytes, revision: int) -> bytes:
    """Whether a key was last changed at this revision; 0: it is not there."""
    return encode((1, 0), (2, 2), (3, key), (6, revision))


def holds(key: bytes, value: bytes) -> bytes:
    return encode((1, 0), (2, 3), (3, key), (7, value))


# Requests and answers ---------------------------------------------------------------------------------------


def transaction(if_: Sequence[bytes], then: Sequence[bytes], else_: Sequence[bytes] = ()) -> bytes:
    return encode(*((1, each) for each in if_), *((2, each) for each in then), *((3, each) for each in else_))


def read_outcome(data: bytes) -> Outcome:
    answer = decode(data)
    ranges = [operation.message(1) for operation in answer.messages(3)]
    found = [
        [KeyValue(each.data(1), each.data(5), each.integer(3)) for each in range_.messages(2)]
        for range_ in ranges
    ]
    counts = [range_.integer(4) for range_ in ranges]
    return Outcome(bool(answer.integer(2)), answer.message(1).integer(3), found, counts)


def read_status(data: bytes) -> Status:
    answer = decode(data)
    return Status(
        version=answer.data(2).decode(),
        size=answer.integer(3),
        size_in_use=answer.integer(9),
        quota=answer.integer(12),
        member=answer.message(1).integer(2),
        leader=answer.integer(4),
        revision=answer.message(1).integer(3),
        errors=[each.decode() for each in answer.all_data(8)],
    )


class Fields:
    """The fields of a message. Where one is absent, it is 0 or empty, as its sender meant."""

    def __init__(self, values: dict[int, list[int | bytes]]) -> None:
        self._values = values

    def integer(self, number: int) -> int:
        value = self._values.get(number, [0])[-1]
        return value if isinstance(value, int) else 0

    def data(self, number: int) -> bytes:
        return next(reversed(self.all_data(number)), b"")

    def all_data(self, number: int) -> list[bytes]:
        """Of a repeated field."""
        return [each for each in self._values.get(number, ()) if isinstance(each, bytes)]

    def message(self, number: int) -> Fields:
        return decode(self.data(number))

    def messages(self, number: int) -> list[Fields]:
        return [decode(each) for each in self.all_data(number)]


def encode(*fields: tuple[int, int | bytes]) -> bytes:
    """A message of these fields. Integers are from 0 to 2^64 - 1."""
    pieces: list[bytes] = []
    for number, value in fields:
        if isinstance(value, int):
            pieces += [_varint(number << 3 | _VARINT), _varint(value)]
        else:
            pieces += [_varint(number << 3 | _BYTES), _varint(len(value)), value]
    return b"".join(pieces)


def decode(data: bytes) -> Fields:
    """The fields of a message. ProtocolError if it is none. Fields of a fixed length are left out."""
    values: dict[int, list[int | bytes]] = {}
    place = 0
    while place < len(data):
        tag, place = _read_varint(data, place)
        kind = tag & 7
        value: int | bytes
        if kind == _VARINT:
            value, place = _read_varint(data, place)
        elif kind == _BYTES:
            length, place = _read_varint(data, place)
            value, place = data[place : place + length], place + length
        elif kind in _FIXED:
            place += _FIXED[kind]
            continue
        else:
            raise ProtocolError(f"a field of a message is of the unknown kind {kind}")
        values.setdefault(tag >> 3, []).append(value)
    if place != len(data):
        raise ProtocolError("a message is cut off")
    return Fields(values)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    """The integer at this place, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise ProtocolError("a message is cut off")
        digit = data[place]
        place += 1
        value |= (digit & 127) << shift
        if digit < 128:
            return value & (1 << 64) - 1, place
    raise ProtocolError("an integer of a message is too long")
