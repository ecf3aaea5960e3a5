"""The incremental request parser: any split of the stream gives the same requests.

`feed` takes the bytes as they come and calls one method of the handler for each request, as soon as that
request is complete; what the handler returns is the reply. A request is read atom by atom (an opcode, a
count, a length, the body of a blob, the tail). An atom is interpreted once, when all of its bytes
are there; until then they are only kept. So no byte is looked at twice, whatever the split, and between
two requests a parser holds nothing.

Only the hot path departs from that: a GET that is all of the data, as a client that waits for its answer
sends it, is answered from its first nine bytes; if more is behind it, those nine are read again. And
what all ranks say at a barrier is the same, byte by byte: see `Repeated`. Compiled, so is each of the hot
requests, also with a SET before it.

A few bytes may ask for much work. So `feed` stops after about `STEPS_AT_ONCE` steps, behind `BYTES_AT_ONCE`
of whole requests, and when a handler says that a request will take longer (it returns None). It keeps the
rest, and calls the handler's `postpone`. The driver then serves others, and feeds the parser again, be it
with nothing: it goes on where it has stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic

from rallypoint.errors import ProtocolError, UnknownOperationError
from rallypoint.store.wire.encoding import VALIDATE, unpack_u32, unpack_u64
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import MAGIC, NO_TLS, OPERATIONS, TLS_BYTE, Op
from rallypoint.store.wire.requests import REPEATED_BYTES, Deliver, HandlerT, Repeated, RequestSpec

try:
    from rallypoint.store.wire.native import Hot, cut_blobs
except ImportError:  # it is not compiled
    Hot = None  # type: ignore[assignment,misc]
    cut_blobs = None  # type: ignore[assignment]

# What the next atom of a request is, when the data so far has ended within one.
_HANDSHAKE: Final = 0
_COUNT: Final = 1
_LENGTH: Final = 2
_BODY: Final = 3
_TAIL: Final = 4
_REST: Final = 5  # whole requests, for which there was no time

_VALIDATE: Final = int(Op.VALIDATE)  # to look up a member of an enum takes longer than to read a request
_GET: Final = int(Op.GET)

# So many blobs of a request are worth a call to have them cut.
_MANY_BLOBS: Final = 8

# Shorter replies are not counted as steps of their own.
_LARGE_REPLY = 4096

STEPS_AT_ONCE = 256
"""How much one client may have done at a time, while others wait: about a quarter of a millisecond. A reply
is a step, and so are 64 bytes of a large one."""
BYTES_AT_ONCE = 2_048
"""How many bytes of short requests one feed may carry out. This bounds the requests that are not counted as
steps: those without a reply, and GETs, which are the hot path."""
STEP_BYTES: Final = 64
BLOB_BYTES: Final = 48
"""What a key or a value takes in memory besides its bytes."""


class RequestTable(Generic[HandlerT]):
    """The table that all parsers of one server share: a spec per opcode, under the server's limits."""

    __slots__ = ("by_opcode", "get_cap", "hot", "limits", "repeated", "request_cap")

    def __init__(
        self, limits: Limits, deliveries: Mapping[Op, Deliver[HandlerT]], *, is_prompt: bool = False
    ) -> None:
        """`is_prompt`: the handlers have methods `get`, `set`, `add`, `add_times`, `check` and `ping`, which
        never leave a request with one key unfinished."""
        self.limits = limits
        self.request_cap = limits.request_bytes
        self.get_cap = min(limits.key_bytes, limits.request_bytes - 9)  # for the key of a GET
        # None where there is no operation, and for VALIDATE, which is read by itself.
        self.by_opcode: list[RequestSpec[HandlerT] | None] = [None] * 256
        for op, deliver in deliveries.items():
            self.by_opcode[op] = RequestSpec(op, limits, deliver)
        self.repeated: Repeated[HandlerT] = Repeated(self.by_opcode)
        self.hot = Hot(limits, _LARGE_REPLY) if is_prompt and Hot is not None else None

    def counts(self, operations: int) -> dict[Op, int]:
        """How many requests of each kind there have been, among the `operations` of all parsers together.

        GETs are not counted by themselves, as they are the most frequent: they are the rest.
        """
        counts = self.repeated.counts()
        if self.hot is not None:
            hot = {
                Op.SET: self.hot.sets,
                Op.ADD: self.hot.adds,
                Op.CHECK: self.hot.checks,
                Op.PING: self.hot.pings,
            }
            for op, count in hot.items():
                if count:
                    counts[op] = counts.get(op, 0) + count
        for spec in self.by_opcode:
            if spec is not None and spec.count:
                counts[spec.op] = counts.get(spec.op, 0) + spec.count
        counts.pop(Op.GET, None)  # those that came in pieces
        counts[Op.GET] = operations - sum(counts.values())
        return counts


class RequestParser(Generic[HandlerT]):
    """The parser of one connection. A ProtocolError from `feed` is final: feed it nothing more."""

    __slots__ = (
        "_atom",
        "_blobs",
        "_blobs_left",
        "_get_cap",
        "_handler",
        "_held",
        "_hot",
        "_is_unfinished",
        "_kept",
        "_known",
        "_need",
        "_size",
        "_spec",
        "_table",
        "operations",
    )

    def __init__(self, handler: HandlerT, table: RequestTable[HandlerT]) -> None:
        self._handler = handler
        self._table = table
        self._get_cap = table.get_cap
        self._hot = table.hot
        self._known = table.repeated.calls
        # The request under way: which atom comes next, how many bytes that takes (0: between two
        # requests), those of them that have come, what has been read before it, and its size.
        self._atom = _HANDSHAKE
        self._need = len(VALIDATE)
        self._kept = bytearray()
        self._spec: RequestSpec[HandlerT] | None = None
        self._blobs: list[bytes] = []
        self._blobs_left = 0
        self._size = 0
        self._held = 0  # what the handler was told last
        self._is_unfinished = False  # whether the handler has not finished the last request
        self.operations = 0
        """Requests that it has handed over, but for the GETs of a read that ends in a violation."""

    @property
    def has_rest(self) -> bool:
        """Whether it has stopped to let others have their turn, and is to be fed again."""
        return bool(self._need) and self._atom == _REST

    @property
    def rest(self) -> bytes:
        """What it has kept, behind the last request that it has handed over."""
        return bytes(self._kept)

    @property
    def is_between_requests(self) -> bool:
        return not self._need

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream, and return the replies of the requests that they complete.

        There may be work left: the handler's `postpone` has been called then.

        Raises ProtocolError, whose `replies` are those of the requests before the violation.
        """
        if not self._need:
            if self._hot is not None:
                try:
                    answer = self._hot.serve_one(self._handler, data)
                finally:
                    self.operations += self._hot.carried
                if answer is not None:
                    return answer
            size = len(data)
            if size > 8 and data[0] == _GET:
                (length,) = unpack_u64(data, 1)
                if length == size - 9 and length <= self._get_cap:
                    self.operations += 1
                    return self._handler.get(data[9:]) or b""
            elif size <= REPEATED_BYTES:
                known = self._known.get(data)
                if known:
                    deliver, blobs, tail, operations, tally = known
                    tally.count += 1
                    self.operations += operations
                    return deliver(self._handler, blobs, tail) or b""
                if known is None:
                    self._table.repeated.notice(data)
        elif self._atom == _REST:
            return self._feed_rest(data)
        else:
            data = self._gather(data)
            if not data:
                return b""
        return self._read_all(data, [])

    def _feed_rest(self, data: bytes) -> bytes:
        """Go on where the parser stopped to let others have their turn."""
        self._kept += data
        replies: list[bytes] = []
        if self._is_unfinished:
            reply = self._handler.go_on()
            if reply is None or self._handler.is_unfinished:
                self._hold()
                self._handler.postpone()
                return reply or b""
            replies.append(reply)
            self._is_unfinished = False
        rest = bytes(self._kept)
        self._kept = bytearray()
        self._need = 0
        return self._read_all(rest, replies)

    def leave_unfinished(self) -> None:
        """The handler calls this when it returns only the first piece of its reply to a GET."""
        self._stop(b"", is_unfinished=True)

    def _stop(self, rest: bytes, *, is_unfinished: bool) -> bytes:
        """Let others have their turn: what is left of the data is for another feed. Returns nothing."""
        self._expect(_REST, 1)
        self._kept += rest
        self._is_unfinished = is_unfinished
        self._hold()
        self._handler.postpone()
        return b""

    def _hold(self) -> None:
        """Tell how many bytes are kept of requests that are not complete, or not carried out."""
        held = len(self._kept)
        if self._spec is not None:
            held += self._size + BLOB_BYTES * len(self._blobs)
        if held != self._held or self._spec is not None:  # a piece more has come, be it of the same size
            self._held = held
            self._handler.hold(held, self._spec is not None)

    def _read_all(self, data: bytes, replies: list[bytes]) -> bytes:
        try:
            self._read(data, replies)
        except ProtocolError as error:
            error.replies = b"".join(replies) + error.replies
            # The client may stay for what it is owed; what it has sent is of no use any more.
            self._kept, self._spec, self._blobs = bytearray(), None, []
            self._hold()
            raise
        return replies[0] if len(replies) == 1 else b"".join(replies)

    def _read(self, data: bytes, replies: list[bytes]) -> None:
        """Read all requests that end in `data`. The state is in local variables: this is the hot path."""
        handler, hot, by_opcode = self._handler, self._hot, self._table.by_opcode
        get_cap, request_cap = self._table.get_cap, self._table.request_cap
        begin = -self._size  # where the request under way begins: before this data, or in it
        position = self._go_on(data) if self._need else 0
        spec, blobs, left = self._spec, self._blobs, self._blobs_left
        end = len(data)
        pause = min(end, BYTES_AT_ONCE)
        others = len(replies)  # replies that are not to a GET
        steps = STEPS_AT_ONCE
        while True:
            if spec is None and hot is not None and position < pause:
                count = len(replies)
                try:
                    position, more = hot.serve(handler, data, position, pause, replies)
                finally:
                    self.operations += hot.carried
                others += more
                if len(replies) > count and len(replies[-1]) >= _LARGE_REPLY:
                    hot = None  # it does not count steps, which now have to be
                    steps -= len(replies[-1]) // STEP_BYTES
                    if self._is_unfinished or (steps < 0 and position < end):
                        self._stop(data[position:], is_unfinished=self._is_unfinished)
                        break
            if spec is None:
                if position >= pause:
                    if position < end:
                        self._stop(data[position:], is_unfinished=False)
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
                        replies.append(reply or b"")
                        position = stop
                        if reply is None:
                            self._stop(data[position:], is_unfinished=True)
                            break
                        if len(reply) >= _LARGE_REPLY:
                            steps -= len(reply) // STEP_BYTES
                            if self._is_unfinished or (steps < 0 and position < end):
                                self._stop(data[position:], is_unfinished=self._is_unfinished)
                                break
                        continue
                    spec, blobs, left = self._cut_get(length), [], 1
                    break
                spec = by_opcode[opcode] or self._no_spec(opcode)
                blobs, left = [], spec.period
                if spec.counted:
                    if position + 8 > end:
                        self._expect(_COUNT, 8)
                        break
                    left *= spec.check_count(unpack_u64(data, position)[0])
                    position += 8
            if left >= _MANY_BLOBS and cut_blobs is not None:
                count = len(blobs)
                position = cut_blobs(data, position, blobs, left, spec.caps, begin + request_cap)
                left -= len(blobs) - count
            while left:
                start = position + 8
                if start > end:
                    self._expect(_LENGTH, 8)
                    break
                (length,) = unpack_u64(data, position)
                stop = start + length
                if length > spec.caps[-left % spec.period] or stop - begin > request_cap:
                    raise spec.blob_too_long(length, -left % spec.period)
                if stop > end:
                    position = start
                    self._expect(_BODY, length)
                    break
                blobs.append(data[start:stop])
                position = stop
                left -= 1
            if left:
                break
            stop = position + spec.tail
            if stop > end:
                self._expect(_TAIL, spec.tail)
                break
            if stop - begin > request_cap:
                raise spec.too_long()
            spec.count += 1
            self.operations += 1
            answer = spec.deliver(handler, blobs, data[position:stop])
            position = stop
            spec = None
            if answer:
                others += 1
                replies.append(answer)
                if len(answer) >= _LARGE_REPLY:
                    steps -= len(answer) // STEP_BYTES
                if self._is_unfinished or (others > steps and position < end):
                    self._stop(data[position:], is_unfinished=self._is_unfinished)
                    break
            elif answer is None:
                self._stop(data[position:], is_unfinished=True)
                break
        self._spec, self._blobs, self._blobs_left = spec, blobs, left
        self.operations += len(replies) - others  # the GETs
        if spec is not None:
            # The data ends within a request: keep the bytes of the atom that is not complete.
            self._size = position - begin
            self._kept += data[position:]
            if len(blobs) > STEPS_AT_ONCE:
                self._handler.postpone()  # to read so many keys takes its time, too
        if spec is not None or self._held:
            self._hold()

    def _gather(self, data: bytes) -> bytes:
        """All pieces of the next atom, and what is behind it, once they are there; else nothing."""
        if not self._kept and len(data) >= self._need:
            return data
        self._kept += data
        if len(self._kept) < self._need:
            if self._atom != _HANDSHAKE:
                self._hold()
            elif self._kept and self._kept[0] != _VALIDATE:
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
            assert self._spec is not None
            self._blobs_left = self._spec.period * self._spec.check_count(unpack_u64(data, 0)[0])
        elif atom == _BODY:
            self._blobs.append(data[:need])
            self._blobs_left -= 1
        else:  # a length or a tail: the loop reads them with what is behind them
            return 0
        return need

    def _shake_hands(self, data: bytes | bytearray) -> None:
        if data[0] == TLS_BYTE:
            error = ProtocolError("it speaks TLS, as with a job's secret, but this store has none")
            error.replies = NO_TLS
            raise error
        if data[0] != _VALIDATE:
            name = Op(data[0]).name if data[0] in OPERATIONS else f"operation {data[0]}"
            raise ProtocolError(f"{name} before VALIDATE")
        (magic,) = unpack_u32(data, 1)
        if magic != MAGIC:
            raise ProtocolError(f"VALIDATE carries 0x{magic:08X} instead of 0x{MAGIC:08X}")
        self._handler.validate()

    def _no_spec(self, opcode: int) -> RequestSpec[HandlerT]:
        if opcode == _VALIDATE:
            raise ProtocolError("a second VALIDATE")
        raise UnknownOperationError(f"there is no operation {opcode}")

    def _cut_get(self, length: int) -> RequestSpec[HandlerT]:
        """Prepare for the rest of a GET whose length has been read, but whose key has not come whole."""
        spec = self._table.by_opcode[_GET] or self._no_spec(_GET)
        if length > self._table.get_cap:
            raise spec.blob_too_long(length, 0)
        self._expect(_BODY, length)
        return spec

    def _expect(self, atom: int, need: int) -> None:
        self._atom, self._need = atom, need
