"""The combiner: what is put together and what is not, who shares a wait, and how an answer is dealt out.

Batches are taken and answered by hand. The simulation (`tests/simulation`) breaks most of these rules, too.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ends import arrive, blob, end_of_wait, i64, leave, recall, wait_in_turn
from rallypoint.errors import ProtocolError
from rallypoint.store.core.context import Context
from rallypoint.store.relay.core.combining import Combiner
from rallypoint.store.relay.core.upstream_requests import Arrival, PopCall, RequestOrder, Waiter
from rallypoint.store.wire.encoding import counted_request, request
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.sessions import Status
from test_core import add, get, set_, wait

pytestmark = pytest.mark.windows

DONE, REFUSED, CALLED, UNCHANGED = Status.DONE, Status.REFUSED, Status.CALLED, Status.UNCHANGED


class Client:
    """A client, which notes what it is answered."""

    def __init__(self) -> None:
        self.order = RequestOrder()
        self.is_present = True
        self.got: list[object] = []
        self.calls: list[PopCall] = []

    def answer(self, status: Status, content: bytes) -> None:
        self.got.append(content if status is DONE else (status, content))

    def left(self, count: int) -> None:
        self.got.append(("left", count))


class Wait(Waiter):
    def __init__(self, client: Client) -> None:
        super().__init__(client.order)
        self._client = client

    @property
    def is_present(self) -> bool:
        return self._client.is_present

    def end(self, refusal: bytes | None, call: PopCall | None) -> None:
        got = "over" if refusal is None and call is None else "called" if call else refusal
        self._client.got.append(got)
        if call is not None:
            self._client.calls.append(call)


class AtBarrier(Arrival):
    def __init__(self, client: Client, weight: int) -> None:
        super().__init__(weight)
        self._client = client

    def release(self, status: Status, content: bytes) -> None:
        self._client.answer(status, content)


class Bench:
    """A combiner, with batches taken and answers given by hand."""

    def __init__(self) -> None:
        self.combiner = Combiner(Context(None, None, None))
        self.number = 0

    def ask(self, client: Client, op: Op, *blobs: bytes, tail: bytes = b"") -> None:
        self.combiner.ask(client.order, op, list(blobs), tail, client.answer)
        self.combiner.check_invariants()

    def get(self, client: Client, key: bytes = b"k") -> None:
        self.ask(client, Op.GET, key)

    def set(self, client: Client, key: bytes = b"k", value: bytes = b"v") -> None:
        self.ask(client, Op.SET, key, value)

    def add(self, client: Client, amount: int, key: bytes = b"n") -> None:
        self.ask(client, Op.ADD, key, tail=i64(amount))

    def wait(self, client: Client, *keys: bytes) -> Waiter:
        waiter = Wait(client)
        self.combiner.wait(waiter, keys)
        self.combiner.check_invariants()
        return waiter

    def arrive(self, client: Client, size: int, weight: int = 1, key: bytes = b"b") -> Arrival:
        arrival = AtBarrier(client, weight)
        self.combiner.arrive(arrival, client.order, key, size)
        self.combiner.check_invariants()
        return arrival

    def leave(self, client: Client, arrival: Arrival, count: int = 1) -> None:
        self.combiner.leave(arrival, count, client.left)
        self.combiner.check_invariants()

    def cancel(self, waiter: Waiter) -> None:
        self.combiner.cancel(waiter)
        self.combiner.check_invariants()

    def send(self, most_bytes: int = 1 << 20, longest: int = 1 << 32) -> list[bytes]:
        self.number += 1
        requests = self.combiner.take_batch(self.number, most_bytes, longest)
        self.combiner.check_invariants()
        return requests

    def take(self, tag: int, content: bytes = b"", status: Status = DONE) -> None:
        self.combiner.receive(tag, status, content)
        self.combiner.check_invariants()


def clients(count: int) -> list[Client]:
    return [Client() for _ in range(count)]


LONG = blob(b"v" * 300)


@pytest.fixture
def bench() -> Bench:
    return Bench()


# Joining


@pytest.mark.parametrize(
    ("op", "blobs"),
    [(Op.GET, [b"k"]), (Op.CHECK, [b"k", b"l"]), (Op.MULTI_GET, [b"k", b"l"]), (Op.CHECK, [])],
)
def test_equal_reads_become_one_whose_reply_is_everybodys(bench: Bench, op: Op, blobs: list[bytes]) -> None:
    ranks = clients(3)
    for rank in ranks:
        bench.ask(rank, op, *blobs)
    assert bench.send() == [request(op, *blobs) if op is Op.GET else counted_request(op, blobs)]
    bench.take(0, b"reply")
    assert [rank.got for rank in ranks] == [[b"reply"]] * 3
    assert bench.combiner.held_bytes == 0


def test_a_read_does_not_join_one_that_stands_before_an_earlier_request_of_its_own_line(bench: Bench) -> None:
    first, second, third = clients(3)
    bench.get(first)
    bench.set(second)
    bench.get(second)
    bench.get(third)
    assert bench.send() == [get(b"k"), set_(b"k", b"v"), get(b"k")]
    bench.take(0, blob(b""))
    bench.take(1)
    assert (first.got, third.got) == ([blob(b"")], [])
    bench.take(2, blob(b"v"))
    assert (second.got, third.got) == ([b"", blob(b"v")], [blob(b"v")])


def test_what_a_request_has_joined_counts_for_the_order_of_its_line(bench: Bench) -> None:
    first, second = clients(2)
    bench.add(first, 1)
    bench.get(first, b"x")
    bench.get(second, b"x")  # joins the second one
    bench.add(second, 1)
    assert bench.send() == [add(b"n", 1), get(b"x"), add(b"n", 1)]


@pytest.mark.parametrize(
    ("op", "blobs"),
    [
        (Op.SET, [b"k", b"v" * 257]),
        (Op.APPEND, [b"k", b"v"]),
        (Op.COMPARE_SET, [b"k", b"", b"v"]),
        (Op.DELETE_KEY, [b"k"]),
        (Op.QUEUE_PUSH, [b"q", b"v"]),
        (Op.QUEUE_POP, [b"q"]),
    ],
)
def test_everything_else_goes_one_by_one(bench: Bench, op: Op, blobs: list[bytes]) -> None:
    ranks = clients(2)
    for rank in ranks:
        bench.ask(rank, op, *blobs)
    assert bench.send() == [request(op, *blobs)] * 2
    bench.take(1, b"second")
    bench.take(0, b"why", REFUSED)
    assert [rank.got for rank in ranks] == [[(REFUSED, b"why")], [b"second"]]


def test_equal_short_sets_become_one_and_others_do_not(bench: Bench) -> None:
    first, second, third = clients(3)
    bench.set(first, b"k", b"v")
    bench.set(second, b"k", b"v")
    bench.set(third, b"k", b"w")
    bench.set(third, b"k", b"v")
    bench.set(second, b"l", b"v")
    bench.set(first, b"k", b"v")
    assert bench.send() == [set_(b"k", b"v"), set_(b"k", b"w"), set_(b"k", b"v"), set_(b"l", b"v")]
    bench.take(0)
    assert (first.got, second.got) == ([b""], [b""])
    bench.set(first, b"k", b"v")
    bench.take(2)
    assert (first.got, third.got) == ([b"", b""], [b""])
    assert bench.send() == [set_(b"k", b"v")]


# ADD


@pytest.mark.parametrize(
    ("amounts", "sums"),
    [
        ([1, -1], [1, -1]),
        ([-1, 1, -2], [-1, 1, -2]),
        ([-1, -2, 0, -3], [-6]),
        ([0, -4, -1], [-5]),
        ([0, 0, 3], [3]),
        ([5, -5, 5], [5, -5, 5]),
        ([1 << 61, (1 << 61) - 1], [(1 << 62) - 1]),
        ([1 << 61, 1 << 61], [1 << 61, 1 << 61]),
        ([-(1 << 61), -(1 << 61)], [-(1 << 61), -(1 << 61)]),
        ([(1 << 63) - 1, 1], [(1 << 63) - 1, 1]),
        ([-(1 << 63), -1], [-(1 << 63), -1]),
    ],
)
def test_amounts_are_put_together_while_they_have_one_sign_and_fit(
    bench: Bench, amounts: list[int], sums: list[int]
) -> None:
    for amount in amounts:
        bench.add(Client(), amount)
    assert bench.send() == [add(b"n", total) for total in sums]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=12), st.integers(-20, 20))
def test_adds_get_what_they_would_have_got_one_by_one(amounts: list[int], value: int) -> None:
    bench, ranks = Bench(), clients(len(amounts))
    for rank, amount in zip(ranks, amounts, strict=True):
        bench.add(rank, amount)
    total = value
    for tag, sent in enumerate(bench.send()):
        total += int.from_bytes(sent[-8:], "little", signed=True)
        bench.take(tag, i64(total))
    for rank, amount in zip(ranks, amounts, strict=True):
        value += amount
        assert rank.got == [i64(value)]


def test_a_sum_that_is_refused_is_asked_for_one_by_one(bench: Bench) -> None:
    ranks = clients(3)
    for rank, amount in zip(ranks, (1, 2, 3), strict=True):
        bench.add(rank, amount)
    assert bench.send() == [add(b"n", 6)]
    bench.take(0, b"beyond", REFUSED)
    assert [rank.got for rank in ranks] == [[]] * 3
    bench.add(Client(), 4)
    assert bench.send() == [add(b"n", 1), add(b"n", 2), add(b"n", 3), add(b"n", 4)]
    bench.take(1, i64(11))
    bench.take(2, i64(12))
    bench.take(3, b"beyond", REFUSED)
    assert [rank.got for rank in ranks] == [[i64(11)], [i64(12)], [(REFUSED, b"beyond")]]
    bench.take(4, i64(16))
    assert bench.combiner.held_bytes == 0


def test_a_line_that_has_gone_on_behind_a_sum_that_is_refused_is_refused(bench: Bench) -> None:
    first, second = clients(2)
    bench.add(first, 1)
    bench.add(second, 2)
    bench.add(second, 3)
    bench.get(first, b"x")
    assert bench.send() == [add(b"n", 6), get(b"x")]
    bench.take(0, b"beyond", REFUSED)
    assert (first.got, second.got) == ([(REFUSED, b"beyond")], [])
    bench.take(1, blob(b""))
    assert bench.send() == [add(b"n", 2), add(b"n", 3)]


# Values that cross once


@pytest.mark.parametrize("value", [blob(b""), blob(b"short"), blob(b"w" * 247)])
def test_a_short_value_is_read_again_and_replaces_a_long_one(bench: Bench, value: bytes) -> None:
    for tag, (asked, answer) in enumerate([(get, LONG), (recall, value), (get, value), (get, LONG)]):
        rank = Client()
        bench.get(rank)
        assert bench.send() == [asked(b"k")]
        bench.take(tag, answer)
        assert rank.got == [answer]


def test_64_values_are_known_and_one_that_is_being_recalled_stays(bench: Bench) -> None:
    rank = Client()
    for tag in range(64):
        bench.get(rank, b"k%d" % tag)
        bench.send()
        bench.take(tag, LONG)
    bench.get(rank, b"k0")
    assert bench.send() == [recall(b"k0")]
    bench.get(rank, b"more")
    bench.send()
    bench.take(65, LONG)
    bench.take(64, b"", UNCHANGED)
    assert rank.got[-1] == LONG
    for key, asked in ((b"k0", recall), (b"k1", get), (b"k2", recall)):
        bench.get(rank, key)
        assert bench.send() == [asked(key)]


# Batches


def test_what_did_not_fit_into_a_batch_is_not_joined_any_more(bench: Bench) -> None:
    rank, late = clients(2)
    bench.set(rank, b"x", b"v" * 100)
    bench.get(rank)
    assert len(bench.send(100)) == 1
    bench.get(late)
    assert bench.send() == [get(b"k")] * 2


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


# Cancelling


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
        bench.combiner.receive(0, DONE, end_of_wait(1))


# Queues


@pytest.mark.parametrize("second_is_there", [True, False])
def test_a_call_is_not_for_who_is_away_nor_for_who_joined_too_late_to_be_sure(
    bench: Bench, second_is_there: bool
) -> None:
    first, second, late = clients(3)
    bench.wait(first, b"q")
    bench.wait(second, b"q")
    bench.send()
    bench.wait(late, b"q")
    first.is_present, second.is_present = False, second_is_there
    bench.take(0, end_of_wait(1), CALLED)
    assert [rank.got for rank in (first, second, late)] == [[], ["called"] if second_is_there else [], []]
    declined = [] if second_is_there else [leave(0)]
    assert bench.send() == [*declined, wait_in_turn(b"q")]
    bench.take(1 + len(declined), end_of_wait(2))
    assert late.got == ["over"]


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
        bench.combiner.receive(0, DONE, i64(1))


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
