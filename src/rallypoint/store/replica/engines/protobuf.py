"""Protocol buffers, as far as etcd's messages need them: fields that are integers or bytes.

A message is a list of fields, each a number and a value. Text and messages within a message are bytes here.
"""

from __future__ import annotations

from typing import Final

from rallypoint.errors import ProtocolError

_VARINT: Final = 0
_EIGHT_BYTES: Final = 1
_BYTES: Final = 2
_FOUR_BYTES: Final = 5
_FIXED: Final = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}


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
