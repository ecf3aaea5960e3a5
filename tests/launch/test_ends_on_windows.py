"""How ranks end on Windows, told by values: the system itself is in tests/windows."""

from __future__ import annotations

import ctypes
import io
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from rallypoint.pytorch.agent import _close_rank
from rallypoint.store.machine.lifetime import children_end_with_us


class _Rank:
    """What torchrun has of a rank: its process, and the files with what it prints."""

    def __init__(self) -> None:
        self.ends = 0
        self.proc = self
        self._stdout = io.StringIO()
        self._stderr = None

    def terminate(self) -> None:
        self.ends += 1


def test_a_rank_has_time_after_ctrl_c_and_is_then_ended() -> None:
    rank = _Rank()
    _close_rank(rank, signal.SIGINT)
    assert (rank.ends, rank._stdout.closed) == (0, False)
    _close_rank(rank, 0)  # CTRL_C_EVENT, by which torchrun would end it
    assert (rank.ends, rank._stdout.closed) == (1, True)


class _Kernel:
    """Windows' own functions: all succeed, and the flags of the job are noted."""

    def __init__(self) -> None:
        self.flags: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*args: Any) -> int:
            if name == "SetInformationJobObject":
                self.flags.append(args[2]._obj[2])
            return 1

        setattr(self, name, function)
        return function


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_launcher_started_runs_on_only_after_its_orderly_end(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = _Kernel()
    monkeypatch.setattr(ctypes, "WinDLL", lambda *_, **__: kernel, raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError) if fails else nullcontext(), children_end_with_us():
        if fails:
            raise RuntimeError("the launcher failed")
    assert kernel.flags == ([0x2000] if fails else [0x2000, 0])
