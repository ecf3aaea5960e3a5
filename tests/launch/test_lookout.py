"""Who looks after whom: who lives is never missed, who is dead soon is, and a look is at few machines."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.launch.rendezvous.digest import Lookout


class Ring:
    """Machines that beat and look once in each period, each time in another order if there is a seed."""

    def __init__(self, count: int, patience: int, seed: int | None = None) -> None:
        self.ids = [str(number) for number in range(count)]
        self.living = set(self.ids)
        self.reads: Counter[str] = Counter()
        self._signs: Counter[str] = Counter()
        self._lookouts = {each: Lookout(patience) for each in self.ids}
        self._random = None if seed is None else Random(seed)

    def pass_period(self) -> None:
        order = sorted(self.living)
        if self._random is not None:
            self._random.shuffle(order)
        for each in order:
            self._signs[each] += 1
            place = self.ids.index(each)
            after = self.ids[place + 1 :] + self.ids[:place]
            silent = self._lookouts[each].find_silent(after, self._read)
            self.ids = [other for other in self.ids if other not in silent]

    def _read(self, name: str) -> int:
        self.reads[name] += 1
        return self._signs[name]


@settings(max_examples=100)
@given(st.integers(2, 80), st.integers(1, 4), st.integers(0, 9), st.integers(0, 1 << 30), st.floats(0.0, 1.0))
def test_the_dead_are_missed_together_and_nobody_else(
    count: int, patience: int, periods: int, seed: int, share: float
) -> None:
    ring, random = Ring(count, patience, seed), Random(seed)
    for _ in range(periods):
        ring.pass_period()
    assert len(ring.ids) == count
    ring.living -= set(random.sample(ring.ids, int(share * (count - 1))))
    # One that still saw a sign, two that get as far as 64 machines, and one more than the patience.
    for _ in range(patience + 4):
        ring.pass_period()
        assert ring.living <= set(ring.ids)
    assert set(ring.ids) == ring.living


@pytest.mark.parametrize("dead", [0, 100], ids=["all live", "every other one has died"])
def test_a_look_is_at_few_machines(dead: int) -> None:
    ring = Ring(200, 3)
    for _ in range(3):
        ring.pass_period()
    ring.living -= set(ring.ids[: 2 * dead : 2])
    ring.reads.clear()
    for _ in range(10):
        ring.pass_period()
    assert set(ring.ids) == ring.living
    looks = 10 * len(ring.living)
    assert ring.reads.total() <= 3 * looks if dead else ring.reads.total() == looks


def test_a_look_that_failed_counts_for_nothing() -> None:
    """As when the meeting place is away: nobody could give a sign of life."""

    def fail(_: str) -> int:
        raise OSError("it is away")

    lookout = Lookout(1)
    for _ in range(2):
        assert lookout.find_silent(["b"], lambda _: 7) == set()
    for _ in range(5):
        with pytest.raises(OSError, match="away"):
            lookout.find_silent(["b"], fail)
    assert lookout.find_silent(["b"], lambda _: 7) == {"b"}


def test_patience_is_with_one_machine_and_starts_anew_with_another() -> None:
    """As when the next one has left, also if it comes again."""
    lookout = Lookout(1)
    for ring in (["b", "c"], ["b", "c"], ["c"], ["b", "c"], ["b", "c"]):
        assert lookout.find_silent(ring[:1], lambda _: 7) == set()
    assert lookout.find_silent(["b"], lambda _: 7) == {"b"}
