"""Which failure `rallypoint explain` names as the first: small logs, each with its verdict.

All texts are made up. Where a log resembles that of a job that went on, both are here: what tells them apart
is never the error itself, but what comes after it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rallypoint.explain import Explanation, Source, explain
from rallypoint.explain.verdict import Verdict

pytestmark = pytest.mark.windows

KNOWN, CONSEQUENCE, UNKNOWN = "known cause", "consequence", "unknown error"


def traceback(line: str, prefix: str = "", function: str = "train") -> str:
    """A traceback that ends with a line, each line of it behind a prefix."""
    frame = f'  File "/app/train.py", line 8, in {function}'
    lines = ["Traceback (most recent call last):", frame, "    step()", line]
    return "".join(f"{prefix}{each}\n" for each in lines)


def explained(*logs: str) -> Explanation:
    return explain([Source(f"{number}.log", [text.encode()]) for number, text in enumerate(logs)])


def mixed(*logs: str) -> str:
    """The lines of some logs in turn."""
    turns = zip(*(log.splitlines(keepends=True) for log in logs), strict=True)
    return "".join(line for turn in turns for line in turn)


def verdict_of(*logs: str) -> Verdict:
    found = explained(*logs)
    assert found.verdict is not None, found.stop
    return found.verdict


def name_of(verdict: Verdict | None) -> str | None:
    """The entry of the knowledge base, else the exception to fix, else the line."""
    if verdict is None:
        return None
    match, root = verdict.event.match, verdict.root
    return match.entry.id if match is not None else root.headline if root is not None else verdict.event.text


_BANANA = "ValueError: the learning rate is a banana"
_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
_CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:9952."
_GLOO = f"{_CLOSED[:14]}[/gloo/transport/tcp/{_CLOSED[15:]}"
_RAISED = traceback(_BANANA)
_STEPS = "step 11 loss 0.5\nstep 12 loss 0.4\n"
_RESET = traceback("ConnectionResetError: [Errno 104] Connection reset by peer")
_TAKEN = (
    "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, "
    "code: -98, name: EADDRINUSE, message: address already in use"
)
_ENDED = "E1115 14:36:29.1 7 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) "
_ENDED += "local_rank: {rank} (pid: 9) of binary: python\n"
_JOINT = "\nThe above exception was the direct cause of the following exception:\n\n"
_HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"


# One exception ----------------------------------------------------------------------------------------------

_FRAMES = '  File "/app/train.py", line 8, in train\n    step()\n'
_FORMS = {
    "with a head": _RAISED,
    "alone": f"{_BANANA}\n",
    "of a rank": f"[rank1]: {_BANANA}\n",
    "of a checkpoint": traceback("x.CheckpointException: CheckpointException ranks:dict_keys([0])")
    + f"Traceback (most recent call last): (RANK 0)\n{_FRAMES}{_BANANA}\n",
    "of an engine": traceback(_BANANA, "(EngineCore_0 pid=9) ERROR 06-29 11:07:41 [core.py:492] ")
    + traceback("RuntimeError: Engine core initialization failed. See root cause above."),
    "with a text in many lines": f"{_FRAMES}ValueError: \n    the learning rate is a banana\n\n    eat it\n",
    "before a destructor's": _RAISED
    + f"Exception ignored in: <function X.__del__ at 0x7f>\n{traceback('KeyError: 1')}",
    "behind a node's name": "n2: starts\nn2: goes on\n" + traceback(_BANANA, "n2: "),
    "behind a logger": traceback(_BANANA, "2024-06-16 10:11:12,123 - ERROR - "),
    "behind escapes": traceback(_BANANA, "\x1b[2m\x1b[36m(pid=9)\x1b[0m "),
    "behind bars": "\r 10%|#   | 1/9 [00:01<00:08, 1.0it/s]\r 20%|##  | 2/9 [00:02<00:07, 1.0it/s]\n"
    + _RAISED,
}


@pytest.mark.parametrize("form", _FORMS)
def test_an_unknown_exception_is_named_in_any_form(form: str) -> None:
    verdict = verdict_of(_FORMS[form])
    assert verdict.certainty == UNKNOWN
    assert verdict.root is not None
    assert verdict.root.account == _BANANA


def test_an_exception_is_told_with_its_rank_and_the_users_own_line() -> None:
    library = '[rank3]:   File "/v/lib/python3.11/site-packages/torch/c10d.py", line 83, in wrapper\n'
    lines = traceback("my.module.StrangeError: no", "[rank3]: ").splitlines(keepends=True)
    verdict = verdict_of("".join([*lines[:3], library, *lines[3:]]))
    assert (name_of(verdict), verdict.event.line, verdict.event.process.rank) == (
        "my.module.StrangeError: no",
        5,
        3,
    )
    assert verdict.root is not None
    assert str(verdict.root.place) == "/app/train.py:8, in train"


@pytest.mark.parametrize(
    ("log", "name"),
    [
        (
            f"terminate called after throwing an instance of 'a::Error'\n  what():  {_BANANA}\n",
            f"a::Error: {_BANANA}",
        ),
        ("thread 'main' panicked at src/mod.rs:11:5:\nno device here\n", "no device here"),
        ("usage: x.py [-h]\nx.py: error: unrecognized arguments: --colour=red\n", "arguments-unknown"),
        ("loading\nFATAL: the frobnicator failed\n", "FATAL: the frobnicator failed"),
    ],
)
def test_what_other_programs_say_at_their_end(log: str, name: str) -> None:
    assert (name_of(verdict_of(log)) or "").endswith(name)


@pytest.mark.parametrize(
    ("log", "name"),
    [
        (_RAISED + _JOINT + traceback("RuntimeError: no training"), _BANANA),
        (_RAISED + _HANDLING + traceback("RuntimeError: no training"), _BANANA),
        (traceback("ModuleNotFoundError: No module named 'x'") + _HANDLING + _RAISED, _BANANA),
        (traceback("KeyError: 'x'") + _HANDLING + _RAISED, _BANANA),
        (_RAISED + _JOINT + traceback("x.ChildFailedError: "), _BANANA),
        (_RAISED + _JOINT + traceback(_MEMORY), "cuda-out-of-memory"),
    ],
)
def test_the_exception_to_fix_of_a_chain(log: str, name: str) -> None:
    verdict = verdict_of(log)
    assert name_of(verdict) == name
    assert len(verdict.chain) == 2


# Causes and consequences ------------------------------------------------------------------------------------

_CAUSES = {
    "a lost connection follows": (
        traceback(_GLOO, "[rank0]: ") + traceback(_BANANA, "[rank3]: "),
        _BANANA,
        UNKNOWN,
        3,
    ),
    "only a lost connection": (traceback(_GLOO, "[rank0]: "), "gloo-peer-gone", CONSEQUENCE, 0),
    "a known cause": (traceback(_MEMORY, "[rank2]: "), "cuda-out-of-memory", KNOWN, 2),
    "a port": (traceback(f"torch.distributed.DistNetworkError: {_TAKEN}"), "port-in-use", KNOWN, None),
    "a launcher ends": (_RAISED + _ENDED.format(code=1, rank=0), _BANANA, UNKNOWN, None),
    "only a launcher": (_ENDED.format(code=1, rank=0), "child-failed", CONSEQUENCE, None),
    "killed": (_STEPS + _ENDED.format(code=-9, rank=0), "killed", KNOWN, None),
    "crashed": (_STEPS + _ENDED.format(code=-11, rank=0), "segmentation-fault", KNOWN, None),
    "two, in order": (
        traceback("KeyError: 'x'", "[rank5]: ") + traceback(_BANANA, "[rank3]: "),
        *("KeyError: 'x'", UNKNOWN, 5),
    ),
    "two, by time": (
        traceback("KeyError: 'x'", "2026-11-15 14:36:20,000 - [rank5]: ")
        + traceback(_BANANA, "2026-11-15 14:36:10,000 - [rank3]: "),
        *(_BANANA, UNKNOWN, 3),
    ),
    "two, mixed": (
        mixed(traceback("KeyError: 'x'", "[rank5]: "), traceback(_BANANA, "[rank3]: ")),
        *("KeyError: 'x'", UNKNOWN, 5),
    ),
    "an error before the end": (
        "ERROR: shard 3 has a bad header\n" + _ENDED.format(code=1, rank=0),
        *("ERROR: shard 3 has a bad header", UNKNOWN, None),
    ),
}


@pytest.mark.parametrize("case", _CAUSES)
def test_the_first_failure(case: str) -> None:
    log, name, certainty, rank = _CAUSES[case]
    verdict = verdict_of(log)
    assert (name_of(verdict), verdict.certainty) == (name, certainty)
    assert verdict.event.process.rank == rank


def test_a_thousand_ranks_follow_one() -> None:
    lost = "".join(traceback(_GLOO, f"[rank{rank}]: ") for rank in range(1000) if rank != 7)
    found = explained(lost + traceback(_BANANA, "[rank7]: "))
    assert found.verdict is not None
    assert (name_of(found.verdict), found.verdict.event.process.rank) == (_BANANA, 7)
    assert found.consequences
    assert all(
        each.match is not None and each.match.entry.id == "gloo-peer-gone" for each in found.consequences
    )


def test_what_nccl_says_explains_what_torch_says() -> None:
    said = "node-a:12:34 [0] transport/net.cc:572 NCCL WARN Call to frobnicate failed : 11\n"
    verdict = verdict_of(said + traceback("RuntimeError: NCCL error in: x.cpp:514, internal error"))
    assert "Call to frobnicate failed" in verdict.event.text
    assert not explained(said + _STEPS).found


_DUPLICATE = "Duplicate GPU detected : rank 4 and rank 0 both on CUDA device 3b000"
_SAID = f"node-a:12:34 [0] init.cc:7 NCCL WARN {_DUPLICATE}"


@pytest.mark.parametrize(
    ("log", "named", "beside"),
    [
        (f"{_SAID}\n" + traceback(f"RuntimeError: NCCL error: {_DUPLICATE}"), "RuntimeError", _DUPLICATE),
        ("the value None could not be cast\n" + _RAISED, _BANANA, "the value None"),
        ("ERROR: shard 3 is odd\nreading\n" + _RAISED, _BANANA, "ERROR: shard 3 is odd"),
        ("ERROR: start failed\nERROR: gave up\n", "ERROR: start failed", "ERROR: gave up"),
        ("ERROR: start failed\nERROR: mkdir x: Permission denied\n", "ERROR: mkdir x", "ERROR: start failed"),
        ("compiling kernels ...\n^C\n", "^C", "compiling kernels"),
        (_RAISED, _BANANA, ""),
    ],
)
def test_what_explains_a_failure_besides(log: str, named: str, beside: str) -> None:
    verdict = verdict_of(log)
    assert verdict.quote[0].startswith(named)
    assert beside in (verdict.by.text if verdict.by is not None else "")


# torchrun's table -------------------------------------------------------------------------------------------


def _table(
    root: int, other: int, exitcode: str, text: str = "To enable traceback see: https://pytorch.org"
) -> str:
    rows = [
        "  time      : 2026-11-15_14:41:26\n  host      : node-a\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 1)\n  error_file: <N/A>\n"
        f"  traceback : {told}\n"
        for rank, code, told in ((other, exitcode, "x"), (root, "1", text))
    ]
    rule = "-" * 60
    return (
        f"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n{'=' * 60}\ntrain.py FAILED\n"
        f"{rule}\nFailures:\n[1]:\n{rows[0]}{rule}\nRoot Cause (first observed failure):\n[0]:\n{rows[1]}"
        f"{'=' * 60}\n"
    )


def test_the_rank_that_torchrun_names_comes_first() -> None:
    failures = traceback("KeyError: 'x'", "[rank0]: ") + traceback(_BANANA, "[rank1]: ")
    verdict = verdict_of(failures + _table(1, 0, "-15"))
    assert (name_of(verdict), verdict.event.process.rank) == (_BANANA, 1)


def test_a_traceback_in_the_table_is_that_of_its_rank() -> None:
    inner = _RAISED.rstrip().replace("\n", "\n  ")
    verdict = verdict_of(_table(5, 0, "-15", inner))
    assert (name_of(verdict), verdict.event.process.rank, verdict.event.process.host) == (
        _BANANA,
        5,
        "node-a",
    )


def test_the_table_alone_is_a_consequence() -> None:
    verdict = verdict_of("train.py FAILED\n" + _table(1, 0, "-15"))
    assert (verdict.certainty, verdict.event.process.rank) == (CONSEQUENCE, 1)


# Attempts and runs ------------------------------------------------------------------------------------------

_RESTARTS = "[default] Worker group FAILED. {left}/3 attempts left; will restart worker group\n"
_FAILED = _ENDED.format(code=1, rank=1)


def test_the_last_attempt_counts() -> None:
    memory = traceback(_MEMORY) + _FAILED
    found = explained(memory + _RESTARTS.format(left=3) + traceback(_BANANA, "[rank1]: ") + _FAILED)
    assert (name_of(found.verdict), found.attempts) == (_BANANA, 2)
    assert [each.match and each.match.entry.id for each in found.earlier] == ["cuda-out-of-memory"]


def test_a_last_attempt_with_consequences_only_leads_to_the_one_before() -> None:
    log = traceback(_BANANA, "[rank1]: ") + _FAILED + _RESTARTS.format(left=3) + traceback(_GLOO) + _FAILED
    assert name_of(verdict_of(log)) == _BANANA


def test_an_attempt_that_works_is_no_failure() -> None:
    log = _STEPS + traceback(_BANANA, "[rank1]: ") + _FAILED + _RESTARTS.format(left=3)
    assert explained(log).found
    assert not explained(
        log + "step 11 loss 0.5\nstep 12 loss 0.4\nstep 13 loss 0.3\nTraining finished\n"
    ).found


_OPENING = "2026-11-15 14:36:19 Starting on port 29500\nReading the settings\n"
_ENDS = {
    "an exception": _RAISED,
    "after steps": _STEPS + traceback("KeyError: 'colour'"),
    "memory": traceback(_MEMORY),
    "an option": "train.py: error: unrecognized arguments: --colour\n",
    "a signal": "./train.sh: line 7: 4711 Killed                  python train.py\n",
    "done": _STEPS + "Training finished\n",
}
_FAIL = [name for name in _ENDS if name != "done"]


@given(st.lists(st.sampled_from(_FAIL), min_size=1, max_size=4), st.sampled_from(list(_ENDS)))
@example(["an exception", "a signal"], "done")
def test_of_several_runs_in_one_log_the_last_one_counts(earlier: list[str], last: str) -> None:
    runs = [_OPENING + _ENDS[name] for name in (*earlier, last)]
    alone, together = explained(runs[-1]), explained("".join(runs))
    assert (together.found, name_of(together.verdict)) == (alone.found, name_of(alone.verdict))
    assert together.attempts == len(runs)


# What a job outlived ----------------------------------------------------------------------------------------

_READY = "INFO:     Application startup complete.\n"
_ANSWERS = 'INFO:     10.0.0.1:4711 - "POST /v1/completions HTTP/1.1" 200 OK\n' * 2
_PROBES = 'INFO:     10.0.0.1:4711 - "GET /health HTTP/1.1" 200 OK\n' * 5
_TOLD = "W1115 14:36:19.1 7 torch/x.py:8] Received Signals.SIGTERM death signal, shutting down workers\n"
_CANCELLED = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024-02-02T02:02:02 ***\n"
_EXITED = "srun: error: n1: task 0: Exited with exit code 1\n"
_BAR = "batch:  50%|##   | 5/10 [00:02<00:08,  1.00s/it]\n"
_FEEDER = traceback("BrokenPipeError: [Errno 32] Broken pipe", function="_feed")
_THREAD = "Exception in thread Thread-5:\n" + traceback("EOFError", function="_bootstrap_inner")
_WARNED = f"[W1115 14:36:19.1 socket.cpp:1] [c10d] {_TAKEN}\n"

_PAIRS = {
    "steps after it": (_RAISED + _STEPS, _STEPS + _RAISED),
    "one line on its way": (_RAISED + _STEPS, _RAISED + "step 11 loss 0.5\n"),
    "a bar that is drawn again": (
        _BAR + _RAISED + _BAR.replace(" 5/", " 6/") + _STEPS,
        _BAR + _RAISED + _BAR,
    ),
    "a retry": (
        traceback(_MEMORY) + "Decreasing batch size to 32\nepoch 0: loss 1.1\nepoch 1: loss 0.9\n",
        "epoch 0: loss 1.1\nCUDA out of memory, retrying with batch size 16\n" + traceback(_MEMORY),
    ),
    "saved at the end": (
        _RAISED + _STEPS + "Saved checkpoint at step 12\n",
        "step 11 loss 0.5\n" + _RAISED + "Saved emergency checkpoint at step 11\nShutdown complete\n",
    ),
    "preempted": (_CANCELLED + "Resuming from ckpt/step_9.pt\n" + _STEPS, _STEPS + _RAISED + _CANCELLED),
    "told to end when it was done": (_STEPS + "Training finished\n" + _TOLD, "Training\n" + _RAISED + _TOLD),
    "a peer that leaves at the end": (_STEPS + "Training finished\n" + _RESET, _RESET),
    "the exit": (_STEPS + "Training finished\n" + _FEEDER, _STEPS + _FEEDER + _EXITED),
    "a thread that lost its peer": (_STEPS + _THREAD + "Best model saved\n", _STEPS + _RAISED),
    "another rank goes on": (
        traceback(_BANANA, "[default1]:") + "[default1]:step 1 loss 2\n[default1]:step 2 loss 1\n",
        traceback(_BANANA, "[default1]:") + "[default0]:step 1 loss 2\n[default0]:step 2 loss 1\n",
    ),
    "a request": (_READY + _RAISED + _ANSWERS, _READY + _RAISED + _PROBES),
    "a server that is told to end": (_READY + _ANSWERS + "^C\n", _READY + _RAISED + "^C\n"),
    "counts": (
        '{"level": "info", "step": 1, "error": null}\n' * 3,
        "ERROR 1000 documents could not be read\n",
    ),
    "tests": (
        "tests/t.py::test_connection_error PASSED\n==== 12 passed, 1 xfailed in 4.20s ====\n",
        "tests/t.py::test_connection_error FAILED\n" + _RAISED + "==== 1 failed, 12 passed in 4.20s ====\n",
    ),
    "exit codes": ("worker 0 exited with code 0\ndone\n", "worker 0 exited with code 1\n"),
    "a warning": (_WARNED + _STEPS, _WARNED + _ENDED.format(code=1, rank=0)),
    "a logged exception": (
        "2024-02-02 02:02:02,002 - WARNING - could not import x, continuing\n" + _RAISED + _STEPS,
        "2024-02-02 02:02:02,002 - INFO - step=3, skipped=0\n" + _RAISED,
    ),
    "a killed process that others do without": (
        "bash: line 1:  1922 Killed  python worker.py\n"
        + _STEPS
        + "step 13 loss 1\nstep 14 loss 2\nstep 15 loss 3\n",
        _STEPS + "bash: line 1:  1922 Killed  python worker.py\n" + _STEPS,
    ),
    "told to end, and saved": (
        _STEPS + "^C\n2024-02-02 02:02:02,002 INFO: Saved the state at step 12\n",
        _STEPS + "^C\n",
    ),
    "what a supervisor reports": (
        "2024-02-02 02:02:02,002 INFO spawned: 'x' with pid 7\n" + _STEPS,
        "2024-02-02 02:02:02,002 INFO exited: x (exit status 1; not expected)\n",
    ),
    "what Python ignores": (f"{_STEPS}Exception ignored in: <function f>\n{_RAISED}", _STEPS + _RAISED),
}


@pytest.mark.parametrize("name", _PAIRS)
def test_what_a_job_outlived_is_told_from_what_it_died_of(name: str) -> None:
    outlived, died = map(explained, _PAIRS[name])
    assert (outlived.found, name_of(outlived.verdict)) == (False, None)
    assert died.verdict is not None


def test_errors_go_before_warnings_and_before_what_was_outlived() -> None:
    assert name_of(verdict_of(_WARNED + _STEPS + _RAISED)) == _BANANA
    assert name_of(verdict_of(traceback("KeyError: 'caught'") + _STEPS + _RAISED)) == _BANANA


@pytest.mark.parametrize(
    "end", [_ENDED.format(code=1, rank=0), "ERROR: it did not work\n", "^C\n", "waiting for node-b\n", ""]
)
def test_a_warning_is_the_cause_if_nothing_else_tells_one(end: str) -> None:
    verdict = verdict_of("loading\n" + _WARNED + end)
    assert (name_of(verdict), verdict.certainty) == ("port-in-use", KNOWN)


# How logs end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["Training done.\n", _STEPS, " 3%|# | 3/90 [00:01<00:30, 2.1it/s]\n", _READY])
def test_a_log_that_ends_at_work_is_fine(end: str) -> None:
    assert not explained("loading the model\n" + end).found


@pytest.mark.parametrize("end", ["waiting for rank 3", " 98%|## | 981/982 [09:01<00:01, 1.1it/s]"])
def test_a_log_that_stops_at_a_beginning_or_right_before_the_last_step_is_a_finding(end: str) -> None:
    found = explained(f"{_STEPS}{end}\n")
    assert found.stop is not None
    assert found.stop.text.strip() == end.strip()


@pytest.mark.parametrize(
    "end", ["initializing ddp: rank 0 of 2", "Waiting for other machines", "  0%|  | 0/9 [00:00<?, ?it/s]"]
)
def test_a_log_that_stops_before_any_work_is_a_finding(end: str) -> None:
    found = explained(f"loading the model\n{end}\n")
    assert found.verdict is None
    assert found.stop is not None
    assert (found.stop.text.strip(), found.stop.line) == (end.strip(), 2)


@pytest.mark.parametrize(
    "end",
    [
        "srun: error: node-a: task 3: Exited with exit code 139",
        "mpirun noticed that process rank 2 with PID 7 on node a exited on signal 6 (Aborted).",
        "process 0 terminated with exit code 3221225477",
        "command terminated with exit code 137",
        "段错误 (核心已转储)",
        "rallypoint: rank 0 (process 7) ended with exit code 3",
    ],
)
def test_who_says_that_a_process_failed_is_believed(end: str) -> None:
    assert explained(f"{_STEPS}{end}\n").verdict is not None


# Several logs -----------------------------------------------------------------------------------------------


def test_the_log_with_the_cause_is_named() -> None:
    found = explained(_STEPS + traceback(_GLOO, "[rank0]: "), _STEPS + traceback(_BANANA, "[rank1]: "))
    assert found.verdict is not None
    assert (name_of(found.verdict), found.verdict.event.log) == (_BANANA, 1)
    assert [each.log for each in found.consequences] == [0]


def test_clocks_of_two_machines_order_their_failures() -> None:
    early, late = (
        "2026-11-15 14:36:10 step 1\n" + _RAISED,
        "2026-11-15 14:36:50 step 9\n" + traceback("KeyError: 'x'"),
    )
    assert name_of(verdict_of(late, early)) == _BANANA


def test_a_rank_within_a_machine_is_no_rank_of_the_job() -> None:
    process = verdict_of(traceback(_BANANA, "[default3]:")).event.process
    assert (process.rank, process.local) == (None, 3)


def test_what_a_files_name_tells_counts() -> None:
    [found] = [explain([Source("x", [_RAISED.encode()], rank=6, host="node-b")]).verdict]
    assert found is not None
    assert (found.event.process.rank, found.event.process.host) == (6, "node-b")


_HEALTHY = sorted((Path(__file__).parent / "logs" / "healthy").glob("*.log"))


@pytest.mark.parametrize("path", _HEALTHY, ids=lambda path: path.stem)
def test_nothing_is_found_in_the_log_of_a_job_that_went_well(path: Path) -> None:
    found = explain([Source(path.name, [path.read_bytes()])])
    assert (found.found, name_of(found.verdict)) == (False, None)


def test_the_rank_that_the_launcher_names_may_only_have_lost_the_other_one() -> None:
    log = "CUDA out of memory, retrying\n" + traceback(_GLOO, "[rank0]: ") + traceback(_BANANA, "[rank1]: ")
    assert name_of(verdict_of(log + _FAILED)) == _BANANA
    assert name_of(verdict_of(log + _FAILED.replace("local_rank: 1", "local_rank: 0"))) == _BANANA


def test_many_announced_exceptions_are_no_trouble() -> None:
    announced = "ERROR 11-15 14:36:19 [serving.py:5] Error while handling request 7\n"
    log = "".join(announced + traceback("ValueError: bad shape") for _ in range(25))
    assert name_of(verdict_of(log)) == "ValueError: bad shape"
    empty = "2026-11-15 14:36:19,123 - data - ERROR - AssertionError:\n" * 1500
    assert explained(empty).found


def test_what_a_restarted_script_prints_first_begins_no_other_attempt() -> None:
    log = _OPENING + traceback(_MEMORY) + _FAILED + _RESTARTS.format(left=3) + _OPENING + _RAISED
    assert explained(log).attempts == 2


def test_the_same_words_announce_several_restarts() -> None:
    log = "".join(f"Restarting training\nstep {at}\n" + traceback(f"ValueError: {at}") for at in range(4))
    assert name_of(verdict_of(log)) == "ValueError: 3"


def test_a_full_cache_is_no_request_to_end() -> None:
    log = "INFO 11-15 14:36:19 [cache.py:3] 128 blocks evicted\n" + _RAISED
    assert name_of(verdict_of(log)) == _BANANA
