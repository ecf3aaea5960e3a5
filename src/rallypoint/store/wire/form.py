"""What a request looks like under the limits of a server, and how to read one that is there whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Generic

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.wire.encoding import unpack_u64
from rallypoint.store.wire.handlers import Deliver, Handler, HandlerT
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import ACTIVITY_BYTES, SHAPES, Op

_HELLO_BYTES: Final = 1_024  # whatever the limit of keys is
_QUESTION_BYTES: Final = 16_384
_REPORT_BYTES: Final = 16 << 20  # of a relay with some 50,000 clients
_NAME_BYTES: Final = 1_024
_OTHER_BLOBS: Final = {"T": "token", "R": "report", "Q": "question", "N": "name", "A": "text"}


class Form(Generic[HandlerT]):
    """One row of the table of requests: a shape, its limits, and the method that takes a complete request."""

    __slots__ = ("caps", "count", "counted", "deliver", "kinds", "op", "period", "tail")

    def __init__(self, op: Op, deliver: Deliver[HandlerT], limits: Limits) -> None:
        shape = SHAPES[op]
        whole = limits.request_bytes
        caps = {"K": limits.key_bytes, "V": limits.value_bytes, "T": 64, "B": limits.batch_bytes}
        caps["R"] = min(whole, _REPORT_BYTES)
        caps["H"] = max(limits.key_bytes, _HELLO_BYTES)
        caps["Q"] = _QUESTION_BYTES
        caps["N"] = _NAME_BYTES
        caps["A"] = ACTIVITY_BYTES
        self.op = op
        self.kinds = shape.blobs
        self.period = len(shape.blobs)
        self.caps = tuple(caps[kind] for kind in shape.blobs)
        self.counted = shape.counted
        self.tail = shape.tail
        self.deliver = deliver
        self.count = 0  # of the requests that were read by it

    def read(self, data: bytes, start: int, stop: int, most_keys: int) -> tuple[list[bytes], int]:
        """The blobs of the request that begins at `start`, and where its tail ends. It is whole if that is
        not beyond `stop`. LimitError if it breaks a limit.
        """
        position, left, period = start + 1, self.period, self.period
        if self.counted:
            count = unpack_u64(data, position)[0] if position + 8 <= stop else 0
            if count > most_keys:
                raise self.too_many_keys(count, most_keys)
            position += 8
            left *= count
        blobs: list[bytes] = []
        while left and position <= stop:
            begin = position + 8
            length = unpack_u64(data, position)[0] if begin <= stop else 0
            position = begin + length
            if length > self.caps[-left % period]:
                raise self.blob_too_long(length, -left % period)
            blobs.append(data[begin:position])
            left -= 1
        return blobs, position + self.tail

    def too_many_keys(self, count: int, limit: int) -> LimitError:
        return LimitError(f"{self.op.name} of {count:,} keys; the limit keys_per_request is {limit:,}")

    def blob_too_long(self, length: int, index: int) -> LimitError:
        """A blob of `length` bytes breaks the limit of the one at `index`."""
        cap, kind = self.caps[index], self.kinds[index]
        if kind in _OTHER_BLOBS:
            what = _OTHER_BLOBS[kind]
            return LimitError(f"{self.op.name} with a {what} of {length:,} bytes; {cap} are allowed")
        what = "key" if kind in "KH" else "value"
        return LimitError(
            f"{self.op.name} with a {what} of {length:,} bytes; the limit {what}_bytes is {cap:,}"
        )


class WholeRequests:
    """Reads requests of which each is there as a whole, as in a batch; and counts them."""

    __slots__ = ("_forms", "limits")

    def __init__(self, limits: Limits, ops: Iterable[Op]) -> None:
        self.limits = limits
        self._forms = {int(op): Form[Handler](op, _deliver_nothing, limits) for op in ops}

    def counts(self) -> dict[Op, int]:
        """How many requests of each kind there have been."""
        return {form.op: form.count for form in self._forms.values()}

    def read(self, data: bytes, start: int, stop: int) -> tuple[Op, list[bytes], bytes]:
        """The operation, the blobs and the tail of the request that is `data[start:stop]`.

        Raises ProtocolError, if that is no request, or LimitError.
        """
        if start == stop or data[start] not in self._forms:
            raise ProtocolError("there is no such operation here")
        form = self._forms[data[start]]
        form.count += 1
        blobs, end = form.read(data, start, stop, self.limits.keys_per_request)
        if end != stop:
            raise ProtocolError(f"{form.op.name} is shorter or longer than it says")
        return form.op, blobs, data[stop - form.tail : stop]


def _deliver_nothing(*_: object) -> bytes:
    return b""
