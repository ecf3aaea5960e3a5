"""What was only a warning, and what a job outlived: told from what ended it."""

from __future__ import annotations

import pytest

from explaining import report_of, traceback
from rallypoint.diagnose.explain import Explanation

pytestmark = pytest.mark.windows

_BANANA = "ValueError: the learning rate is a banana"
_CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:9952."
_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
_WARNED = "[W1115 14:36:19.1 socket.cpp:1] [c10d] EADDRINUSE on port 29500\n"
_WENT_ON = "".join(f"step {number} loss 0.5\n" for number in range(20))

_SILENT = "".join(f"{name}\n" for name in "abcdefghijklmnopqrst")
"""Lines that show neither a job at work nor its end."""


def _title(report: Explanation) -> str:
    return report.verdict.incident.title if report.verdict is not None else ""


@pytest.mark.parametrize(
    "line",
    [
        _WARNED,
        "2026-11-15 14:36:19 - WARNING - EADDRINUSE\n",
        "EADDRINUSE (ignored)\n",
    ],
)
def test_a_warning_is_a_notice_if_no_process_ended_badly(line: str) -> None:
    for log in (line, line + _WENT_ON):
        report = report_of(log)
        assert (report.verdict, report.suspects, report.found) == (None, (), False)
        assert [(told.title, told.role) for told in report.notices] == [("The port is taken", "notice")]


@pytest.mark.parametrize(
    "end",
    [
        "torch.x.ChildFailedError: \n",
        "E1115 14:36:20.1 7 torch/x.py:869] failed (exitcode: 1) local_rank: 0 (pid: 1) of binary: python\n",
        "Fatal Python error: Aborted\n",
        "rallypoint: rank 0 (process 7) ended with exit code 3\n",
        "srun: error: node-a: task 0: Exited with exit code 1\n",
        f"{_WARNED}[E1115 14:36:20.1 socket.cpp:1] [c10d] EADDRINUSE\n{_SILENT}",
    ],
)
def test_a_warning_is_the_cause_if_a_process_ended_badly(end: str) -> None:
    report = report_of(_WARNED + end)
    assert (_title(report), report.notices) == ("The port is taken", ())
    assert report.verdict is not None
    assert report.verdict.sure == "certain"


def test_the_warnings_of_nccl_are_errors() -> None:
    assert report_of("node-a:12:34 [0] NCCL WARN EADDRINUSE\n").found


@pytest.mark.parametrize("error", [_BANANA, _MEMORY, _CLOSED])
def test_errors_go_before_warnings(error: str) -> None:
    """What was warned of at the start, and went by, did not end the job hours later."""
    report = report_of(_WARNED + _WENT_ON + traceback(error, "[rank3]: "))
    assert report.verdict is not None
    assert report.verdict.incident.ranks == [3]
    assert [told.title for told in report.others] == ["The port is taken"]


def test_an_exception_is_no_warning_whatever_it_says() -> None:
    report = report_of(traceback("ValueError: EADDRINUSE, retrying"))
    assert _title(report) == "The port is taken"


def test_what_a_job_outlived_is_no_failure() -> None:
    """Steps after it show that it was caught; other lines only make it less sure that it ended anything."""
    for error in (traceback(_MEMORY), traceback(_BANANA), "EADDRINUSE\n"):
        ended, unclear = report_of(_WENT_ON + error), report_of(error + _SILENT)
        assert ended.verdict is not None
        assert unclear.verdict is not None
        assert ended.verdict.sure != "possible"
        assert unclear.verdict.sure == "possible"
        assert "nothing shows that a process ended badly" in unclear.verdict.reasons[-1]
        went_on = report_of(error + _WENT_ON)
        assert (went_on.found, [told.role for told in went_on.notices]) == (False, ["notice"])
    assert report_of(traceback(_BANANA, "[rank3]: ") + _WENT_ON).found  # nobody has caught that one
    assert report_of(
        traceback(_BANANA) + _WENT_ON + "srun: error: a: task 0: Exited with exit code 1\n"
    ).found


def test_a_traceback_in_a_warning_is_one() -> None:
    """A launcher that ends the others warns, too, but not of the exception below."""
    warned = f"2026-11-15 14:36:19 - WARNING - could not import x\n{traceback(_BANANA)}"
    assert not report_of(f"{warned}step 1 loss 0.5\n").found
    sent = f"2026-11-15 14:36:19 - WARNING - Sending process 7 closing signal SIGTERM\n{traceback(_BANANA)}"
    assert report_of(f"{sent}step 1 loss 0.5\n").found


def test_the_backtrace_of_an_error_belongs_to_it() -> None:
    frames = "".join(f"frame #{number}: c10::x() + 0x1\n" for number in range(40))
    report = report_of(f"RuntimeError: EADDRINUSE\nException raised from x at y.cpp:1\n{frames}")
    assert report.verdict is not None
    assert report.verdict.sure == "certain"


def test_one_log_shows_how_the_job_of_all_logs_ended() -> None:
    assert not report_of(_WARNED, _WENT_ON).found
    assert _title(report_of(_WARNED, "torch.x.ChildFailedError: \n")) == "The port is taken"
