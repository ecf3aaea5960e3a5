"""Whether a machine is fit to take part in a job."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from rallypoint.diagnose.doctor.checks import QUICK, judge_gpus, judge_room
from rallypoint.diagnose.findings import State
from rallypoint.launch import health

NOT_HERE = pytest.mark.skipif(sys.platform == "win32", reason="the tool is a shell script")


@pytest.mark.parametrize(
    ("code", "told", "is_loaded", "state"),
    [
        (0, "0, NVIDIA H200, 0\n1, NVIDIA H200, 0\n", True, State.OK),
        (0, "0, Tesla T4, [N/A]\n", True, State.OK),
        (0, "0, NVIDIA H200, 0\n1, NVIDIA H200, 2\n", True, State.FAILURE),
        (15, "Unable to determine the device handle for GPU 0000:4F:00.0\n", True, State.FAILURE),
        (9, "NVIDIA-SMI has failed\n", False, State.UNKNOWN),
        (6, "No devices were found\n", True, State.UNKNOWN),
        (0, "0, GeForce, [Not Supported]\n", True, State.OK),
    ],
    ids=["well", "without ECC", "errors", "one has fallen off", "no driver", "all are hidden", "no counter"],
)
def test_gpus(code: int, told: str, is_loaded: bool, state: State) -> None:
    assert judge_gpus(code, told, is_loaded=is_loaded).state is state


def test_room() -> None:
    assert judge_room("/x", 1 << 30).state is State.OK
    assert judge_room("/x", 1 << 20).state is State.FAILURE


def test_quick_checks_are_over_before_the_launcher_gives_up() -> None:
    assert max(each.seconds for each in QUICK) < health.SECONDS["quick"]


def put(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a tool for GPUs where it is found first."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@NOT_HERE
def test_a_machine_with_a_broken_gpu_is_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(health.SECONDS, "quick", 60.0)
    put(tmp_path, "echo '3, NVIDIA H200, 1'", monkeypatch)
    assert "could not be corrected: GPU 3 (NVIDIA H200): 1" in health.why_unfit("quick")


@NOT_HERE
def test_a_driver_that_hangs_makes_no_machine_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "exec sleep 9", monkeypatch)
    begun = time.monotonic()
    assert health.why_unfit("quick") == ""
    assert time.monotonic() - begun < 30
