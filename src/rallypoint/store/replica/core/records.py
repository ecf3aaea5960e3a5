"""What stands in the log: records, each with its time and the inputs of a store since the one before. Pure.

A record may be longer than what an engine takes at once. Then it is written in parts, one after the other,
each as a record of the log with a number of its own.

Checkpoints are plain data as bytes (`pack`, `unpack`): None, numbers, texts, bytes, and lists of such. The
same data gives the same bytes, on every machine and in every version.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from math import isfinite
from struct import Struct
from typing import Any, Final, NamedTuple
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

_ITEM: Final = Struct("<BQ")
_FLOAT: Final = Struct("<d")
_NONE, _FALSE, _TRUE, _INT, _FLOATING, _BYTES, _TEXT, _LIST, _RUN = range(9)
_DEEPEST: Final = 32
BYTES_PER_READ: Final = 4 << 20
"""How long the records of a read are, about."""

_FEWEST: Final = 32
_MOST: Final = 1024


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

    def feed(self, data: bytes) -> bytes | None:
        """Feed the next entry of the log; returns the record that it completes, if any.

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


def pack(value: Any) -> bytes:
    """Data as bytes."""
    parts: list[bytes] = []
    _write(value, parts.append)
    return b"".join(parts)


def unpack(data: bytes) -> Any:
    """The data that `pack` was given, with lists for tuples. ValueError if these are not such bytes."""
    value, end = _read(data, 0, _DEEPEST)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes are left")
    return value


def _write(value: Any, put: Callable[[bytes], None]) -> None:
    if isinstance(value, bytes):
        put(_ITEM.pack(_BYTES, len(value)))
        put(value)
    elif isinstance(value, list | tuple):
        if len(value) > 1 and set(map(type, value)) == {bytes}:  # keys and values: very many, and quickly
            put(_ITEM.pack(_RUN, len(value)))
            put(struct.pack(f"<{len(value)}Q", *map(len, value)))
            put(b"".join(value))
            return
        put(_ITEM.pack(_LIST, len(value)))
        for each in value:
            _write(each, put)
    elif value is None or isinstance(value, bool):
        put(_ITEM.pack(_NONE if value is None else _TRUE if value else _FALSE, 0))
    elif isinstance(value, int):
        content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        put(_ITEM.pack(_INT, len(content)))
        put(content)
    elif isinstance(value, float):
        put(_ITEM.pack(_FLOATING, _FLOAT.size))
        put(_FLOAT.pack(value))
    elif isinstance(value, str):
        content = value.encode(errors="surrogatepass")
        put(_ITEM.pack(_TEXT, len(content)))
        put(content)
    else:
        raise TypeError(f"{type(value).__name__} is no plain data")


def _read(data: bytes, start: int, depth: int) -> tuple[Any, int]:
    begin = start + _ITEM.size
    if begin > len(data):
        raise ValueError("it ends too early")
    kind, size = _ITEM.unpack_from(data, start)
    if kind == _LIST:
        if not depth:
            raise ValueError("lists within lists go too deep")
        values = []
        for _ in range(size):
            value, begin = _read(data, begin, depth - 1)
            values.append(value)
        return values, begin
    if kind == _RUN:
        return _read_run(data, begin, size)
    end = begin + size
    if end > len(data):
        raise ValueError("it ends too early")
    return _value_of(kind, data[begin:end]), end


def _read_run(data: bytes, begin: int, count: int) -> tuple[list[bytes], int]:
    position = begin + 8 * count
    if position > len(data):
        raise ValueError("it ends too early")
    values = []
    for length in struct.unpack_from(f"<{count}Q", data, begin):
        values.append(data[position : position + length])
        position += length
    if position > len(data):
        raise ValueError("it ends too early")
    return values, position


def _value_of(kind: int, content: bytes) -> Any:
    if kind == _BYTES:
        return content
    if kind == _INT:
        return int.from_bytes(content, "little", signed=True)
    if kind == _TEXT:
        return content.decode(errors="surrogatepass")
    if kind == _FLOATING and len(content) == _FLOAT.size:
        return _FLOAT.unpack(content)[0]
    if kind in (_NONE, _FALSE, _TRUE) and not content:
        return None if kind == _NONE else kind == _TRUE
    raise ValueError(f"there is no kind {kind} of {len(content)} bytes")


class Pace:
    """As many as are likely to have `BYTES_PER_READ`, by those that were read before."""

    def __init__(self) -> None:
        self._next = _FEWEST

    def next_count(self) -> int:
        """How many to ask for. Unless `note` is called, few the next time: they may have been too long."""
        count, self._next = self._next, _FEWEST
        return count

    def note(self, records: Sequence[bytes]) -> None:
        """What has been read."""
        length = sum(map(len, records)) + 1
        self._next = min(max(BYTES_PER_READ * len(records) // length, _FEWEST), _MOST)


@contextmanager
def parsing(log: str, what: str) -> Iterator[None]:
    """FormatError if the block cannot make sense of this part of a log of this name.

    Anybody who may write there may have written it.
    """
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise FormatError(
            f"{log}: {what} cannot be read: {error}",
            hint="another version of Rallypoint has written it, or somebody else; `rallypoint erase --engine "
            "URL` removes all of this job, if it is of no use any more",
        ) from error
