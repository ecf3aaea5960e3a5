"""Requests: how a server reads them under its limits, and which method of a handler takes which operation.

A *handler* is what a parser hands requests to, usually a connection. `CLIENT_METHODS`, `SESSION_METHODS` and
`EXTENSION_METHODS` map operations to its methods; a `RequestSpec` joins such an entry with the operation's
row of `opcodes` and the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.wire.encoding import unpack_i64, unpack_u64
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import ACTIVITY_BYTES, OPERATIONS, Op

_HELLO_BYTES: Final = 1_024  # whatever the limit of keys is
_QUESTION_BYTES: Final = 16_384
_REPORT_BYTES: Final = 16 << 20  # of a relay with some 50,000 clients
_NAME_BYTES: Final = 1_024
_OTHER_BLOBS: Final = {"T": "token", "R": "report", "Q": "question", "N": "name", "A": "text"}


class Handler(Protocol):
    """What every handler has, besides the methods of the operations that it serves."""

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


class RequestHandler(Handler, Protocol):
    """Carries out torch's operations: a method for each, which returns the reply to send, or `b""`.

    A method may return None if the request takes longer: call `go_on` until it returns the reply. A `get`
    that returns only the first piece of its reply calls the parser's `leave_unfinished` before. A method may
    raise ProtocolError; the connection must then be closed.
    """

    def set(self, key: bytes, value: bytes, /) -> bytes: ...
    def compare_set(self, key: bytes, expected: bytes, desired: bytes, /) -> bytes: ...
    def add(self, key: bytes, amount: int, /) -> bytes: ...
    def check(self, keys: list[bytes], /) -> bytes: ...
    def wait(self, keys: list[bytes], /) -> bytes | None: ...
    def num_keys(self) -> bytes: ...
    def delete_key(self, key: bytes, /) -> bytes: ...
    def append(self, key: bytes, value: bytes, /) -> bytes: ...
    def multi_get(self, keys: list[bytes], /) -> bytes | None: ...
    def multi_set(self, keys_and_values: list[bytes], /) -> bytes | None: ...
    def cancel_wait(self) -> bytes: ...
    def ping(self, nonce: bytes, /) -> bytes: ...
    def queue_push(self, key: bytes, value: bytes, /) -> bytes: ...
    def queue_pop(self, key: bytes, /) -> bytes: ...
    def queue_len(self, key: bytes, /) -> bytes: ...
    def list_keys(self) -> bytes | None: ...
    def barrier(self, key: bytes, world_size: int, /) -> bytes: ...


class SessionHandler(Handler, Protocol):
    """Carries out the operations of a relay's connection (see `sessions`)."""

    def open_session(self, token: bytes, tail: bytes, /) -> bytes | None: ...
    def batch(self, payload: bytes, /) -> bytes | None: ...
    def present(self) -> bytes | None: ...
    def bye(self) -> bytes: ...
    def beat(self) -> bytes | None: ...


class ExtensionHandler(Handler, Protocol):
    """Carries out our operations that any connection may send."""

    def enter(self, name: bytes, /) -> bytes | None:
        """The client chooses one of several stores."""

    def look(self, question: bytes, /) -> bytes | None:
        """The client requests a snapshot."""

    def tell(self, text: bytes, /) -> bytes:
        """The client reports its activity, in ASCII, for snapshots."""


class RawHandler(Handler, Protocol):
    """Takes requests as they are: the operation, its blobs and its tail."""

    def carry(self, op: Op, blobs: list[bytes], tail: bytes, /) -> bytes | None: ...


HandlerT = TypeVar("HandlerT", bound=Handler)

Deliver = Callable[[HandlerT, list[bytes], bytes], bytes | None]
"""Hands a complete request to a handler: its blobs, which may be kept but not changed, and its tail. Returns
the reply, or None if the request is not finished."""

CLIENT_METHODS: Final[dict[Op, Deliver[RequestHandler]]] = {
    Op.SET: lambda handler, blobs, _: handler.set(blobs[0], blobs[1]),
    Op.COMPARE_SET: lambda handler, blobs, _: handler.compare_set(*blobs),
    Op.GET: lambda handler, blobs, _: handler.get(blobs[0]),
    Op.ADD: lambda handler, blobs, tail: handler.add(blobs[0], unpack_i64(tail)[0]),
    Op.CHECK: lambda handler, blobs, _: handler.check(blobs),
    Op.WAIT: lambda handler, blobs, _: handler.wait(blobs),
    Op.GETNUMKEYS: lambda handler, _, __: handler.num_keys(),
    Op.DELETE_KEY: lambda handler, blobs, _: handler.delete_key(blobs[0]),
    Op.APPEND: lambda handler, blobs, _: handler.append(blobs[0], blobs[1]),
    Op.MULTI_GET: lambda handler, blobs, _: handler.multi_get(blobs),
    Op.MULTI_SET: lambda handler, blobs, _: handler.multi_set(blobs),
    Op.CANCEL_WAIT: lambda handler, _, __: handler.cancel_wait(),
    Op.PING: lambda handler, _, tail: handler.ping(tail),
    Op.QUEUE_PUSH: lambda handler, blobs, _: handler.queue_push(blobs[0], blobs[1]),
    Op.QUEUE_POP: lambda handler, blobs, _: handler.queue_pop(blobs[0]),
    Op.QUEUE_LEN: lambda handler, blobs, _: handler.queue_len(blobs[0]),
    Op.LIST_KEYS: lambda handler, _, __: handler.list_keys(),
    Op.BARRIER: lambda handler, blobs, tail: handler.barrier(blobs[0], unpack_i64(tail)[0]),
}
"""torch's operations."""

SESSION_METHODS: Final[dict[Op, Deliver[SessionHandler]]] = {
    Op.SESSION: lambda handler, blobs, tail: handler.open_session(blobs[0], tail),
    Op.BATCH: lambda handler, blobs, _: handler.batch(blobs[0]),
    Op.PRESENT: lambda handler, _, __: handler.present(),
    Op.BYE: lambda handler, _, __: handler.bye(),
    Op.BEAT: lambda handler, _, __: handler.beat(),
}
"""The operations of a relay's connection."""


def _tell(handler: ExtensionHandler, blobs: list[bytes], _: bytes) -> bytes:
    if not blobs[0].isascii():  # it is put into JSON unread
        raise ProtocolError("TELL with a text that is not ASCII")
    return handler.tell(blobs[0])


EXTENSION_METHODS: Final[dict[Op, Deliver[ExtensionHandler]]] = {
    Op.ENTER: lambda handler, blobs, _: handler.enter(blobs[0]),
    Op.LOOK: lambda handler, blobs, _: handler.look(blobs[0]),
    Op.TELL: _tell,
}
"""Our operations that any connection may send."""


def carried(ops: Iterable[Op]) -> dict[Op, Deliver[RawHandler]]:
    """These operations, passed to the handler's `carry` as they are."""

    def pass_on(op: Op) -> Deliver[RawHandler]:
        return lambda handler, blobs, tail: handler.carry(op, blobs, tail)

    return {op: pass_on(op) for op in ops}


class RequestSpec(Generic[HandlerT]):
    """How requests of one operation are read: their shape, its limits, and the method that takes them."""

    __slots__ = ("caps", "count", "counted", "deliver", "kinds", "op", "period", "tail")

    def __init__(self, op: Op, deliver: Deliver[HandlerT], limits: Limits) -> None:
        operation = OPERATIONS[op]
        whole = limits.request_bytes
        caps = {"K": limits.key_bytes, "V": limits.value_bytes, "T": 64, "B": limits.batch_bytes}
        caps["R"] = min(whole, _REPORT_BYTES)
        caps["H"] = max(limits.key_bytes, _HELLO_BYTES)
        caps["Q"] = _QUESTION_BYTES
        caps["N"] = _NAME_BYTES
        caps["A"] = ACTIVITY_BYTES
        self.op = op
        self.kinds = operation.blobs
        self.period = len(operation.blobs)
        self.caps = tuple(caps[kind] for kind in operation.blobs)
        self.counted = operation.counted
        self.tail = operation.tail
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
