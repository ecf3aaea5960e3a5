"""Machines that wait for the place of one that is lost or not fit: real launchers, on this machine."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

from jobs import Job, free_port, job
from rallypoint.rollcall.judgement import judge
from rallypoint.rollcall.plan import JobRound
from rallypoint.rollcall.question import Question
from rallypoint.stores.client.deadline import Deadline
from rallypoint.stores.client.look import look
from raw import until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="launchers are told to go by SIGTERM")

WORK = """
import os, sys, time
os.write(1, f"round {os.environ['GROUP_RANK']} of {os.environ['GROUP_WORLD_SIZE']}\\n".encode())
while not os.path.exists("over"):
    time.sleep(0.05)
"""
"""A rank that works until the test says that the job is over."""

GPU_WITH_ERRORS = """#!/bin/sh
echo '0, NVIDIA H200, 0'
echo '1, NVIDIA H200, 3'
"""


def start(running: Job, port: int, conf: str = "", path: str = "") -> None:
    """One more launcher of a job of two machines and a spare one."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=rallypoint", "--rdzv-id=job"]
    options += [f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf=spares=1,join_timeout=60{conf}"]
    running.start(WORK, options, {"RALLYPOINT_PATCH": "never", **({"PATH": path} if path else {})})


def meeting(port: int) -> JobRound:
    """The round of the job that meets at a port."""
    found = judge(look("localhost", port, Question(), Deadline(10.0))).meetings
    return found[0] if found else JobRound("", 0, -1, ())


def test_a_spare_takes_the_place_of_a_machine_that_goes(tmp_path: Path) -> None:
    port = free_port()
    with job(tmp_path) as running:
        start(running, port, ",health=off")
        running.await_listening(f"localhost:{port}")
        start(running, port, ",health=off")
        running.await_text("of 2", 0)
        running.await_text("of 2", 1)
        for _ in range(2):
            start(running, port, ",health=off")
        until(lambda: len(meeting(port).spares + meeting(port).waiting) == 2, "two more wait", 60)
        assert (len(meeting(port).spares), len(meeting(port).waiting)) == (1, 1)
        running.agents[1].send_signal(signal.SIGTERM)
        until(lambda: meeting(port).round == 1 and meeting(port).store, "the next round is complete", 60)
        running.await_text("of 2", 0, 2)
        (tmp_path / "over").touch()
        codes = running.wait()
        assert codes[0] == 0, running.logs()
        assert sorted(codes[2:]) == [0, 0], running.logs()
        assert running.logs().count("this spare machine was not needed") == 1
        assert "Traceback" not in running.log(2) + running.log(3)


@pytest.mark.slow
def test_a_launcher_whose_agent_is_killed_says_so_at_once(tmp_path: Path) -> None:
    """The signs of life would take an hour."""
    port = free_port()
    options = ["--nnodes=2", "--spares=1", "--health=off", "--nproc-per-node=1", "--rdzv-id=job"]
    options += [f"--rdzv-endpoint=localhost:{port}", "--rdzv-conf=keep_alive_interval=1000"]
    command = ("-m", "rallypoint", "run")
    with job(tmp_path) as running:
        running.start(WORK, options, command=command)
        running.await_listening(f"localhost:{port}")
        running.start(WORK, options, command=command)
        running.await_text("of 2", 0)
        running.start(WORK, options, command=command)
        until(lambda: meeting(port).spares, "the spare one waits", 60)
        (agent,) = [
            each
            for each in psutil.Process(running.agents[1].pid).children()
            if "rallypoint.pytorch.agent" in each.cmdline()
        ]
        agent.kill()
        running.await_text("of 2", 2)
        (tmp_path / "over").touch()
        codes = running.wait()
        assert (codes[0], codes[2]) == (0, 0), running.logs()


@pytest.mark.slow
def test_a_machine_that_is_not_fit_stays_out_and_a_spare_takes_its_place(tmp_path: Path) -> None:
    port = free_port()
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(GPU_WITH_ERRORS)
    (tools / "nvidia-smi").chmod(0o755)
    with job(tmp_path) as running:
        start(running, port, ",health=off")
        running.await_listening(f"localhost:{port}")
        start(running, port, ",health=full", f"{tools}:/usr/bin:/bin")
        until(lambda: meeting(port).sick, "it says that it is not fit", 60)
        start(running, port, ",health=off")
        running.await_text("of 2", 0)
        running.await_text("of 2", 2)
        (reason,) = meeting(port).sick
        assert "could not be corrected: GPU 1 (NVIDIA H200): 3" in reason
        assert running.agents[1].poll() is None, "it stays as long as the job may need its machine"
        (tmp_path / "over").touch()
        codes = running.wait()
        assert (codes[0], codes[2]) == (0, 0)
        assert codes[1] != 0
        assert "stays out of the job: errors of memory" in running.log(1)
        assert "is not fit: errors of memory" in running.log(0)
