"""Requests that have arrived whole, which need no incremental parser.

- `Repeated`: all ranks send the same bytes at a barrier; the parser knows such data by its bytes.
- `WholeRequests`: the requests of a batch, or of a file's log.
- `Scanner`: whether a leader may answer some data itself, or has to log it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final, Generic, NamedTuple

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import OPERATIONS, READ_OPS, REPEAT_OPS, Op
from rallypoint.store.wire.requests import Deliver, Handler, HandlerT, RequestSpec

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

    __slots__ = ("_counts", "_last", "_limits", "_specs", "calls")

    def __init__(self, limits: Limits, specs: Sequence[RequestSpec[HandlerT] | None]) -> None:
        """`specs` has an entry for each opcode."""
        self.calls: dict[bytes, KnownData[HandlerT] | tuple[()]] = {}
        """By data, what it holds; an empty tuple if it has to be parsed. `notice` makes the entries."""
        self._counts: dict[Op, int] = {}  # of entries that are gone
        self._last = b""
        self._limits = limits
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
                blobs, end = spec.read(data, start, stop, self._limits.keys_per_request)
            except ProtocolError:
                return ()
            if end > stop or end - start > self._limits.request_bytes:
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
        self._specs = {int(op): RequestSpec[Handler](op, _deliver_nothing, limits) for op in ops}

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
        blobs, end = spec.read(data, start, stop, self.limits.keys_per_request)
        if end != stop:
            raise ProtocolError(f"{spec.op.name} is shorter or longer than it says")
        return spec.op, blobs, data[stop - spec.tail : stop]


def _deliver_nothing(*_: object) -> bytes:
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

    __slots__ = ("_limits", "_remembered", "_specs")

    def __init__(self, limits: Limits, raw: frozenset[Op]) -> None:
        """`raw`: the operations that may be passed on as they are; others have to be parsed."""
        self._limits = limits
        self._specs = {
            int(op): (RequestSpec[Handler](op, _deliver_nothing, limits), op is Op.WAIT, op in READ_OPS)
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
        start, stop, limits = 0, len(data), self._limits
        only_reads = True
        awaited: list[bytes] = []
        while start < stop:
            found = self._specs.get(data[start])
            if found is None:
                return _OTHER
            spec, waits, reads = found
            try:
                blobs, end = spec.read(data, start, stop, limits.keys_per_request)
            except LimitError:
                return _OTHER
            if end > stop or end - start > limits.request_bytes:
                return _OTHER
            if waits:
                awaited += blobs
            elif not reads:
                only_reads = False
            start = end
        if not only_reads:
            return _WRITES
        return Classified(Nature.READS, awaited) if awaited else _READS
