"""A relay without its sockets: its clients' replies in their order, and its session upstream."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ends import (
    CALLED,
    DONE,
    PRESENT,
    REFUSED,
    TOKEN,
    Batch,
    ByHand,
    Desk,
    arrive,
    batch,
    blob,
    end_of_wait,
    frame,
    i64,
    leave,
    pop_called,
    read_upstream,
    relay_on,
    session,
    wait_in_turn,
    welcome,
)
from rallypoint.errors import LimitError, ProtocolError, SessionLostError
from rallypoint.store.core.context import DriverTask
from rallypoint.store.core.store import Core
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.relay.core.upstream import BEAT, BYE
from rallypoint.store.wire.encoding import VALIDATE, counted_request, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.sessions import ASK
from test_core import CANCEL_WAIT, add, barrier, get, pop, push, set_, wait
from test_snapshots import finish

pytestmark = pytest.mark.windows

PING = request(Op.PING, tail=b"ping")
NOTHING = counted_request(Op.CHECK, [])


@pytest.fixture
def relay() -> ByHand:
    return ByHand()


# Replies in their order


def test_a_ping_behind_a_wait_comes_back_from_the_store(relay: ByHand) -> None:
    first, second = relay.desk.open(2)
    assert first.ask(wait(b"w") + PING) == b""
    assert second.ask(barrier(b"b", 2) + PING) == b""
    assert relay.asked() == [wait(b"w"), NOTHING, arrive(b"b", 2, 1), NOTHING]
    relay.answer((0, DONE, end_of_wait(1)), (1, DONE, b"\x00"), (3, DONE, b"\x00"))
    assert first.take() == b"\x00ping"
    assert second.take() == b"ping"
    assert first.ask(PING) == b"ping"


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.data())
def test_whatever_is_pipelined_and_cut_is_answered_as_by_the_store(data: st.DataObject) -> None:
    """One client, at a store and at a relay on another one; nobody else sets what it waits for."""
    parts = [set_(b"k", b"v"), get(b"k"), add(b"n", 2), PING, pop(b"q"), push(b"q", b"x"), CANCEL_WAIT]
    parts += [wait(b"k"), wait(b"never"), barrier(b"b", 1), request(Op.GETNUMKEYS), wait(), ASK, get(b"x")]
    parts += [request(Op.DELETE_KEY, b"k"), barrier(b"b", 2) + CANCEL_WAIT]
    sent = data.draw(st.lists(st.sampled_from(parts), max_size=10))
    (direct,) = Desk(Core()).open()
    relay, wire = relay_on(Desk(Core()))
    (rank,) = relay.open()
    for each in sent:
        if each == CANCEL_WAIT or data.draw(st.booleans()):
            wire.run()  # else a cancel might come before the end of a wait, as it may anywhere
        rank.send(each)
    wire.run()
    assert rank.take() == direct.ask(b"".join(sent))
    assert wire.core.combiner.held_bytes == 0


# Cancelling, and barriers


@pytest.mark.parametrize("is_released", [True, False])
def test_a_cancel_at_a_barrier_waits_until_it_is_known_who_was_released(
    relay: ByHand, is_released: bool
) -> None:
    (rank,) = relay.desk.open()
    rank.send(barrier(b"b", 2))
    assert relay.asked() == [arrive(b"b", 2, 1)]
    assert rank.ask(CANCEL_WAIT + get(b"k") + BEAT) == b""
    assert relay.asked() == [leave(0, 1), get(b"k")]
    if is_released:
        relay.answer((0, DONE, i64(1)))
    relay.answer((1, DONE, i64(not is_released)), (2, DONE, blob(b"v")))
    assert rank.take() == (b"\x00\x01" if is_released else b"\x01") + blob(b"v") + blob(b"")


def test_who_was_released_before_it_left_still_waits_where_it_has_arrived_again(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    rank.send(barrier(b"b", 2))
    relay.asked()
    rank.send(CANCEL_WAIT + barrier(b"b", 2))
    relay.asked()
    relay.answer((0, DONE, i64(1)), (1, DONE, i64(0)))
    assert rank.take() == b"\x00\x01"
    rank.send(CANCEL_WAIT)
    assert relay.asked() == [leave(2, 1)]


def test_a_second_barrier_of_the_same_key_and_size_is_refused(relay: ByHand) -> None:
    rank, other = relay.desk.open(2)
    rank.send(barrier(b"b", 2) + barrier(b"b", 3) + barrier(b"c", 2))
    other.send(barrier(b"b", 2))
    assert rank.error is None
    rank.send(barrier(b"b", 2))
    assert "already waits" in str(rank.error)
    assert relay.asked() == [arrive(b"b", 2, 1)]


def test_a_client_waits_for_no_more_keys_than_the_limit() -> None:
    relay = ByHand(Limits(keys_per_request=2))
    rank, other = relay.desk.open(2)
    rank.send(wait(b"a", b"b"))
    other.send(wait(b"a", b"b") + CANCEL_WAIT + wait(b"a", b"c"))
    assert other.error is None
    rank.send(wait(b"c"))
    assert isinstance(rank.error, LimitError)


# Refusals, and ends


@pytest.mark.parametrize("sent", [get(b"k"), wait(b"k"), PING, request(Op.SNAPSHOT, b"{}")])
def test_a_connection_with_a_session_asks_in_batches_alone(relay: ByHand, sent: bytes) -> None:
    (below,) = relay.desk.open()
    below.ask(session(bytes(16)))
    assert below.ask(BEAT) == blob(b"")
    below.send(sent)
    assert "on a connection that has a session" in str(below.error)
    assert relay.asked() == []


@pytest.mark.parametrize("sent", [get(b"k"), wait(b"k"), barrier(b"k", 2)])
def test_a_session_is_not_opened_by_a_client_that_waits_for_a_reply(relay: ByHand, sent: bytes) -> None:
    (below,) = relay.desk.open()
    below.send(sent + session(bytes(16)))
    assert "SESSION on a connection that waits" in str(below.error)


def test_who_is_refused_is_closed_behind_its_earlier_replies(relay: ByHand) -> None:
    rank, other = relay.desk.open(2)
    rank.send(get(b"k") + add(b"k", 1) + get(b"l"))
    other.send(get(b"k"))
    relay.asked()
    relay.answer((0, DONE, blob(b"word")), (1, REFUSED, b"no number"), (2, DONE, blob(b"l")))
    assert rank.take() == blob(b"word")
    assert "no number" in str(rank.error)
    assert (other.take(), other.error) == (blob(b"word"), None)


def test_who_breaks_a_rule_gets_what_it_is_owed_however_its_stream_is_cut() -> None:
    """The 16th reply that is due is a reason to pause: the violation behind it is not read before."""
    too_long = b"\x01" + blob(b"key") + i64(1 << 40)
    stream = get(b"k") * 14 + wait(b"w") + request(Op.SNAPSHOT, b"{}") + too_long
    for cut in range(len(stream)):
        relay = ByHand()
        (rank,) = relay.desk.open()
        rank.send(stream[:cut])
        rank.send(stream[cut:])
        assert relay.asked() == [get(b"k"), wait(b"w")]
        assert rank.error is None
        relay.answer((1, DONE, end_of_wait(1)), (0, DONE, blob(b"v")))
        assert rank.take() == blob(b"v") * 14 + b"\x00"
        assert "the limit value_bytes" in str(rank.error)
        assert rank.connection in relay.core.clients
        assert rank.connection.held == 0
        finish(relay.core)
        relay.desk.settle()
        assert rank.take().endswith(b"}")
        assert rank.connection not in relay.core.clients


def test_who_is_owed_much_is_read_no_further_whatever_it_asks_for() -> None:
    """Each BEAT behind a GET is owed a reply, too."""
    relay = ByHand()
    (rank,) = relay.desk.open()
    rank.send(get(b"k") + BEAT * 1_000)
    assert relay.core.combiner.replies_due == 16
    relay.asked()
    relay.answer((0, DONE, blob(b"v")))
    assert rank.take() == blob(b"v") + blob(b"") * 1_000


def test_what_a_client_leaves_behind_is_given_up(relay: ByHand) -> None:
    rank, other = relay.desk.open(2)
    rank.send(wait(b"q"))
    relay.asked()
    relay.answer((0, CALLED, end_of_wait(1)))
    rank.send(wait(b"w") + barrier(b"b", 3) + get(b"k"))
    other.send(barrier(b"b", 3))
    assert relay.asked() == [wait(b"w"), arrive(b"b", 3, 2), get(b"k")]
    relay.answer((3, DONE, blob(b"")))
    rank.send(wait(b"unsent"))
    rank.close()
    assert relay.asked() == [leave(1), leave(0), leave(2, 1)]
    relay.answer(*((tag, DONE, i64(1)) for tag in (4, 5, 6)))
    relay.answer((2, DONE, i64(1)))
    assert other.take() == b"\x00"
    assert relay.core.combiner.held_bytes == 0


@pytest.mark.parametrize(
    "too_long", [set_(b"k", b"v" * 1_000), wait(*([b"k" * 100] * 10)), barrier(b"k" * 1_000, 2)], ids=len
)
def test_what_the_store_would_not_take_is_refused_and_nothing_is_owed_for_it(too_long: bytes) -> None:
    relay = ByHand(most_bytes=1_000)
    rank, other = relay.desk.open(2)
    rank.send(too_long)
    assert relay.asked() == []
    assert "the store takes" in str(rank.error)
    other.send(set_(b"k", b"v" * 800))
    assert relay.asked() == [set_(b"k", b"v" * 800)]
    assert not relay.core.combiner.replies_due or other.error is None


def test_clients_are_held_back_while_too_much_is_under_way() -> None:
    relay = ByHand(Limits(relayed_bytes=10_000))
    (rank,) = relay.desk.open()
    rank.send(set_(b"k", b"v" * 4_000) * 2)
    assert relay.desk.take() == [DriverTask.FLUSH]
    rank.send(set_(b"k", b"v" * 4_000))
    assert relay.desk.take() == [DriverTask.HOLD]
    relay.asked()
    relay.answer((0, DONE, b""))
    assert relay.desk.take() == []
    relay.answer((1, DONE, b""))
    assert relay.desk.take() == [DriverTask.READ_ON]


# Queues


def test_one_of_those_who_wait_is_called_and_pops_as_such(relay: ByHand) -> None:
    first, second = relay.desk.open(2)
    first.send(wait(b"q"))
    second.send(wait(b"q"))
    assert relay.asked() == [wait(b"q")]
    assert relay.answer((0, CALLED, end_of_wait(1))) == [wait_in_turn(b"q")]
    assert (first.take(), second.take()) == (b"\x00", b"")
    first.send(pop(b"q") + pop(b"q"))
    assert relay.asked() == [pop_called(b"q", 0), pop(b"q")]
    relay.answer((2, DONE, i64(1) + blob(b"v")), (3, DONE, i64(0)))
    assert first.take() == i64(1) + blob(b"v") + i64(0)


# The session upstream


def test_a_session_is_opened_and_batches_are_sent_byte_by_byte() -> None:
    core = RelayCore(TOKEN, Limits(session_seconds=1.0))
    assert core.connect().hex() == (
        "20100000000000000000 0102030405060708090a0b0c0d0e0f"
        "e8030000000000000000000000000000 0000000000000000".replace(" ", "")
    )
    rank = core.open("rank")
    rank.receive(VALIDATE + get(b"k"))
    assert core.flush() == b""
    assert core.receive_upstream(welcome()[:24]) == b""
    # What was asked before goes before PRESENT.
    assert core.receive_upstream(welcome()[24:]).hex() == (
        "21220000000000000001000000000000000000000000000000"
        + "0a00000000000000"
        + "0301000000000000006b"
        + "22"
    )
    assert BYE == b"\x23"
    core.check_invariants()


def test_batches_are_cut_at_what_the_upstream_takes() -> None:
    relay = ByHand(most_bytes=205)
    (rank,) = relay.desk.open()
    rank.send(b"".join(set_(b"k", letter * 60) for letter in (b"u", b"v", b"w")))
    sent = relay.core.flush()
    assert len(sent) <= 205
    (first,) = read_upstream(sent)
    assert isinstance(first, Batch)
    assert len(first.requests) == 2


@pytest.mark.parametrize("answer", [2, 3, 255])
def test_who_is_not_known_any_more_has_lost_its_session(answer: int) -> None:
    core = RelayCore(TOKEN)
    core.connect()
    with pytest.raises(SessionLostError if answer == 2 else ProtocolError):
        core.receive_upstream(welcome(answer))


def test_a_store_that_has_taken_what_it_cannot_have_has_lost_the_session(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    for taken in (1, 99):
        relay.core.lose_upstream()
        relay.core.connect()
        with pytest.raises(SessionLostError):
            relay.core.receive_upstream(welcome(1, taken))
    relay = ByHand()
    (rank,) = relay.desk.open()
    rank.send(get(b"k"))
    relay.asked()
    relay.answer((0, DONE, blob(b"")), taken=1)
    relay.core.lose_upstream()
    relay.core.connect()
    with pytest.raises(SessionLostError):  # it has forgotten what it had taken
        relay.core.receive_upstream(welcome(1, 0))


@pytest.mark.parametrize("number", [2, 9])
def test_a_frame_out_of_order_loses_the_session(relay: ByHand, number: int) -> None:
    with pytest.raises(SessionLostError):
        relay.core.receive_upstream(frame(number, 0))


@pytest.mark.parametrize("data", [blob(b"short"), blob(bytes(8)), frame(1, 0, (7, DONE, b""))])
def test_nonsense_from_upstream_is_a_violation(relay: ByHand, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        relay.core.receive_upstream(data)


@pytest.mark.parametrize("content", [b"", bytes(7), bytes(9), i64(-1 << 63)])
@pytest.mark.parametrize("asked", [[add(b"n", 1)], [barrier(b"b", 2)], [barrier(b"b", 2), CANCEL_WAIT]])
def test_an_answer_that_is_no_number_loses_the_session(
    relay: ByHand, asked: list[bytes], content: bytes
) -> None:
    (rank,) = relay.desk.open()
    for each in asked:
        rank.send(each)
        assert len(relay.asked()) == 1
    with pytest.raises(SessionLostError):
        relay.core.receive_upstream(frame(1, 0, (len(asked) - 1, DONE, content)))


def told(relay: ByHand) -> bytes:
    """What it sends by itself within half a minute."""
    return b"".join(relay.core.upstream.tick() for _ in range(30))


def test_an_empty_batch_is_sent_only_when_there_is_something_to_tell(relay: ByHand) -> None:
    assert told(relay) == b""
    (rank,) = relay.desk.open()
    rank.send(get(b"k"))
    assert relay.asked() == [get(b"k")]
    assert told(relay) == b""
    relay.answer((0, DONE, blob(b"")))
    assert told(relay) == batch(2, 1)
    assert told(relay) == b""
    relay.answer()
    rank.send(get(b"k"))
    assert relay.core.flush() == batch(3, 2, get(b"k"))
    assert told(relay) == b""
    relay.answer((1, DONE, blob(b"")))
    relay.core.lose_upstream()
    assert told(relay) == b""
    relay.core.connect()
    relay.core.receive_upstream(welcome(1, 3))
    assert told(relay) == b""  # the SESSION has told it


def test_what_was_not_taken_is_sent_again_as_it_was_and_present_comes_last(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    rank.send(wait(b"a"))
    first = relay.core.flush()
    rank.send(wait(b"b"))
    second = relay.core.flush()
    relay.answer(taken=0)
    relay.core.lose_upstream()
    rank.send(get(b"k"))
    assert relay.core.flush() == b""
    assert relay.core.connect() == session(taken=1, known=True)
    assert relay.core.receive_upstream(welcome(1)) == first + second + batch(3, 1, get(b"k")) + PRESENT
    relay.core.lose_upstream()
    relay.core.connect()
    assert relay.core.receive_upstream(welcome(1, 2)) == batch(3, 1, get(b"k")) + PRESENT
    relay.core.lose_upstream()
    relay.core.connect()
    assert relay.core.receive_upstream(welcome(1, 3)) == PRESENT
