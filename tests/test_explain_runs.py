"""Several runs in one log, such as nohup writes it: the last one counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explaining import CAUSES, log_of_text, traceback
from rallypoint.diagnose.explain import Explanation, explain
from rallypoint.diagnose.explain.words import as_json, as_text

pytestmark = pytest.mark.windows

_OPENING = "2026-11-15 14:36:19 Starting on port 29500\nReading the settings\n"
_STEPS = "".join(f"step {number} loss 0.{number}\n" for number in range(1, 7))
_ENDS = {
    "an exception": traceback("ValueError: the learning rate is a banana"),
    "after steps": _STEPS + traceback("KeyError: 'colour'"),
    "memory": traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    "an option": "train.py: error: unrecognized arguments: --colour\n",
    "a signal": "./train.sh: line 7: 4711 Killed                  python train.py\n",
    "another rank": "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:9952\n",
    "a hang": "Connecting to the others\n",
    "at work": _STEPS,
    "done": _STEPS + "Training finished\n",
}
_FAIL = tuple(name for name in _ENDS if name not in ("a hang", "at work", "done"))


def _explained(text: str) -> Explanation:
    return explain([log_of_text(text)])


def _told(report: Explanation) -> tuple[str, str] | None:
    if report.verdict is None:
        return None
    return report.verdict.incident.headline, report.verdict.incident.role


@given(st.lists(st.sampled_from(_FAIL), min_size=1), st.sampled_from([*_FAIL, "at work", "done"]))
def test_what_is_said_is_said_of_the_last_run(earlier: list[str], last: str) -> None:
    runs = [_OPENING + _ENDS[name] for name in (*earlier, last)]
    alone, all_runs = _explained(runs[-1]), _explained("".join(runs))
    assert (_told(all_runs), all_runs.found) == (_told(alone), alone.found)
    if alone.verdict is not None and all_runs.verdict is not None:
        before = sum(run.count("\n") for run in runs[:-1])
        assert all_runs.verdict.incident.first.line == before + alone.verdict.incident.first.line
        assert all_runs.attempts == len(runs)
    assert as_json(all_runs)["logs"] == ["log"]
    assert as_json(all_runs)["lines"] == sum(run.count("\n") for run in runs)


def test_the_failures_of_earlier_runs_are_told_beside_it() -> None:
    text = as_text(_explained(_OPENING + _ENDS["an exception"] + _OPENING + _ENDS["memory"]))
    assert "Other tries (the above is of try 2 of 2)\n  try 1: ValueError: the learning rate" in text
    well = _explained(_OPENING + _ENDS["an exception"] + _OPENING + _ENDS["done"])
    assert [told.headline for told in well.notices] == ["ValueError: the learning rate is a banana"]


def test_what_is_told_of_a_failure_is_what_the_last_run_tells() -> None:
    taken = "RuntimeError: The server socket has failed to listen: EADDRINUSE, port {}\n"
    report = explain([log_of_text("".join(_OPENING + taken.format(port) for port in (1234, 2345)))], CAUSES)
    assert report.verdict is not None
    assert report.verdict.incident.what == "Another process holds port 2345."


def test_runs_of_several_logs_are_counted_from_their_ends() -> None:
    lost, cause = _OPENING + _ENDS["another rank"], _OPENING + _ENDS["an exception"]
    logs = [
        log_of_text(_OPENING + _ENDS["memory"] + 2 * lost, "rank0.log"),
        log_of_text(2 * cause, "rank1.log"),
    ]
    assert _told(explain(logs)) == ("ValueError: the learning rate is a banana", "cause")


def test_what_torchrun_starts_again_is_a_try_of_the_same_run() -> None:
    failed = "[E1115 x/api.py:869] failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python\n"
    again = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group\n"
    report = _explained(_OPENING + _ENDS["memory"] + failed + again + _OPENING + _ENDS["another rank"])
    assert _told(report) == (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "cause",
    )


@pytest.mark.parametrize("end", ["step 1 loss 0.5\nstep 2 loss 0.4\n", "Training finished\n"])
def test_others_that_begin_when_a_rank_has_died_are_no_further_run(end: str) -> None:
    died = traceback("KeyError: 'colour'", "[rank3]: ")
    assert _told(_explained(_OPENING + died + _OPENING + end)) == ("KeyError: 'colour'", "cause")


def test_a_run_that_shows_neither_a_failure_nor_work_lets_nobody_off() -> None:
    report = _explained(_OPENING + _ENDS["an exception"] + _OPENING + _ENDS["a hang"])
    assert _told(report) == ("ValueError: the learning rate is a banana", "cause")


@pytest.mark.parametrize(
    "text",
    [
        # what comes again is not the opening of the same process, or stands far from the failure
        _OPENING + _ENDS["memory"] + "Reading the settings\n" + _ENDS["an option"],
        "".join(
            f"[rank{rank}]: {line}\n" + (traceback("KeyError: 1", f"[rank{rank}]: ") if rank == last else "")
            for rank, last in ((0, 0), (1, 0))
            for line in _OPENING.splitlines()
        )
        + "[rank1]: step 1 loss 0.5\n[rank1]: step 2 loss 0.4\n",
        _OPENING + _ENDS["an exception"] + "others say good-bye\n" * 20 + _OPENING,
        _OPENING + _ENDS["an exception"] + _OPENING.replace("\n", "\nsomething else\n"),
        # a bar is drawn again, and an error is said again: these are no openings
        2 * ("epoch:  20%|##   | 2/10 [00:02<00:08,  1.00s/it]\nbatch of rank 1\n" + _ENDS["an exception"])
        + "epoch:  20%|##   | 2/10 [00:02<00:08,  1.00s/it]\nbatch of rank 1\n",
        2 * ("it fails:\n" + _ENDS["an exception"]) + "it fails:\n",
    ],
)
def test_what_is_no_further_run(text: str) -> None:
    report = _explained(text)
    assert report.verdict is not None
    assert report.attempts == 1
