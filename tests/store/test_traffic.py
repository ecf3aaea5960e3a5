"""How much a server is asked and how long that takes: figures against exact ones."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.store.core.turn import MARK_SECONDS, Durations, Traffic, Turn
from rallypoint.store.server.loops.loop import LegacyLoop, LibuvLoop, Loop
from rallypoint.store.wire.opcodes import Op

pytestmark = pytest.mark.windows

repeatable = settings(derandomize=True, deadline=None)

MICROSECOND = 1e-6
QUARTER_OCTAVE = 2**0.25


def end_second(
    traffic: Traffic,
    now: float,
    wall: float = 0.0,
    counts: dict[Op, int] | None = None,
    *,
    clients: int = 0,
    waiting: int = 0,
    turns: Durations | None = None,
) -> None:
    turn = Turn(now, wall - now)
    traffic.end_second(turn, (turns or Durations()).copy(), counts or {}, clients=clients, waiting=waiting)


# Durations


@repeatable
@given(
    durations=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50),
    share=st.sampled_from([0.5, 0.9, 0.99, 1.0]),
)
def test_quantiles_are_right_to_a_quarter_of_an_octave(durations: list[float], share: float) -> None:
    spread = Durations()
    for each in durations:
        spread.add(each)
    needed = next(count for count in range(1, len(durations) + 1) if count >= share * len(durations))
    exact = sorted(durations)[needed - 1]
    found = spread.quantile(share)
    assert found >= exact * (1 - 1e-9), "so much of them does not go beyond"
    assert found + MICROSECOND <= (exact + MICROSECOND) * QUARTER_OCTAVE * (1 + 1e-9)


def test_a_duration_may_be_longer_than_any_or_by_a_clock_that_went_back() -> None:
    spread = Durations()
    spread.add(1e6)
    assert 100 < spread.quantile(0.5) < 1e6
    spread.add(-1.0)
    assert spread.quantile(0.5) < MICROSECOND


def test_what_was_added_since_is_the_difference() -> None:
    spread = Durations()
    spread.add(1.0)
    before = spread.copy()
    spread.add(0.001)
    assert (spread - before).quantile(1.0) == pytest.approx(0.001, rel=0.2)
    assert before.quantile(1.0) == pytest.approx(1.0, rel=0.2)


# Rates, and what was


def test_a_rate_is_of_the_last_seconds() -> None:
    traffic = Traffic()
    assert traffic.operations(0.0, {Op.GET: 10}) == [("GET", 10, 0.0)]
    for second in range(20):
        end_second(traffic, float(second), 0.0, {Op.GET: 100 * second, Op.SET: 7}, clients=0, waiting=0)
    rates = {name: rate for name, _, rate in traffic.operations(19.0, {Op.GET: 1_900, Op.SET: 7})}
    assert rates == {"GET": 100.0, "SET": 0.0}
    rates = {name: rate for name, _, rate in traffic.operations(19.5, {Op.GET: 1_955, Op.ADD: 11})}
    assert rates == {"GET": pytest.approx((1_955 - 1_400) / 5.5, abs=0.001), "ADD": 2.0}


def test_a_rate_of_less_than_a_second_is_as_of_one() -> None:
    traffic = Traffic()
    end_second(traffic, 1.0, 0.0, {Op.GET: 10}, clients=0, waiting=0)
    assert traffic.operations(1.1, {Op.GET: 15}) == [("GET", 15, 5.0)]


def test_seconds_are_told_as_they_were() -> None:
    traffic = Traffic()
    turns = Durations()
    turns.add(0.001)
    end_second(traffic, 1.0, 101.0, {Op.GET: 10, Op.SET: 1}, clients=3, waiting=2, turns=turns)
    end_second(traffic, 2.0, 102.0, {Op.GET: 15, Op.SET: 1}, clients=4, waiting=0, turns=turns)
    first, second = traffic.history
    assert first[:2] == (101.0, 11)
    assert first[3:] == (3, 2)
    assert 0.001 <= first[2] < 0.0012
    assert second == (102.0, 5, -1.0, 4, 0), "a second has only its own durations"


def test_five_minutes_are_kept() -> None:
    traffic = Traffic()
    for second in range(1_000):
        end_second(traffic, float(second), float(second), {}, clients=0, waiting=0)
    assert [time for time, *_ in traffic.history] == [float(second) for second in range(700, 1_000)]


def test_the_last_errors_are_kept_and_all_are_counted() -> None:
    traffic = Traffic()
    for number in range(200):
        traffic.note_error(float(number), "peer", f"reason {number}")
    assert traffic.error_count == 200
    assert list(traffic.errors) == [(float(n), "peer", f"reason {n}") for n in range(72, 200)]


# Turns


def test_what_was_slow_is_forgotten_after_a_while() -> None:
    traffic, turns = Traffic(), Durations()

    def p99(now: float, *took: float) -> float:
        for seconds in took:
            turns.add(seconds)
        end_second(traffic, now, turns=turns)
        return traffic.turn_quantile(0.99)

    assert traffic.turn_quantile(0.99) == -1.0
    assert p99(1_000.0) == -1.0
    assert p99(1_001.0, 1.0) == pytest.approx(1.0, rel=0.2)
    assert p99(1_000.0 + MARK_SECONDS) == pytest.approx(1.0, rel=0.2), "it is of the minutes before"
    assert p99(1_000.0 + 2 * MARK_SECONDS, 0.001) == pytest.approx(0.001, rel=0.2)
    assert [row[2] for row in traffic.history][::3] == [-1.0, pytest.approx(0.001, rel=0.2)]


@pytest.mark.skipif(sys.platform == "win32", reason="many turns have the same time on its coarse clock")
@pytest.mark.parametrize("make", [LegacyLoop, lambda: LibuvLoop("uvloop")], ids=["legacy", "libuv"])
def test_a_turn_has_one_time_and_some_turns_are_timed(make: Callable[[], Loop]) -> None:
    loop = make()
    times: list[float] = []

    def read() -> None:
        times.append(loop.turn.now)
        if len(times) == 640:
            loop.stop()

    with ExitStack() as stack:
        stack.callback(loop.close)
        for _ in range(2):
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            theirs.send(b"x")
            loop.watch_readable(ours, read)
        began = time.monotonic()
        loop.run()
    assert times == sorted(times)
    assert began <= times[0] <= times[-1] <= time.monotonic()
    assert 320 <= len(set(times)) < 640, "both were ready, and were read in one turn"
    assert 0.0 < loop.turns.quantile(1.0) < 1.0, "some of the turns were timed"
