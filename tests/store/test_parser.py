"""The request parser: the same requests from any split, in linear work, under every limit.

The encoder and the table of operations in here are written from the protocol's description, apart from
those of the package, so that a mistake in one does not hide in the other.
"""

from __future__ import annotations

import struct
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.core import tickets
from rallypoint.store.core.clients import EXTENSION_METHODS, SESSION_METHODS
from rallypoint.store.core.store import CLIENT_METHODS
from rallypoint.store.relay.core import downstream
from rallypoint.store.wire import parser
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import BATCH_OPS, CLIENT_OPS, OPERATIONS, SESSION_OPS, Op
from rallypoint.store.wire.parser import RequestParser, RequestTable
from rallypoint.store.wire.requests import RawHandler, carried

pytestmark = pytest.mark.windows

MAGIC = 0x3C85F7CE
VALIDATE = b"\x00" + struct.pack("<I", MAGIC)

repeatable = settings(derandomize=True, deadline=None, max_examples=200)

ALL = carried([*CLIENT_OPS, Op.REPORT])

Call = tuple[object, ...]


def test_every_operation_is_in_the_table_and_has_its_method() -> None:
    assert OPERATIONS.keys() == set(Op)
    assert CLIENT_METHODS.keys() == CLIENT_OPS
    assert SESSION_METHODS.keys() == SESSION_OPS
    extensions = {op for op, row in OPERATIONS.items() if not row.traits} - {Op.VALIDATE}
    assert EXTENSION_METHODS.keys() == extensions
    for own in (tickets._METHODS, downstream._OWN):
        assert {*CLIENT_OPS, *own} >= BATCH_OPS >= own.keys()


class Recorder:
    """A handler that notes what it is called with; the reply to the n-th call is `[n]`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_postponed = False

    def postpone(self) -> None:
        self.is_postponed = True

    def hold(self, count: int, is_cut: bool) -> None:
        """What the parser keeps is not among the calls."""

    def validate(self) -> None:
        self.note("VALIDATE")

    def get(self, key: bytes) -> bytes:
        return self.note("GET", key)

    def carry(self, op: Op, blobs: list[bytes], tail: bytes) -> bytes:
        number = [tail] if op is Op.PING else list(struct.unpack("<q", tail)) if tail else []
        return self.note(op.name, *blobs, *number)

    def note(self, name: str, *arguments: bytes | int) -> bytes:
        self.calls.append((name, *arguments))
        return b"[%d]" % len(self.calls)


def feed_all(feed: Callable[[bytes], bytes], recorder: Recorder, data: bytes) -> bytes:
    """All replies, as often as the parser stops to let others have their turn."""
    replies = feed(data)
    while recorder.is_postponed:
        recorder.is_postponed = False
        replies += feed(b"")
    return replies


class Bench:
    """A parser on a recorder. `validated` has its VALIDATE behind it, which is not among `calls`.

    The parsers of one server share a `table`.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        validated: bool = True,
        table: RequestTable[RawHandler] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.recorder = recorder or Recorder()
        self.table = table or RequestTable(limits or Limits(), ALL)
        self.parser = RequestParser(cast(RawHandler, self.recorder), self.table)
        if validated:
            self.parser.feed(VALIDATE)
            self.recorder.calls.clear()

    @property
    def calls(self) -> list[Call]:
        return self.recorder.calls

    def feed(self, *pieces: bytes) -> bytes:
        return b"".join([feed_all(self.parser.feed, self.recorder, piece) for piece in pieces])


@dataclass(frozen=True)
class Sent:
    """A request as it goes over the wire, and the call that it is to become."""

    wire: bytes
    call: Call


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def i64(number: int) -> bytes:
    return struct.pack("<q", number)


def blob(content: bytes) -> bytes:
    return u64(len(content)) + content


def plain(opcode: int, name: str, *contents: bytes) -> Sent:
    return Sent(bytes([opcode]) + b"".join(map(blob, contents)), (name, *contents))


def with_number(opcode: int, name: str, key: bytes, number: int) -> Sent:
    return Sent(bytes([opcode]) + blob(key) + i64(number), (name, key, number))


def counted(opcode: int, name: str, count: int, contents: Sequence[bytes]) -> Sent:
    return Sent(bytes([opcode]) + u64(count) + b"".join(map(blob, contents)), (name, *contents))


def ping(nonce: bytes) -> Sent:
    return Sent(b"\x0d" + nonce, ("PING", nonce))


EXAMPLES = [
    plain(1, "SET", b"key", b"value"),
    plain(1, "SET", b"", b""),
    plain(2, "COMPARE_SET", b"key", b"", b"desired"),
    plain(3, "GET", b"key"),
    plain(3, "GET", b""),
    with_number(4, "ADD", b"key", -5),
    with_number(4, "ADD", b"key", (1 << 63) - 1),
    counted(5, "CHECK", 2, [b"one", b"two"]),
    counted(5, "CHECK", 0, []),
    counted(6, "WAIT", 2, [b"one", b"one"]),
    plain(7, "GETNUMKEYS"),
    plain(8, "DELETE_KEY", b"key"),
    plain(9, "APPEND", b"key", b"more"),
    counted(10, "MULTI_GET", 3, [b"one", b"", b"three"]),
    counted(11, "MULTI_SET", 2, [b"one", b"1", b"two", b""]),
    plain(12, "CANCEL_WAIT"),
    ping(b"\x00\x01\x02\x03"),
    plain(14, "QUEUE_PUSH", b"queue", b"value"),
    plain(15, "QUEUE_POP", b"queue"),
    plain(16, "QUEUE_LEN", b"queue"),
    plain(17, "LIST_KEYS"),
    with_number(18, "BARRIER", b"key", 16_000),
    with_number(18, "BARRIER", b"key", -(1 << 63)),
    plain(50, "REPORT", b"text"),
]
each_example = pytest.mark.parametrize("sent", EXAMPLES, ids=lambda sent: str(sent.call[0]))


def in_bytes(wire: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in wire]


# One operation at a time


def test_the_examples_cover_all_operations() -> None:
    assert {sent.wire[0] for sent in EXAMPLES} == {*range(1, 19), 50}


@each_example
def test_an_operation_whole_in_bytes_and_with_the_beginning_of_the_next(sent: Sent) -> None:
    trailing = [b"\x03", b"\x03\x03\x00", b"\x0b" + u64(1) + b"\x05"]
    for pieces in ([sent.wire], in_bytes(sent.wire), *([sent.wire + begin] for begin in trailing)):
        bench = Bench()
        assert bench.feed(*pieces[:-1]) == b""
        assert bench.calls == []
        assert bench.feed(pieces[-1]) == b"[1]"
        assert bench.calls == [sent.call]
        # What a handler keeps must not be a view into a buffer that is used again.
        assert all(type(argument) in (bytes, int) for argument in bench.calls[0][1:])


# Any split


keys = st.binary(max_size=12)
values = st.binary(max_size=40) | st.sampled_from([255, 256, 1023, 1024, 5000]).map(lambda size: b"v" * size)
numbers = st.integers(-(1 << 63), (1 << 63) - 1)


def plain_requests(opcode: int, name: str, *contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[Sent]:
    return st.tuples(*contents).map(lambda drawn: plain(opcode, name, *drawn))


def counted_requests(opcode: int, name: str) -> st.SearchStrategy[Sent]:
    return st.lists(keys, max_size=12).map(lambda drawn: counted(opcode, name, len(drawn), drawn))


def multi_sets() -> st.SearchStrategy[Sent]:
    pairs = st.lists(st.tuples(keys, values), max_size=8)
    flat = pairs.map(lambda drawn: [content for pair in drawn for content in pair])
    return flat.map(lambda drawn: counted(11, "MULTI_SET", len(drawn) // 2, drawn))


requests = st.one_of(
    plain_requests(1, "SET", keys, values),
    plain_requests(2, "COMPARE_SET", keys, values, values),
    plain_requests(3, "GET", keys),
    st.builds(with_number, st.just(4), st.just("ADD"), keys, numbers),
    counted_requests(5, "CHECK"),
    counted_requests(6, "WAIT"),
    plain_requests(7, "GETNUMKEYS"),
    plain_requests(8, "DELETE_KEY", keys),
    plain_requests(9, "APPEND", keys, values),
    counted_requests(10, "MULTI_GET"),
    multi_sets(),
    plain_requests(12, "CANCEL_WAIT"),
    st.binary(min_size=4, max_size=4).map(ping),
    plain_requests(14, "QUEUE_PUSH", keys, values),
    plain_requests(15, "QUEUE_POP", keys),
    plain_requests(16, "QUEUE_LEN", keys),
    plain_requests(17, "LIST_KEYS"),
    st.builds(with_number, st.just(18), st.just("BARRIER"), keys, numbers),
)
streams = st.lists(requests, max_size=12).map(lambda drawn: [Sent(VALIDATE, ("VALIDATE",)), *drawn])


@st.composite
def split_streams(draw: st.DrawFn) -> tuple[list[Sent], list[bytes]]:
    """Requests, and their bytes in pieces, some of which may be empty."""
    stream = draw(streams)
    wire = b"".join(sent.wire for sent in stream)
    cuts = sorted(draw(st.lists(st.integers(0, len(wire)), max_size=20)))
    return stream, [wire[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(wire)], strict=True)]


@repeatable
@given(split_streams())
def test_any_split_gives_the_same_and_each_request_with_its_last_byte(
    drawn: tuple[list[Sent], list[bytes]],
) -> None:
    stream, pieces = drawn
    whole, split = Bench(validated=False), Bench(validated=False)
    whole.feed(b"".join(pieces))
    assert whole.calls == [sent.call for sent in stream]
    ends = [sum(len(sent.wire) for sent in stream[: count + 1]) for count in range(len(stream))]
    fed = 0
    for piece in pieces:
        before = len(split.calls)
        fed += len(piece)
        replies = split.feed(piece)
        complete = sum(end <= fed for end in ends)
        assert len(split.calls) == complete
        assert replies == b"".join(b"[%d]" % number for number in range(max(before, 1) + 1, complete + 1))
    assert split.calls == whole.calls


@repeatable
@given(split_streams(), st.integers(0, 3), st.integers(1, 60), st.data())
def test_a_parser_that_stops_and_goes_on_gives_the_same(
    drawn: tuple[list[Sent], list[bytes]], steps: int, size: int, data: st.DataObject
) -> None:
    """Others have their turn whenever a client has had enough; more may come from it meanwhile."""
    stream, pieces = drawn
    bench, replies = Bench(validated=False), b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parser, "STEPS_AT_ONCE", steps)
        patch.setattr(parser, "BYTES_AT_ONCE", size)
        for piece in pieces:
            before = len(bench.calls)
            replies += bench.parser.feed(piece)
            assert len(bench.calls) - before <= max(steps + 1, size)
            if bench.recorder.is_postponed and data.draw(st.booleans()):
                replies += feed_all(bench.parser.feed, bench.recorder, b"")
        replies += feed_all(bench.parser.feed, bench.recorder, b"")
    assert bench.calls == [sent.call for sent in stream]
    assert replies == b"".join(b"[%d]" % number for number in range(2, len(stream) + 1))


# Linear work


def cut(wire: bytes, size: int) -> list[bytes]:
    return [wire[begin : begin + size] for begin in range(0, len(wire), size)]


def multi_get_of(count: int) -> bytes:
    return counted(10, "MULTI_GET", count, [b"/key/%06d" % number for number in range(count)]).wire


def set_of(size: int) -> bytes:
    return plain(1, "SET", b"key", b"v" * size).wire


def sets_of_64_bytes(count: int) -> bytes:
    """Cutting what is read off the front of the data, one request at a time, would be quadratic."""
    return set_of(64) * count


def count_calls(action: Callable[[], object]) -> int:
    """How many calls of Python and C functions an action makes: what is read again is counted again."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(on_event)
    try:
        action()
    finally:
        sys.setprofile(previous)
    return count


def count_allocated(parser: RequestParser[RawHandler], pieces: list[bytes]) -> int:
    """How many bytes the feeds allocate, those given back at once included: what is copied is counted."""
    total = 0
    tracemalloc.start()
    try:
        for piece in pieces:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            parser.feed(piece)
            total += tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return total


LARGE_REQUESTS = [
    pytest.param(multi_get_of, 1_000, 4096, id="multi_get-4KiB"),
    pytest.param(multi_get_of, 500, 7, id="multi_get-7B"),
    pytest.param(set_of, 1_500, 1, id="value-1B"),
    pytest.param(set_of, 20_000, 13, id="value-13B"),
    pytest.param(set_of, 200_000, 512, id="value-512B"),
    pytest.param(sets_of_64_bytes, 1_000, 1 << 30, id="many in one piece"),
]


@pytest.mark.parametrize(("request_of", "size", "piece"), LARGE_REQUESTS)
def test_four_times_the_request_takes_four_times_the_calls_and_copies(
    request_of: Callable[[int], bytes], size: int, piece: int
) -> None:
    def calls_for(size: int) -> int:
        bench, pieces = Bench(), cut(request_of(size), piece)
        return count_calls(lambda: bench.feed(*pieces))

    def bytes_for(size: int) -> int:
        return count_allocated(Bench().parser, cut(request_of(size), piece))

    assert calls_for(4 * size) < 5 * calls_for(size)
    assert bytes_for(4 * size) < 6 * bytes_for(size)


# Limits


EMPTY = u64(0)
SMALL = Limits(key_bytes=10, value_bytes=20, keys_per_request=3)

# Each place of a blob: the request before it, its operation, which limit holds, and the request's rest.
BLOB_PLACES = [
    pytest.param(b"\x01", "SET", "key", EMPTY, id="SET-key"),
    pytest.param(b"\x01" + blob(b"k"), "SET", "value", b"", id="SET-value"),
    pytest.param(b"\x02", "COMPARE_SET", "key", EMPTY * 2, id="COMPARE_SET-key"),
    pytest.param(b"\x02" + blob(b"k"), "COMPARE_SET", "value", EMPTY, id="COMPARE_SET-expected"),
    pytest.param(b"\x02" + blob(b"k") + EMPTY, "COMPARE_SET", "value", b"", id="COMPARE_SET-desired"),
    pytest.param(b"\x03", "GET", "key", b"", id="GET"),
    pytest.param(b"\x04", "ADD", "key", i64(1), id="ADD"),
    pytest.param(b"\x05" + u64(1), "CHECK", "key", b"", id="CHECK"),
    pytest.param(b"\x06" + u64(2) + blob(b"k"), "WAIT", "key", b"", id="WAIT-second"),
    pytest.param(b"\x08", "DELETE_KEY", "hello", b"", id="DELETE_KEY"),
    pytest.param(b"\x09", "APPEND", "key", EMPTY, id="APPEND-key"),
    pytest.param(b"\x09" + blob(b"k"), "APPEND", "value", b"", id="APPEND-value"),
    pytest.param(b"\x0a" + u64(3) + blob(b"k") * 2, "MULTI_GET", "key", b"", id="MULTI_GET-third"),
    pytest.param(b"\x0b" + u64(1), "MULTI_SET", "key", EMPTY, id="MULTI_SET-key"),
    pytest.param(b"\x0b" + u64(1) + blob(b"k"), "MULTI_SET", "value", b"", id="MULTI_SET-value"),
    pytest.param(b"\x0b" + u64(2) + blob(b"k") * 2, "MULTI_SET", "key", EMPTY, id="MULTI_SET-second-key"),
    pytest.param(b"\x0e", "QUEUE_PUSH", "key", EMPTY, id="QUEUE_PUSH-key"),
    pytest.param(b"\x0e" + blob(b"k"), "QUEUE_PUSH", "value", b"", id="QUEUE_PUSH-value"),
    pytest.param(b"\x0f", "QUEUE_POP", "key", b"", id="QUEUE_POP"),
    pytest.param(b"\x10", "QUEUE_LEN", "key", b"", id="QUEUE_LEN"),
    pytest.param(b"\x12", "BARRIER", "key", i64(2), id="BARRIER"),
]
each_blob = pytest.mark.parametrize(("begin", "name", "what", "rest"), BLOB_PLACES)
LIMITS_OF = {
    "key": 10,
    "value": 20,
    "hello": 1_024,
}  # a DELETE_KEY may be a hello, whatever the limit of keys
NAMES_OF = {"key": "key_bytes", "value": "value_bytes", "hello": "key_bytes"}


def refuse(bench: Bench, wire: bytes) -> LimitError:
    """Feed all but the last byte, which is fine, then the last one, which is not."""
    assert bench.feed(wire[:-1]) == b""
    with pytest.raises(LimitError) as caught:
        bench.feed(wire[-1:])
    assert bench.calls == []
    return caught.value


@each_blob
def test_a_blob_is_accepted_at_its_limit_and_refused_at_a_length_beyond_it(
    begin: bytes, name: str, what: str, rest: bytes
) -> None:
    content = b"x" * LIMITS_OF[what]
    wire = begin + blob(content) + rest
    for pieces in ([wire], in_bytes(wire)):
        bench = Bench(SMALL)
        bench.feed(*pieces)
        ((called, *arguments),) = bench.calls
        assert called == name
        assert content in arguments
    for excess in (1, 1 << 31, (1 << 63) - 20, (1 << 64) - 1_025):
        length = u64(LIMITS_OF[what] + excess)
        error = refuse(Bench(SMALL), begin + length)
        assert name in error.message
        assert NAMES_OF[what] in error.message
        for whole in (begin + length, begin + length + b"x" * 100):
            with pytest.raises(LimitError):
                Bench(SMALL).feed(whole)


@pytest.mark.parametrize(
    ("opcode", "name", "blobs"), [(5, "CHECK", 3), (6, "WAIT", 3), (10, "MULTI_GET", 3), (11, "MULTI_SET", 6)]
)
def test_as_many_keys_as_the_limit_are_accepted_and_more_refused_at_the_count(
    opcode: int, name: str, blobs: int
) -> None:
    wire = bytes([opcode]) + u64(3) + blob(b"k") * blobs
    for pieces in ([wire], in_bytes(wire)):
        bench = Bench(SMALL)
        bench.feed(*pieces)
        assert bench.calls[0][1:] == (b"k",) * blobs
    for count in (4, 1 << 31, 1 << 63, (1 << 64) - 1):
        error = refuse(Bench(SMALL), bytes([opcode]) + u64(count))
        assert name in error.message
        assert "keys_per_request" in error.message
        with pytest.raises(LimitError):
            Bench(SMALL).feed(bytes([opcode]) + u64(count) + blob(b"k") * 10)


@pytest.mark.parametrize(("index", "what"), [(0, "key"), (8, "key"), (9, "value"), (19, "value")])
def test_the_limits_of_blobs_hold_throughout_a_long_request(index: int, what: str) -> None:
    contents = [b"k"] * 20
    for length in (LIMITS_OF[what], LIMITS_OF[what] + 1):
        contents[index] = b"x" * length
        sent = counted(11, "MULTI_SET", 10, contents)
        for pieces in ([sent.wire], in_bytes(sent.wire), cut(sent.wire, 30)):
            bench = Bench(Limits(key_bytes=LIMITS_OF["key"], value_bytes=LIMITS_OF["value"]))
            if length == LIMITS_OF[what]:
                bench.feed(*pieces)
                assert bench.calls == [sent.call]
            else:
                with pytest.raises(LimitError, match=NAMES_OF[what]):
                    bench.feed(*pieces)
                assert bench.calls == []


@pytest.mark.parametrize("pairs", [3, 12])
def test_request_bytes_is_the_size_of_a_whole_request_however_it_is_cut(pairs: int) -> None:
    contents = [b"one", b"1" * 10, b"two", b"2" * 10, b"three", b"3" * 10] * (pairs // 3)
    sent = counted(11, "MULTI_SET", pairs, contents)
    stream = sent.wire * 4
    at_limit, below = Limits(request_bytes=len(sent.wire)), Limits(request_bytes=len(sent.wire) - 1)
    for size in (1, 2, 7, 8, 9, 12, 17, 40, 50, 200):
        # What stands behind a request does not count.
        for pieces in (cut(stream, size), [stream[:size], stream[size:]]):
            assert Bench(at_limit).feed(*pieces) == b"[1][2][3][4]", size
        bench = Bench(below)
        with pytest.raises(LimitError, match=r"MULTI_SET.*request_bytes"):
            bench.feed(*cut(sent.wire, size))
        assert bench.calls == []


def test_request_bytes_bounds_what_is_held() -> None:
    """It is refused at the length that breaks it, and at the latest with the first byte over the limit."""
    wire = b"\x01" + blob(b"key") + u64(1000)
    error = refuse(Bench(Limits(request_bytes=1000)), wire)
    assert "SET" in error.message
    assert "request_bytes" in error.message
    with pytest.raises(LimitError, match=r"SET.*request_bytes"):
        Bench(Limits(request_bytes=500)).feed(*in_bytes(wire + b"v" * (501 - len(wire))))


# Violations


@pytest.mark.parametrize("opcode", [19, 255])
def test_an_unknown_opcode(opcode: int) -> None:
    with pytest.raises(ProtocolError, match=str(opcode)):
        Bench().feed(bytes([opcode]))
    with pytest.raises(ProtocolError):
        Bench(validated=False).feed(bytes([opcode]) * len(VALIDATE))


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_nothing_runs_without_the_right_validate(size: int) -> None:
    """However it is cut; it is known at the latest when as many bytes are there as VALIDATE has."""
    magics = [0, MAGIC ^ 1, MAGIC ^ (1 << 31), 0xCEF7853C]
    wrong = [b"\x00" + struct.pack("<I", magic) + EXAMPLES[0].wire for magic in magics]
    for wire in (*wrong, *(sent.wire + VALIDATE for sent in EXAMPLES)):
        bench = Bench(validated=False)
        with pytest.raises(ProtocolError, match="VALIDATE"):
            bench.feed(*cut(wire[: max(size, len(VALIDATE))], size))
        assert bench.calls == []


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_second_validate(size: int) -> None:
    for between in ([], [EXAMPLES[0]]):
        wire = VALIDATE + b"".join(sent.wire for sent in between) + VALIDATE + EXAMPLES[0].wire
        bench = Bench(validated=False)
        with pytest.raises(ProtocolError, match="VALIDATE"):
            bench.feed(*cut(wire, size))
        assert bench.calls == [("VALIDATE",), *(sent.call for sent in between)]


class Objector(Recorder):
    """A handler that does not stand for numbers."""

    def carry(self, op: Op, blobs: list[bytes], tail: bytes) -> bytes:
        if op is Op.ADD:
            raise ProtocolError("no numbers")
        return super().carry(op, blobs, tail)

    def get(self, key: bytes) -> bytes:
        raise ProtocolError("no gets")


VIOLATIONS = {
    "opcode": b"\xff",
    "validate": VALIDATE,
    "GET": b"\x03" + u64(11),
    "SET": b"\x01" + u64(3) + b"key" + u64(21),
    "MULTI_GET": b"\x0a" + u64(4),
    "a GET that the handler refuses": EXAMPLES[3].wire,
    "an ADD that the handler refuses": EXAMPLES[5].wire,
}


@pytest.mark.parametrize("violation", VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_the_error_has_the_replies_before_it_also_when_it_comes_again(violation: bytes) -> None:
    before = EXAMPLES[0].wire + ping(b"nonc").wire
    for behind in (b"", b"\x0dnonc", b"\x00" * 100):
        for data, replies in ((violation, b""), (before + violation, b"[2][3]")):
            table: RequestTable[RawHandler] = RequestTable(SMALL, ALL)
            for _ in range(4):  # what comes again is known by its bytes
                bench = Bench(table=table, recorder=Objector())
                assert bench.feed(EXAMPLES[0].wire) == b"[1]"
                with pytest.raises(ProtocolError) as caught:
                    bench.feed(data + behind)
                assert caught.value.replies == replies
                assert len(bench.calls) == (3 if replies else 1)


# The same data again and again, as from many clients at a barrier


@repeatable
@given(st.lists(st.lists(requests, min_size=1, max_size=4), max_size=4), st.data())
def test_what_is_said_again_gives_the_same_as_in_bytes(said: list[list[Sent]], data: st.DataObject) -> None:
    """Each of some reads comes several times, in any order, now and then to a parser within a request."""
    whole, in_pieces = Bench(), Bench()
    pieces = [b"".join(sent.wire for sent in sents) for sents in said]
    pieces += [piece[: len(piece) // 2] for piece in pieces]
    for piece in data.draw(st.lists(st.sampled_from(pieces), max_size=16)) if pieces else []:
        try:
            expected = in_pieces.feed(*in_bytes(piece))
        except ProtocolError as error:
            with pytest.raises(type(error)):
                whole.feed(piece)
            break
        assert whole.feed(piece) == expected
    assert whole.calls == in_pieces.calls


def test_what_is_known_is_bounded_and_found_again() -> None:
    bench = Bench()
    for number in range(1000):
        sent = plain(1, "SET", b"%d" % number, b"value")
        for _ in range(3):
            bench.feed(sent.wire)
            assert bench.calls[-1] == sent.call
    assert len(bench.calls) == 3000
    assert 0 < len(bench.table.repeated.calls) <= 64
    known = sum(map(len, bench.table.repeated.calls))
    for _ in range(3):
        bench.feed(plain(1, "SET", b"key", b"v" * 300).wire)
    assert sum(map(len, bench.table.repeated.calls)) == known, "only short data is kept"
