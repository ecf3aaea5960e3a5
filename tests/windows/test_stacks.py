"""What ranks do, on Windows: real processes are asked by an event. None imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.launch.environment import inject
from rallypoint.launch.handover import Handover
from rallypoint.launch.stacks import signals_of
from rallypoint.launch.stacks.activity import RankActivity
from rallypoint.launch.stacks.frames import fold
from rallypoint.launch.stacks.requesting import sources_in
from rallypoint.launch.stacks.sampling import RankSampler
from raw import until

pytestmark = pytest.mark.windows

SECONDS = 120.0
SIGNALS = signals_of("on", "the test")
WAITS = """
import threading, time, rallypoint
lock = threading.Lock()
held = threading.Event()
def hold():
    with lock:
        held.set()
        time.sleep(1000)
def odd():
    lock.acquire()
threading.Thread(target=hold, daemon=True).start()
held.wait()
rallypoint.step(7)
odd()
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A rank that waits for a lock."""
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    environ = {**Handover(tmp_path, SIGNALS).variables(), "RANK": "3"}
    process = subprocess.Popen([sys.executable, str(script)], env={**inject(os.environ), **environ})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_rank_answers_with_its_line_and_its_threads(rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    sampler = RankSampler(tmp_path, SIGNALS, 1000.0)
    seen: list[RankActivity] = []

    def is_in_odd() -> bool:
        seen[:] = sampler.sample().ranks
        return bool(seen) and bool(seen[0].stack) and fold(seen[0].stack).own[0].function == "odd"

    until(is_in_odd, "the rank is in its function", SECONDS)
    [each] = seen
    assert (each.rank, each.pid, each.step) == (3, sources_in(tmp_path)[0].pid, 7)
    assert "hold" in [frame.function for stack in each.threads for frame in stack]
    assert rank.poll() is None
    rank.kill()
    rank.wait()
    until(lambda: sampler.sample().ranks[0].ended == "its process is gone", "it is seen to be gone", SECONDS)
