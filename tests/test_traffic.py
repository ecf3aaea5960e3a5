"""How much a server is asked and how long that takes: figures against exact ones."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.rollcall.snapshot import Mishap, Operation, Second
from rallypoint.server.core.traffic import TURN_SECONDS, Spread, Traffic
from rallypoint.server.loops.legacy import LegacyLoop
from rallypoint.server.loops.loop import SAMPLED, Callback, sampled_of
from rallypoint.server.loops.readers import make_readers
from rallypoint.wire.opcodes import Op

repeatable = settings(derandomize=True, deadline=None)

MICROSECOND = 1e-6
QUARTER_OCTAVE = 2**0.25


# Durations


@repeatable
@given(
    durations=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50),
    share=st.sampled_from([0.5, 0.9, 0.99, 1.0]),
)
def test_quantiles_are_right_to_a_quarter_of_an_octave(durations: list[float], share: float) -> None:
    spread = Spread()
    for each in durations:
        spread.add(each)
    needed = next(count for count in range(1, len(durations) + 1) if count >= share * len(durations))
    exact = sorted(durations)[needed - 1]
    found = spread.quantile(share)
    assert found >= exact * (1 - 1e-9), "so much of them does not go beyond"
    assert found + MICROSECOND <= (exact + MICROSECOND) * QUARTER_OCTAVE * (1 + 1e-9)


def test_there_is_no_quantile_of_nothing() -> None:
    assert Spread().quantile(0.5) == -1.0


def test_a_duration_may_be_longer_than_any_or_by_a_clock_that_went_back() -> None:
    spread = Spread()
    spread.add(1e6)
    assert 100 < spread.quantile(0.5) < 1e6
    spread.add(-1.0)
    assert spread.quantile(0.5) < MICROSECOND


def test_durations_are_told_by_kind_but_not_of_waits() -> None:
    traffic = Traffic()
    for op, seconds in [(Op.GET, 0.001), (Op.GET, 0.004), (Op.SET, 1.0), (Op.WAIT, 9.0), (Op.BARRIER, 9.0)]:
        traffic.note_duration(op, seconds)
    counts = {Op.GET: 5, Op.SET: 1, Op.ADD: 1, Op.WAIT: 1, Op.BARRIER: 1, Op.CHECK: 0}
    found = {each.name: (each.p50, each.p99) for each in traffic.operations(0.0, counts)}
    assert list(found) == ["SET", "GET", "ADD", "WAIT", "BARRIER"]
    assert found["ADD"] == found["WAIT"] == found["BARRIER"] == (-1.0, -1.0)
    assert 0.001 <= found["GET"][0] < 0.0012
    assert 0.004 <= found["GET"][1] < 0.0048
    assert 1.0 <= found["SET"][0] < 1.2


@pytest.mark.parametrize("opcode", [-1, 19, 31, 255])
def test_what_is_no_operation_has_no_duration(opcode: int) -> None:
    traffic = Traffic()
    traffic.note_duration(opcode, 1.0)
    traffic.end_second(1.0, 0.0, {}, clients=0, waiting=0)
    assert traffic._durations == {}
    assert traffic.history[-1].p99 == -1.0


# Rates, and what was


def test_a_rate_is_of_the_last_seconds() -> None:
    traffic = Traffic()
    assert traffic.operations(0.0, {Op.GET: 10}) == [Operation("GET", 10, 0.0)]
    for second in range(20):
        traffic.end_second(float(second), 0.0, {Op.GET: 100 * second, Op.SET: 7}, clients=0, waiting=0)
    rates = {each.name: each.per_second for each in traffic.operations(19.0, {Op.GET: 1_900, Op.SET: 7})}
    assert rates == {"GET": 100.0, "SET": 0.0}
    rates = {each.name: each.per_second for each in traffic.operations(19.5, {Op.GET: 1_955, Op.ADD: 11})}
    assert rates == {"GET": pytest.approx((1_955 - 1_400) / 5.5, abs=0.001), "ADD": 2.0}


def test_a_rate_of_less_than_a_second_is_as_of_one() -> None:
    traffic = Traffic()
    traffic.end_second(1.0, 0.0, {Op.GET: 10}, clients=0, waiting=0)
    assert traffic.operations(1.1, {Op.GET: 15})[0].per_second == 5.0


def test_seconds_are_told_as_they_were() -> None:
    traffic = Traffic()
    traffic.note_duration(Op.GET, 0.001)
    traffic.end_second(1.0, 101.0, {Op.GET: 10, Op.SET: 1}, clients=3, waiting=2)
    traffic.end_second(2.0, 102.0, {Op.GET: 15, Op.SET: 1}, clients=4, waiting=0)
    first, second = traffic.history
    assert first == Second(101.0, 11, first.p99, 3, 2)
    assert 0.001 <= first.p99 < 0.0012
    assert second == Second(102.0, 5, -1.0, 4, 0), "a second has only its own durations"


def test_five_minutes_are_kept() -> None:
    traffic = Traffic()
    for second in range(1_000):
        traffic.end_second(float(second), float(second), {}, clients=0, waiting=0)
    assert [each.time for each in traffic.history] == [float(second) for second in range(700, 1_000)]


def test_the_last_errors_are_kept_and_all_are_counted() -> None:
    traffic = Traffic()
    for number in range(200):
        traffic.note_error(float(number), "peer", f"reason {number}")
    assert traffic.error_count == 200
    assert list(traffic.errors) == [Mishap(float(n), "peer", f"reason {n}") for n in range(72, 200)]


# Which events are timed


@repeatable
@given(st.lists(st.integers(0, 400), max_size=60))
def test_one_event_in_so_many_is_timed_whatever_comes_in_a_turn(turns: list[int]) -> None:
    timed, first = [], 0
    for begin, count in zip([0, *accumulate(turns)], turns, strict=False):
        if first < count:
            chosen, first = sampled_of(first, count)
            timed += [begin + index for index in chosen]
        else:
            first -= count
    assert timed == list(range(0, sum(turns), SAMPLED))


@repeatable
@given(first=st.integers(0, SAMPLED - 1), count=st.integers(0, 1_000))
def test_what_is_next_is_the_same_for_turns_without_a_timed_event(first: int, count: int) -> None:
    chosen, after = sampled_of(first, count)
    assert 0 <= after < SAMPLED
    if not chosen:
        assert after == first - count


def _pipes(stack: ExitStack, count: int) -> Iterator[tuple[int, int]]:
    for _ in range(count):
        ends = os.pipe()
        for end in ends:
            stack.callback(os.close, end)
        yield ends


@pytest.mark.skipif(make_readers() is None, reason="needs epoll")
@pytest.mark.parametrize("files", [1, 3, 200])
def test_readers_time_one_call_in_so_many(files: int) -> None:
    readers = make_readers()
    assert readers is not None
    calls: list[int] = []
    timed: list[int] = []

    def sample(callback: Callback, began: float) -> None:
        assert began > 0.0
        timed.append(len(calls))
        callback()

    readers.sample = sample
    with ExitStack() as stack:
        stack.callback(readers.close)
        for reader, writer in _pipes(stack, files):
            os.write(writer, b"x")
            readers.watch(reader, lambda reader=reader: calls.append(reader))  # type: ignore[misc]
        while len(calls) < 1_000:
            readers.call_back()
    assert len(calls) < 1_000 + files, "each is called once in a turn, timed or not"
    assert timed == list(range(0, len(calls), SAMPLED))


@pytest.mark.parametrize("files", [1, 3, 200])
def test_the_legacy_loop_times_one_read_in_so_many(files: int) -> None:
    loop = LegacyLoop()
    calls: list[int] = []
    timed: list[int] = []

    def sample(callback: Callback, began: float) -> None:
        assert began > 0.0
        timed.append(len(calls))
        callback()

    def called(number: int) -> None:
        calls.append(number)
        if len(calls) == 1_000:
            loop.stop()

    with ExitStack() as stack:
        stack.callback(loop.close)
        for number in range(files):
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            theirs.send(b"x")
            loop.watch_readable(ours, lambda number=number: called(number))  # type: ignore[misc]
        loop.sample = sample
        loop.run()
    assert timed == list(range(0, len(calls), SAMPLED))


def test_what_is_timed_is_written_to_as_well() -> None:
    """A read that is timed is called from elsewhere; a write of the same turn is not forgotten."""
    loop = LegacyLoop()
    seen: list[str] = []
    with ExitStack() as stack:
        stack.callback(loop.close)
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        theirs.send(b"x")

        def written() -> None:
            seen.append("written")
            loop.stop()

        loop.watch_readable(ours, lambda: seen.append("read"))
        loop.watch_writable(ours, written)
        loop.sample = lambda callback, _: (seen.append("timed"), callback())[1]  # type: ignore[func-returns-value]
        loop.run()
    assert seen == ["timed", "read", "written"]


def test_what_was_slow_is_forgotten_after_a_while() -> None:
    traffic = Traffic()

    def p99(now: float) -> float:
        traffic.end_second(now, now, {Op.GET: 1}, clients=1, waiting=0)
        (told,) = traffic.operations(now, {Op.GET: 1})
        return told.p99

    assert p99(1_000.0) == -1.0
    traffic.note_duration(Op.GET, 1.0)
    assert p99(1_001.0) == pytest.approx(1.0, rel=0.2)
    assert p99(1_000.0 + TURN_SECONDS) == pytest.approx(1.0, rel=0.2), "it is of the minutes before"
    traffic.note_duration(Op.GET, 0.001)
    assert p99(1_000.0 + 2 * TURN_SECONDS) == pytest.approx(0.001, rel=0.2)
