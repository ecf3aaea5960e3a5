"""The combiner: what is put together, what is not, and how an answer is dealt out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from combining_bench import DONE, REFUSED, UNCHANGED, Bench, Client, clients
from ends import arrive, blob, i64, recall
from rallypoint.errors import ProtocolError
from rallypoint.store.wire.encoding import counted_request, request
from rallypoint.store.wire.opcodes import Op
from test_core import add, get, set_, wait

pytestmark = pytest.mark.windows

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


def test_reads_of_other_keys_in_another_order_or_by_another_operation_are_others(bench: Bench) -> None:
    asked = [(Op.GET, [b"k"]), (Op.GET, [b"l"]), (Op.CHECK, [b"k"]), (Op.MULTI_GET, [b"k"])]
    asked += [(Op.MULTI_GET, [b"k", b"l"]), (Op.MULTI_GET, [b"l", b"k"])]
    for op, keys in asked:
        bench.ask(Client(), op, *keys)
    assert len(bench.send()) == 6


def test_what_has_been_sent_is_not_joined(bench: Bench) -> None:
    first, second = clients(2)
    bench.get(first)
    assert bench.send() == [get(b"k")]
    bench.get(second)
    bench.take(0, blob(b"old"))
    assert (first.got, second.got) == ([blob(b"old")], [])
    assert bench.send() == [get(b"k")]
    bench.take(1, blob(b"new"))
    assert second.got == [blob(b"new")]


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


def test_a_long_value_is_recalled_and_given_from_what_is_known(bench: Bench) -> None:
    ranks = clients(3)
    bench.get(ranks[0])
    assert bench.send() == [get(b"k")]
    bench.take(0, LONG)
    bench.get(ranks[1])
    bench.get(ranks[2])
    assert bench.send() == [recall(b"k")]
    bench.take(1, b"", UNCHANGED)
    assert [rank.got for rank in ranks] == [[LONG]] * 3


@pytest.mark.parametrize("value", [blob(b""), blob(b"short"), blob(b"w" * 247)])
def test_a_short_value_is_read_again_and_replaces_a_long_one(bench: Bench, value: bytes) -> None:
    for tag, (asked, answer) in enumerate([(get, LONG), (recall, value), (get, value), (get, LONG)]):
        rank = Client()
        bench.get(rank)
        assert bench.send() == [asked(b"k")]
        bench.take(tag, answer)
        assert rank.got == [answer]


def test_a_value_that_has_changed_is_the_one_that_is_known_afterwards(bench: Bench) -> None:
    new = blob(b"w" * 300)
    rank = Client()
    for tag, (content, status) in enumerate([(LONG, DONE), (new, DONE), (b"", UNCHANGED)]):
        bench.get(rank)
        bench.send()
        bench.take(tag, content, status)
    assert rank.got == [LONG, new, new]


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


def test_what_is_said_to_be_unchanged_must_be_known(bench: Bench) -> None:
    bench.get(Client())
    bench.send()
    with pytest.raises(ProtocolError, match="not known here"):
        bench.combiner.take(0, UNCHANGED, b"")


# Batches


def test_a_batch_ends_where_it_would_be_too_long(bench: Bench) -> None:
    rank = Client()
    sets = [set_(b"k%d" % number, b"v" * 10) for number in range(5)]
    for number in range(5):
        bench.set(rank, b"k%d" % number, b"v" * 10)
    each = 8 + len(sets[0])
    assert bench.send(2 * each) == sets[:2]
    assert bench.send(2 * each - 1) == sets[2:3]
    assert bench.send(1) == sets[3:4]  # one that is too long by itself goes alone
    assert bench.combiner.has_unsent
    assert bench.send(1) == sets[4:]
    assert not bench.combiner.has_unsent


def test_what_did_not_fit_into_a_batch_is_not_joined_any_more(bench: Bench) -> None:
    rank, late = clients(2)
    bench.set(rank, b"x", b"v" * 100)
    bench.get(rank)
    assert len(bench.send(100)) == 1
    bench.get(late)
    assert bench.send() == [get(b"k")] * 2


def test_the_next_batch_waits_for_the_answers_to_what_is_answered_at_once(bench: Bench) -> None:
    rank, other = clients(2)
    assert not bench.combiner.has_batch
    bench.get(rank)
    bench.set(rank)
    assert bench.combiner.has_batch
    bench.send()
    bench.get(other)
    assert not bench.combiner.has_batch
    bench.take(0, blob(b""))
    assert not bench.combiner.has_batch
    bench.take(1)
    assert bench.combiner.has_batch


def test_a_batch_of_waits_and_arrivals_does_not_hold_up_the_next(bench: Bench) -> None:
    bench.wait(Client(), b"k")
    bench.arrive(Client(), 2)
    assert bench.send() == [wait(b"k"), arrive(b"b", 2, 1)]
    bench.get(Client())
    assert bench.combiner.has_batch


def test_an_answer_to_what_was_not_asked_is_a_violation(bench: Bench) -> None:
    bench.get(Client())
    bench.send()
    bench.take(0, blob(b""))
    for tag in (0, 1):
        with pytest.raises(ProtocolError, match="not under way"):
            bench.combiner.take(tag, DONE, b"")


def test_what_is_held_is_counted_until_it_is_answered(bench: Bench) -> None:
    rank = Client()
    bench.set(rank, b"k", b"v" * 1_000)
    held = bench.combiner.held_bytes
    assert held > 1_000
    bench.get(rank)
    bench.wait(rank, b"w" * 1_000)
    assert held < bench.combiner.held_bytes < held + 1_000
    bench.send()
    bench.take(0)
    bench.take(1, LONG)
    assert bench.combiner.held_bytes == 0
