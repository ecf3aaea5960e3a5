"""The incremental request parser: any split of the stream gives the same requests.

`feed` takes the bytes as they come and calls one method of the handler for each request, as soon as that
request is complete; what the handler returns is the reply. A request is read atom by atom (an opcode, a
count, a length, the body of a blob, the tail). An atom is interpreted once, when all of its bytes
are there; until then they are only kept. So no byte is looked at twice, whatever the split, and between
two requests a parser holds nothing.

Only the hot path departs from that: a GET that is all of the data, as a client that waits for its answer
sends it, is answered from its first nine bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.wire.encoding import unpack_i64, unpack_u32, unpack_u64
from rallypoint.wire.limits import Limits
from rallypoint.wire.opcodes import MAGIC, SHAPES, Op


class RequestHandler(Protocol):
    """Who carries requests out: a method per operation, which returns the reply to send, or `b""`.

    A method may raise ProtocolError; the connection is then to be closed.
    """

    def validate(self) -> bytes: ...
    def set(self, key: bytes, value: bytes, /) -> bytes: ...
    def compare_set(self, key: bytes, expected: bytes, desired: bytes, /) -> bytes: ...
    def get(self, key: bytes, /) -> bytes: ...
    def add(self, key: bytes, amount: int, /) -> bytes: ...
    def check(self, keys: list[bytes], /) -> bytes: ...
    def wait(self, keys: list[bytes], /) -> bytes: ...
    def num_keys(self) -> bytes: ...
    def delete_key(self, key: bytes, /) -> bytes: ...
    def append(self, key: bytes, value: bytes, /) -> bytes: ...
    def multi_get(self, keys: list[bytes], /) -> bytes: ...
    def multi_set(self, keys_and_values: list[bytes], /) -> bytes: ...
    def cancel_wait(self) -> bytes: ...
    def ping(self, nonce: bytes, /) -> bytes: ...
    def queue_push(self, key: bytes, value: bytes, /) -> bytes: ...
    def queue_pop(self, key: bytes, /) -> bytes: ...
    def queue_len(self, key: bytes, /) -> bytes: ...
    def list_keys(self) -> bytes: ...
    def barrier(self, key: bytes, world_size: int, /) -> bytes: ...


def _validate(handler: RequestHandler, _blobs: list[bytes], tail: bytes) -> bytes:
    (magic,) = unpack_u32(tail)
    if magic != MAGIC:
        raise ProtocolError(f"VALIDATE carries 0x{magic:08X} instead of 0x{MAGIC:08X}")
    return handler.validate()


_Deliver = Callable[[RequestHandler, list[bytes], bytes], bytes]

_DELIVERIES: Final[dict[Op, _Deliver]] = {
    Op.VALIDATE: _validate,
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


# What the next atom of a request is.
_OPCODE: Final = 0
_COUNT: Final = 1
_LENGTH: Final = 2
_BODY: Final = 3
_TAIL: Final = 4

_GET: Final = int(Op.GET)

# Shorter replies are not counted against the limit: one read holds too few requests for that.
_LARGE_REPLY: Final = 4096


class _Form:
    """One row of the table of requests: a shape, its limits, and whom a complete request goes to."""

    __slots__ = ("caps", "deliver", "first_atom", "kinds", "op", "period", "tail")

    def __init__(self, op: Op, limits: Limits) -> None:
        shape = SHAPES[op]
        self.op = op
        self.kinds = shape.blobs
        self.period = len(shape.blobs)
        self.caps = tuple(limits.key_bytes if kind == "K" else limits.value_bytes for kind in shape.blobs)
        self.first_atom = _COUNT if shape.counted else _LENGTH
        self.tail = shape.tail
        self.deliver = _DELIVERIES[op]

    def too_long(self, length: int, index: int) -> LimitError:
        what = "key" if self.kinds[index] == "K" else "value"
        cap = self.caps[index]
        return LimitError(
            f"{self.op.name} with a {what} of {length:,} bytes; the limit {what}_bytes is {cap:,}"
        )


class Forms:
    """The table that all parsers of one server share: a form per opcode, under the server's limits."""

    __slots__ = ("by_opcode", "key_cap", "limits")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.key_cap = limits.key_bytes
        self.by_opcode = tuple(_Form(op, limits) for op in Op)


class RequestParser:
    """The parser of one connection. A ProtocolError from `feed` is final: feed it nothing more."""

    __slots__ = (
        "_atom",
        "_blobs",
        "_blobs_left",
        "_form",
        "_forms",
        "_handler",
        "_have",
        "_kept",
        "_need",
        "_size",
        "_validated",
    )

    def __init__(self, handler: RequestHandler, forms: Forms) -> None:
        self._handler = handler
        self._forms = forms
        self._validated = False
        # The request under way, if the data so far ended within one:
        self._atom = _OPCODE
        self._form = forms.by_opcode[Op.VALIDATE]
        self._blobs: list[bytes] = []
        self._blobs_left = 0
        self._size = 0
        # Pieces of its next atom: `_have` bytes of the `_need` that it takes.
        self._kept: list[bytes] = []
        self._have = 0
        self._need = 0

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream, and return the replies of the requests that they complete.

        Raises ProtocolError, whose `replies` are those of the requests before the violation.
        """
        if self._atom == _OPCODE and len(data) > 8 and data[0] == _GET and self._validated:
            (length,) = unpack_u64(data, 1)
            if length == len(data) - 9 and length <= self._forms.key_cap:
                return self._handler.get(data[9:])
        if self._have:
            self._grow(len(data))
            self._kept.append(data)
            self._have += len(data)
            if self._have < self._need:
                return b""
            data = b"".join(self._kept)
            self._kept.clear()
            self._size -= self._have
            self._have = 0
        replies: list[bytes] = []
        try:
            self._read(data, replies)
        except ProtocolError as error:
            error.replies = b"".join(replies)
            raise
        return replies[0] if len(replies) == 1 else b"".join(replies)

    def _read(self, data: bytes, replies: list[bytes]) -> None:
        """Read all requests that end in `data`. The state lives in local variables: this is the hot path."""
        handler = self._handler
        key_cap = self._forms.key_cap
        atom, form, blobs, left = self._atom, self._form, self._blobs, self._blobs_left
        begin = -1  # where the request under way begins in this data; -1 if it began in earlier data
        position = 0
        end = len(data)
        large = 0  # bytes of the large ones among the replies
        while True:
            if atom == _OPCODE:
                if position == end:
                    break
                begin = position
                opcode = data[position]
                position += 1
                if opcode == _GET and position + 8 <= end and self._validated:
                    (length,) = unpack_u64(data, position)
                    position += 8
                    stop = position + length
                    if stop <= end and length <= key_cap:
                        reply = handler.get(data[position:stop])
                        replies.append(reply)
                        if len(reply) >= _LARGE_REPLY:
                            large = self._checked_replies(large + len(reply))
                        position = stop
                        continue
                    form, atom, blobs, left = self._cut_get(length), _BODY, [], 1
                else:
                    form = self._form_of(opcode)
                    atom, blobs, left = form.first_atom, [], form.period
            if atom == _COUNT:
                if position + 8 > end:
                    break
                left *= self._checked_count(form, unpack_u64(data, position)[0])
                position += 8
                atom = _LENGTH
            elif atom == _BODY:
                stop = position + self._need
                if stop > end:
                    break
                blobs.append(data[position:stop])
                position = stop
                left -= 1
                atom = _LENGTH
            while left:
                start = position + 8
                if start > end:
                    break
                (length,) = unpack_u64(data, position)
                if length > form.caps[-left % form.period]:
                    raise form.too_long(length, -left % form.period)
                stop = start + length
                if stop > end:
                    position = start
                    atom = _BODY
                    self._need = length
                    break
                blobs.append(data[start:stop])
                position = stop
                left -= 1
            if left:
                break
            stop = position + form.tail
            if stop > end:
                atom = _TAIL
                break
            reply = form.deliver(handler, blobs, data[position:stop])
            if reply:
                replies.append(reply)
                if len(reply) >= _LARGE_REPLY:
                    large = self._checked_replies(large + len(reply))
            position = stop
            atom = _OPCODE
        self._atom, self._form, self._blobs, self._blobs_left = atom, form, blobs, left
        if atom != _OPCODE:
            self._suspend(data, begin, position)

    def _form_of(self, opcode: int) -> _Form:
        if opcode >= len(self._forms.by_opcode):
            raise ProtocolError(f"there is no operation {opcode}")
        form = self._forms.by_opcode[opcode]
        if opcode == Op.VALIDATE:
            if self._validated:
                raise ProtocolError("a second VALIDATE")
            self._validated = True  # for the requests behind it; a wrong one ends the connection
        elif not self._validated:
            raise ProtocolError(f"{form.op.name} before VALIDATE")
        return form

    def _cut_get(self, length: int) -> _Form:
        """The form of a GET whose length has been read, but whose key has not come whole."""
        form = self._forms.by_opcode[_GET]
        if length > form.caps[0]:
            raise form.too_long(length, 0)
        self._need = length
        return form

    def _checked_count(self, form: _Form, count: int) -> int:
        limit = self._forms.limits.keys_per_request
        if count > limit:
            raise LimitError(f"{form.op.name} of {count:,} keys; the limit keys_per_request is {limit:,}")
        return count

    def _checked_replies(self, count: int) -> int:
        """Bound the replies to one feed: short requests for long values could ask for any amount."""
        limit = self._forms.limits.unsent_bytes
        if count > limit:
            raise LimitError(f"asked for more than {limit:,} bytes at once, the limit unsent_bytes")
        return count

    def _suspend(self, data: bytes, begin: int, position: int) -> None:
        """The data ends within a request: keep the bytes of the incomplete atom, and count the request's."""
        if self._atom == _TAIL:
            self._need = self._form.tail
        elif self._atom != _BODY:
            self._need = 8
        if position < len(data):
            self._kept.append(data[position:])
            self._have = len(data) - position
        if begin >= 0:
            self._size = 0
        self._grow(len(data) - max(begin, 0))

    def _grow(self, count: int) -> None:
        self._size += count
        limit = self._forms.limits.request_bytes
        if self._size > limit:
            name = self._form.op.name
            raise LimitError(f"{name} of more than {limit:,} bytes, the limit request_bytes")
