"""The messages of sessions: each byte by byte, as it was written from any split, or refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ends import TOKEN, blob
from rallypoint.errors import ProtocolError
from rallypoint.store.wire import sessions as wire
from rallypoint.store.wire.encoding import encode
from rallypoint.store.wire.opcodes import Op

pytestmark = pytest.mark.windows

repeatable = settings(derandomize=True, deadline=None, max_examples=60)
numbers = st.integers(0, 2**64 - 1)


BYTES: list[tuple[bytes, str]] = [
    (wire.ASK, "05 0100000000000000 1500000000000000 72616c6c79706f696e742f73657373696f6e732f33"),
    (
        wire.session_request(TOKEN, 1000, 7, known=True),
        "20 1000000000000000 000102030405060708090a0b0c0d0e0f"
        "e803000000000000 0700000000000000 0100000000000000",
    ),
    (
        wire.session_request(TOKEN, 0, 0, known=False),
        "20 1000000000000000 000102030405060708090a0b0c0d0e0f"
        "0000000000000000 0000000000000000 0000000000000000",
    ),
    (
        wire.pack_welcome(wire.Welcome(wire.Answer.TAKEN_UP, 1000, 5, 4 << 30)),
        "01 e803000000000000 0500000000000000 0000000001000000",
    ),
    (
        wire.batch(3, 2, [bytes.fromhex("07"), bytes.fromhex("03 0100000000000000 6b")]),
        "21 2b00000000000000 0300000000000000 0200000000000000"
        "0100000000000000 07 0a00000000000000 03 0100000000000000 6b",
    ),
    (wire.batch(3, 2, []), "21 1000000000000000 0300000000000000 0200000000000000"),
    (
        wire.frame(4, 3, [wire.item(9, wire.Status.DONE, b"\x00"), wire.item(8, wire.Status.UNCHANGED, b"")]),
        "3300000000000000 0400000000000000 0300000000000000"
        "0900000000000000 00 0100000000000000 00 0800000000000000 03 0000000000000000",
    ),
    (wire.end_of_wait(6), "00 0600000000000000"),
    (encode(Op.PRESENT, [], b""), "22"),
    (encode(Op.BYE, [], b""), "23"),
    (encode(Op.BEAT, [], b""), "2a"),
    (encode(Op.ENTER, [b"job"], b""), "31 0300000000000000 6a6f62"),
    (encode(Op.REPORT, [b"job"], b""), "32 0300000000000000 6a6f62"),
    (
        encode(Op.ARRIVE, [b"k"], wire.pack_pair(8, 3)),
        "24 0100000000000000 6b 0800000000000000 0300000000000000",
    ),
    (encode(Op.LEAVE, [], wire.pack_pair(5, 2)), "25 0500000000000000 0200000000000000"),
    (
        encode(Op.WAIT_IN_TURN, [b"k", b"lm"], b""),
        "26 0200000000000000 0100000000000000 6b 0200000000000000 6c6d",
    ),
    (encode(Op.RECALL, [b"k"], b""), "27 0100000000000000 6b"),
    (
        encode(Op.POP_CALLED, [b"k"], bytes.fromhex("0400000000000000")),
        "28 0100000000000000 6b 0400000000000000",
    ),
]


@pytest.mark.parametrize(("ours", "documented"), BYTES)
def test_each_message_is_what_the_reference_says_byte_by_byte(ours: bytes, documented: str) -> None:
    assert ours.hex() == documented.replace(" ", "")


def test_the_statuses_and_answers_have_the_numbers_of_the_reference() -> None:
    statuses = wire.Status
    assert [statuses.DONE, statuses.REFUSED, statuses.CALLED, statuses.UNCHANGED] == [0, 1, 2, 3]
    assert [wire.Answer.NEW, wire.Answer.TAKEN_UP, wire.Answer.UNKNOWN] == [0, 1, 2]
    assert wire.WELCOME_BYTES == 25


@repeatable
@given(numbers, numbers, st.lists(st.binary(max_size=40), max_size=5))
def test_a_batch_is_read_as_it_was_written(number: int, taken: int, requests: list[bytes]) -> None:
    payload = wire.batch(number, taken, requests)[9:]
    assert wire.parse_head(payload) == (number, taken)
    assert [payload[start:stop] for start, stop in wire.parse_requests(payload)] == requests
    assert len(wire.batch(1, 1, [b"x"])) == wire.BATCH_OVERHEAD + 1


ITEMS = st.lists(st.tuples(numbers, st.sampled_from(list(wire.Status)), st.binary(max_size=30)), max_size=4)


@repeatable
@given(st.lists(st.tuples(numbers, numbers, ITEMS), max_size=4), st.lists(st.integers(0, 200)))
def test_frames_are_read_as_they_were_written_from_any_split(
    sent: list[tuple[int, int, list[tuple[int, wire.Status, bytes]]]], cuts: list[int]
) -> None:
    data = b"".join(
        wire.frame(number, taken, [wire.item(*each) for each in items]) for number, taken, items in sent
    )
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    reader = wire.FrameReader()
    found = [payload for start, stop in pairwise(places) for payload in reader.feed(data[start:stop])]
    assert [(*wire.parse_head(payload), list(wire.parse_items(payload))) for payload in found] == sent


@repeatable
@given(st.integers(0, 255), numbers, numbers, numbers)
def test_a_welcome_and_a_session_are_read_as_they_were_written(
    answer: int, keeps: int, taken: int, most: int
) -> None:
    welcome = wire.Welcome(answer, keeps, taken, most)
    assert wire.parse_welcome(wire.pack_welcome(welcome)) == welcome
    known = bool(answer % 2)
    assert wire.parse_session(wire.session_request(TOKEN, keeps, taken, known=known)[25:]) == (
        keeps,
        taken,
        known,
    )


@pytest.mark.parametrize(
    ("read", "payload"),
    [
        (wire.parse_head, bytes(15)),
        (wire.parse_requests, bytes(16) + b"\x01" * 7),
        (wire.parse_requests, bytes(16) + blob(b"abc")[:-1]),
        (wire.parse_requests, bytes(16) + b"\xff" * 8),
        (wire.parse_items, bytes(16) + bytes(16)),
        (wire.parse_items, bytes(16) + wire.item(1, wire.Status.DONE, b"abc")[:-1]),
        (wire.parse_items, bytes(16) + bytes(8) + b"\x06" + bytes(8)),
        (wire.parse_items, bytes(16) + bytes(9) + b"\xff" * 8),
        (wire.parse_end_of_wait, b"\x00"),
        (wire.parse_end_of_wait, bytes(10)),
    ],
)
def test_what_is_cut_off_or_cannot_be_is_a_violation(read: Callable[[bytes], object], payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(read(payload))  # type: ignore[call-overload]
