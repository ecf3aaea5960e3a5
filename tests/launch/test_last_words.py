"""The last lines of a failed job: about the process that is blamed, or nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rallypoint.launch.blame import Exit, Failure, LostServer, RankIdentity, find_blame
from rallypoint.launch.last_words import explain_failure, last_words, logs_since, place_of_report

_CLOSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:9952. This is typically caused by ..."
_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB."
_SECONDS = 150


def _failure(rank: int, moment: float, message: str, kind: str = "RuntimeError") -> Failure:
    who = RankIdentity("node-a", 100 + rank, rank, rank, 2, local_world_size=2)
    frame = 'Traceback (most recent call last):\n  File "train.py", line 7, in step\n    x\n'
    return Failure(who, moment, kind, message, f"{frame}{kind}: {message}")


def _words(failures: list[Failure], exits: list[Exit], files: list[Path]) -> list[str]:
    blame = find_blame(failures, exits)
    assert blame is not None
    found = explain_failure(blame, files)
    return last_words(found, "here") if found is not None else []


def test_an_error_of_the_users_own_gets_its_line_and_no_guess() -> None:
    lost = _failure(0, 1.0, _CLOSED)
    for message in ("learning rate 3.0 is out of range [0, 1]", "index 7 is bad", "no CUDA in this table"):
        assert _words([lost, _failure(1, 2.0, message, "ValueError")], [], []) == [
            "do first: Look at train.py:7, in step",
            "whole report: here",
        ]


def test_a_known_cause_has_a_title_and_advice() -> None:
    cause, action, report = _words([_failure(1, 2.0, _MEMORY, "OutOfMemoryError")], [], [])
    assert re.match("cause: .*memory", cause)
    assert action.startswith("do first: ")
    assert report == "whole report: here"


def test_what_only_followed_is_no_cause() -> None:
    assert _words([_failure(0, 1.0, _CLOSED)], [], []) == []


def test_nothing_is_said_where_nothing_more_is_known() -> None:
    lost = [_failure(0, 1.0, _CLOSED)]
    assert _words(lost, [Exit(1, 101, 3, 1.0, 1)], []) == [], "the exit code says nothing"
    blame = find_blame(lost, [], [LostServer("the job's store", "has ended by signal SIGKILL", 0.5)])
    assert blame is not None
    assert explain_failure(blame) is None, "the ranks' words are no cause of a server's end"


def test_a_killed_rank_gets_no_certain_cause() -> None:
    blame = find_blame([_failure(0, 1.0, _CLOSED)], [Exit(1, 101, -9, 1.0, 1)])
    assert blame is not None
    assert "dmesg" in blame.hint
    found = explain_failure(blame)
    assert found is None or "ran out" not in "".join(last_words(found, ""))


def test_an_error_of_the_launcher_gets_no_guess() -> None:
    who = RankIdentity("node-a", 7, -1, -1, -1)
    trace = (
        'Traceback (most recent call last):\n  File "/x/site-packages/torch/distributed/run.py", line 7, in f'
        "\n    raise ValueError(x)\nValueError: Unsupported nproc_per_node value: gpuu"
    )
    message = "Unsupported nproc_per_node value: gpuu"
    blame = find_blame([Failure(who, 1.0, "ValueError", message, trace)], [])
    assert blame is not None
    found = explain_failure(blame)
    assert found is None or "CUDA_VISIBLE" not in "".join(last_words(found, ""))


def test_files_tell_of_a_rank_that_reported_nothing(tmp_path: Path) -> None:
    run = tmp_path / "logs" / "none_abc"
    old = tmp_path / "logs" / "none_old" / "attempt_0" / "1" / "stderr.log"
    thrown = "terminate called after throwing an instance of 'c10::Error'\n  what():  "
    for rank, text in enumerate(("all is well\n", f"{thrown}CUDA error: device-side assert triggered\n")):
        path = run / "attempt_0" / str(rank) / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    old.parent.mkdir(parents=True)
    old.write_text("CUDA error: out of memory\n")
    os.utime(old, (1.0, 1.0))
    files = logs_since(tmp_path / "logs", time.time() - 60)
    assert [path.parts[-2:] for path in files] == [("0", "stderr.log"), ("1", "stderr.log")]
    blame = find_blame([_failure(0, 1.0, _CLOSED)], [Exit(1, 101, -6, 1.0, 1)])
    assert blame is not None
    found = explain_failure(blame, files)
    assert found is not None
    assert "index" in last_words(found, "")[0]
    assert place_of_report(found, files) == f"rallypoint explain {run}"


def test_reports_are_kept_for_a_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    blame = find_blame([_failure(1, 2.0, "'labels'", "KeyError")], [])
    assert blame is not None
    found = explain_failure(blame)
    assert found is not None
    first = Path(place_of_report(found, []))
    os.utime(first, (1.0, 1.0))
    second = Path(place_of_report(found, []))
    assert list(tmp_path.iterdir()) == [second]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))
    assert place_of_report(found, []) == ""


# Real jobs -------------------------------------------------------------------------------------------------

_JOIN = "import datetime, os, signal, socket, time\nimport torch, torch.distributed as dist\n"
_INIT = f"{_JOIN}dist.init_process_group('gloo')\nrank = dist.get_rank()\n"

# A script of two ranks, options, and patterns for the last line of the report and those that follow it.
JOBS = {
    "port": (
        f"{_JOIN}if os.environ['RANK'] == '1': time.sleep(600)\n"
        "held = socket.socket(); held.bind(('127.0.0.1', 0)); held.listen()\n"
        "dist.TCPStore('127.0.0.1', held.getsockname()[1], 2, True)\n",
        (),
        r"cause: .*[Pp]ort.*\ndo first: .*port",
    ),
    "variable": (
        f"{_JOIN}if os.environ['RANK'] == '1': del os.environ['MASTER_ADDR']\n"
        "dist.init_process_group('gloo')\n",
        (),
        r"cause: .*variable.*\ndo first: ",
    ),
    "own": (
        f"{_INIT}if rank == 1: {{}}['labels']\ndist.all_reduce(torch.ones(1))\n",
        (),
        r"\n\ndo first: Look at \S+own.py:5, in <module>\n",
    ),
    "killed": (
        f"{_INIT}if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(torch.ones(1))\n",
        (),
        r"ended by SIGKILL\n[\s\S]*\nhint: .*dmesg",
    ),
    "sizes": (
        f"{_INIT}dist.all_reduce(torch.ones(4 + 4 * rank))\n",
        ("--log-dir=logs", "--redirects=3"),
        r"cause: .*\ndo first: ",
    ),
    "barrier": (
        f"{_JOIN}dist.init_process_group('gloo')\n"
        "group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))\n"
        "if dist.get_rank() == 1: time.sleep(600)\n"
        "dist.barrier(group)\n",
        (),
        r"failed first: ",
    ),
}


def _run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node=2", *words],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_fails_says_why_and_what_to_do(name: str, tmp_path: Path) -> None:
    script, options, pattern = JOBS[name]
    (tmp_path / f"{name}.py").write_text(script)
    said = _run(tmp_path, *options, f"{name}.py")
    assert re.search(pattern, said), said
    place = said.rpartition("whole report: ")[2].strip() if "\nwhole report: " in said else ""
    assert not options or place.startswith("rallypoint explain logs/"), said
    assert options or not place or Path(place).exists()


def test_a_known_cause_is_explained_unless_nobody_wants_to_know(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nraise OSError(28, os.strerror(28))\n")
    lines = _run(tmp_path, "train.py").splitlines()[-3:]
    assert re.match(r"cause: .*disk", lines[0])
    assert lines[1].startswith("do first: ")
    assert Path(lines[2].removeprefix("whole report: ")).exists()
    said = _run(tmp_path, "--no-explain", "train.py")
    assert "failed first: OSError" in said
    assert "do first: " not in said
