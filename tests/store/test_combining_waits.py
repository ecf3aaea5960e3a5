"""The combiner's waits and arrivals: who shares them, who needs proof, and who leaves meanwhile."""

from __future__ import annotations

import pytest

from combining_bench import CALLED, DONE, REFUSED, Bench, Client, clients
from ends import arrive, blob, end_of_wait, i64, leave, pop_called, wait_in_turn
from rallypoint.errors import ProtocolError
from rallypoint.store.wire.encoding import request
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.sessions import Status
from test_core import set_, wait

pytestmark = pytest.mark.windows


@pytest.fixture
def bench() -> Bench:
    return Bench()


# Waits


def test_waits_for_the_same_key_share_one_be_it_sent_or_not(bench: Bench) -> None:
    first, second, late, other = clients(4)
    bench.wait(first, b"k")
    bench.wait(second, b"k")
    bench.wait(other, b"l")
    assert bench.send() == [wait(b"k"), wait(b"l")]
    bench.wait(late, b"k")
    assert not bench.combiner.has_batch
    bench.take(0, end_of_wait(2))
    assert [rank.got for rank in (first, second, late, other)] == [["over"], ["over"], ["over"], []]


def test_waits_for_the_same_keys_share_one_only_until_it_is_sent(bench: Bench) -> None:
    """One of the keys may have come, and gone again, before the late one began to wait for both."""
    first, second, late, other = clients(4)
    bench.wait(first, b"k", b"l")
    bench.wait(second, b"k", b"l")
    bench.wait(other, b"l", b"k")
    assert bench.send() == [wait(b"k", b"l"), wait(b"l", b"k")]
    bench.wait(late, b"k", b"l")
    assert bench.send() == [wait(b"k", b"l")]
    bench.take(0, end_of_wait(2))
    assert [rank.got for rank in (first, second, late, other)] == [["over"], ["over"], [], []]


def test_a_wait_does_not_join_an_unsent_one_that_stands_before_its_line(bench: Bench) -> None:
    first, second = clients(2)
    bench.wait(first, b"k")
    bench.ask(second, Op.DELETE_KEY, b"k")
    bench.wait(second, b"k")
    assert bench.send() == [wait(b"k"), request(Op.DELETE_KEY, b"k"), wait(b"k")]
    bench.take(0, end_of_wait(1))
    assert (first.got, second.got) == (["over"], [])


@pytest.mark.parametrize("empty", [True, False])
def test_who_joined_late_waits_anew_unless_a_later_batch_was_taken_before_the_end(
    bench: Bench, empty: bool
) -> None:
    first, late, later = clients(3)
    bench.wait(first, b"k")
    bench.send()
    bench.wait(late, b"k")
    if empty:
        bench.number += 1
        bench.combiner.begin_batch(bench.number)
    else:
        bench.set(Client(), b"x")
        bench.send()
    bench.wait(later, b"k")
    bench.take(0, end_of_wait(2))
    assert [rank.got for rank in (first, late, later)] == [["over"], ["over"], []]
    assert bench.send() == [wait(b"k")]
    bench.take(1 if empty else 2, end_of_wait(3))
    assert later.got == ["over"]


def test_an_answered_request_of_a_later_batch_is_proof_as_well(bench: Bench) -> None:
    first, late, later = clients(3)
    bench.wait(first, b"k")
    bench.send()
    bench.wait(late, b"k")
    bench.get(Client(), b"x")
    bench.send()
    bench.wait(later, b"k")
    bench.take(1, blob(b""))
    bench.take(0, end_of_wait(0))
    assert [rank.got for rank in (first, late, later)] == [["over"], ["over"], []]


def test_an_answered_leave_is_no_proof_as_a_relay_on_the_way_may_answer_it(bench: Bench) -> None:
    first, late, other = clients(3)
    bench.wait(first, b"k")
    gone = bench.wait(other, b"x")
    bench.send()
    bench.wait(late, b"k")
    bench.cancel(gone)
    assert bench.send() == [leave(1)]
    bench.take(2, i64(1))
    bench.take(0, end_of_wait(0))
    assert (first.got, late.got) == (["over"], [])


def test_a_request_of_the_same_batch_as_the_wait_proves_nothing_for_who_joined_late(bench: Bench) -> None:
    first, late = clients(2)
    bench.wait(first, b"k")
    bench.get(first, b"x")
    bench.send()
    bench.wait(late, b"k")
    bench.take(1, blob(b""))
    bench.take(0, end_of_wait(1))
    assert (first.got, late.got) == ([blob(b""), "over"], [])
    assert bench.send() == [wait(b"k")]


def test_a_wait_is_not_over_before_an_earlier_request_of_its_line_that_did_not_fit_into_the_batch(
    bench: Bench,
) -> None:
    first, rank, other = clients(3)
    bench.wait(first, b"k")
    bench.send()
    bench.set(other, b"x", b"v" * 100)
    bench.ask(rank, Op.DELETE_KEY, b"k")
    bench.wait(rank, b"k")
    assert bench.send(100) == [set_(b"x", b"v" * 100)]
    # The key is set before batch 3, with the DELETE_KEY, has come: the wait is not over for the last one.
    bench.take(0, end_of_wait(2))
    assert first.got == ["over"]
    assert rank.got == []


def test_a_wait_that_is_refused_is_refused_for_all(bench: Bench) -> None:
    first, late = clients(2)
    bench.wait(first, b"k")
    bench.send()
    bench.wait(late, b"k")
    bench.take(0, b"why", REFUSED)
    assert (first.got, late.got) == ([b"why"], [b"why"])
    bench.wait(first, b"k")
    assert bench.send() == [wait(b"k")]


# Cancelling


def test_a_wait_that_nobody_shares_any_more_is_left_if_it_was_sent(bench: Bench) -> None:
    first, second = clients(2)
    waiters = [bench.wait(rank, b"k") for rank in (first, second)]
    bench.send()
    bench.cancel(waiters[0])
    assert not bench.combiner.has_unsent
    bench.cancel(waiters[1])
    bench.wait(first, b"k")  # does not join what is being left
    assert bench.send() == [leave(0), wait(b"k")]
    bench.take(1, i64(1))
    bench.take(2, end_of_wait(2))
    assert (first.got, second.got) == (["over"], [])
    assert bench.combiner.held_bytes == 0


def test_a_wait_that_was_not_sent_is_not_sent_when_it_is_cancelled(bench: Bench) -> None:
    first, second = clients(2)
    waiters = [bench.wait(rank, b"k") for rank in (first, second)]
    bench.cancel(waiters[0])
    bench.cancel(waiters[1])
    bench.cancel(waiters[1])
    assert not bench.combiner.has_unsent
    bench.wait(second, b"k")
    assert bench.send() == [wait(b"k")]


@pytest.mark.parametrize("status", [DONE, CALLED, REFUSED])
def test_the_end_of_a_wait_that_crosses_its_leave_is_for_nobody(bench: Bench, status: Status) -> None:
    rank = Client()
    waiter = bench.wait(rank, b"k")
    bench.send()
    bench.cancel(waiter)
    assert bench.send() == [leave(0)]
    bench.take(0, b"why" if status is REFUSED else end_of_wait(1), status)
    bench.take(1, i64(0))
    assert rank.got == []
    assert not bench.combiner.has_unsent
    with pytest.raises(ProtocolError):
        bench.combiner.take(0, DONE, end_of_wait(1))


# Queues


def test_a_call_is_for_the_first_and_the_others_wait_in_turn_together(bench: Bench) -> None:
    ranks = clients(3)
    for rank in ranks:
        bench.wait(rank, b"q")
    bench.send()
    bench.take(0, end_of_wait(1), CALLED)
    assert [rank.got for rank in ranks] == [["called"], [], []]
    bench.wait(Client(), b"q")  # who comes now has not been passed over
    assert bench.send() == [wait_in_turn(b"q"), wait(b"q")]
    bench.combiner.pop_called(ranks[0], ranks[0].calls[0], b"q", ranks[0])
    assert bench.send() == [pop_called(b"q", 0)]
    bench.take(3, i64(1) + blob(b"v"))
    bench.take(1, end_of_wait(2), CALLED)
    assert [rank.got[-1:] for rank in ranks] == [[i64(1) + blob(b"v")], ["called"], []]


def test_a_call_is_not_for_who_joined_too_late_to_be_sure(bench: Bench) -> None:
    first, second, late = clients(3)
    bench.wait(first, b"q")
    bench.wait(second, b"q")
    bench.send()
    bench.wait(late, b"q")
    first.is_present = False
    bench.take(0, end_of_wait(1), CALLED)
    assert [rank.got for rank in (first, second, late)] == [[], ["called"], []]
    assert bench.send() == [wait_in_turn(b"q")]
    bench.take(1, end_of_wait(2))
    assert late.got == ["over"]


def test_a_call_that_nobody_can_follow_is_dismissed_and_who_is_back_waits_in_turn(bench: Bench) -> None:
    rank, other = clients(2)
    waiter, second = bench.wait(rank, b"q"), bench.wait(other, b"q")
    bench.send()
    rank.is_present = other.is_present = False
    bench.take(0, end_of_wait(1), CALLED)
    assert bench.send() == [leave(0)]
    bench.take(1, i64(1))
    assert list(bench.combiner.parked) == [waiter, second]
    bench.cancel(second)
    rank.is_present = True
    bench.combiner.ask_again(waiter)
    bench.combiner.ask_again(second)
    assert bench.send() == [wait_in_turn(b"q")]
    assert not bench.combiner.parked
    bench.take(2, end_of_wait(3), CALLED)
    assert (rank.got, other.got) == (["called"], [])


# Barriers


def test_arrivals_at_one_barrier_leave_as_one_with_their_number(bench: Bench) -> None:
    ranks = clients(4)
    for rank, weight in zip(ranks, (1, 3, 1, 1), strict=True):
        bench.arrive(rank, 9, weight)
    bench.arrive(Client(), 8)
    bench.arrive(Client(), 9, key=b"c")
    assert bench.send() == [arrive(b"b", 9, 6), arrive(b"b", 8, 1), arrive(b"c", 9, 1)]
    bench.take(0, i64(2))
    assert [rank.got for rank in ranks] == [[i64(1)], [i64(1)], [], []]
    bench.take(0, i64(3))
    assert [rank.got[-1:] for rank in ranks] == [[i64(1)], [i64(2)], [i64(1)], []]
    bench.arrive(ranks[0], 9)
    assert bench.send() == [arrive(b"b", 9, 1)]
    bench.take(0, i64(1))
    assert ranks[3].got == [i64(1)]
    with pytest.raises(ProtocolError):
        bench.combiner.take(0, DONE, i64(1))


def test_an_arrival_does_not_join_one_that_stands_before_its_line(bench: Bench) -> None:
    first, second = clients(2)
    bench.arrive(first, 2)
    bench.set(second)
    bench.arrive(second, 2)
    assert bench.send() == [arrive(b"b", 2, 1), set_(b"k", b"v"), arrive(b"b", 2, 1)]


def test_who_leaves_before_its_arrival_was_sent_is_not_counted(bench: Bench) -> None:
    first, second = clients(2)
    arrivals = [bench.arrive(first, 9, 3), bench.arrive(second, 9, 1)]
    bench.leave(first, arrivals[0], 2)
    bench.leave(second, arrivals[1])
    assert (first.got, second.got) == ([("left", 2)], [("left", 1)])
    assert bench.send() == [arrive(b"b", 9, 1)]


def test_when_all_leave_before_their_arrival_was_sent_nothing_is_sent(bench: Bench) -> None:
    rank = Client()
    bench.leave(rank, bench.arrive(rank, 9))
    assert not bench.combiner.has_unsent
    bench.arrive(rank, 9)
    assert bench.send() == [arrive(b"b", 9, 1)]


@pytest.mark.parametrize(
    ("released", "expected"),
    [
        # A and B leave, C stays: who stays is released first, then the others in their order.
        (1, ([("left", 1)], [("left", 1)], [i64(1)])),
        (2, ([i64(1), ("left", 0)], [("left", 1)], [i64(1)])),
        (3, ([i64(1), ("left", 0)], [i64(1), ("left", 0)], [i64(1)])),
    ],
)
def test_leaves_that_cross_a_release_are_for_those_who_were_not_released(
    bench: Bench, released: int, expected: tuple[list[object], ...]
) -> None:
    ranks = clients(3)
    arrivals = [bench.arrive(rank, 9) for rank in ranks]
    bench.send()
    bench.leave(ranks[0], arrivals[0])
    bench.leave(ranks[1], arrivals[1])
    assert bench.send() == [leave(0, 1), leave(0, 1)]
    bench.take(0, i64(released))
    left = 3 - released
    for tag in (1, 2):  # the store takes back while there is one
        bench.take(tag, i64(min(left, 1)))
        left -= min(left, 1)
    assert tuple(rank.got for rank in ranks) == expected


def test_an_arrival_for_several_that_leaves_in_part_crosses_a_release(bench: Bench) -> None:
    first, second = clients(2)
    arrivals = [bench.arrive(first, 9, 3), bench.arrive(second, 9, 2)]
    bench.send()
    bench.leave(first, arrivals[0], 2)
    bench.leave(second, arrivals[1], 1)
    bench.send()
    bench.take(0, i64(4))  # one each who stay, then the two of the first
    bench.take(1, i64(1))
    bench.take(2, i64(0))
    assert first.got == [i64(1), i64(2), ("left", 0)]
    assert second.got == [i64(1), ("left", 1)]


def test_an_arrival_that_is_refused_is_refused_for_all(bench: Bench) -> None:
    ranks = clients(2)
    for rank in ranks:
        bench.arrive(rank, 9)
    bench.send()
    bench.take(0, b"why", REFUSED)
    assert [rank.got for rank in ranks] == [[(REFUSED, b"why")]] * 2


def test_no_more_leave_than_have_arrived_before_the_arrival_was_sent(bench: Bench) -> None:
    rank, other = clients(2)
    arrival = bench.arrive(rank, 9, 1)
    bench.arrive(other, 9, 2)
    bench.leave(rank, arrival, 2)
    assert rank.got == [("left", 1)]
    assert bench.send() == [arrive(b"b", 9, 2)]
