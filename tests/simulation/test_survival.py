"""A store on a real engine goes on when its processes are killed: some rounds of `survival.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from survival import HOW, WHO, Trial, running


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["etcd", "redis"])
def test_nothing_is_lost_or_doubled_when_processes_are_killed(engine: str, tmp_path: Path) -> None:
    with running(engine, tmp_path) as system:
        trial = Trial(system, seed=18)
        trial.run(2 * len(WHO) * len(HOW))
    assert trial.figures.counts["operations"] > 1_000
    assert not trial.figures.counts["undecided"]
