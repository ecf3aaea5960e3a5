"""A store on a real engine goes on when its processes are killed: some rounds of `survival.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.launch.rendezvous.participant import Round
from simulated_ranks import FailedError
from survival import HOW, WHO, Trial, running
from survival_launchers import Entry, check_rounds


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["etcd", "redis"])
def test_nothing_is_lost_or_doubled_when_processes_are_killed(engine: str, tmp_path: Path) -> None:
    with running(engine, tmp_path) as system:
        trial = Trial(system, seed=18)
        trial.run(2 * len(WHO) * len(HOW))
    assert trial.figures.counts["operations"] > 1_000
    assert not trial.figures.counts["undecided"]
    assert trial.figures.counts["rounds of 3"]


def entry(number: int, who: str, came: int, members: str = "ab", store: str = "h:1", rank: int = -1) -> Entry:
    """Somebody has entered a round, with the rank that it should have, unless another one is given."""
    ranked = members.index(who) if rank < 0 else rank
    met = Round(number, ranked, len(members), f"{number}-{members[0]}", store)
    return Entry(who, met, came, at=0, took=0)


GOOD = [entry(0, "a", 2), entry(0, "b", 1)]


def test_rounds_that_are_one_for_all_members_are_right() -> None:
    check_rounds([*GOOD, *(entry(1, who, came, "bca") for came, who in enumerate("abc", 1))])


@pytest.mark.parametrize(
    "entries",
    [
        [GOOD[0], entry(0, "b", 1, "abc")],
        [GOOD[0], entry(0, "b", 1, store="h:2")],
        [GOOD[0], entry(0, "b", 1, rank=0)],
        [GOOD[0], entry(0, "b", 2)],  # each has another store
        [GOOD[0], entry(0, "b", 3)],  # a store that is not new
        [GOOD[0]],
        [*GOOD, GOOD[0]],
        [*GOOD, entry(2, "a", 1), entry(2, "b", 2)],
        [entry(0, "a", 1, "a")],
    ],
    ids=["members", "store", "rank", "two stores", "old store", "absent", "twice", "left out", "too small"],
)
def test_rounds_that_are_not_one_are_caught(entries: list[Entry]) -> None:
    with pytest.raises(FailedError):
        check_rounds(entries)
