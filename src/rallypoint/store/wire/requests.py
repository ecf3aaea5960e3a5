"""Requests: how a server reads them under its limits, and how they come to who carries them out.

A *handler* is what a parser hands requests to, usually a connection. For each operation that it serves, it
has a function that passes a request to the method for it (`Deliver`). A `RequestSpec` joins such a function
with the operation's row of `opcodes` and the limits. Requests that have arrived whole need no parser:

- `Repeated`: data that all ranks send alike at a barrier, which the parser knows by its bytes.
- `WholeRequests`: the requests of a batch, or of a file's log.
- `Scanner`: whether a leader may answer some data itself, or has to log it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.wire.encoding import unpack_u64
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import ACTIVITY_BYTES, OPERATIONS, READ_OPS, REPEAT_OPS, Op

_HELLO_BYTES: Final = 1_024  # whatever the limit of keys is
_QUESTION_BYTES: Final = 16_384
_REPORT_BYTES: Final = 16 << 20  # of a relay with some 50,000 clients
_NAME_BYTES: Final = 1_024
_OTHER_BLOBS: Final = {"T": "token", "R": "report", "Q": "question", "N": "name", "A": "text"}


class Handler(Protocol):
    """What every handler has, besides the methods of the operations that it serves.

    A method returns the reply to send, or `b""`, or None if the request takes longer: call `go_on` until it
    returns the reply. A `get` that returns only the first piece of its reply calls the parser's
    `leave_unfinished` before. A method may raise ProtocolError; the connection must then be closed.
    """

    def validate(self) -> None: ...
    def get(self, key: bytes, /) -> bytes | None: ...

    @property
    def is_unfinished(self) -> bool:
        """Whether the last request is not finished, although its method has returned bytes."""

    def go_on(self) -> bytes | None:
        """Go on with the last request; return its reply, or a piece of it, or None."""

    def hold(self, count: int, is_cut: bool, /) -> None:
        """The parser keeps that many bytes of requests that are not complete, or not carried out.

        `is_cut`: it waits for the rest of a request.
        """

    def postpone(self) -> None:
        """There is work left: have the parser fed again, as soon as others have had their turn."""


class RawHandler(Handler, Protocol):
    """Takes requests as they are: the operation, its blobs and its tail."""

    def carry(self, op: Op, blobs: list[bytes], tail: bytes, /) -> bytes | None: ...


HandlerT = TypeVar("HandlerT", bound=Handler)

Deliver = Callable[[HandlerT, list[bytes], bytes], bytes | None]
"""Hands a complete request to a handler: its blobs, which may be kept but not changed, and its tail. Returns
the reply, or None if the request is not finished."""


def carried(ops: Iterable[Op]) -> dict[Op, Deliver[RawHandler]]:
    """These operations, passed to the handler's `carry` as they are."""

    def pass_on(op: Op) -> Deliver[RawHandler]:
        return lambda handler, blobs, tail: handler.carry(op, blobs, tail)

    return {op: pass_on(op) for op in ops}


class RequestSpec(Generic[HandlerT]):
    """How requests of one operation are read: their shape, its limits, and the method that takes them."""

    __slots__ = ("caps", "count", "counted", "deliver", "kinds", "limits", "op", "period", "tail")

    def __init__(self, op: Op, limits: Limits, deliver: Deliver[HandlerT]) -> None:
        operation = OPERATIONS[op]
        caps = {"K": limits.key_bytes, "V": limits.value_bytes, "T": 64, "B": limits.batch_bytes}
        caps["R"] = min(limits.request_bytes, _REPORT_BYTES)
        caps["H"] = max(limits.key_bytes, _HELLO_BYTES)
        caps["Q"] = _QUESTION_BYTES
        caps["N"] = _NAME_BYTES
        caps["A"] = ACTIVITY_BYTES
        self.op = op
        self.limits = limits
        self.kinds = operation.blobs
        self.period = len(operation.blobs)
        self.caps = tuple(caps[kind] for kind in operation.blobs)
        self.counted = operation.counted
        self.tail = operation.tail
        self.deliver = deliver
        self.count = 0  # of the requests that were read by it

    def read(self, data: bytes, start: int, stop: int) -> tuple[list[bytes], int]:
        """The blobs of the request that begins at `start`, and where its tail ends. It is whole if that is
        not beyond `stop`. LimitError if it breaks a limit.
        """
        position, left, period = start + 1, self.period, self.period
        if self.counted:
            left *= self.check_count(unpack_u64(data, position)[0] if position + 8 <= stop else 0)
            position += 8
        blobs: list[bytes] = []
        while left and position <= stop:
            begin = position + 8
            length = unpack_u64(data, position)[0] if begin <= stop else 0
            position = begin + length
            if length > self.caps[-left % period]:
                raise self.blob_too_long(length, -left % period)
            blobs.append(data[begin:position])
            left -= 1
        position += self.tail
        if position - start > self.limits.request_bytes:
            raise self.too_long()
        return blobs, position

    def check_count(self, count: int) -> int:
        """How many keys a request names; LimitError if they are too many."""
        limit = self.limits.keys_per_request
        if count > limit:
            raise LimitError(f"{self.op.name} of {count:,} keys; the limit keys_per_request is {limit:,}")
        return count

    def too_long(self) -> LimitError:
        """The whole request is too long."""
        cap = self.limits.request_bytes
        return LimitError(f"{self.op.name} of more than {cap:,} bytes, the limit request_bytes")

    def blob_too_long(self, length: int, index: int) -> LimitError:
        """The blob at `index` has `length` bytes, which is too long: for its limit, or for the request's."""
        cap, kind = self.caps[index], self.kinds[index]
        if length <= cap:
            return self.too_long()
        if kind in _OTHER_BLOBS:
            what = _OTHER_BLOBS[kind]
            return LimitError(f"{self.op.name} with a {what} of {length:,} bytes; {cap} are allowed")
        what = "key" if kind in "KH" else "value"
        return LimitError(
            f"{self.op.name} with a {what} of {length:,} bytes; the limit {what}_bytes is {cap:,}"
        )


# Requests that have arrived whole, which need no incremental parser

REPEATED_BYTES = 256
"""Longer data is always read."""
_MOST_ENTRIES: Final = 64

_Call = tuple[Deliver[HandlerT], list[bytes], bytes]


class _Tally:
    """How often some known data has arrived, and the operations of its requests."""

    __slots__ = ("count", "ops")

    def __init__(self, ops: Sequence[Op]) -> None:
        self.count = 0
        self.ops = ops


KnownData = tuple[Deliver[HandlerT], list[bytes], bytes, int, _Tally]
"""The requests that some data holds: one call for all of them, their number, and where they are counted."""


class Repeated(Generic[HandlerT]):
    """Data that has arrived before, and the requests that it holds.

    At a barrier, thousands of clients send the same bytes. Between two requests, the same bytes are the
    same requests: they need not be read again, and share the keys that were read.

    Data gets an entry when it arrives twice in a row, so keys that are used once cost one lookup and no
    more. Threads may share it: each would make the same entry.
    """

    __slots__ = ("_counts", "_last", "_specs", "calls")

    def __init__(self, specs: Sequence[RequestSpec[HandlerT] | None]) -> None:
        """`specs` has an entry for each opcode."""
        self.calls: dict[bytes, KnownData[HandlerT] | tuple[()]] = {}
        """By data, what it holds; an empty tuple if it has to be parsed. `notice` makes the entries."""
        self._counts: dict[Op, int] = {}  # of entries that are gone
        self._last = b""
        self._specs = specs

    def notice(self, data: bytes) -> None:
        """Data without an entry has arrived."""
        if data != self._last:
            self._last = data
            return
        if len(self.calls) >= _MOST_ENTRIES:
            self._counts = self.counts()
            self.calls.clear()
        self.calls[data] = self._parse(data)

    def counts(self) -> dict[Op, int]:
        """How many requests of each kind were recognized by their bytes."""
        counts = dict(self._counts)
        for known in self.calls.values():
            if known:
                tally = known[-1]
                for op in tally.ops:
                    counts[op] = counts.get(op, 0) + tally.count
        return counts

    def _parse(self, data: bytes) -> KnownData[HandlerT] | tuple[()]:
        """The requests in `data`; an empty tuple unless all are whole, and of operations in REPEAT_OPS."""
        calls: list[_Call[HandlerT]] = []
        ops: list[Op] = []
        start, stop = 0, len(data)
        while start < stop:
            spec = self._specs[data[start]]
            if spec is None or spec.op not in REPEAT_OPS:
                return ()
            try:
                blobs, end = spec.read(data, start, stop)
            except LimitError:
                return ()
            if end > stop:
                return ()
            calls.append((spec.deliver, blobs, data[end - spec.tail : end]))
            ops.append(spec.op)
            start = end
        call = calls[0] if len(calls) == 1 else (_in_turn(calls), [], b"")
        return (*call, len(calls), _Tally(ops))


def _in_turn(calls: Sequence[_Call[HandlerT]]) -> Deliver[HandlerT]:
    """One call that carries out several requests."""

    def deliver_all(handler: HandlerT, _: list[bytes], __: bytes) -> bytes:
        replies: list[bytes] = []
        try:
            for deliver, blobs, tail in calls:
                replies.append(deliver(handler, blobs, tail) or b"")
        except ProtocolError as error:
            error.replies = b"".join(replies)
            raise
        return b"".join(replies)

    return deliver_all


class WholeRequests:
    """Reads whole requests, and counts them."""

    __slots__ = ("_specs", "limits")

    def __init__(self, limits: Limits, ops: Iterable[Op]) -> None:
        self.limits = limits
        self._specs = {int(op): RequestSpec[Handler](op, limits, deliver_nothing) for op in ops}

    def counts(self) -> dict[Op, int]:
        """How many requests of each kind there have been."""
        return {spec.op: spec.count for spec in self._specs.values()}

    def read(self, data: bytes, start: int, stop: int) -> tuple[Op, list[bytes], bytes]:
        """The operation, the blobs and the tail of the request that is `data[start:stop]`.

        Raises ProtocolError, if that is no request, or LimitError.
        """
        if start == stop or data[start] not in self._specs:
            raise ProtocolError("there is no such operation here")
        spec = self._specs[data[start]]
        spec.count += 1
        blobs, end = spec.read(data, start, stop)
        if end != stop:
            raise ProtocolError(f"{spec.op.name} is shorter or longer than it says")
        return spec.op, blobs, data[stop - spec.tail : stop]


def deliver_nothing(*_: object) -> bytes:
    """For requests that are only read."""
    return b""


_MOST_REMEMBERED: Final = 4_096
_REMEMBERED_BYTES: Final = range(65, 1_025)
"""Lengths of data that is worth remembering. Shorter data is classified as quickly as it is looked up."""


class Nature(Enum):
    """What some data holds."""

    READS = "requests that change nothing"
    WRITES = "requests of which some may change something"
    OTHER = "not, or not only, whole requests: it has to be parsed"


class Classified(NamedTuple):
    """What some data is, and the keys that it waits for, if it only reads."""

    nature: Nature
    awaited: list[bytes]


_OTHER: Final = Classified(Nature.OTHER, [])
_WRITES: Final = Classified(Nature.WRITES, [])
_READS: Final = Classified(Nature.READS, [])


class Scanner:
    """Classifies data without parsing it. It remembers data that all ranks send alike."""

    __slots__ = ("_remembered", "_specs")

    def __init__(self, limits: Limits, raw: frozenset[Op]) -> None:
        """`raw`: the operations that may be passed on as they are; others have to be parsed."""
        self._specs = {
            int(op): (RequestSpec[Handler](op, limits, deliver_nothing), op is Op.WAIT, op in READ_OPS)
            for op in OPERATIONS
            if op in raw
        }
        self._remembered: dict[bytes, Classified] = {}

    def classify(self, data: bytes) -> Classified:
        """Classify data that begins with a request."""
        if len(data) not in _REMEMBERED_BYTES:
            return self._classify(data)
        found = self._remembered.get(data)
        if found is None:
            found = self._classify(data)
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            self._remembered[data] = found
        return found

    def _classify(self, data: bytes) -> Classified:
        start, stop = 0, len(data)
        only_reads = True
        awaited: list[bytes] = []
        while start < stop:
            found = self._specs.get(data[start])
            if found is None:
                return _OTHER
            spec, waits, reads = found
            try:
                blobs, end = spec.read(data, start, stop)
            except LimitError:
                return _OTHER
            if end > stop:
                return _OTHER
            if waits:
                awaited += blobs
            elif not reads:
                only_reads = False
            start = end
        if not only_reads:
            return _WRITES
        return Classified(Nature.READS, awaited) if awaited else _READS
