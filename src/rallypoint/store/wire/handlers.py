"""The objects that a parser hands requests to: their interfaces, and which method takes which operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

from rallypoint.errors import ProtocolError
from rallypoint.store.wire.encoding import unpack_i64
from rallypoint.store.wire.opcodes import Op


class Handler(Protocol):
    """What every handler has, whatever else the forms of its requests call."""

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
    """Who carries requests out: a method per operation, which returns the reply to send, or `b""`.

    A method may return None: the request takes longer, and `go_on` is to be called. A `get` that returns just
    the first piece of its reply has called the parser's `leave_unfinished`. It may raise ProtocolError; the
    connection is then to be closed.
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
    """Who takes part in sessions: what a relay's connection asks for (see `sessions`)."""

    def open_session(self, token: bytes, tail: bytes, /) -> bytes | None: ...
    def batch(self, payload: bytes, /) -> bytes | None: ...
    def present(self) -> bytes | None: ...
    def bye(self) -> bytes: ...
    def beat(self) -> bytes | None: ...


class EnterHandler(Handler, Protocol):
    """Who takes a connection to one of several stores, or is the only one."""

    def enter(self, name: bytes, /) -> bytes | None: ...


class LookHandler(Handler, Protocol):
    """Who tells what it knows."""

    def look(self, question: bytes, /) -> bytes | None: ...


class TellHandler(Handler, Protocol):
    """Who keeps what a client says of itself, for those who look. The text is ASCII."""

    def tell(self, text: bytes, /) -> bytes: ...


class RawHandler(Handler, Protocol):
    """Who takes requests as they are: the operation, its blobs and its tail."""

    def carry(self, op: Op, blobs: list[bytes], tail: bytes, /) -> bytes | None: ...


HandlerT = TypeVar("HandlerT", bound=Handler)

Deliver = Callable[[HandlerT, list[bytes], bytes], bytes | None]
"""How a complete request of one operation is handed to a handler: its blobs, which may be kept but not
changed, and its tail. Returns the reply, or None if the request is not finished."""

SERVED: Final[dict[Op, Deliver[RequestHandler]]] = {
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
"""torch's operations, each by a method of its own."""

SESSIONS: Final[dict[Op, Deliver[SessionHandler]]] = {
    Op.SESSION: lambda handler, blobs, tail: handler.open_session(blobs[0], tail),
    Op.BATCH: lambda handler, blobs, _: handler.batch(blobs[0]),
    Op.PRESENT: lambda handler, _, __: handler.present(),
    Op.BYE: lambda handler, _, __: handler.bye(),
    Op.BEAT: lambda handler, _, __: handler.beat(),
}
"""What a relay's connection asks for besides."""

ENTERS: Final[dict[Op, Deliver[EnterHandler]]] = {Op.ENTER: lambda handler, blobs, _: handler.enter(blobs[0])}
"""What any connection may say first."""

LOOKS: Final[dict[Op, Deliver[LookHandler]]] = {Op.LOOK: lambda handler, blobs, _: handler.look(blobs[0])}
"""The requests of tools that look into a store."""


def _tell(handler: TellHandler, blobs: list[bytes], _: bytes) -> bytes:
    if not blobs[0].isascii():  # it is put into JSON unread
        raise ProtocolError("TELL with a text that is not ASCII")
    return handler.tell(blobs[0])


TELLS: Final[dict[Op, Deliver[TellHandler]]] = {Op.TELL: _tell}
"""What launchers say of their ranks."""


def carried(ops: Iterable[Op]) -> dict[Op, Deliver[RawHandler]]:
    """Operations that are handed over as they are."""

    def pass_on(op: Op) -> Deliver[RawHandler]:
        return lambda handler, blobs, tail: handler.carry(op, blobs, tail)

    return {op: pass_on(op) for op in ops}
