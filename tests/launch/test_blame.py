"""Who failed first: told from reports alone, in whatever order they come."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from processes import hand_over
from rallypoint.explain.verdict import judge
from rallypoint.launch import reports
from rallypoint.launch.blame import Exit, Failure, LostServer, RankIdentity, find_blame
from rallypoint.launch.handover import VARIABLE
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
        assert Reports(folder).roll() == JoinProgress(1, 4, f"missing: 0, 2 and 3 on {socket.gethostname()}")


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
