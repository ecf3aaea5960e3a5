"""Requests that are known by their bytes: what all ranks say at a barrier is the same, byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic

from rallypoint.errors import ProtocolError
from rallypoint.store.wire.form import Form
from rallypoint.store.wire.handlers import Deliver, HandlerT
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op

# None of them takes long: so few keys are in so few bytes.
REPEATED: Final = (Op.SET, Op.ADD, Op.CHECK, Op.WAIT, Op.CANCEL_WAIT, Op.PING, Op.BARRIER)
"""The requests that may be known by their bytes. Their replies are short, so nothing has to count them: at
most a byte for each wait of the client's own that one of them ends."""

REPEATED_BYTES = 256
"""Longer data is always read."""
_MOST_ENTRIES: Final = 64

_Call = tuple[Deliver[HandlerT], list[bytes], bytes]


class _Tally:
    """How often data has come that is known, and which requests it is."""

    __slots__ = ("count", "ops")

    def __init__(self, ops: Sequence[Op]) -> None:
        self.count = 0
        self.ops = ops


Known = tuple[Deliver[HandlerT], list[bytes], bytes, int, _Tally]
"""What data stands for: a call, how many requests that is, and where they are counted."""


class Repeated(Generic[HandlerT]):
    """Data that has come before, and the requests that it was.

    At a barrier, thousands of clients send the same bytes. Between two requests, the same bytes are the
    same requests: they need not be read again, and share the keys that were read.

    Data is noted down when it comes twice in a row, so that keys of which each is used once cost a look-up
    and no more. Threads may share it: each would make the same entry.
    """

    __slots__ = ("_counts", "_forms", "_last", "_limits", "calls")

    def __init__(self, limits: Limits, forms: Sequence[Form[HandlerT] | None]) -> None:
        """`forms` has the form of each opcode."""
        self.calls: dict[bytes, Known[HandlerT] | tuple[()]] = {}
        """What data stands for; nothing, if it has to be read. Where there is no entry, `notice` is due."""
        self._counts: dict[Op, int] = {}  # of entries that are gone
        self._last = b""
        self._limits = limits
        self._forms = forms

    def notice(self, data: bytes) -> None:
        """Data has come that has no entry."""
        if data != self._last:
            self._last = data
            return
        if len(self.calls) >= _MOST_ENTRIES:
            self._counts = self.counts()
            self.calls.clear()
        self.calls[data] = self._understand(data)

    def counts(self) -> dict[Op, int]:
        """How many requests of each kind have been known by their bytes."""
        counts = dict(self._counts)
        for known in self.calls.values():
            if known:
                tally = known[-1]
                for op in tally.ops:
                    counts[op] = counts.get(op, 0) + tally.count
        return counts

    def _understand(self, data: bytes) -> Known[HandlerT] | tuple[()]:
        """The requests of data that holds nothing but whole ones, each of a kind that may be repeated."""
        calls: list[_Call[HandlerT]] = []
        ops: list[Op] = []
        start, stop = 0, len(data)
        while start < stop:
            form = self._forms[data[start]]
            if form is None or form.op not in REPEATED:
                return ()
            try:
                blobs, end = form.read(data, start, stop, self._limits.keys_per_request)
            except ProtocolError:
                return ()
            if end > stop or end - start > self._limits.request_bytes:
                return ()
            calls.append((form.deliver, blobs, data[end - form.tail : end]))
            ops.append(form.op)
            start = end
        call = calls[0] if len(calls) == 1 else (_in_turn(calls), [], b"")
        return (*call, len(calls), _Tally(ops))


def _in_turn(calls: Sequence[_Call[HandlerT]]) -> Deliver[HandlerT]:
    """Several requests as if they were one."""

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
