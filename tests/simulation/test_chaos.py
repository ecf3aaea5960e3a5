"""A minute of the soak of `chaos.py`; and that its schedule and its checks are as they should be."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_plan import LAST, PASSING, Fault, Verdict, plan
from rallypoint.client.tcp import TCPStore
from raw import until

if sys.platform != "linux":
    pytest.skip("the soak needs network namespaces", allow_module_level=True)

import chaos
from chaos_job import what_is_missing
from chaos_rank import Rank, WrongAnswerError

_PROGRAM = [sys.executable, chaos.__file__]
_MISSING = what_is_missing()

needs_namespaces = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)


def test_a_seed_gives_the_same_faults_again_and_misses_none() -> None:
    assert plan(7, 3) == plan(7, 3) != plan(8, 3)
    faults = [fault for number in range(len(LAST) * len(PASSING)) for fault in plan(7, number)]
    assert {_card_of(fault) for fault in faults} == {
        (card.kind, card.victim, card.verdict) for card in (*PASSING, *LAST) if card is not None
    }


def _card_of(fault: Fault) -> tuple[str, str, Verdict]:
    is_rank = fault.victim.startswith("rank")
    return fault.kind, "rank" if is_rank else fault.victim, fault.verdict


def test_a_rank_notices_what_is_counted_twice() -> None:
    with TCPStore("127.0.0.1", 0, 1, True, 30) as store:
        rank = Rank(store, 0, 1)
        assert rank.take_step(0)
        store.add("total", 1)
        with pytest.raises(WrongAnswerError, match="the counter is 3, but should be 2"):
            rank.take_step(1)


def test_without_rights_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["chaos.py"])
    assert chaos.main() == 2
    assert (
        capsys.readouterr().err == "chaos: cannot be run here: network namespaces need the rights of root\n"
    )


def _namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return re.findall(rf"^rp{pid % 100_000}\w+", listed, re.MULTILINE)


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_faults(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    outcomes = tmp_path / "outcomes.json"
    command = [*_PROGRAM, "--seconds=60", "--seed=16", f"--json={outcomes}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment(files)
    )
    said, _ = process.communicate()
    assert process.returncode == 0, said
    found = json.loads(outcomes.read_text())["outcomes"]
    assert len(found) >= 6, said
    assert list(files.iterdir()) == []
    assert _namespaces_of(process.pid) == []


@needs_namespaces
@pytest.mark.slow
def test_told_to_end_it_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        _PROGRAM, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment(tmp_path)
    )
    try:
        until(lambda: bool(list(tmp_path.glob("chaos-*/job-*/rank-0"))), "a job runs", 90.0)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []
    assert _namespaces_of(process.pid) == []


def _environment(files: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(files)}
