"""Relays on a relay: what a session asks is asked upstream, and what it waits for while it is away."""

from __future__ import annotations

import pytest

from ends import (
    CALLED,
    DONE,
    TOKEN,
    UNCHANGED,
    ByHand,
    Played,
    arrive,
    blob,
    end_of_wait,
    i64,
    leave,
    recall,
    wait_in_turn,
)
from rallypoint.store.wire.encoding import counted_request
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.sessions import ASK
from test_core import add, barrier, get, wait

pytestmark = pytest.mark.windows

CHILD = b"child" + TOKEN[5:]
LONG = b"v" * 300


@pytest.fixture
def relay() -> ByHand:
    return ByHand()


@pytest.fixture
def child(relay: ByHand) -> Played:
    return Played(relay.desk, CHILD)


# Requests


def test_requests_of_a_session_are_joined_with_those_of_ranks(relay: ByHand, child: Played) -> None:
    (rank,) = relay.desk.open()
    rank.send(add(b"n", 2) + get(b"k"))
    assert child.send(add(b"n", 3), ASK, counted_request(Op.CHECK, [])) == [(1, DONE, b"\x00")]
    assert relay.asked() == [add(b"n", 5), get(b"k"), counted_request(Op.CHECK, [])]
    relay.answer((0, DONE, i64(5)), (1, DONE, blob(b"v")), (2, DONE, b"\x00"))
    assert child.items() == [(0, DONE, i64(5)), (2, DONE, b"\x00")]
    assert rank.take() == i64(2) + blob(b"v")


def test_a_long_value_crosses_once_on_every_way(relay: ByHand, child: Played) -> None:
    other = Played(relay.desk, bytes(16))
    child.send(get(b"k"))
    assert relay.asked() == [get(b"k")]
    relay.answer((0, DONE, blob(LONG)))
    assert child.items() == [(0, DONE, blob(LONG))]
    child.send(recall(b"k"))
    other.send(recall(b"k"))
    assert relay.asked() == [recall(b"k")]
    relay.answer((1, UNCHANGED, b""))
    assert child.items() == [(1, UNCHANGED, b"")]
    assert other.items() == [(0, DONE, blob(LONG))]
    child.send(recall(b"k"))
    relay.asked()
    relay.answer((2, DONE, blob(b"w" * 300)))
    assert child.items() == [(2, DONE, blob(b"w" * 300))]


def test_what_waits_and_arrives_is_given_up_with_the_session(relay: ByHand, child: Played) -> None:
    child.send(wait(b"k"), arrive(b"b", 3, 2), wait(b"q"))
    assert relay.asked() == [wait(b"k"), arrive(b"b", 3, 2), wait(b"q")]
    relay.answer((2, CALLED, end_of_wait(1)))
    child.end.send(b"\x23")
    assert sorted(relay.asked()) == [leave(0), leave(1, 2), leave(2)]
    relay.answer(*((tag, DONE, i64(1)) for tag in (3, 4, 5)))
    assert relay.core.combiner.held_bytes == 0


# Arrivals of who is away


def test_arrivals_are_taken_back_upstream_and_given_again(relay: ByHand, child: Played) -> None:
    child.send(arrive(b"b", 3, 2))
    assert relay.asked() == [arrive(b"b", 3, 2)]
    child.lose()
    assert relay.asked() == [leave(0, 2)]
    relay.answer((1, DONE, i64(2)))
    child.open()
    assert relay.asked() == []
    assert child.present() == []
    assert relay.asked() == [arrive(b"b", 3, 2)]
    relay.answer((2, DONE, i64(1)))
    relay.answer((2, DONE, i64(1)))
    assert child.items() == [(0, DONE, i64(1)), (0, DONE, i64(1))]
    assert child.send(leave(0)) == [(1, DONE, i64(0))]


def test_a_release_that_crosses_is_told_when_the_session_is_back(relay: ByHand, child: Played) -> None:
    child.send(arrive(b"b", 3, 4))
    relay.asked()
    child.lose()
    assert relay.asked() == [leave(0, 4)]
    relay.answer((0, DONE, i64(3)), (1, DONE, i64(1)))
    assert child.come_back() == [(0, DONE, i64(3))]
    assert relay.asked() == [arrive(b"b", 3, 1)]


def test_who_is_back_before_it_is_known_who_was_taken_back_arrives_again_then(
    relay: ByHand, child: Played
) -> None:
    child.send(arrive(b"b", 3, 2))
    relay.asked()
    child.lose()
    assert relay.asked() == [leave(0, 2)]
    assert child.come_back() == []
    assert child.send(leave(0, 1)) == []  # that is not known yet, either
    assert relay.answer((1, DONE, i64(2))) == [arrive(b"b", 3, 1)]
    assert child.items() == [(1, DONE, i64(1))]


def test_a_leave_of_more_than_are_left_after_a_release_is_of_those_alone(
    relay: ByHand, child: Played
) -> None:
    """The relay below has not heard of the release yet: of its four, three are gone."""
    (rank,) = relay.desk.open()
    child.send(arrive(b"b", 3, 4))
    rank.send(barrier(b"b", 3))
    assert relay.asked() == [arrive(b"b", 3, 5)]
    relay.answer((0, DONE, i64(3)))
    assert child.send(leave(0, 1), leave(0, 1), leave(0, 2)) == [(0, DONE, i64(3))]
    asked = relay.asked()
    assert asked[0] == leave(0, 1)
    assert set(asked[1:]) <= {leave(0, 0)}
    relay.answer((1, DONE, i64(1)), *((tag, DONE, i64(0)) for tag in range(2, 1 + len(asked))))
    assert sorted(child.items()) == [(1, DONE, i64(1)), (2, DONE, i64(0)), (3, DONE, i64(0))]
    relay.answer((0, DONE, i64(1)))
    assert rank.take() == b"\x00"


# Waits and calls of who is away


def test_a_push_that_comes_while_its_waiter_is_away_is_for_another(relay: ByHand, child: Played) -> None:
    (rank,) = relay.desk.open()
    child.send(wait(b"q"))
    rank.send(wait(b"q"))
    assert relay.asked() == [wait(b"q")]
    child.lose()
    assert relay.answer((0, CALLED, end_of_wait(1))) == []  # the one who is away waits no more upstream
    assert rank.take() == b"\x00"
    assert child.come_back() == []
    assert relay.asked() == [wait_in_turn(b"q")]
    relay.answer((1, CALLED, end_of_wait(2)))
    assert child.items() == [(0, CALLED, end_of_wait(0))]


def test_a_wait_that_has_to_be_asked_anew_is_asked_anew_though_its_session_is_away(
    relay: ByHand, child: Played
) -> None:
    (rank,) = relay.desk.open()
    rank.send(wait(b"k"))
    assert relay.asked() == [wait(b"k")]
    child.send(wait(b"k"))
    assert relay.asked() == []
    child.lose()
    # It ended before the child had begun to wait, perhaps: so that goes on waiting, as it would at a server.
    assert relay.answer((0, DONE, end_of_wait(1))) == [wait(b"k")]


# Three deep
