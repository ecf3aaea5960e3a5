"""The incremental request parser: any split of the stream gives the same requests.

`feed` takes the bytes as they come and calls one method of the handler for each request, as soon as that
request is complete; what the handler returns is the reply. A request is read atom by atom (an opcode, a
count, a length, the body of a blob, the tail). An atom is interpreted once, when all of its bytes
are there; until then they are only kept. So no byte is looked at twice, whatever the split, and between
two requests a parser holds nothing.

Only the hot path departs from that: a GET that is all of the data, as a client that waits for its answer
sends it, is answered from its first nine bytes; if more is behind it, those nine are read again. So is a
relay's batch. And what all ranks say at a barrier is the same, byte by byte: see `_Repeated`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Generic, Protocol, TypeVar

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.wire.encoding import VALIDATE, unpack_i64, unpack_u32, unpack_u64
from rallypoint.wire.limits import Limits
from rallypoint.wire.opcodes import MAGIC, SHAPES, Op


class Handler(Protocol):
    """What every handler has, whatever else the forms of its requests call."""

    def validate(self) -> None: ...
    def get(self, key: bytes, /) -> bytes: ...


class RequestHandler(Handler, Protocol):
    """Who carries requests out: a method per operation, which returns the reply to send, or `b""`.

    A method may raise ProtocolError; the connection is then to be closed.
    """

    def set(self, key: bytes, value: bytes, /) -> bytes: ...
    def compare_set(self, key: bytes, expected: bytes, desired: bytes, /) -> bytes: ...
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


class SessionHandler(Handler, Protocol):
    """Who takes part in sessions: what a relay's connection asks for (see `sessions`)."""

    def open_session(self, token: bytes, tail: bytes, /) -> bytes: ...
    def batch(self, payload: bytes, /) -> bytes: ...
    def present(self) -> bytes: ...
    def bye(self) -> bytes: ...


class LookHandler(Handler, Protocol):
    """Who tells what it knows."""

    def look(self, question: bytes, /) -> bytes: ...


class Carrier(Handler, Protocol):
    """Who takes requests as they are: the operation, its blobs and its tail."""

    def carry(self, op: Op, blobs: list[bytes], tail: bytes, /) -> bytes: ...


HandlerT = TypeVar("HandlerT", bound=Handler)

Deliver = Callable[[HandlerT, list[bytes], bytes], bytes]
"""How a complete request of one operation is handed to a handler: its blobs, which may be kept but not
changed, and its tail."""

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
}
"""What a relay's connection asks for besides."""

LOOKS: Final[dict[Op, Deliver[LookHandler]]] = {Op.LOOK: lambda handler, blobs, _: handler.look(blobs[0])}
"""What somebody asks who wants to know how it stands."""


def carried(ops: Iterable[Op]) -> dict[Op, Deliver[Carrier]]:
    """Operations that are handed over as they are."""

    def pass_on(op: Op) -> Deliver[Carrier]:
        return lambda handler, blobs, tail: handler.carry(op, blobs, tail)

    return {op: pass_on(op) for op in ops}


# What the next atom of a request is, when the data so far has ended within one.
_HANDSHAKE: Final = 0
_COUNT: Final = 1
_LENGTH: Final = 2
_BODY: Final = 3
_TAIL: Final = 4

_GET: Final = int(Op.GET)
_BATCH: Final = int(Op.BATCH)

# Shorter replies are not counted against the limit: one read holds too few requests for that.
_LARGE_REPLY: Final = 4096

REPEATED: Final = (Op.SET, Op.ADD, Op.CHECK, Op.WAIT, Op.CANCEL_WAIT, Op.PING, Op.BARRIER)
"""The requests that may be known by their bytes. Their replies are short, so nothing has to count them: at
most a byte for each wait of the client's own that one of them ends."""

_HELLO_BYTES: Final = 1_024  # whatever the limit of keys is
_QUESTION_BYTES: Final = 16_384
_OTHER_BLOBS: Final = {"T": "token", "R": "report", "Q": "question"}

_REPEATED_BYTES: Final = 256
_REPEATED_READS: Final = 64


class _Form(Generic[HandlerT]):
    """One row of the table of requests: a shape, its limits, and whom a complete request goes to."""

    __slots__ = ("caps", "count", "counted", "deliver", "kinds", "op", "period", "tail")

    def __init__(self, op: Op, deliver: Deliver[HandlerT], limits: Limits) -> None:
        shape = SHAPES[op]
        whole = limits.request_bytes
        caps = {"K": limits.key_bytes, "V": limits.value_bytes, "T": 64, "B": whole, "R": whole}
        caps["H"] = max(limits.key_bytes, _HELLO_BYTES)
        caps["Q"] = _QUESTION_BYTES
        self.op = op
        self.kinds = shape.blobs
        self.period = len(shape.blobs)
        self.caps = tuple(caps[kind] for kind in shape.blobs)
        self.counted = shape.counted
        self.tail = shape.tail
        self.deliver = deliver
        self.count = 0  # of the requests that were read by it


class Forms(Generic[HandlerT]):
    """The table that all parsers of one server share: a form per opcode, under the server's limits."""

    __slots__ = ("by_opcode", "get_cap", "limits", "repeated", "request_cap")

    def __init__(self, limits: Limits, deliveries: Mapping[Op, Deliver[HandlerT]]) -> None:
        self.limits = limits
        self.request_cap = limits.request_bytes
        self.get_cap = min(limits.key_bytes, limits.request_bytes - 9)  # for the key of a GET
        # None where there is no operation, and for VALIDATE, which is read by itself.
        self.by_opcode: list[_Form[HandlerT] | None] = [None] * 256
        for op, deliver in deliveries.items():
            self.by_opcode[op] = _Form(op, deliver, limits)
        self.repeated: _Repeated[HandlerT] = _Repeated(limits, deliveries)

    def counts(self, operations: int) -> dict[Op, int]:
        """How many requests of each kind there have been, among so many of all parsers together.

        GETs are not counted by themselves, as there are so many: they are what is left.
        """
        counts = self.repeated.counts()
        for form in self.by_opcode:
            if form is not None and form.count:
                counts[form.op] = counts.get(form.op, 0) + form.count
        counts.pop(Op.GET, None)  # those that came in pieces
        counts[Op.GET] = operations - sum(counts.values())
        return counts


_Call = tuple[Deliver[HandlerT], list[bytes], bytes]


class _Tally:
    """How often some data has come that is known, and which requests it is."""

    __slots__ = ("count", "ops")

    def __init__(self, ops: Sequence[Op]) -> None:
        self.count = 0
        self.ops = ops


_Known = tuple[Deliver[HandlerT], list[bytes], bytes, int, _Tally]
"""What data stands for: a call, how many requests that is, and where they are counted."""


class _Repeated(Generic[HandlerT]):
    """Data that has come before, and the requests that it was.

    At a barrier, thousands of clients send the same bytes. Between two requests, the same bytes are the
    same requests: they need not be read again, and share the keys that were read.

    Data is noted down when it comes twice in a row, so that keys of which each is used once cost a look-up
    and no more. A parser of its own reads it then, whose handler carries nothing out. Threads may share it:
    an entry is the same whoever makes it.
    """

    __slots__ = ("_counts", "_deliveries", "_forms", "_last", "_limits", "calls")

    def __init__(self, limits: Limits, deliveries: Mapping[Op, Deliver[HandlerT]]) -> None:
        self.calls: dict[bytes, _Known[HandlerT] | tuple[()]] = {}
        """What data stands for; nothing, if it has to be read. Where there is no entry, `notice` is due."""
        self._counts: dict[Op, int] = {}  # of entries that are gone
        self._last = b""
        self._limits = limits
        self._deliveries = deliveries
        self._forms: Forms[_Notes] | None = None

    def notice(self, data: bytes) -> None:
        """Data has come that has no entry."""
        if data != self._last:
            self._last = data
            return
        if len(self.calls) >= _REPEATED_READS:
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

    def _understand(self, data: bytes) -> _Known[HandlerT] | tuple[()]:
        if self._forms is None:
            self._forms = Forms(self._limits, carried(op for op in REPEATED if op in self._deliveries))
        notes = _Notes()
        parser = RequestParser(notes, self._forms)
        try:
            parser.feed(VALIDATE + data)
        except ProtocolError:
            return ()
        if not parser.is_between_requests:
            return ()
        calls = [(self._deliveries[op], blobs, tail) for op, blobs, tail in notes.requests]
        call = calls[0] if len(calls) == 1 else (_in_turn(calls), [], b"")
        return (*call, len(calls), _Tally([op for op, _, _ in notes.requests]))


class _Notes:
    """A handler that only notes which requests there are."""

    __slots__ = ("requests",)

    def __init__(self) -> None:
        self.requests: list[tuple[Op, list[bytes], bytes]] = []

    def validate(self) -> None:
        pass

    def get(self, _: bytes, /) -> bytes:
        raise ProtocolError("a GET is read each time, as its reply may be long")

    def carry(self, op: Op, blobs: list[bytes], tail: bytes, /) -> bytes:
        self.requests.append((op, blobs, tail))
        return b""


def _in_turn(calls: Sequence[_Call[HandlerT]]) -> Deliver[HandlerT]:
    """Several requests as if they were one."""

    def deliver_all(handler: HandlerT, _: list[bytes], __: bytes) -> bytes:
        replies: list[bytes] = []
        try:
            for deliver, blobs, tail in calls:
                replies.append(deliver(handler, blobs, tail))
        except ProtocolError as error:
            error.replies = b"".join(replies)
            raise
        return b"".join(replies)

    return deliver_all


class WholeRequests:
    """Reads requests that are there as a whole, as in a batch: under the same limits, and no more of them."""

    __slots__ = ("_forms", "limits")

    def __init__(self, limits: Limits, ops: Iterable[Op]) -> None:
        self.limits = limits
        self._forms = {int(op): (op, _Form[Handler](op, _deliver_nothing, limits)) for op in ops}

    def counts(self) -> dict[Op, int]:
        """How many requests of each kind there have been."""
        return {op: form.count for op, form in self._forms.values()}

    def read(self, data: bytes, start: int, stop: int) -> tuple[Op, list[bytes], bytes]:
        """The operation, the blobs and the tail of the request that is `data[start:stop]`.

        Raises ProtocolError, if that is no request, or LimitError.
        """
        if start == stop or data[start] not in self._forms:
            raise ProtocolError("there is no such operation in a batch")
        op, form = self._forms[data[start]]
        form.count += 1
        position, left = start + 1, form.period
        if form.counted:
            count = unpack_u64(data, position)[0] if position + 8 <= stop else 0
            if count > self.limits.keys_per_request:
                limit = self.limits.keys_per_request
                raise LimitError(f"{op.name} of {count:,} keys; the limit keys_per_request is {limit:,}")
            position += 8
            left *= count
        blobs: list[bytes] = []
        caps, period = form.caps, form.period
        while left:
            begin = position + 8
            length = unpack_u64(data, position)[0] if begin <= stop else 0
            position = begin + length
            if length > caps[-left % period]:
                raise _blob_too_long(form, length, -left % period)
            blobs.append(data[begin:position])
            left -= 1
            if position > stop:
                break
        if position + form.tail != stop:
            raise ProtocolError(f"{op.name} in a batch is shorter or longer than it says")
        return op, blobs, data[position:stop]


def _deliver_nothing(*_: object) -> bytes:
    return b""


def _blob_too_long(form: _Form[HandlerT], length: int, index: int) -> LimitError:
    cap = form.caps[index]
    if form.kinds[index] in _OTHER_BLOBS:
        what = _OTHER_BLOBS[form.kinds[index]]
        return LimitError(f"{form.op.name} with a {what} of {length:,} bytes; {cap} are allowed")
    what = "key" if form.kinds[index] in "KH" else "value"
    return LimitError(f"{form.op.name} with a {what} of {length:,} bytes; the limit {what}_bytes is {cap:,}")


class RequestParser(Generic[HandlerT]):
    """The parser of one connection. A ProtocolError from `feed` is final: feed it nothing more."""

    __slots__ = (
        "_atom",
        "_blobs",
        "_blobs_left",
        "_form",
        "_forms",
        "_get_cap",
        "_handler",
        "_kept",
        "_known",
        "_need",
        "_size",
        "operations",
    )

    def __init__(self, handler: HandlerT, forms: Forms[HandlerT]) -> None:
        self._handler = handler
        self._forms = forms
        self._get_cap = forms.get_cap
        self._known = forms.repeated.calls
        # The request under way: which atom comes next, how many bytes that takes (0: between two
        # requests), those of them that have come, what has been read before it, and its size.
        self._atom = _HANDSHAKE
        self._need = len(VALIDATE)
        self._kept = bytearray()
        self._form: _Form[HandlerT] | None = None
        self._blobs: list[bytes] = []
        self._blobs_left = 0
        self._size = 0
        self.operations = 0
        """Requests that it has handed over, but for the GETs of a read that ends in a violation."""

    @property
    def is_between_requests(self) -> bool:
        """Whether no request is under way."""
        return not self._need

    def opcode_in(self, data: bytes) -> int:
        """Of which kind the request is that is under way, or that the next bytes of the stream begin with."""
        if not self._need:
            return data[0]
        return int(self._form.op if self._form is not None else Op.VALIDATE)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream, and return the replies of the requests that they complete.

        Raises ProtocolError, whose `replies` are those of the requests before the violation.
        """
        if not self._need:
            size = len(data)
            if size > 8 and data[0] == _GET:
                (length,) = unpack_u64(data, 1)
                if length == size - 9 and length <= self._get_cap:
                    self.operations += 1
                    return self._handler.get(data[9:])
            elif size > 8 and data[0] == _BATCH:
                batch = self._forms.by_opcode[_BATCH]
                (length,) = unpack_u64(data, 1)
                if batch is not None and length == size - 9 and size <= self._forms.request_cap:
                    self.operations += 1
                    batch.count += 1
                    return batch.deliver(self._handler, [data[9:]], b"")
            elif size <= _REPEATED_BYTES:
                known = self._known.get(data)
                if known:
                    deliver, blobs, tail, operations, tally = known
                    tally.count += 1
                    self.operations += operations
                    return deliver(self._handler, blobs, tail)
                if known is None:
                    self._forms.repeated.notice(data)
        else:
            data = self._gather(data)
            if not data:
                return b""
        replies: list[bytes] = []
        try:
            self._read(data, replies)
        except ProtocolError as error:
            error.replies = b"".join(replies)
            raise
        return replies[0] if len(replies) == 1 else b"".join(replies)

    def _read(self, data: bytes, replies: list[bytes]) -> None:
        """Read all requests that end in `data`. The state is in local variables: this is the hot path."""
        handler, by_opcode = self._handler, self._forms.by_opcode
        get_cap, request_cap = self._forms.get_cap, self._forms.request_cap
        begin = -self._size  # where the request under way begins: before this data, or in it
        position = self._go_on(data) if self._need else 0
        form, blobs, left = self._form, self._blobs, self._blobs_left
        end = len(data)
        large = 0  # bytes of the large ones among the replies
        others = 0  # replies that are not to a GET
        while True:
            if form is None:
                if position == end:
                    break
                begin = position
                opcode = data[position]
                position += 1
                if opcode == _GET and position + 8 <= end:
                    (length,) = unpack_u64(data, position)
                    position += 8
                    stop = position + length
                    if stop <= end and length <= get_cap:
                        reply = handler.get(data[position:stop])
                        replies.append(reply)
                        if len(reply) >= _LARGE_REPLY:
                            large = self._checked_replies(large + len(reply))
                        position = stop
                        continue
                    form, blobs, left = self._cut_get(length), [], 1
                    break
                form = by_opcode[opcode] or self._no_form(opcode)
                blobs, left = [], form.period
                if form.counted:
                    if position + 8 > end:
                        self._expect(_COUNT, 8)
                        break
                    left = self._repeated(form, unpack_u64(data, position)[0])
                    position += 8
            while left:
                start = position + 8
                if start > end:
                    self._expect(_LENGTH, 8)
                    break
                (length,) = unpack_u64(data, position)
                stop = start + length
                if length > form.caps[-left % form.period] or stop - begin > request_cap:
                    raise self._too_long(form, length, -left % form.period)
                if stop > end:
                    position = start
                    self._expect(_BODY, length)
                    break
                blobs.append(data[start:stop])
                position = stop
                left -= 1
            if left:
                break
            stop = position + form.tail
            if stop > end:
                self._expect(_TAIL, form.tail)
                break
            if stop - begin > request_cap:
                raise self._too_long(form)
            form.count += 1
            self.operations += 1
            reply = form.deliver(handler, blobs, data[position:stop])
            if reply:
                others += 1
                replies.append(reply)
                if len(reply) >= _LARGE_REPLY:
                    large = self._checked_replies(large + len(reply))
            position = stop
            form = None
        self._form, self._blobs, self._blobs_left = form, blobs, left
        self.operations += len(replies) - others  # the GETs
        if form is not None:
            # The data ends within a request: keep the bytes of the atom that is not complete.
            self._size = position - begin
            self._kept += data[position:]

    def _gather(self, data: bytes) -> bytes:
        """All pieces of the next atom, and what is behind it, once they are there; else nothing."""
        if not self._kept and len(data) >= self._need:
            return data
        self._kept += data
        if len(self._kept) < self._need:
            if self._atom == _HANDSHAKE and self._kept and self._kept[0] != Op.VALIDATE:
                self._shake_hands(self._kept)
            return b""
        data = bytes(self._kept)
        self._kept = bytearray()
        return data

    def _go_on(self, data: bytes) -> int:
        """Read the atom that begins the data, now that it is complete; return where the next one begins."""
        atom, need = self._atom, self._need
        self._need = 0
        if atom == _HANDSHAKE:
            self._shake_hands(data)
        elif atom == _COUNT:
            assert self._form is not None
            self._blobs_left = self._repeated(self._form, unpack_u64(data, 0)[0])
        elif atom == _BODY:
            self._blobs.append(data[:need])
            self._blobs_left -= 1
        else:  # a length or a tail: the loop reads them with what is behind them
            return 0
        return need

    def _shake_hands(self, data: bytes | bytearray) -> None:
        if data[0] != Op.VALIDATE:
            name = Op(data[0]).name if data[0] in SHAPES else f"operation {data[0]}"
            raise ProtocolError(f"{name} before VALIDATE")
        (magic,) = unpack_u32(data, 1)
        if magic != MAGIC:
            raise ProtocolError(f"VALIDATE carries 0x{magic:08X} instead of 0x{MAGIC:08X}")
        self._handler.validate()

    def _no_form(self, opcode: int) -> _Form[HandlerT]:
        if opcode == Op.VALIDATE:
            raise ProtocolError("a second VALIDATE")
        raise ProtocolError(f"there is no operation {opcode}")

    def _cut_get(self, length: int) -> _Form[HandlerT]:
        """Prepare for the rest of a GET whose length has been read, but whose key has not come whole."""
        form = self._forms.by_opcode[_GET] or self._no_form(_GET)
        if length > self._forms.get_cap:
            raise self._too_long(form, length)
        self._expect(_BODY, length)
        return form

    def _repeated(self, form: _Form[HandlerT], count: int) -> int:
        limit = self._forms.limits.keys_per_request
        if count > limit:
            raise LimitError(f"{form.op.name} of {count:,} keys; the limit keys_per_request is {limit:,}")
        return form.period * count

    def _checked_replies(self, count: int) -> int:
        """Bound the replies to one feed: short requests for long values could ask for any amount."""
        limit = self._forms.limits.unsent_bytes
        if count > limit:
            raise LimitError(f"asked for more than {limit:,} bytes at once, the limit unsent_bytes")
        return count

    def _expect(self, atom: int, need: int) -> None:
        self._atom, self._need = atom, need

    def _too_long(self, form: _Form[HandlerT], length: int = 0, index: int = 0) -> LimitError:
        """Which limit a blob of this length broke: its own, or that of the whole request."""
        if length and length > form.caps[index]:
            return _blob_too_long(form, length, index)
        cap = self._forms.request_cap
        return LimitError(f"{form.op.name} of more than {cap:,} bytes, the limit request_bytes")
