"""The core: what all connections together see, without any socket or clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.core.context import GoOn
from rallypoint.store.core.store import Connection, Core
from rallypoint.store.wire.encoding import VALIDATE, blob, blobs, counted_request, pack_i64, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op

pytestmark = pytest.mark.windows

STOP_WAITING = b"\x00"
WAIT_CANCELED = b"\x01"
CANCEL_WAIT = request(Op.CANCEL_WAIT)


def set_(key: bytes, value: bytes = b"") -> bytes:
    return request(Op.SET, key, value)


def get(key: bytes) -> bytes:
    return request(Op.GET, key)


def add(key: bytes, amount: int) -> bytes:
    return request(Op.ADD, key, tail=pack_i64(amount))


def wait(*keys: bytes) -> bytes:
    return counted_request(Op.WAIT, keys)


def barrier(key: bytes, size: int) -> bytes:
    return request(Op.BARRIER, key, tail=pack_i64(size))


def push(key: bytes, value: bytes = b"") -> bytes:
    return request(Op.QUEUE_PUSH, key, value)


def pop(key: bytes) -> bytes:
    return request(Op.QUEUE_POP, key)


@pytest.fixture
def core() -> Core:
    return Core()


def connect(core: Core, count: int = 1) -> list[Connection]:
    """Connections that have their VALIDATE behind them."""
    connections = [core.open(f"client {number}") for number in range(count)]
    for connection in connections:
        assert connection.receive(VALIDATE) == b""
    return connections


def woken(core: Core) -> list[str]:
    core.check_invariants()
    return [connection.peer for connection in core.outbox.take_woken()]


# Replies


def test_each_operation_replies_as_the_protocol_says(core: Core) -> None:
    (client,) = connect(core)
    exchanges = [
        (set_(b"k", b"old"), b""),
        (get(b"k"), blob(b"old")),
        (get(b"missing"), blob(b"")),
        (request(Op.COMPARE_SET, b"k", b"old", b"new"), blob(b"new")),
        (request(Op.COMPARE_SET, b"k", b"old", b"newer"), blob(b"new")),
        (request(Op.COMPARE_SET, b"missing", b"old", b"newer"), blob(b"old")),
        (add(b"n", 5), pack_i64(5)),
        (add(b"n", -7), pack_i64(-2)),
        (counted_request(Op.CHECK, [b"k", b"n"]), b"\x00"),
        (counted_request(Op.CHECK, [b"k", b"missing"]), b"\x01"),
        (wait(b"k", b"n"), STOP_WAITING),
        (wait(b"missing"), b""),
        (CANCEL_WAIT, WAIT_CANCELED),
        (request(Op.GETNUMKEYS), pack_i64(2)),
        (request(Op.APPEND, b"k", b"er"), b""),
        (counted_request(Op.MULTI_GET, [b"k", b"missing", b"n"]), blobs([b"newer", b"", b"-2"])),
        (counted_request(Op.MULTI_SET, [b"a", b"1", b"b", b"2"], blobs_each=2), b""),
        (counted_request(Op.MULTI_GET, [b"a", b"b"]), blobs([b"1", b"2"])),
        (request(Op.DELETE_KEY, b"a"), pack_i64(1)),
        (request(Op.DELETE_KEY, b"a"), pack_i64(0)),
        (request(Op.PING, tail=b"\x01\x02\x03\xff"), b"\x01\x02\x03\xff"),
        (push(b"q", b"first"), b""),
        (push(b"q", b""), b""),
        (request(Op.QUEUE_LEN, b"q"), pack_i64(2)),
        (pop(b"q"), pack_i64(2) + blob(b"first")),
        (pop(b"q"), pack_i64(1) + blob(b"")),
        (pop(b"q"), pack_i64(0)),
        (request(Op.LIST_KEYS), pack_i64(3) + blobs([b"k", b"n", b"b"])),
        (barrier(b"k", 1), STOP_WAITING),
    ]
    for sent, reply in exchanges:
        assert client.receive(sent) == reply
        assert woken(core) == []


def test_each_key_is_itself_whatever_came_before_it(core: Core) -> None:
    """More keys than the compiled server remembers, of many lengths, and alike but for one byte."""
    (client,) = connect(core)
    zeros = [bytearray(length) for length in range(1, 140)]
    keys = [bytes(each[:at] + b"\1" + each[at + 1 :]) for each in zeros for at in range(0, len(each), 5)]
    for number, key in enumerate(keys):
        assert client.receive(add(key, number)) == pack_i64(number)
    for number, key in reversed(list(enumerate(keys))):
        assert client.receive(add(key, 1)) == pack_i64(number + 1)
        assert client.receive(get(key)) == blob(b"%d" % (number + 1))
    assert client.receive(request(Op.GETNUMKEYS)) == pack_i64(len(keys))


@pytest.mark.parametrize("number", [0, 1, -1, 255, -256, 1 << 40, -(1 << 63), (1 << 63) - 1])
def test_a_number_is_packed_in_eight_bytes(number: int) -> None:
    assert pack_i64(number) == number.to_bytes(8, "little", signed=True)


def test_own_wakes_stand_where_they_happen(core: Core) -> None:
    (client,) = connect(core)
    assert client.receive(wait(b"k") + set_(b"k", b"v") + get(b"k")) == STOP_WAITING + blob(b"v")
    assert client.receive(wait(b"n") + add(b"n", 7)) == STOP_WAITING + pack_i64(7)
    compared = request(Op.COMPARE_SET, b"c", b"", b"v")
    assert client.receive(wait(b"c") + compared) == STOP_WAITING + blob(b"v")
    assert client.receive(wait(b"q") + push(b"q", b"v") + pop(b"q")) == STOP_WAITING + pack_i64(1) + blob(
        b"v"
    )
    assert client.receive(wait(b"x") + wait(b"x") + get(b"k") + set_(b"x")) == blob(b"v") + STOP_WAITING * 2
    assert woken(core) == []


def test_the_wakes_of_others_come_through_take_woken(core: Core) -> None:
    first, second, setter = connect(core, 3)
    assert first.receive(wait(b"k")) == b""
    assert second.receive(wait(b"k", b"l")) == b""
    assert setter.receive(set_(b"k") + get(b"k")) == blob(b"")
    assert woken(core) == ["client 0"]
    assert setter.receive(set_(b"l")) == b""
    assert woken(core) == ["client 1"]
    assert woken(core) == []


def test_what_a_violation_woke_before_it_is_still_woken(core: Core) -> None:
    waiter, offender = connect(core, 2)
    waiter.receive(wait(b"k"))
    with pytest.raises(ProtocolError) as caught:
        offender.receive(request(Op.PING, tail=b"nonc") + set_(b"k") + b"\xff" + set_(b"l"))
    assert caught.value.replies == b"nonc"
    assert woken(core) == ["client 0"]
    core.close(offender)
    assert waiter.receive(counted_request(Op.CHECK, [b"k"])) == b"\x00"
    assert waiter.receive(counted_request(Op.CHECK, [b"l"])) == b"\x01"


@pytest.mark.parametrize("sent", [add(b"word", 1), barrier(b"b", 2) * 2], ids=["ADD", "BARRIER"])
def test_a_violation_of_the_store_ends_that_connection_alone(core: Core, sent: bytes) -> None:
    offender, other = connect(core, 2)
    other.receive(set_(b"word", b"twelve"))
    with pytest.raises(ProtocolError) as caught:
        offender.receive(get(b"word") + sent + get(b"word"))
    assert caught.value.replies == blob(b"twelve")
    core.close(offender)
    assert other.receive(get(b"word")) == blob(b"twelve")
    core.check_invariants()


# CANCEL_WAIT


def test_a_cancel_is_answered_whatever_it_finds(core: Core) -> None:
    client, other = connect(core, 2)
    assert client.receive(CANCEL_WAIT) == WAIT_CANCELED
    client.receive(wait(b"k"))
    assert client.receive(CANCEL_WAIT) == WAIT_CANCELED
    client.receive(barrier(b"k", 2))
    assert client.receive(CANCEL_WAIT) == WAIT_CANCELED
    client.receive(wait(b"k"))
    other.receive(set_(b"k"))
    assert woken(core) == ["client 0"]
    assert client.receive(CANCEL_WAIT) == WAIT_CANCELED


# Opening and closing


def test_a_close_uncounts_waits_and_barriers(core: Core) -> None:
    leaver, stayer, other = connect(core, 3)
    leaver.receive(wait(b"k") + barrier(b"b", 2))
    stayer.receive(wait(b"k"))
    core.close(leaver)
    assert woken(core) == []
    assert other.receive(barrier(b"b", 2)) == b""
    other.receive(set_(b"k"))
    assert woken(core) == ["client 1"]
    assert stayer.receive(barrier(b"b", 2)) == STOP_WAITING
    assert woken(core) == ["client 2"]


def test_one_connection_more_than_the_limit_is_refused() -> None:
    core = Core(Limits(connections=2))
    first, _ = connect(core, 2)
    with pytest.raises(LimitError, match="connections"):
        core.open("client 3")
    core.close(first)
    core.open("client 3")
    core.check_invariants()


def late(core: Core, now: float) -> list[Connection]:
    core.turn.now = now
    return [connection for connection, _ in core.overdue()]


def test_handshakes_are_overdue_in_their_order() -> None:
    core = Core(Limits(handshake_seconds=10))
    assert late(core, 1000.0) == []
    opened = []
    for number in range(4):
        core.turn.now = 100.0 + number
        opened.append(core.open(f"client {number}"))
    assert late(core, 109.9) == []
    assert late(core, 110.0) == [opened[0]]
    opened[0].receive(VALIDATE)
    assert late(core, 110.9) == []
    assert late(core, 111.0) == [opened[1]]
    opened[1].receive(VALIDATE[:4])
    core.close(opened[2])
    assert late(core, 110.9) == []
    assert late(core, 111.0) == [opened[1]]
    assert late(core, 1000.0) == [opened[1], opened[3]]
    core.check_invariants()
    for connection in late(core, 1000.0):
        core.close(connection)
    assert late(core, 1000.0) == []


# Limits


@pytest.mark.parametrize(
    "sent",
    [
        get(b"k") * 200,
        counted_request(Op.MULTI_GET, [b"k"] * 5) * 20,
        request(Op.COMPARE_SET, b"k", b"", b"") * 20,
        get(b"k") * 10 + request(Op.PING, tail=b"ping") + get(b"k") * 10,
        request(Op.LIST_KEYS) * 1_000,
    ],
    ids=["GETs", "MULTI_GETs", "COMPARE_SET", "GET-PING-GET", "LIST_KEYS"],
)
def test_who_asks_for_much_gets_it_in_pieces(sent: bytes) -> None:
    core = Core()
    (client,) = connect(core)
    client.receive(set_(b"k", b"v" * 10_000))
    replies = [client.receive(sent)]
    while core.outbox.take_others() == [GoOn(client)]:
        replies.append(client.receive(b""))
    assert max(map(len, replies)) < 80_000
    assert len(replies) > 2


def test_a_reply_longer_than_the_limit_is_refused() -> None:
    core = Core(Limits(unsent_bytes=100_000))
    (client,) = connect(core)
    client.receive(set_(b"k", b"v" * 60_000))
    client.receive(request(Op.APPEND, b"k", b"v" * 60_000))
    for number in range(20):
        client.receive(set_(b"%08000d" % number))
    for sent in (get(b"k"), counted_request(Op.MULTI_GET, [b"k"] * 2), request(Op.LIST_KEYS)):
        with pytest.raises(LimitError, match="unsent_bytes"):
            client.receive(sent)


@pytest.mark.parametrize("size", [10, 1_000, 5_000])
@pytest.mark.parametrize(
    "sent",
    [get(b"k"), counted_request(Op.MULTI_GET, [b"k"]), request(Op.COMPARE_SET, b"k", b"", b"")],
    ids=["GET", "MULTI_GET", "COMPARE_SET"],
)
def test_the_bound_is_for_one_read_not_for_a_life(size: int, sent: bytes) -> None:
    core = Core(Limits(unsent_bytes=20_000))
    (client,) = connect(core)
    client.receive(set_(b"k", b"v" * size))
    for _ in range(20_000 // size + 10):
        assert client.receive(sent) == blob(b"v" * size)


# Random histories


def receive(connection: Connection, data: bytes) -> tuple[bytes, bool]:
    """The replies, and whether the connection goes on."""
    try:
        return connection.receive(data), True
    except ProtocolError as error:
        return error.replies, False


FIRST = st.sampled_from(
    [
        None,
        b"text",
        b"-7",
        b"99",
        b"%d" % ((1 << 63) - 20),
        b"%d" % (20 - (1 << 63)),
        b"%d" % (1 << 64),
        b"9" * 18,
    ]
)
AMOUNTS = st.integers(-3, 3) | st.sampled_from([1 << 60, -(1 << 63)])


@settings(derandomize=True, deadline=None, max_examples=300)
@given(FIRST, AMOUNTS, st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 4))
def test_adds_in_one_read_are_as_in_reads_of_their_own(
    first: bytes | None, amount: int, times: int, is_awaited: bool, waits_itself: bool, room: int
) -> None:
    """Also where the sum goes beyond 64 bits or the room at one of them, and where the first one wakes."""
    key, begins = b"the counter", [request(Op.SET, b"the counter", first)] if first is not None else []
    limits = Limits(stored_bytes=len(key) + (len(first) if first is not None else 0) + room)
    whole, single = Core(limits), Core(limits)
    seen = []
    for core, pieces in (whole, 1), (single, times):
        client, other = connect(core, 2)
        for each in begins:
            client.receive(each)
        if is_awaited and first is None:
            (client if waits_itself else other).receive(wait(key))
        replies = b""
        for _ in range(pieces):
            more, goes_on = receive(client, add(key, amount) * (times // pieces))
            replies += more
            if not goes_on:
                break
        seen.append((replies, goes_on, woken(core), other.receive(get(key)), core.counts()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "behind",
    [
        get(b"the key"),
        add(b"the key", 1),
        add(b"another", 1),
        counted_request(Op.CHECK, [b"the key"]),
        request(Op.PING, tail=b"1234"),
    ],
)
@pytest.mark.parametrize("value", [b"7", b"text", b"too much for the room"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_set_and_what_is_behind_it_are_as_in_reads_of_their_own(
    behind: bytes, value: bytes, waits: bool
) -> None:
    """Also where one of the two is refused, and where the SET wakes its own client."""
    seen = []
    for apart in (False, True):
        core = Core(Limits(stored_bytes=20))
        [client] = connect(core, 1)
        if waits:
            client.receive(wait(b"the key"))
        told = request(Op.SET, b"the key", value)
        replies, goes_on = receive(client, told if apart else told + behind)
        if apart and goes_on:
            more, goes_on = receive(client, behind)
            replies += more
        seen.append((replies, goes_on, core.counts()))
    assert seen[0] == seen[1]
