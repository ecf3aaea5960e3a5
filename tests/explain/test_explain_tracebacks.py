"""Exceptions in logs, as Python and other runtimes write them."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.explain.events import Raised
from rallypoint.explain.lines import compiled, load
from rallypoint.explain.tracebacks import MOST_FRAMES, MOST_MORE, MOST_TEXT, Part, Reader

PLAIN = dedent("""\
    Traceback (most recent call last):
      File "/home/user/train.py", line 40, in <module>
        main()
      File "/venv/site-packages/torch/nn/modules/module.py", line 1553, in _wrapped_call_impl
        return self._call_impl(*args, **kwargs)
               ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
      [Previous line repeated 99 more times]
      File "/home/user/model.py", line 7, in forward
        raise ValueError("bad shape")
    ValueError: bad shape
    """)

CHAIN = dedent("""\
    Traceback (most recent call last):
      File "/home/user/data.py", line 3, in load
        return table[key]
    KeyError: 'label'

    The above exception was the direct cause of the following exception:

    Traceback (most recent call last):
      File "/home/user/train.py", line 9, in <module>
        load()
    RuntimeError: cannot load

    During handling of the above exception, another exception occurred:

    Traceback (most recent call last):
      File "/home/user/train.py", line 11, in <module>
        report()
    torch.distributed.DistBackendError: NCCL error
    """)

GROUP = dedent("""\
      + Exception Group Traceback (most recent call last):
      |   File "/srv/app.py", line 680, in __aexit__
      |     raise BaseExceptionGroup(
      | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
      +-+---------------- 1 ----------------
        | Traceback (most recent call last):
        |   File "/srv/worker.py", line 12, in send
        |     raise ValueError("first")
        | ValueError: first
        +---------------- 2 ----------------
        | Traceback (most recent call last):
        |   File "/srv/worker.py", line 20, in receive
        |     raise KeyError("second")
        | KeyError: 'second'
        +------------------------------------
    """)

BOX = dedent("""\
    ╭─────────────────────────────── Traceback (most recent call last) ────────────────────────────────╮
    │ /home/user/finetune.py:218 in <module>                                                           │
    │                                                                                                  │
    │   217 if __name__ == "__main__":                                                                 │
    │ ❱ 218 │   main()                                                                                 │
    │                                                                                                  │
    │ /home/user/finetune.py:167 in main                                                               │
    │                                                                                                  │
    │   166 │   │   │   │   scale = 1.0 / args.accum                                                   │
    │ ❱ 167 │   │   │   │   running += out.loss.item() * scale                                         │
    ╰──────────────────────────────────────────────────────────────────────────────────────────────────╯
    RuntimeError: CUDA error: uncorrectable ECC error encountered
    CUDA kernel errors might be asynchronously reported at some other API call.
    """)

LOADER = dedent("""\
    Traceback (most recent call last):
      File "train.py", line 10, in <module>
        for batch in loader:
    ValueError: Caught ValueError in DataLoader worker process 0.
    Original Traceback (most recent call last):
      File "/venv/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
        data = fetcher.fetch(index)
      File "data.py", line 5, in __getitem__
        raise ValueError("bad sample")
    ValueError: bad sample
    """)

SPAWNED = dedent("""\
    Traceback (most recent call last):
      File "main.py", line 3, in <module>
        mp.spawn(work, nprocs=2)
    torch.multiprocessing.spawn.ProcessRaisedException:

    -- Process 1 terminated with the following error:
    Traceback (most recent call last):
      File "main.py", line 8, in work
        os.environ["MASTER_ADDR"]
    KeyError: 'MASTER_ADDR'
    """)

REMOTE = dedent('''\
    multiprocessing.pool.RemoteTraceback:
    """
    Traceback (most recent call last):
      File "pool.py", line 125, in worker
        result = (True, func(*args, **kwds))
    ZeroDivisionError: division by zero
    """

    The above exception was the direct cause of the following exception:

    Traceback (most recent call last):
      File "main.py", line 4, in <module>
        pool.map(f, range(3))
    ZeroDivisionError: division by zero
    ''')

RAY = dedent("""\
    Traceback (most recent call last):
      File "/home/user/run.py", line 5, in <module>
        ray.get(f.remote())
    ray.exceptions.RayTaskError(ValueError): ray::f() (pid=123, ip=10.0.0.1)
      File "/home/user/run.py", line 3, in f
        raise ValueError("bad")
    ValueError: bad
    """)

FAULT = dedent("""\
    Fatal Python error: Segmentation fault

    Thread 0x00007fb0e1fff700 (most recent call first):
      File "/usr/lib/python3.11/threading.py", line 331 in wait

    Current thread 0x00007fb0e2fff700 (most recent call first):
      File "/home/user/ops.py", line 9 in kernel
      File "/home/user/train.py", line 3 in <module>

    Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)
    """)

ABORTED = dedent("""\
    terminate called after throwing an instance of 'c10::DistBackendError'
      what():  [PG ID 0 PG GUID 0 Rank 1] Process group watchdog thread terminated
    Exception raised from ncclCommWatchdog at ProcessGroupNCCL.cpp:1901 (most recent call first):
    frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7fca10b2df86 in libc10.so)
    frame #1: <unknown function> + 0xdc253 (0x7f in /lib/libstdc++.so.6)

    Fatal Python error: Aborted
    """)


def read(text: str) -> list[Raised]:
    reader = Reader()
    for number, line in enumerate(text.splitlines(), 1):
        reader.read(line, number)
    reader.close()
    assert reader.idle
    return reader.done


def headlines(text: str) -> list[str]:
    """Those of the one chain in a text."""
    (raised,) = read(text)
    return [one.headline for one in raised.chain]


def test_plain() -> None:
    (raised,) = read(PLAIN)
    assert (raised.headline, raised.line, raised.earlier) == ("ValueError: bad shape", 10, None)
    assert [frame.line for frame in raised.frames] == [40, 1553, 7]
    assert raised.frames[-1].source == 'raise ValueError("bad shape")'
    assert raised.frames[1].source == "return self._call_impl(*args, **kwargs)"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "\n".join(line.strip() for line in text.splitlines()),
        lambda text: "\n".join(f"      {line}" for line in text.splitlines()),
        lambda text: text.partition("\n")[2],
        lambda text: text.replace("Traceback", "Step 3:   0%|    | 0/10Traceback", 1),
        lambda text: "\n".join(line for line in text.splitlines() if not line.startswith("    ")),
        lambda text: text.replace("  File", "another rank says this\n  File"),
    ],
    ids=["no indents", "indented", "headless", "progress", "no code", "foreign lines"],
)
def test_plain_as_logs_change_it(change: object) -> None:
    assert callable(change)
    (raised,) = read(change(PLAIN))
    assert raised.headline == "ValueError: bad shape"
    assert [frame.line for frame in raised.frames] == [40, 1553, 7]


@pytest.mark.parametrize(
    ("text", "account"),
    [
        ("ValueError: bad", "ValueError: bad"),
        ("ValueError:\n  bad", "ValueError: bad"),
        ("RuntimeError: it failed:\nno memory", "RuntimeError: it failed: no memory"),
        (
            "RuntimeError: NCCL error\nLast error:\nLast error:\nno route",
            "RuntimeError: NCCL error: no route",
        ),
        (
            "x.ValidationError: 2 validation errors for A\nlr\n  too high",
            "x.ValidationError: 2 validation errors for A: too high",
        ),
        ('File "a.py", line 1, in f\n  assert x == 3\nAssertionError', "AssertionError: assert x == 3"),
        ('File "a.py", line 1, in f\n  raise Odd\nKeyError', "KeyError"),
    ],
)
def test_an_exception_is_told_with_the_line_that_says_what_happened(text: str, account: str) -> None:
    assert read(text)[0].account == account


def test_chain() -> None:
    (raised,) = read(CHAIN)
    first, second, last = raised.chain
    assert (first.headline, second.headline) == ("KeyError: 'label'", "RuntimeError: cannot load")
    assert (second.handling, last.handling) == (False, True)
    assert last.frames[0].line == 11


def test_group() -> None:
    group, other = read(GROUP)
    assert [one.name for one in group.chain] == ["ValueError", "ExceptionGroup"]
    assert group.earlier is not None
    assert group.earlier.frames[0].line == 12
    assert other.headline == "KeyError: 'second'"


def test_chain_after_a_group_of_one() -> None:
    lines = GROUP.splitlines()
    text = "\n".join([*lines[:9], lines[-1], *CHAIN.splitlines()[4:11]])
    assert [one.partition(":")[0] for one in headlines(text)] == [
        "ValueError",
        "ExceptionGroup",
        "RuntimeError",
    ]


def test_box() -> None:
    (raised,) = read(BOX)
    assert raised.message == "CUDA error: uncorrectable ECC error encountered"
    assert raised.more == ("CUDA kernel errors might be asynchronously reported at some other API call.",)
    assert [str(frame) for frame in raised.frames] == [
        "/home/user/finetune.py:218, in <module>",
        "/home/user/finetune.py:167, in main",
    ]
    assert [frame.source for frame in raised.frames] == ["main()", "running += out.loss.item() * scale"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOADER, ["ValueError: bad sample", "ValueError: Caught ValueError in DataLoader worker process 0."]),
        (SPAWNED, ["KeyError: 'MASTER_ADDR'", "torch.multiprocessing.spawn.ProcessRaisedException"]),
        (
            REMOTE,
            [
                "ZeroDivisionError: division by zero",
                "multiprocessing.pool.RemoteTraceback",
                "ZeroDivisionError: division by zero",
            ],
        ),
        (
            RAY,
            ["ValueError: bad", "ray.exceptions.RayTaskError(ValueError): ray::f() (pid=123, ip=10.0.0.1)"],
        ),
        (
            "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nTypeError: bad",
            ["TypeError: bad", "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:"],
        ),
        (
            f"core.ChildException: {PLAIN}",
            ["ValueError: bad shape", "core.ChildException"],
        ),
    ],
    ids=["loader", "spawn", "pool", "ray", "dynamo", "in the header's line"],
)
def test_traceback_within_a_message(text: str, expected: list[str]) -> None:
    assert headlines(text) == expected


def test_faulthandler() -> None:
    (raised,) = read(FAULT)
    assert (raised.headline, raised.native) == ("Fatal Python error: Segmentation fault", True)
    assert [str(frame) for frame in raised.frames] == [
        "/home/user/train.py:3, in <module>",
        "/home/user/ops.py:9, in kernel",
    ]


def test_dump_of_a_process_that_goes_on() -> None:
    assert read("Timeout (0:00:30)!\n" + FAULT.partition("\n")[2]) == []


def test_abort_follows_the_exception_of_cxx() -> None:
    assert headlines(ABORTED) == [
        "c10::DistBackendError: [PG ID 0 PG GUID 0 Rank 1] Process group watchdog thread terminated",
        "Fatal Python error: Aborted",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("SystemExit: 2", "SystemExit: 2"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "torch.OutOfMemoryError: CUDA out of memory."),
        ("httpx.ReadTimeout: timed out", "httpx.ReadTimeout: timed out"),
        ("terminate called without an active exception", "terminate called without an active exception"),
        (
            "thread 'main' (1) panicked at src/utils/mod.rs:1157:5:\nnccl is not enabled\nstack backtrace:",
            "panicked: nccl is not enabled",
        ),
        ("thread 'main' panicked at 'no entry', src/lib.rs:3:9", "panicked: no entry"),
        (
            "*** SIGSEGV (@0x0) received by PID 24044 (TID 0x7f64); stack trace: ***\n    @     0x7f64 f",
            "*** SIGSEGV (@0x0) received by PID 24044 (TID 0x7f64); stack trace: ***",
        ),
        (
            "[node1:99] *** Process received signal ***\n[node1:99] Signal: Segmentation fault (11)",
            "[node1:99] Signal: Segmentation fault (11)",
        ),
    ],
)
def test_headers_that_stand_alone(text: str, expected: str) -> None:
    (raised,) = read(text)
    assert (raised.headline, raised.line) == (expected, 1)


_TABLE = load("tracebacks.toml")


@pytest.mark.parametrize("row", _TABLE["header"].values(), ids=_TABLE["header"])
def test_the_headers_of_python(row: dict[str, Any]) -> None:
    pattern = compiled(row["pattern"], "tracebacks.toml")
    assert [line for line in row["examples"] if not pattern.match(line)] == []
    assert [line for line in row["not"] if pattern.match(line)] == []


@pytest.mark.parametrize("line", [line for row in _TABLE["failure"] for line in row["examples"]])
def test_what_other_runtimes_write_when_they_fail(line: str) -> None:
    reader = Reader()
    assert reader.read(line, 1) is Part.HEADER
    reader.close()
    assert reader.done[0].native


@pytest.mark.parametrize(
    "text",
    [
        "MeanSquaredError: 0.031",
        "ValidationError: 12",
        "Epoch: 3",
        "INFO: ready",
        "Error: it failed",
        "retry after ConnectionError: reset by peer",
        "UserWarning: slow",
        "usage: train.py [-h]\n  --lr LR\nloading",
        'Stack (most recent call last):\n  File "a.py", line 3, in f\n    g()\n' + "step\n" * 20,
    ],
)
def test_lines_that_are_no_exception(text: str) -> None:
    assert read(text) == []


def test_message_of_several_lines_ends() -> None:
    reader = Reader()
    lines = ["ValueError: 2 errors", "  a is missing", "  b is missing", "", "loading the next one"]
    parts = [reader.read(line, number) for number, line in enumerate(lines)]
    assert parts == [Part.HEADER, Part.MORE, Part.MORE, Part.MORE, Part.NONE]
    reader.close()
    assert reader.done[0].more == ("  a is missing", "  b is missing")


def test_record_ends_a_message() -> None:
    reader = Reader()
    reader.read("ValueError: bad", 1)
    assert reader.read("shutting down", 2, record=True) is Part.NONE


def test_traceback_in_records_of_a_logger() -> None:
    reader = Reader()
    for number, line in enumerate(PLAIN.splitlines()):
        reader.read(line, number, record=True)
    assert reader.read("stopping", 11, record=True) is Part.NONE
    reader.close()
    assert reader.done == [Raised("ValueError", "bad shape", 9, frames=read(PLAIN)[0].frames)]


def test_memory_is_bounded() -> None:
    frames = 'File "a.py", line 1, in f\n' * 5_000
    (raised,) = read(
        f"Traceback (most recent call last):\n{frames}ValueError: {'x' * 10_000}\n" + "y\n" * 1_000
    )
    assert len(raised.frames) == MOST_FRAMES
    assert len(raised.headline) == MOST_TEXT
    assert len(raised.more) == MOST_MORE


def test_exception_is_complete_some_lines_after_it() -> None:
    reader = Reader()
    for number, line in enumerate((PLAIN + "\n" + "step\n" * 30).splitlines()):
        reader.read(line, number)
    assert reader.idle
    assert len(reader.done) == 1


EXAMPLES = (PLAIN, CHAIN, GROUP, BOX, LOADER, SPAWNED, REMOTE, RAY, FAULT, ABORTED)


@given(st.sampled_from(EXAMPLES), st.sampled_from(EXAMPLES), st.randoms(use_true_random=False))
def test_processes_do_not_disturb_each_other(one: str, other: str, random: object) -> None:
    """Lines of two processes, mixed in any way, make the same exceptions as by themselves."""
    choose = getattr(random, "random")  # noqa: B009
    waiting, readers = [one.splitlines(), other.splitlines()], [Reader(), Reader()]
    sizes = [len(lines) for lines in waiting]
    while any(waiting):
        turn = int(choose() < 0.5) if all(waiting) else int(not waiting[0])
        readers[turn].read(waiting[turn].pop(0), sizes[turn] - len(waiting[turn]))
    for reader in readers:
        reader.close()
    assert [reader.done for reader in readers] == [read(one), read(other)]


@given(st.lists(st.sampled_from("\n".join(EXAMPLES).splitlines())))
def test_any_lines_in_any_order(lines: list[str]) -> None:
    reader = Reader()
    for number, line in enumerate(lines):
        reader.read(line, number)
    reader.close()
    assert reader.idle
    assert all(raised.headline for raised in reader.done)
