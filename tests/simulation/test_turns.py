"""Turns of tests that run side by side: in the order of requests, and without cost to the test's timeout."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import turns
from processes import end
from turns import in_turns

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no test takes turns on Windows")

_TURN = """
import pathlib, sys, turns
turns._FOLDER = pathlib.Path(sys.argv[1])
with turns.in_turns("it", shared=sys.argv[2] == "shared"):
    print("begun", flush=True)
    sys.stdin.readline()
"""


class Queue:
    """Processes that ask for a turn one after the other."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def ask(self, kind: str = "alone") -> subprocess.Popen[str]:
        """Return when the process waits or has its turn."""
        before = self.tickets()
        process = subprocess.Popen(
            [sys.executable, "-c", _TURN, str(self._folder), kind],
            cwd=Path(turns.__file__).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(end, process)
        while self.tickets() == before:
            assert process.poll() is None
        return process

    def tickets(self) -> list[Path]:
        return list(self._folder.glob("*/[0-9]*"))


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.setattr(turns, "_FOLDER", tmp_path)
    with ExitStack() as stack:
        yield Queue(tmp_path, stack)


def await_turn(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    assert process.stdout.readline() == "begun\n"


def has_turn(process: subprocess.Popen[str]) -> bool:
    assert process.stdout
    return bool(select.select([process.stdout], [], [], 0.5)[0])


def test_who_shares_a_turn_does_not_overtake_who_does_not(queue: Queue) -> None:
    first, second = queue.ask("shared"), queue.ask("shared")
    await_turn(first)
    await_turn(second)
    alone, last = queue.ask(), queue.ask("shared")
    first.communicate("\n")
    assert not has_turn(alone)
    second.communicate("\n")
    await_turn(alone)
    assert not has_turn(last)
    alone.communicate("\n")
    await_turn(last)


def test_a_process_that_is_killed_gives_up_its_turn(queue: Queue) -> None:
    first, second, last = (queue.ask() for _ in range(3))
    first.kill()
    await_turn(second)
    second.kill()
    await_turn(last)
    last.communicate("\n")
    assert queue.tickets() == []


def test_the_timeout_of_a_test_stands_still_while_it_waits(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = []
    monkeypatch.setattr(
        turns, "_await_end", lambda ticket: timers.append(signal.getitimer(signal.ITIMER_REAL))
    )
    queue.ask()
    with in_turns("it"):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0.0
    assert timers == [(0.0, 0.0)]


def test_a_turn_within_a_turn_is_refused(queue: Queue) -> None:
    with in_turns("it"), pytest.raises(AssertionError, match="within a turn"), in_turns("another"):
        pass
