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
    Wire,
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
from rallypoint.store.core.outbox import Close, DriverTask
from rallypoint.store.core.store import Core
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.relay.core.upstream import BEAT, BYE
from rallypoint.store.wire.encoding import VALIDATE, counted_request, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.sessions import ASK
from test_core import CANCEL_WAIT, add, barrier, get, pop, push, set_, wait
from test_looking import finish

pytestmark = pytest.mark.windows

PING = request(Op.PING, tail=b"ping")
NOTHING = counted_request(Op.CHECK, [])


@pytest.fixture
def relay() -> ByHand:
    return ByHand()


# Replies in their order


def test_replies_come_in_the_order_of_the_requests(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    assert rank.ask(PING) == b"ping"
    assert rank.ask(get(b"k") + PING + add(b"n", 1) + CANCEL_WAIT + ASK + get(b"l")) == b""
    assert relay.asked() == [get(b"k"), add(b"n", 1), get(b"l")]
    relay.answer((0, DONE, blob(b"v")))
    assert rank.take() == blob(b"v") + b"ping"
    relay.answer((2, DONE, blob(b"w")))
    assert rank.take() == b""
    relay.answer((1, DONE, i64(1)))
    assert rank.take() == i64(1) + b"\x01" + b"\x00" + blob(b"w")
    assert rank.ask(PING) == b"ping"


def test_the_end_of_a_wait_stands_behind_what_was_asked_before_and_holds_up_nothing(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    rank.send(get(b"k") + wait(b"w") + get(b"l"))
    assert relay.asked() == [get(b"k"), wait(b"w"), get(b"l")]
    relay.answer((1, DONE, end_of_wait(1)))
    assert rank.take() == b""
    relay.answer((0, DONE, blob(b"v")))
    assert rank.take() == blob(b"v") + b"\x00"
    relay.answer((2, DONE, blob(b"w")))
    assert rank.take() == blob(b"w")


def test_what_stands_behind_a_wait_need_not_wait_for_it(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    rank.send(wait(b"w") + get(b"l") + wait(b"x") + get(b"m"))
    assert len(relay.asked()) == 4
    relay.answer((1, DONE, blob(b"1")), (3, DONE, blob(b"2")))
    assert rank.take() == blob(b"1") + blob(b"2")
    relay.answer((2, DONE, end_of_wait(1)), (0, DONE, end_of_wait(1)))
    assert rank.take() == b"\x00\x00"


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
    assert wire.core.requests.combiner.held_bytes == 0


def test_what_stands_behind_a_cancel_that_is_answered_at_once_comes_behind_its_answer(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    assert rank.ask(barrier(b"b", 2) + CANCEL_WAIT + PING) == b"\x01ping"


# Cancelling, and barriers


def test_a_cancel_of_waits_is_answered_at_once(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    rank.send(wait(b"w"))
    assert relay.asked() == [wait(b"w")]
    assert rank.ask(CANCEL_WAIT) == b"\x01"
    assert relay.asked() == [leave(0)]
    relay.answer((0, DONE, end_of_wait(1)), (1, DONE, i64(0)))
    assert rank.take() == b""
    assert rank.ask(CANCEL_WAIT) == b"\x01"


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


def test_a_cancel_of_several_barriers_is_answered_once_all_are_known(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    rank.send(barrier(b"b", 2) + barrier(b"c", 2))
    relay.asked()
    rank.send(CANCEL_WAIT)
    assert relay.asked() == [leave(0, 1), leave(1, 1)]
    relay.answer((2, DONE, i64(1)))
    assert rank.take() == b""
    relay.answer((1, DONE, i64(1)), (3, DONE, i64(0)))
    assert rank.take() == b"\x00\x01"


def test_who_has_cancelled_may_arrive_again_before_it_is_known(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    rank.send(barrier(b"b", 2))
    relay.asked()
    rank.send(CANCEL_WAIT + barrier(b"b", 2))
    assert relay.asked() == [leave(0, 1), arrive(b"b", 2, 1)]
    relay.answer((1, DONE, i64(1)))
    assert rank.take() == b"\x01"
    relay.answer((2, DONE, i64(1)))
    assert rank.take() == b"\x00"
    rank.send(barrier(b"b", 2))
    assert rank.error is None


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


@pytest.mark.parametrize("sent", [get(b"k"), wait(b"k"), PING, request(Op.LOOK, b"{}")])
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


def test_who_is_refused_is_owed_nothing_for_what_it_asked_since() -> None:
    relay = ByHand()
    rank = relay.core.open("rank")
    rank.receive(VALIDATE + add(b"k", 1) + get(b"k"))
    relay.asked()
    assert rank.is_owed
    relay.core.receive_upstream(frame(1, 1, (0, REFUSED, b"no number")))
    assert not rank.is_owed
    assert [each.client for each in relay.core.outbox.take_others() if isinstance(each, Close)] == [rank]


def test_who_breaks_a_rule_gets_what_it_is_owed_however_its_stream_is_cut() -> None:
    """The 16th reply that is due is a reason to pause: the violation behind it is not read before."""
    too_long = b"\x01" + blob(b"key") + i64(1 << 40)
    stream = get(b"k") * 14 + wait(b"w") + request(Op.LOOK, b"{}") + too_long
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
    assert relay.core.requests.replies_due == 16
    relay.asked()
    relay.answer((0, DONE, blob(b"v")))
    assert rank.take() == blob(b"v") + blob(b"") * 1_000


def test_a_wait_that_is_refused_closes_its_client(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    rank.send(wait(b"w"))
    relay.asked()
    relay.answer((0, REFUSED, b"too many"))
    assert "too many" in str(rank.error)


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
    assert relay.core.requests.combiner.held_bytes == 0


def test_an_ended_client_still_gets_the_replies_to_what_it_has_asked(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    rank.send(get(b"k") + wait(b"w"))
    relay.core.end(next(iter(relay.core.clients)))
    assert rank.connection.is_owed
    assert relay.asked() == [get(b"k")]
    relay.answer((0, DONE, blob(b"v")))
    assert rank.take() == blob(b"v")
    assert not rank.connection.is_owed


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
    assert not relay.core.requests.replies_due or other.error is None


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


def test_who_cancels_after_it_was_called_hands_the_call_on(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    rank.send(wait(b"q"))
    relay.asked()
    relay.answer((0, CALLED, end_of_wait(1)))
    assert rank.ask(CANCEL_WAIT) == b"\x00\x01"
    assert relay.asked() == [leave(0)]


def test_who_is_called_twice_to_a_queue_keeps_one_call(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    rank.send(wait(b"q"))
    relay.asked()
    relay.answer((0, CALLED, end_of_wait(1)))
    rank.send(wait(b"q"))
    relay.asked()
    assert relay.answer((1, CALLED, end_of_wait(2))) == [leave(0)]
    relay.answer((2, DONE, i64(1)))
    rank.send(pop(b"q"))
    assert relay.asked() == [pop_called(b"q", 1)]


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


def test_what_the_welcome_says_is_heeded() -> None:
    core = RelayCore(TOKEN)
    core.connect()
    assert core.upstream.keeps_seconds == 60.0
    core.receive_upstream(welcome(keeps=1_500, most_bytes=123))
    assert (core.upstream.keeps_seconds, core.upstream.most_bytes) == (1.5, 123)


def test_batches_are_cut_at_what_the_upstream_takes() -> None:
    relay = ByHand(most_bytes=205)
    (rank,) = relay.desk.open()
    rank.send(b"".join(set_(b"k", letter * 60) for letter in (b"u", b"v", b"w")))
    sent = relay.core.flush()
    assert len(sent) <= 205
    (first,) = read_upstream(sent)
    assert isinstance(first, Batch)
    assert len(first.requests) == 2


def test_what_does_not_fit_beside_a_long_wait_goes_in_the_next_batch_at_once() -> None:
    relay = ByHand(most_bytes=205)
    first, second = relay.desk.open(2)
    first.send(wait(b"a" * 60, b"b" * 60))
    second.send(get(b"k" * 60))
    batches = [each for each in read_upstream(relay.core.flush()) if isinstance(each, Batch)]
    assert [each.requests for each in batches] == [[wait(b"a" * 60, b"b" * 60)], [get(b"k" * 60)]]
    relay.answer((1, DONE, blob(b"v")))
    assert second.take() == blob(b"v")


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


def test_that_much_has_come_is_told_within_a_second(relay: ByHand) -> None:
    (rank,) = relay.desk.open()
    rank.send(get(b"k"))
    relay.asked()
    relay.answer((0, DONE, blob(b"v" * 100_000)))
    assert relay.core.upstream.tick() == batch(2, 1)


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


def break_an_exchange(up: int | None, down: int | None) -> None:
    """Two adds, a wait and a read, over a connection that is lost after so many bytes."""
    store = Desk(Core())
    relay, wire = relay_on(store)
    first, second = relay.open(2)
    (outsider,) = store.open()
    first.send(add(b"n", 1) + wait(b"k") + get(b"n"))
    second.send(add(b"n", 1))
    wire.push(up)
    if down is not None:
        wire.pull(down)
    outsider.send(set_(b"k"))
    wire.lose()
    wire.connect()
    wire.run()
    assert first.take() in (i64(1) + b"\x00" + blob(b"2"), i64(1) + blob(b"2") + b"\x00")
    assert second.take() == i64(2)
    assert outsider.ask(get(b"n")) == blob(b"2")
    assert wire.core.requests.combiner.held_bytes == 0


def test_an_exchange_that_breaks_is_carried_out_and_answered_once() -> None:
    for up in range(0, 110, 9):
        break_an_exchange(up, None)
    for down in (*range(0, 90, 7), None):
        break_an_exchange(None, down)


@pytest.mark.parametrize("count", [0, 1, 24, 25])
def test_a_connection_that_is_lost_before_or_with_the_welcome_is_no_loss(count: int) -> None:
    store = Desk(Core())
    relay = Desk(RelayCore(TOKEN))
    wire = Wire(relay, store)
    (rank,) = relay.open()
    rank.send(add(b"n", 1))
    for _ in range(3):
        wire.push()
        wire.pull(count)
        wire.lose()
        wire.connect()
    wire.run()
    assert rank.take() == i64(1)
    assert len(store.front.sessions) == 1


def test_a_store_that_was_started_anew_is_not_mistaken_for_the_old_one() -> None:
    relay, wire = relay_on(Desk(Core()))
    wire.lose()
    wire.upstream = Desk(Core())
    wire.connect()
    wire.push()
    with pytest.raises(SessionLostError):
        wire.pull()
    wire.core.reset(bytes(16))
    wire.connect()
    wire.run()
    (rank,) = relay.open()
    rank.send(add(b"n", 1))
    wire.run()
    assert rank.take() == i64(1)


def test_a_wait_that_is_refused_behind_another_request_closes_its_client_after_the_reply_to_that() -> None:
    relay = ByHand(most_bytes=1_000)
    (rank,) = relay.desk.open()
    rank.send(get(b"k") + wait(*([b"k" * 100] * 10)))
    assert relay.asked() == [get(b"k")]
    assert rank.error is None
    relay.answer((0, DONE, blob(b"v")))
    assert rank.take() == blob(b"v")
    assert "the store takes" in str(rank.error)
