"""Who failed first: told from reports alone, in whatever order they come."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from processes import hand_over
from rallypoint.explain.verdict import judge
from rallypoint.launch import reports
from rallypoint.launch.blame import Exit, Failure, LostServer, RankIdentity, find_blame
from rallypoint.launch.handover import VARIABLE
from rallypoint.launch.last_words import explain_failure, last_words, logs_since, place_of_report
from rallypoint.launch.reports import JoinProgress, Reports

_CLOSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:9952. This is typically caused by ..."


def _failure(rank: int, time: float, message: str, kind: str = "RuntimeError", tries: int = 0) -> Failure:
    who = RankIdentity("node-a", 100 + rank, rank, rank, 4, local_world_size=4, tries=tries)
    return Failure(who, time, kind, message, f"Traceback\n{kind}: {message}")


def _exit(rank: int, time: float, code: int) -> Exit:
    return Exit(rank, 100 + rank, code, time)


def test_nobody_is_blamed_for_nothing() -> None:
    assert find_blame([], []) is None
    assert find_blame([], [_exit(0, 1.0, -signal.SIGTERM)]) is None
    assert find_blame([], [_exit(0, 1.0, 0xC000013A)]) is None, "Ctrl-C, on Windows"


def test_the_first_failure_is_the_cause() -> None:
    failures = [_failure(2, 1.0, "a"), _failure(0, 2.0, "b")]
    blame = find_blame(failures, [])
    assert blame is not None
    assert blame.headline == "rank 2 (process 102 on node-a) failed first: RuntimeError: a"
    assert blame.followers(failures) == ["rank 0 (process 100 on node-a): RuntimeError"]
    assert blame.cause is not None
    assert blame.cause.message == "a"


def test_a_store_that_died_is_the_cause_of_lost_connections_and_of_what_came_later() -> None:
    lost = LostServer("the job's store (process 7 on node-a)", "has ended by signal SIGKILL", 2.0)
    followed = _failure(0, 1.9, _CLOSED)
    for failures in ([followed], [followed, _failure(1, 3.0, "the key is missing")]):
        blame = find_blame(failures, [], [lost])
        assert blame is not None
        assert blame.headline == "the job's store (process 7 on node-a) has ended by signal SIGKILL"
        assert len(blame.followers(failures)) == len(failures)
        assert "memory" in blame.hint
    blame = find_blame([_failure(1, 1.0, "bad"), followed], [], [lost])
    assert blame is not None
    assert blame.headline.startswith("rank 1 ")


LOST = [
    _CLOSED,
    'Failed to check the "should dump" flag on TCPStore',
    "sendBytes failed on SocketImpl(fd=3): Broken pipe",
    "Failed to recv, got 0 bytes",
    "NCCL error: remote process exited or there was a network error",
]
_BAD = _failure(3, 2.0, "bad", "ValueError")
_NOBODY_CAME = _failure(-1, 9.0, "1 of 2 machines came", "RendezvousTimeoutError")

# Failures and exits, and whom the headline names.
BLAMED: list[tuple[list[Failure], list[Exit], str]] = [
    *(([_failure(0, 1.0, message), _BAD], [], "rank 3 ") for message in LOST),
    ([_failure(1, 1.0, _CLOSED), _failure(0, 2.0, _CLOSED)], [], "rank 1 "),  # all only followed
    ([_BAD], [_exit(1, 3.0, -6)], "rank 3 "),
    ([_failure(1, 100.2, "bad")], [_exit(0, 100.0, -6)], "rank 1 "),  # torchrun notes whole seconds
    ([_failure(1, 1.0, _CLOSED, tries=1), _NOBODY_CAME], [], "the launcher "),
    ([_failure(1, 1.0, "of the first try"), _failure(0, 9.0, "of the second", tries=1)], [], "rank 0 "),
]


def test_the_cause_is_told_from_what_followed() -> None:
    for failures, exits, who in BLAMED:
        blame = find_blame(failures, exits)
        assert blame is not None
        assert blame.headline.startswith(who), failures


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (-9, "ended by SIGKILL"),
        (-11, "ended by SIGSEGV"),
        (3, "exit code 3"),
        (3221225477, "exit code 3221225477 (0xC0000005, access violation)"),
    ],
)
def test_a_rank_that_died_without_a_word_is_the_cause(code: int, how: str) -> None:
    exits = [_exit(1, 1.0, code), _exit(0, 3.0, 1), _exit(2, 3.0, -signal.SIGTERM)]
    failures = [_failure(0, 2.0, _CLOSED)]
    blame = find_blame(failures, exits)
    assert blame is not None
    assert blame.headline.startswith("rank 1 ")
    assert how in blame.headline
    assert blame.hint
    assert blame.followers(failures) == ["rank 0 (process 100 on node-a): RuntimeError"]


KNOWN = [
    ("CUDA out of memory. Tried to allocate 20 GiB", "OutOfMemoryError", True),
    ("No module named 'banana'", "ModuleNotFoundError", False),
    ("use_libuv was requested but PyTorch was built without libuv support", "DistStoreError", True),
    ("wait timeout after 300000ms, keys: /x", "DistStoreError", True),
    ("port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: x", "DistNetworkError", True),
    ("anything else", "ValueError", False),
]


def test_what_to_do_is_in_the_knowledge_base() -> None:
    for message, kind, known in KNOWN:
        blame = find_blame([_failure(0, 1.0, message, kind)], [])
        assert blame is not None
        assert blame.cause is not None
        assert blame.hint == ""
        verdict = judge([blame.event], []).verdict
        assert verdict is not None
        assert (verdict.event.match is not None) == known, message


# The reports themselves ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hand_over(monkeypatch, tmp_path)
    return tmp_path


def test_ranks_that_join_are_counted_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Reports(folder).roll() == JoinProgress(0, 0)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for rank in ("0", "2", "2"):
        monkeypatch.setenv("RANK", rank)
        reports.report_joined()
    assert Reports(folder).roll() == JoinProgress(2, 3)


def test_of_the_ranks_of_a_machine_those_that_are_missing_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "0"}
    for rank, local_rank in (("4", "0"), ("6", "2")):
        for name, value in {**environ, "RANK": rank, "LOCAL_RANK": local_rank}.items():
            monkeypatch.setenv(name, value)
        reports.report_joined()
    missing = f"missing: 5 and 7 on {socket.gethostname()}"
    assert Reports(folder).roll() == JoinProgress(2, 4, missing, whole=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    reports.report_joined()
    assert Reports(folder).roll().joined == 1, "who joined an earlier try has not joined this one"


def test_a_launcher_that_does_not_say_how_many_ranks_are_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are all of them, where the store is on loopback; else it is not known."""
    for name, value in {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    for store in ("node-a:29500", "10.0.0.1:29500", ""):
        reports.report_joined(store)
        assert Reports(folder).roll().expected == 0, store
    for store in ("localhost:29500", "127.0.0.1:29500", "[::1]:29500"):
        reports.report_joined(store)
        missing = f"missing: 0, 2 and 3 on {socket.gethostname()}"
        assert Reports(folder).roll() == JoinProgress(1, 4, missing, store=store)


def test_who_is_no_rank_does_not_join(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    reports.report_joined()
    assert list(folder.iterdir()) == []


def test_the_roll_of_the_whole_job_goes_first(folder: Path) -> None:
    reports.ROLL.leave(JoinProgress(5, 8, "missing: 3 and 7 on node-b"))
    assert Reports(folder).roll() == JoinProgress(5, 8, "missing: 3 and 7 on node-b")
    assert not Reports(folder).roll().complete


def test_failures_come_in_the_order_of_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, moment in (("1", 20.0), ("0", 10.0)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr("time.time", lambda moment=moment: moment)
        assert not reports.report_failure(ValueError, ValueError(f"of {rank}"), None)
    assert [failure.message for failure in Reports(folder).failures()] == ["of 0", "of 1"]


@pytest.mark.parametrize("kind", ["ChildFailedError", "SignalException", "RendezvousTimeoutError"])
def test_the_launcher_speaks_for_torchruns_agent(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    error_type = type(kind, (Exception,), {"failures": {}})
    assert not reports.report_failure(error_type, error_type("why"), None)
    program = SimpleNamespace(name="rallypoint.pytorch.agent")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", program)
    assert reports.report_failure(error_type, error_type("why"), None)
    told = [failure.headline for failure in Reports(folder).failures()]
    assert told == (["RendezvousTimeoutError: why"] if kind == "RendezvousTimeoutError" else [])


def test_a_broken_report_is_left_out(folder: Path) -> None:
    (folder / "failed-0-1.json").write_text("{")
    assert Reports(folder).failures() == []


def test_a_folder_that_is_not_there_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    hand_over(monkeypatch, folder / "on another machine")
    reports.report_joined()


def test_nobody_asked_nothing_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.chdir(tmp_path)
    reports.report_joined()
    assert list(tmp_path.iterdir()) == []


# The last lines of a failed job: about the process that is blamed, or nothing -------------------------------

_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB."
_SECONDS = 150


def _traced(rank: int, moment: float, message: str, kind: str = "RuntimeError") -> Failure:
    who = RankIdentity("node-a", 100 + rank, rank, rank, 2, local_world_size=2)
    frame = 'Traceback (most recent call last):\n  File "train.py", line 7, in step\n    x\n'
    return Failure(who, moment, kind, message, f"{frame}{kind}: {message}")


def _words(failures: list[Failure], exits: list[Exit], files: list[Path]) -> list[str]:
    blame = find_blame(failures, exits)
    assert blame is not None
    found = explain_failure(blame, files)
    return last_words(found, "here") if found is not None else []


def test_an_error_of_the_users_own_gets_its_line_and_no_guess() -> None:
    lost = _traced(0, 1.0, _CLOSED)
    for message in ("learning rate 3.0 is out of range [0, 1]", "index 7 is bad", "no CUDA in this table"):
        assert _words([lost, _traced(1, 2.0, message, "ValueError")], [], []) == [
            "do first: Look at train.py:7, in step",
            "whole report: here",
        ]


def test_a_known_cause_has_a_title_and_advice() -> None:
    cause, action, report = _words([_traced(1, 2.0, _MEMORY, "OutOfMemoryError")], [], [])
    assert re.match("cause: .*memory", cause)
    assert action.startswith("do first: ")
    assert report == "whole report: here"


def test_what_only_followed_is_no_cause() -> None:
    assert _words([_traced(0, 1.0, _CLOSED)], [], []) == []


def test_nothing_is_said_where_nothing_more_is_known() -> None:
    lost = [_traced(0, 1.0, _CLOSED)]
    assert _words(lost, [Exit(1, 101, 3, 1.0, 1)], []) == [], "the exit code says nothing"
    blame = find_blame(lost, [], [LostServer("the job's store", "has ended by signal SIGKILL", 0.5)])
    assert blame is not None
    assert explain_failure(blame) is None, "the ranks' words are no cause of a server's end"


def test_a_killed_rank_gets_no_certain_cause() -> None:
    blame = find_blame([_traced(0, 1.0, _CLOSED)], [Exit(1, 101, -9, 1.0, 1)])
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
    blame = find_blame([_traced(0, 1.0, _CLOSED)], [Exit(1, 101, -6, 1.0, 1)])
    assert blame is not None
    found = explain_failure(blame, files)
    assert found is not None
    assert "index" in last_words(found, "")[0]
    assert place_of_report(found, files) == f"rallypoint explain {run}"


def test_reports_are_kept_for_a_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    blame = find_blame([_traced(1, 2.0, "'labels'", "KeyError")], [])
    assert blame is not None
    found = explain_failure(blame)
    assert found is not None
    first = Path(place_of_report(found, []))
    os.utime(first, (1.0, 1.0))
    second = Path(place_of_report(found, []))
    assert list(tmp_path.iterdir()) == [second]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))
    assert place_of_report(found, []) == ""


# Real jobs that fail ------------------------------------------------------------------------------------

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
    pytest.importorskip("torch", reason="torchrun is needed")
    (tmp_path / "train.py").write_text("import os\nraise OSError(28, os.strerror(28))\n")
    lines = _run(tmp_path, "train.py").splitlines()[-3:]
    assert re.match(r"cause: .*disk", lines[0])
    assert lines[1].startswith("do first: ")
    assert Path(lines[2].removeprefix("whole report: ")).exists()
    said = _run(tmp_path, "--no-explain", "train.py")
    assert "failed first: OSError" in said
    assert "do first: " not in said
