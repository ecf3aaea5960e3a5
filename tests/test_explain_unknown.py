"""Logs about which nothing is known: what is read from them, and which line is the verdict."""

from __future__ import annotations

import pytest

from explaining import dedent, report_of, traceback
from rallypoint.diagnose.explain import Explanation, words

pytestmark = pytest.mark.windows

_FRAMES = '  File "/app/train.py", line 8, in train\n    step()\n'
_BANANA = "ValueError: the learning rate is a banana"


def _told(report: Explanation) -> tuple[str, str]:
    """The headline of the verdict, and its role."""
    return (report.verdict.incident.headline, report.verdict.incident.role) if report.verdict else ("", "")


def _advice(log: str) -> list[str]:
    verdict = report_of(log).verdict
    return verdict.incident.do if verdict is not None else []


# Reading ---------------------------------------------------------------------------------------------------

_INNERMOST = {
    "no head": f"{_FRAMES}{_BANANA}\n",
    "alone": f"    raise ValueError(\n{_BANANA}\n",
    "of a rank": f"[rank1]: {_BANANA}\n",
    "loader": traceback("ValueError: Caught ValueError in DataLoader worker process 1.")
    + f"Original Traceback (most recent call last):\n{_FRAMES}{_BANANA}\n",
    "spawn": traceback("torch.multiprocessing.spawn.ProcessRaisedException: ")
    + f"\n-- Process 0 terminated with the following error:\n{traceback(_BANANA)}",
    "old spawn": traceback("Exception: ")
    + f"\n-- Process 0 terminated with the following error:\n{traceback(_BANANA)}",
    "checkpoint": traceback("x.CheckpointException: CheckpointException ranks:dict_keys([0])")
    + f"Traceback (most recent call last): (RANK 0)\n{_FRAMES}{_BANANA}\n",
    "ray": traceback("ray.exceptions.RayTaskError(ValueError): ray::f() (pid=7, ip=10.0.0.1)")
    + f"{_FRAMES}{_BANANA}\n",
    "vllm": f"(VllmWorker rank=1 pid=9) ERROR 06-29 11:07:41 [multiproc_executor.py:492] {_BANANA}\n"
    + traceback("RuntimeError: Engine core initialization failed. See root cause above."),
    "lost colours": f"[2m[36m(RayTrainWorker pid=9)[0m {_BANANA}\n",
    "no indentation": 'Traceback (most recent call last):\nFile "/a.py", line 8, in main\n'
    f"fire.Fire(train_from_folder)\n{_BANANA}\n",
    "no indentation, and no head": "".join(f'File "/a.py", line {n}, in f\nf({n})\n' for n in range(12))
    + f"{_BANANA}\n",
    "shown": traceback("triton.compiler.errors.CompilationError: at 9:4:")
    + '    for n in tl.range(\n    ^\nValueError("the learning rate is a banana")\n',
    "in one line": 'x: Traceback (most recent call last): File "/a.py", line 8, in f raise ValueError(x) '
    f"{_BANANA}\n",
    "in json": '{"trace": "Traceback (most recent call last):\\n  File \\"/a.py\\", line 8, in f\\n    x()\\n'
    + f'{_BANANA}\\n"}}\n',
    "in a block": f"{_FRAMES}ValueError: \n    the learning rate is a banana\n\n    so eat it\n",
    "rich": "╭──── Traceback (most recent call last) ────╮\n│ /app/train.py:8 in train     │\n"
    f"│ ❱  8 │   raise RuntimeError('no')  │\n╰──────────────╯\n{_BANANA}\n",
    "destructor": traceback(_BANANA)
    + f"Exception ignored in: <function X.__del__ at 0x7f>\n{traceback('KeyError: 1')}",
}


@pytest.mark.parametrize("name", _INNERMOST)
def test_the_innermost_exception_is_the_cause(name: str) -> None:
    report = report_of(_INNERMOST[name])
    assert _told(report) == (_BANANA, "cause")
    assert report.others == ()
    assert not any("raise" in suspect.text for suspect in report.suspects)


@pytest.mark.parametrize("shown", ["AssertionError()", "IncompatibleTypeErrorImpl('invalid operands')"])
def test_what_a_compiler_shows_comes_before_what_follows(shown: str) -> None:
    log = traceback("triton.compiler.errors.CompilationError: at 9:4:") + f"    ^\n{shown}\n{_BANANA}\n"
    verdict = report_of(log).verdict
    assert verdict is not None
    assert verdict.incident.text == shown


def test_a_frame_in_a_box_is_a_place() -> None:
    verdict = report_of(_INNERMOST["rich"]).verdict
    assert verdict is not None
    assert verdict.incident.raised is not None
    assert str(verdict.incident.raised.place) == "/app/train.py, line 8, in train"


def test_what_python_ignores_is_nothing() -> None:
    ignored = f"Exception ignored in: <function X.__del__ at 0x7f>\n{traceback('KeyError: 1')}"
    assert not report_of(f"step 1 loss 0.5\n{ignored}").found


def test_the_point_of_a_message_may_be_in_its_next_line() -> None:
    report = report_of(
        traceback("RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for w")
    )
    assert report.verdict is not None
    assert report.verdict.incident.first.line == 5
    assert _told(report)[0].endswith("for Net: size mismatch for w")


def test_last_words_of_other_programs() -> None:
    thrown = (
        "terminate called after throwing an instance of 'gloo::IoException'\n  what():  [pair.cc:7] refused\n"
    )
    assert _told(report_of(thrown)) == ("gloo::IoException: [pair.cc:7] refused", "cause")
    usage = "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --local-rank=0\n"
    failed = "failed (exitcode: 2) local_rank: 0 (pid: 7) of binary: python\n"
    assert _told(report_of(usage + failed))[0] == "train.py: error: unrecognized arguments: --local-rank=0"
    sweep = "Run 0jbbwa4t errored: IndexError('list index out of range')\nwandb: ERROR killing sweep.\n"
    assert _told(report_of(sweep)) == ("IndexError: list index out of range", "cause")


# Layers ----------------------------------------------------------------------------------------------------


def test_what_nccl_says_comes_before_what_torch_says() -> None:
    said = "node-a:12:34 [0] transport/p2p.cc:572 NCCL WARN failed to open CUDA IPC handle : 11\n"
    harmless = "node-a:12:34 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]\n"
    error = traceback("RuntimeError: NCCL error in: x.cpp:514, internal error")
    report = report_of(harmless + said + error)
    assert _told(report) == ("transport/p2p.cc:572 NCCL WARN failed to open CUDA IPC handle : 11", "cause")
    assert [each.role for each in report.consequences] == ["wrapper"]
    assert not report_of(f"{harmless}{said}step 1 loss 0.5\n").found
    last = traceback(
        "RuntimeError: NCCL error in: x.cpp:514, invalid argument\nLast error:\nInvalid rank : 2/2"
    )
    assert _told(report_of(last)) == ("Invalid rank : 2/2", "cause")


_REASONS = {
    "WARN launcher: Could not import Fused Scan kernels: No module named 'scan_ops'": (
        "NotImplementedError: This model requires Fused Scan kernels"
    ),
    "[W 2021-02-05 19:14:13] Trial 3 failed, because the value None is no number.": (
        "ValueError: No trials are complete yet"
    ),
}


@pytest.mark.parametrize("reason", _REASONS)
def test_why_something_could_not_be_had_comes_before_that_it_is_needed(reason: str) -> None:
    needed = traceback(_REASONS[reason])
    assert _told(report_of(f"{reason}\nloading\n{needed}")) == (reason, "cause")
    assert _told(report_of(f"{reason}\nloading\n{traceback(_BANANA)}")) == (_BANANA, "cause")
    assert _told(report_of(f"{needed}{reason}\n"))[0] == _REASONS[reason]
    assert _told(report_of(f"{reason}, using another\n{needed}"))[0] == _REASONS[reason]
    assert not report_of(f"{reason}\nstep 1 loss 0.5\nstep 2 loss 0.4\n").found


@pytest.mark.parametrize(
    "said",
    [
        "/usr/bin/ld: cannot find -lcuda: No such file or directory\n",
        "nvcc fatal   : Unsupported gpu architecture 'compute_120'\n",
        "C:/Temp/tmpz1k8/cuda_utils.c:13: error: include file 'Python.h' not found\n",
    ],
)
def test_a_compiler_is_heard_if_a_build_failed(said: str) -> None:
    build = traceback(
        "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1."
    )
    assert _told(report_of(said + build)) == (said.strip(), "cause")
    assert _told(report_of(said + traceback(_BANANA)))[0] == _BANANA
    alone = report_of(f"building\n{said}error: command 'g++' failed with exit code 1\n")
    assert (alone.verdict, alone.suspects[0].text) == (None, said.strip())


def test_what_loads_a_model_is_heard_if_it_is_not_loaded() -> None:
    said = "gguf_init_from_file: invalid magic number 67676a74\n"
    lost = traceback("pydantic.ValidationError: 1 validation error for LlamaCpp")
    loader = "llama_model_loader: loaded meta data with 19 pairs\n"
    assert _told(report_of(loader + said + lost))[0] == said.strip()
    assert _told(report_of(said + traceback(_BANANA)))[0] == _BANANA
    fine = "llama_model_load_from_file_impl: using device CUDA0 (a GPU) - 23306 MiB free\n"
    assert _told(report_of(fine + lost))[0].startswith("pydantic")


def test_a_line_of_tensorflow_is_no_warning_of_what_follows() -> None:
    line = "2024-05-01 10:00:01.123456: W tensorflow/utils/py_utils.cc:38] Could not find TensorRT\n"
    assert _told(report_of(line + traceback(_BANANA))) == (_BANANA, "cause")


@pytest.mark.parametrize(
    "panic",
    [
        "thread 'main' panicked at 'no nccl here', src/mod.rs:11:5\n",
        "thread 'main' (1) panicked at src/mod.rs:11:5:\nno nccl here\n",
    ],
)
def test_a_panic_is_an_exception(panic: str) -> None:
    report = report_of(f"{panic}note: run with `RUST_BACKTRACE=1`\nserver-1 exited with code 101\n")
    assert _told(report) == ("Rust panic: no nccl here", "cause")
    assert "at src/mod.rs, line 11" in words.as_text(report)
    served = 'INFO: 10.0.0.1:3 - "POST /generate HTTP/1.1" 200 OK\n' * 3
    assert not report_of(f"ready\n{panic.replace('main', 'worker-3')}{served}").found


def test_a_metric_is_no_exception() -> None:
    log = "".join(f"[2026-11-18 10:00:0{number}] TestError: 0.341{number}\n" for number in range(1, 5))
    assert (report_of(log).verdict, report_of(log).suspects) == (None, ())
    assert _told(report_of("KeyError: 0\n"))[0] == "KeyError: 0"


# Endings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("[launch.py:184:sigkill_handler] ['python', 'x.py'] exits with return code = -7", "SIGBUS"),
        ("[launch.py:184:sigkill_handler] ['python', 'x.py'] exits with return code = 3", "exit code 3"),
        ("srun: error: node-a: task 3: Exited with exit code 139", "SIGSEGV"),
        ("mpirun noticed that process rank 2 with PID 7 on node a exited on signal 6 (Aborted).", "SIGABRT"),
        ("process 0 terminated with exit code 3221225477", "access violation"),
        ("command terminated with exit code 137", "SIGKILL"),
        ("Primary job  terminated normally, but 1 process returned", ""),
    ],
)
def test_a_launcher_that_says_it_failed_is_believed(line: str, what: str) -> None:
    report = report_of(f"step 1 loss 0.5\nstep 2 loss 0.5\n{line}\n")
    assert report.verdict is not None
    assert (report.verdict.sure, report.verdict.incident.cause) == ("possible", None)
    assert what in report.verdict.incident.what
    assert not report_of(f"step 1 loss 0.5\n{line}\n".replace(line, "x exited with code 0")).found


def test_of_several_ends_the_first_one_counts_or_the_one_that_tells_more() -> None:
    gone = "ERROR 07-09 02:14:20 [x.py:1] Worker proc 2 died unexpectedly\n"
    after = "ERROR 07-09 02:14:21 [x.py:2] the output handler failed: no more output\n"
    assert "Worker proc 2" in _told(report_of(gone + after))[0]
    assert "Worker proc 2" in _told(report_of(gone + traceback("EOFError")))[0]
    assert "Worker proc 2" in _told(report_of(gone + traceback("RuntimeError: Executor failed.")))[0]
    killed = "mpirun noticed that process rank 7 with PID 9 on node a exited on signal 9 (Killed).\n"
    assert "signal 9" in _told(report_of("Primary job  terminated normally, but 1 process\n" + killed))[0]


def test_a_log_that_stops_is_not_all_clear() -> None:
    report = report_of("loading the model\ninitializing ddp: rank 0 of 2\n")
    assert (report.found, report.verdict) == (True, None)
    assert report.stop is not None
    assert (report.stop.text, report.stop.line) == ("initializing ddp: rank 0 of 2", 2)
    assert "It\nstops at\n  | initializing ddp: rank 0 of 2\n  (0.log, line 2)\n" in words.as_text(report)
    for end in ("Training done.\n", "{'loss': 0.5, 'epoch': 1}\n", " 3%|# | 3/90 [00:01<00:30, 2.1it/s]\n"):
        assert not report_of("loading the model\n" + end).found


def test_a_server_that_answers_again_has_not_failed() -> None:
    answered = 'INFO:     10.5.0.8:40110 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    error = f"ERROR:    Exception in ASGI application\n{traceback('KeyError: 1')}"
    assert not report_of(dedent(answered + error + answered * 2)).found
    assert report_of(dedent(answered + error)).found


# Words -----------------------------------------------------------------------------------------------------


def test_a_wrapper_is_never_said_to_be_certain() -> None:
    verdict = report_of("torch.x.ChildFailedError: \n").verdict
    assert verdict is not None
    assert verdict.sure == "possible"
    assert not any("nothing else" in reason for reason in verdict.reasons)


# Advice ----------------------------------------------------------------------------------------------------


def test_advice_is_of_the_kind_and_names_what_the_error_names() -> None:
    advice = _advice(traceback("FileNotFoundError: [Errno 2] No such file or directory: '/data/a.tar'"))
    assert "`ls -l /data/a.tar`" in advice[0]
    library = '  File "/v/lib/python3.10/site-packages/peft/lora.py", line 3, in f\n    g()\n'
    raised = "TypeError: f() got an unexpected keyword argument 'x'"
    log = f"Traceback (most recent call last):\n{_FRAMES}{library}{raised}\n"
    assert "`python -m pip show peft`" in _advice(log)[0]


def test_what_stands_beside_a_general_error_may_tell_its_kind() -> None:
    compiled = traceback("torch._dynamo.exc.BackendCompilerFailed: backend='x' raised:") + f"{_BANANA}\n"
    assert "TORCHDYNAMO_DISABLE=1" in " ".join(_advice(compiled))
    assert "npu-smi" in " ".join(
        _advice(traceback("RuntimeError: f: error code is 5") + "EZ9999: Inner Error\n")
    )
    assert "npu-smi" not in " ".join(_advice(traceback("IndexError: out of range") + "EZ9999: Inner Error\n"))


def test_what_the_message_says_of_a_remedy_is_repeated() -> None:
    log = (
        traceback("ValueError: the cache is too small.")
        + "Try to set --cache-size to 8.\nPlease report it.\n"
    )
    assert _advice(log)[0] == "Its own words: Try to set --cache-size to 8."
    assert "cache_size" in _advice(traceback("ValueError: no value for cache_size"))[0]


def test_where_a_program_stood_that_somebody_has_ended_is_told() -> None:
    """It may have hung there; not one that has made steps."""
    start = "loading 3 shards\nAll distributed processes registered. Starting with 8 processes\n"
    end = "Received Signals.SIGINT death signal, shutting down workers\n"
    stop = report_of(start + end).stop
    assert stop is not None
    assert stop.text == "All distributed processes registered. Starting with 8 processes"
    assert stop.advice is not None
    assert "NCCL_P2P_DISABLE=1" in " ".join(stop.advice.do)
    assert report_of(start + "step 1 loss 0.5\nstep 2 loss 0.4\n" + end).stop is None
