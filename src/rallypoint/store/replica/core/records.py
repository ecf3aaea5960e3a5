"""What stands in the log: records, each with its time and the inputs of a store since the one before. Pure.

A record may be longer than what an engine takes at once. Then it is written in parts, one after the other,
each as a record of the log with a number of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from math import isfinite
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from rallypoint.errors import RallypointError
from rallypoint.store.replica.log import LostRecordsError

FORMAT: Final = 1
"""Of records and checkpoints. Who does not know it refuses to go on: it would do something else."""

SAME_VERSION: Final = (
    "all processes of a store have to be of the same version of Rallypoint, from the first record of its log "
    "on: for another version, name another job in the URL of the engine"
)
DAMAGED: Final = (
    "something else has written into the log, or the engine has damaged it: nobody can go on with it; name "
    "another job in the URL of the engine"
)

_HEAD: Final = Struct("<BBd")
_ENTRY: Final = Struct("<BQQ")
_LINK: Final = Struct("<I")
LINK_BYTES: Final = _LINK.size
_WHOLE, _MORE, _LAST = range(3)


class FormatError(RallypointError):
    """A record or a checkpoint that this version cannot read."""


class Kind(IntEnum):
    """What an entry of a record says."""

    TERM = 0
    """Somebody else leads from now on: all clients are gone. `client` is the term."""
    OPEN = 1
    """A client has come, to the store of the name that stands before the first zero byte; behind it: from
    where."""
    REQUESTS = 2
    """A client has sent these whole requests."""
    CLOSE = 3
    """A client is gone."""
    EXPIRE = 4
    """Sessions whose time is over are given up."""
    TELL = 5
    """The relays of a store, which is named, are asked to tell of themselves."""
    END_SESSION = 6
    """A session of too great a weight is given up: the name of its store, a zero byte, and its token."""
    DROP = 7
    """A store is not needed any more."""


class Entry(NamedTuple):
    """One input."""

    kind: Kind
    client: int = 0
    data: bytes = b""


_KINDS: Final = frozenset(map(int, Kind))


def pack_record(time: float, entries: Iterable[Entry]) -> bytes:
    """A record, of any length."""
    parts = [_HEAD.pack(FORMAT, _WHOLE, time)]
    for kind, client, data in entries:
        parts.append(_ENTRY.pack(kind, client, len(data)))
        parts.append(data)
    return b"".join(parts)


def parse_record(record: bytes) -> tuple[float, Iterator[tuple[int, int, bytes]]]:
    """The time and the entries of a record; each as a plain tuple, as there are very many."""
    if len(record) < _HEAD.size:
        raise FormatError("it ends too early", hint=DAMAGED)
    form, mark, time = _HEAD.unpack_from(record)
    if (form, mark) != (FORMAT, _WHOLE) or not isfinite(time):
        raise FormatError(f"it begins with {form}, {mark} and the time {time}", hint=DAMAGED)
    return time, _entries(record)


def link(parts: Iterable[bytes], last: int) -> list[bytes]:
    """Each with a sum of what stands before it in the log. `last`: of what stands before the first."""
    linked = []
    for part in parts:
        linked.append(part + _LINK.pack(last))
        last = crc32(linked[-1])
    return linked


def unlink(data: bytes, last: int) -> bytes:
    """What was linked. FormatError if this version cannot read it; LostRecordsError if what stood before it
    when it was written is something else than what has been read: the engine has lost that meanwhile."""
    if len(data) < _HEAD.size + LINK_BYTES or data[0] != FORMAT:
        raise FormatError(
            f"it has format {list(data[:1])}, and this version knows {FORMAT}",
            hint=SAME_VERSION,
        )
    if data[1] > _LAST:
        raise FormatError(f"it has the mark {data[1]}", hint=DAMAGED)
    if not data.endswith(_LINK.pack(last)):
        raise LostRecordsError(
            "the log goes on from another record than the one that was read: the engine has lost records"
        )
    return data[:-LINK_BYTES]


def _entries(record: bytes) -> Iterator[tuple[int, int, bytes]]:
    position, end = _HEAD.size, len(record)
    while position < end:
        start = position + _ENTRY.size
        if start > end:
            raise FormatError("it ends within an entry", hint=DAMAGED)
        kind, client, length = _ENTRY.unpack_from(record, position)
        position = start + length
        if position > end or kind not in _KINDS:
            raise FormatError(f"it has an entry of kind {kind} and {length:,} bytes", hint=DAMAGED)
        yield kind, client, record[start:position]


def seal(checkpoint: bytes) -> bytes:
    """A checkpoint with the sum of its bytes."""
    return checkpoint + _LINK.pack(crc32(checkpoint))


def unseal(data: bytes) -> bytes:
    """What was sealed; FormatError if it has changed since."""
    if len(data) < LINK_BYTES or seal(data[:-LINK_BYTES]) != data:
        raise FormatError("a checkpoint cannot be read: its bytes have changed", hint=DAMAGED)
    return data[:-LINK_BYTES]


def in_parts(record: bytes, most: int) -> Sequence[bytes]:
    """A record as what is appended to the log: itself, or its parts if it is longer than `most` bytes."""
    if len(record) <= most:
        return [record]
    step = most - _HEAD.size
    parts = [record[start : start + step] for start in range(0, len(record), step)]
    marks = [_MORE] * (len(parts) - 1) + [_LAST]
    return [_HEAD.pack(FORMAT, mark, 0.0) + part for mark, part in zip(marks, parts, strict=True)]


class Assembly:
    """Puts parts together again."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    @property
    def is_open(self) -> bool:
        """Whether more parts are to come."""
        return bool(self._parts)

    def take(self, data: bytes) -> bytes | None:
        """What the log has next; returns the record that is complete then, if one is.

        A leader that dies in the middle leaves parts behind: a whole record is the next leader's first.
        """
        mark = data[1] if len(data) >= _HEAD.size and data[0] == FORMAT else _WHOLE
        if mark == _WHOLE:
            self._parts.clear()
            return data
        self._parts.append(data[_HEAD.size :])
        if mark == _MORE:
            return None
        record = b"".join(self._parts)
        self._parts.clear()
        return record
