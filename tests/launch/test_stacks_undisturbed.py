"""Looking at a rank changes nothing in it: no call ends early or fails, however often it is looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import interruptible
from jobs import free_port
from rallypoint.client.tcp import TCPStore
from rallypoint.launch.environment import inject
from rallypoint.launch.handover import Handover
from rallypoint.launch.stacks import signals_of
from rallypoint.launch.stacks.sampling import RankSampler

if sys.platform != "linux":
    pytest.skip("it asks as Linux does", allow_module_level=True)

SIGNALS = signals_of("on", "the test")
RANKS = 4
LOOK_SECONDS = 0.05


def test_no_call_is_shortened_or_fails(tmp_path: Path) -> None:
    environ = {**inject(os.environ), **Handover(tmp_path, SIGNALS).variables()}
    ranks = [
        subprocess.Popen(
            [sys.executable, interruptible.__file__, str(rank), str(RANKS)],
            env={**environ, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    sampler = RankSampler(tmp_path, SIGNALS, 1000.0)
    answers = 0
    while any(rank.poll() is None for rank in ranks):
        answers += sum(each.stack_seconds < 0 for each in sampler.sample().ranks if each.stack)
        time.sleep(LOOK_SECONDS)
    results = [json.loads(line) for rank in ranks for line in rank.communicate()[0].splitlines()]
    assert {name for name, *_ in results} == set(interruptible.CALLS)
    wrong = [
        (name, seconds, value, number)
        for name, seconds, value, number in results
        if (value, number) != interruptible.CALLS[name][:2] or seconds < interruptible.SECONDS * 0.99
    ]
    assert wrong == []
    assert answers > len(results), "the ranks were looked at during their calls"


CONNECTS = """
import sys, time
from torch.distributed import TCPStore
began = time.monotonic()
TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
print(time.monotonic() - began, flush=True)
"""


@pytest.mark.slow
def test_a_connection_to_a_store_that_opens_late_is_not_delayed(tmp_path: Path) -> None:
    """torch's client begins anew with a longer pause whenever a signal interrupts its connect()."""
    (tmp_path / "train.py").write_text(CONNECTS)
    port = free_port()
    environ = {**inject(os.environ), **Handover(tmp_path, SIGNALS).variables()}
    rank = subprocess.Popen(
        [sys.executable, str(tmp_path / "train.py"), str(port)],
        env={**environ, "RANK": "0", "RALLYPOINT_PATCH": "never"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    sampler = RankSampler(tmp_path, SIGNALS, 1000.0)
    stacks: list[str] = []
    deadline = time.monotonic() + 60
    opened = 0.0
    with ExitStack() as ends:
        while rank.poll() is None and time.monotonic() < deadline:
            found = [frame.function for each in sampler.sample().ranks for frame in each.stack]
            if not stacks and found == ["<module>"]:
                stacks, opened = found, time.monotonic() + 5
            if opened and time.monotonic() > opened:
                ends.enter_context(TCPStore("127.0.0.1", port, is_master=True))
                opened = float("inf")
            time.sleep(LOOK_SECONDS)
        rank.kill()
        out, errors = rank.communicate()
    assert errors == ""
    assert 4 < float(out) < 15
