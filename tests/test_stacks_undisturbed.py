"""Looking at a rank changes nothing in it: no call ends early or fails, however often it is looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import interruptible
from rallypoint.launch.environment import inject
from rallypoint.launch.reports import VARIABLE
from rallypoint.launch.stacks.looking import Looker
from rallypoint.launch.stacks.switch import SIGNALS_VARIABLE, signals_of

if sys.platform != "linux":
    pytest.skip("it asks as Linux does", allow_module_level=True)

SIGNALS = signals_of("on", "the test")
RANKS = 4
LOOK_SECONDS = 0.05


def test_no_call_is_shortened_or_fails(tmp_path: Path) -> None:
    environ = {**inject(os.environ), VARIABLE: str(tmp_path), SIGNALS_VARIABLE: ",".join(map(str, SIGNALS))}
    ranks = [
        subprocess.Popen(
            [sys.executable, interruptible.__file__, str(rank), str(RANKS)],
            env={**environ, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    looker = Looker(tmp_path, SIGNALS, 1000.0)
    answers = 0
    while any(rank.poll() is None for rank in ranks):
        answers += sum(each.stack_seconds < 0 for each in looker.look().ranks if each.stack)
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
