"""The encoding of etcd's messages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import ProtocolError
from rallypoint.store.replica.engines import etcd_messages as messages
from rallypoint.store.replica.engines.etcd_messages import decode, encode

_FIELDS = st.lists(
    st.tuples(st.integers(1, 2**29 - 1), st.integers(0, 2**64 - 1) | st.binary(max_size=300)), max_size=8
)


@given(_FIELDS)
def test_what_was_encoded_is_decoded(fields: Sequence[tuple[int, int | bytes]]) -> None:
    message = decode(encode(*fields))
    for number in {number for number, _ in fields} | {1}:
        values = [value for each, value in fields if each == number]
        assert message.all_data(number) == [each for each in values if isinstance(each, bytes)]
        assert message.integer(number) == (values[-1] if values and isinstance(values[-1], int) else 0)


@given(_FIELDS, st.data())
def test_bytes_that_are_cut_off_are_no_other_message(
    fields: Sequence[tuple[int, int | bytes]], data: st.DataObject
) -> None:
    """What is left is the fields before, or an error."""
    encoded = encode(*fields)
    cut = encoded[: data.draw(st.integers(0, len(encoded)))]
    whole = [encode(*fields[:count]) for count in range(len(fields) + 1)]
    if cut in whole:
        decode(cut)
    else:
        with pytest.raises(ProtocolError):
            decode(cut)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    try:
        messages.read_outcome(data)
    except ProtocolError:
        pass


def test_bytes_as_the_specification_gives_them() -> None:
    """The examples of the encoding's own guide, and what etcd's messages need besides."""
    assert encode((1, 150)) == bytes.fromhex("089601")
    assert encode((2, b"testing")) == bytes.fromhex("120774657374696e67")
    assert encode((3, encode((1, 150)))) == bytes.fromhex("1a03089601")
    assert decode(bytes.fromhex("08ffffffffffffffffff01")).integer(1) == 2**64 - 1
    mixed = decode(bytes.fromhex("0d01020304" + "110102030405060708" + "1805"))
    assert (mixed.integer(1), mixed.integer(2), mixed.integer(3)) == (0, 0, 5)
    for wrong in ("0b", "08", "12", "120561", "0d0102", "08" + "ff" * 11):
        with pytest.raises(ProtocolError):
            decode(bytes.fromhex(wrong))
