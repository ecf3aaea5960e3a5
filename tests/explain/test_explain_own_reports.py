"""Structured reports are read as facts: those that Rallypoint prints today, and torchrun's table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rallypoint.cli.run import _JoinLine, _print_failure, _print_stall
from rallypoint.codec import to_text
from rallypoint.explain.events import FAILURES, Event, Kind, Process, Raised
from rallypoint.explain.lines import Line, Prefixes
from rallypoint.explain.reported import OwnReports, Tables, ended, failed, lost
from rallypoint.frames import Frame
from rallypoint.launch import reports
from rallypoint.launch.blame import Exit, Failure, LostServer, RankIdentity
from rallypoint.launch.options import RendezvousSettings
from rallypoint.launch.rendezvous.digest import RoundEnd
from rallypoint.launch.rendezvous.roster import Ending, Size
from rallypoint.launch.reports import JoinProgress, Reports
from rallypoint.launch.stacks.activity import MachineActivity, RankActivity
from rallypoint.launch.stacks.flight_recorder import Difference, as_events
from rallypoint.launch.stacks.progress import put_together
from rallypoint.launch.stacks.words import stall_lines

_LOGS = Path(__file__).parent / "logs" / "own"
_CLOSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:9952."
_TRACEBACK = """Traceback (most recent call last):
  File "/home/user/train.py", line 7, in load
    return table["labels"]
           ~~~~~^^^^^^^^^^
KeyError: 'labels'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/user/train.py", line 12, in <module>
    load({})
RuntimeError: the table has no labels"""


_WAITING = (
    Frame("/x/site-packages/torch/distributed/c10d.py", 9, "all_reduce"),
    Frame("train.py", 41, "train"),
)


def _read(text: str) -> tuple[list[Event], list[Line]]:
    """The facts of a log, and the lines that belong to no report."""
    own, tables, prefixes = OwnReports(0), Tables(0), Prefixes()
    events: list[Event] = []
    others = []
    for number, line in enumerate(map(prefixes.split, text.splitlines()), 1):
        is_taken, found = own.read(line, number)
        if not is_taken:
            is_taken, found_too = tables.read(line, number)
            found = [*found, *found_too]
        events += found
        others += [] if is_taken or not line.text.strip() else [line]
    return [*events, *own.close(), *tables.close()], others


def _only(text: str) -> Event:
    """The one fact of a text that is nothing but a report."""
    [event], others = _read(text)
    assert not others
    return event


def _failure(
    rank: int, message: str, kind: str = "RuntimeError", trace: str = "", program: str = ""
) -> Failure:
    who = RankIdentity("node-a", 100 + rank, rank, rank, 2, local_world_size=2)
    return Failure(who, 1.0 + rank, kind, message, trace or f"{kind}: {message}", program=program)


def _report(
    capsys: pytest.CaptureFixture[str],
    failures: list[Failure] | None = None,
    exits: list[Exit] | None = None,
    lost: list[LostServer] | None = None,
    stall: str = "",
) -> str:
    """What the launcher prints at the end of a job that has failed in this way."""
    with reports.new_folder() as folder:
        for failure in failures or []:
            name = f"failed-{failure.who.rank}-{failure.who.pid}.json"
            (folder / name).write_text(to_text(failure))
        reports.report_exits(exits or [], folder)
        reports.STALL.leave(stall, folder)
        _print_failure(Reports(folder), lost or [])
    return capsys.readouterr().err


def _stall() -> str:
    loading = (Frame("data.py", 88, "load_batch"), Frame("train.py", 33, "train"))
    ranks = (RankActivity(0, 1, _WAITING, 60.0), RankActivity(1, 2, loading, 60.0))
    return "\n".join(stall_lines(put_together([MachineActivity("node-a", ranks, world_size=2)])))


# The launcher's report of a failure -------------------------------------------------------------------------


def test_the_rank_that_failed_first_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    failures = [_failure(0, _CLOSED), _failure(1, "the table has no labels", trace=_TRACEBACK)]
    event = _only(_report(capsys, failures))
    assert (event.kind, event.process) == (Kind.EXCEPTION, Process(1, None, "node-a", 101))
    assert event.first
    assert event.raised is not None
    assert event.raised.headline == "RuntimeError: the table has no labels"
    assert str(event.raised.place) == "/home/user/train.py:12, in <module>"
    assert event.raised.earlier is not None
    assert event.raised.earlier.headline == "KeyError: 'labels'"
    assert not event.raised.handling


def test_a_rank_that_only_lost_another_one_is_not_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    event = _only(_report(capsys, [_failure(0, _CLOSED)]))
    assert (event.kind, event.process.rank, event.first) == (Kind.EXCEPTION, 0, False)


def test_an_error_of_the_launcher_itself(capsys: pytest.CaptureFixture[str]) -> None:
    message = "1 of 2 machines never connected\nhint: is the network memory of CUDA out of range?"
    event = _only(_report(capsys, [_failure(-1, message, "RendezvousTimeoutError")]))
    assert event.process == Process(None, None, "node-a", 99)
    assert event.headline == "RendezvousTimeoutError: 1 of 2 machines never connected"


@pytest.mark.parametrize(
    ("code", "kind"), [(-9, Kind.KILLED), (-11, Kind.KILLED), (3, Kind.ENDED), (0xC0000005, Kind.ENDED)]
)
def test_a_rank_that_ended_without_a_word(code: int, kind: Kind, capsys: pytest.CaptureFixture[str]) -> None:
    event = _only(_report(capsys, [_failure(0, _CLOSED)], [Exit(1, 101, code, 1.0, 1, "node-a")]))
    assert (event.kind, event.code, event.first) == (kind, code, True)
    assert event.process == Process(1, None, "node-a", 101)


@pytest.mark.parametrize("how", ["by signal SIGKILL", "with exit code 1"])
def test_a_server_that_is_gone(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    server = reports.lost_server("the job's store", 7, "node-a:29500", how)
    event = _only(_report(capsys, lost=[server]))
    assert (event.kind, event.first) == (Kind.KILLED if "SIG" in how else Kind.ENDED, True)
    assert event.process.pid == 7


def test_where_the_job_stood_still_before_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    failure = _failure(0, "timed out", "DistBackendError")
    (first, stall), others = _read(_report(capsys, [failure], stall=_stall()))
    assert not others
    assert (first.kind, stall.kind, stall.process.rank) == (Kind.EXCEPTION, Kind.STALL, 1)


def test_advice_is_no_clue() -> None:
    report = "rallypoint: rank 1 (process 5 on vm) ended by SIGKILL"
    advice = (
        "\n\nhint: it was killed from outside, most likely because the machine's memory ran out\n"
        "\ncause (certain): rank 1: Out of memory"
        "\ndo first: Ask the kernel: `dmesg -T | grep -i -E 'killed process|oom'`; kubectl (OOMKilled)."
        "\nwhole report: /tmp/out-of-memory.txt"
    )
    assert _only(report + advice).kind is Kind.KILLED


# Stalls, the start, and messages ----------------------------------------------------------------------------


def test_a_stall_names_the_odd_rank_and_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    _print_stall([*_stall().splitlines(), "see `rallypoint stacks localhost:29500`"])
    event = _only(capsys.readouterr().err)
    assert (event.kind, event.process.rank, event.process.host) == (Kind.STALL, 1, "node-a")
    assert "load_batch (data.py:88)" in event.text
    _print_stall(["the ranks go on"])
    assert _only(capsys.readouterr().err).kind is Kind.STEP


def test_the_rank_of_a_stall_is_the_first_of_those_that_are_elsewhere() -> None:
    waiting = [RankActivity(rank, rank + 1, _WAITING, 60.0) for rank in range(4)]
    odd = [RankActivity(4 + at, 9, (Frame("data.py", 80 + at, f"load_{at}"),), 60.0) for at in range(2)]
    for ranks, process in (([*waiting, *odd], Process(4, None, "node-a")), (waiting, Process())):
        work = put_together([MachineActivity("node-a", tuple(ranks), world_size=len(ranks))])
        event = _only("rallypoint: " + "\n".join(stall_lines(work)))
        assert (event.kind, event.process) == (Kind.STALL, process)
        assert ("load_0 (data.py:80)" in event.text) == bool(process)


def test_ranks_that_have_joined(capsys: pytest.CaptureFixture[str]) -> None:
    with reports.new_folder() as folder:
        for joined, absent, kind in ((1, "missing: rank 1 on b", Kind.BEGIN), (2, "", Kind.READY)):
            (folder / "roll.json").write_text(to_text(JoinProgress(joined, 2, absent)))
            line = _JoinLine(Reports(folder), from_start=True)
            line._began -= 31
            line.refresh()
            assert _only(capsys.readouterr().err).kind is kind


def test_a_new_attempt(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torch")
    from rallypoint.pytorch.plugin import RallypointHandler

    meeting = SimpleNamespace(size=Size(2, 2), conf=RendezvousSettings())
    handler = cast(RallypointHandler, SimpleNamespace(_meeting=meeting, restarts_left=1))
    for first in (None, Ending("rank 1 (process 5 on node-a) failed first: KeyError: 'out of memory'")):
        RallypointHandler._announce_restart(handler, 0, RoundEnd(first, complete=True, present=2))
    told = [each for each in caplog.messages if "attempt" in each]  # torch logs there as well
    assert [_only(each).kind for each in told] == [Kind.RESTART, Kind.RESTART]


def test_a_message_with_a_hint_is_an_error() -> None:
    event = _only("rallypoint: a.toml holds no table\n\nhint: begin it with [run]")
    assert (event.kind, event.text) == (Kind.ERROR, "a.toml holds no table")
    assert _read("rallypoint: warning: no memory\n\nstep 3\nhint: none of ours")[0] == []


def test_what_others_print_stays_theirs() -> None:
    text = (
        "rallypoint: 2 of 2 ranks have joined after 3.0 s\n"
        '  File "train.py", line 3, in step\n'
        "KeyError: 1\n"
        "rallypoint: rank 1 (process 5 on vm) ended by SIGKILL\n"
        '[rank0]:   File "train.py", line 3\n'
        "causes: unknown"
    )
    assert [line.text.strip()[:4] for line in _read(text)[1]] == ["File", "KeyE", "File", "caus"]


# torchrun ---------------------------------------------------------------------------------------------------

_TABLE = """failed (exitcode: -9) local_rank: 1 (pid: 901) of binary: /usr/bin/python
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-15_14:45:26
  host      : node-a
  rank      : 4 (local_rank: 0)
  exitcode  : -15 (pid: 900)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 900
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-15_14:45:26
  host      : node-a
  rank      : 5 (local_rank: 1)
  exitcode  : -9 (pid: 901)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 901
============================================================"""


def test_torchruns_table() -> None:
    (agent, other, root), others = _read(_TABLE)
    assert [line.text[:3] for line in others] == ["==="]
    assert (agent.code, agent.first, agent.process) == (-9, True, Process(None, 1, None, 901))
    assert (other.code, other.first, other.process) == (-15, False, Process(4, None, "node-a", 900))
    assert (root.kind, root.code, root.first) == (Kind.KILLED, -9, True)
    assert root.process == Process(5, None, "node-a", 901)


def test_a_row_with_a_traceback_is_its_exception() -> None:
    (_, cause), others = _read((_LOGS / "recorded.log").read_text().split("ChildFailedError:")[1])
    assert {line.text[0] for line in others} == {"="}
    assert (cause.kind, cause.code, cause.first, cause.process.rank) == (Kind.EXCEPTION, 1, True, 1)
    assert cause.raised is not None
    assert cause.raised.headline == "RuntimeError: the table has no labels"
    assert [each.name for each in cause.raised.chain] == ["KeyError", "RuntimeError"]


# Real jobs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("killed", [(Kind.KILLED, None, "exitcode: -9"), (Kind.KILLED, 1, "SIGKILL")]),
        ("hang", [(Kind.STALL, 1, "load_batch (hang.py:7)")]),
        ("success", []),
        ("value-error", [(Kind.ENDED, None, "exitcode: 1"), (Kind.EXCEPTION, 1, "learning rate 3.0 is out")]),
        ("nproc", [(Kind.EXCEPTION, None, "ValueError: Unsupported nproc_per_node value: gpuu")]),
        ("secret-malformed", [(Kind.ERROR, None, "RALLYPOINT_SECRET")]),
        ("secret-server", [(Kind.ERROR, None, "another secret"), (Kind.TOLD, None, "interrupted")]),
        ("secret-client", [(Kind.EXCEPTION, None, "it does not prove that it has this job's secret")]),
    ],
)
def test_the_failures_in_the_log_of_a_real_job(
    name: str, expected: list[tuple[Kind, int | None, str]]
) -> None:
    events, _ = _read((_LOGS / f"{name}.log").read_text())
    failures = [each for each in events if each.kind in FAILURES]
    assert [(each.kind, each.process.rank) for each in failures] == [row[:2] for row in expected]
    assert all(row[2] in each.headline for row, each in zip(expected, failures, strict=True))


# A launcher's own records -----------------------------------------------------------------------------------


def test_what_a_launcher_states() -> None:
    event = failed(Process(1), "RuntimeError", "the table has no labels", _TRACEBACK, 2.0)
    assert event.headline == "RuntimeError: the table has no labels"
    assert event.raised is not None
    assert [each.name for each in event.raised.chain] == ["KeyError", "RuntimeError"]
    assert failed(Process(1), "OSError", "a\nb", "cut", 2.0).raised == Raised("OSError", "a", 0, ("b",))
    assert ended(Process(1), -9, 2.0).kind is Kind.KILLED
    assert ended(Process(1), 3, 2.0).text == "ended with exit code 3"
    assert lost("the job's store has ended by signal SIGKILL", 2.0).is_failure


def test_ranks_that_the_flight_recorder_shows_apart() -> None:
    missing = Difference("missing", "0 default_pg", 7, (("all_reduce", (0,), "train.py, line 4"),), (1, 3), 0)
    assert [(each.kind, each.process.rank) for each in as_events([missing])] == [
        (Kind.STALL, 1),
        (Kind.STALL, 3),
    ]
    calls = (("broadcast", (2,), "train.py, line 9"), ("all_reduce", (0, 1), "train.py, line 4"))
    [event] = as_events([Difference("differs", "0 default_pg", 7, calls, (), 0)])
    assert event.process.rank == 2
    assert "train.py, line 9" in event.text
    [event] = as_events([Difference("unfinished", "0 default_pg", 7, calls[1:], (), 0)])
    assert (event.is_failure, event.process.rank) == (True, None)
    assert "does not end" in event.text
