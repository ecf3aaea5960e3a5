"""Who wrote a line, and when: told from what launchers and loggers put before it."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.diagnose.explain.prefixes import Line, Prefixes
from rallypoint.diagnose.explain.stamps import Stamp, complete_stamp

pytestmark = pytest.mark.windows

_NEAR = datetime(2026, 11, 15, 12)
_TIME = "2026-11-15 14:36:19"


def _split(*lines: str) -> Line:
    prefixes = Prefixes()
    return [prefixes.split(line) for line in lines][-1]


def _time(line: Line) -> str:
    return "" if line.stamp is None else str(line.stamp.resolve(_NEAR))[:19]


@pytest.mark.parametrize(
    ("raw", "rank", "host", "time", "text"),
    [
        # torchrun's tee, which tells a rank within the machine, and torch's own before a traceback
        ("[default0]:step 0", None, None, "", "step 0"),
        ("[worker3]:step 0", None, None, "", "step 0"),
        ("[default1]:[rank9]:   File", 9, None, "", "  File"),
        ("[rank3]: ValueError: x", 3, None, "", "ValueError: x"),
        # torch's C++ logging: now with the month as a plain number, and before 2.2
        ("[rank0]:[E1115 14:36:19.123456789 PG.cpp:616] [Rank 0] Watchdog", 0, None, _TIME, "Watchdog"),
        ("[E727 23:07:54.322 PG.cpp:629] [Rank 3] x", 3, None, "2026-07-27 23:07:54", "x"),
        ("[PG ID 0 PG GUID 0(default_pg) Rank 3] Exception", 3, None, "", "Exception"),
        ("[W1115 14:36:19.123 socket.cpp:601] [c10d] The client", None, None, _TIME, "The client"),
        ("[E socket.cpp:922] [c10d] The client", None, None, "", "The client"),
        # torchrun's own logging: now, in between, and at first
        ("E1115 14:36:19.123000 12345 torch/x/api.py:869] failed", None, None, _TIME, "failed"),
        ("W1115 14:36:19.123000 9 site-packages/torch/x.py:8] [0/8] hit", None, None, _TIME, "hit"),
        (f"[{_TIME},123] torch.distributed.x.api: [ERROR] failed", None, None, _TIME, "failed"),
        ("ERROR:torch.distributed.elastic.multiprocessing.api:failed", None, None, "", "failed"),
        # DeepSpeed
        (f"[{_TIME},123] [INFO] [logging.py:96:log_dist] [Rank 2] x", 2, None, _TIME, "x"),
        # NCCL
        ("node-a:12:34 [0] NCCL WARN x", None, "node-a", "", "NCCL WARN x"),
        (
            f"[{_TIME}] node-a:12:34 [0] socket.cc:5 NCCL WARN x",
            None,
            "node-a",
            _TIME,
            "socket.cc:5 NCCL WARN x",
        ),
        ("\t[rank3]: ValueError: x", 3, None, "", "ValueError: x"),
        # UCX
        (
            "[1746494437.177960] [node-a:16:0]   address.c:944  UCX  ERROR x",
            None,
            "node-a",
            "",
            "UCX  ERROR x",
        ),
        # a collector of logs, which adds the time twice
        (f"1794753379123\t{_TIME.replace(' ', 'T')}.123Z\t  File", None, None, _TIME, "  File"),
        # Python's logging
        (f"{_TIME},123 - ERROR - bad", None, None, _TIME, "bad"),
        (f"{_TIME},123 - my.module - ERROR - bad", None, None, _TIME, "bad"),
        (f"{_TIME}.123 | ERROR    | bad", None, None, _TIME, "bad"),
        (f"{_TIME} INFO  bad", None, None, _TIME, "bad"),
        ("11/15/2026 14:36:19 - INFO - __main__ - bad", None, None, _TIME, "bad"),
        ("ERROR:root:bad", None, None, "", "bad"),
        ("[14:36:19] bad", None, None, _TIME, "bad"),
        # a date in brackets, before a logger's name and before an exception's
        (f"[{_TIME}] torch.distributed.x.api: [ERROR] bad", None, None, _TIME, "bad"),
        (f"[{_TIME}] FileExistsError: bad", None, None, _TIME, "FileExistsError: bad"),
        # TensorFlow; Slurm's daemon
        (f"{_TIME}.123456: E tensorflow/core/x_ops.cc:59] bad", None, None, _TIME, "bad"),
        ("Nov 15 14:36:19.587 4122 slurmstepd   0x4af00: error: bad", None, None, _TIME, "error: bad"),
        # Celery
        (f"[{_TIME},123: WARNING/MainProcess] x", None, None, _TIME, "x"),
        # containers, also as Google Cloud gathers them
        ("ERROR 2026-11-15T14:36:19.123456789Z KeyError: 1", None, None, _TIME, "KeyError: 1"),
        ("2026-11-15T14:36:19.123456789Z stderr F [rank1]: x", 1, None, _TIME, "x"),
        ("2026-11-15T15:36:19.1+01:00   File", None, None, _TIME, "  File"),
        ("[pod/job-worker-1/pytorch] x", None, "job-worker-1", "", "x"),
        ("worker-1  | x", None, "worker-1", "", "x"),
        # mpirun, Ray, the kernel, ourselves
        ("[1,12]<stderr>: x", 12, None, "", "x"),
        ("(TrainWorker pid=123, ip=10.0.0.1) x", None, "10.0.0.1", "", "x"),
        ("Nov 15 14:36:19 node-a kernel: [123.456789] Out of memory", None, "node-a", _TIME, "Out of memory"),
        ("[Sun Nov 15 14:36:19 2026] Out of memory", None, None, _TIME, "Out of memory"),
        ("rallypoint: rank 2 (process 7 on node-a) failed first: V: a", 2, "node-a", "", "V: a"),
        # a progress bar that has not ended its line
        ("Epoch 0:  6%|#  | 3/50 [6:28<94:39, 1.37it/s, loss=2][E PG.cpp:4] [Rank 7] x", 7, None, "", "x"),
    ],
)
def test_prefixes(raw: str, rank: int | None, host: str | None, time: str, text: str) -> None:
    line = _split(raw)
    assert (line.rank, line.host, _time(line), line.text) == (rank, host, time, text)


@pytest.mark.parametrize(
    ("raw", "severity"),
    [
        ("[W1115 14:36:19.123 socket.cpp:601] [c10d] x", "mild"),
        ("[rank0]:[E1115 14:36:19.123456789 PG.cpp:616] [Rank 0] x", "serious"),
        (f"{_TIME},475 - Tuner - INFO - [rank7]: AssertionError", ""),
        ("[F socket.cpp:922] [c10d] x", "serious"),
        (f"{_TIME}.123456: F tensorflow/core/x_ops.cc:59] x", "serious"),
        (f"{_TIME}.123456: E tensorflow/core/x_ops.cc:59] x", ""),
        ("I1115 14:36:19.123000 12345 torch/x/api.py:869] x", "mild"),
        (f"[{_TIME},123] torch.distributed.x.api: [ERROR] x", "serious"),
        (f"[{_TIME},123] [INFO] [logging.py:96:log_dist] [Rank 2] x", "mild"),
        ("WARNING:torch.distributed.run:x", "mild"),
        (f"{_TIME},123 - my.module - CRITICAL - x", "serious"),
        (f"{_TIME} INFO [E1115 14:36:19.1 socket.cpp:1] x", "serious"),  # the inner one knows better
        ("node-a:12:34 [0] NCCL INFO x", "mild"),
        ("node-a:12:34 [0] socket.cc:5 NCCL WARN x", ""),
        ("/home/user/x.py:12: UserWarning: x", "mild"),
        ("[WARNING|trainer.py:3] x", "mild"),
        ("WARNING: x", "mild"),
        ("ERROR: x", "serious"),
        ("rallypoint: rank 2 (process 7 on node-a) failed first: V: a", "serious"),
        (f"{_TIME},123 - ERROR - x failed, retrying", "mild"),
        ("x (ignored)", "mild"),
        ("RuntimeError: x", ""),
        ("WARNINGS are off", ""),
    ],
)
def test_severity(raw: str, severity: str) -> None:
    assert _split(raw).severity == severity


@pytest.mark.parametrize(
    "raw",
    [
        "RuntimeError: CUDA error: x",
        "socket.gaierror: [Errno -2] Name or service not known",
        "torch.cuda.OutOfMemoryError: CUDA out of memory",
        "python3.11: can't open file 'x'",
        "train.py: error: unrecognized arguments",
        "slurmstepd: error: Detected 1 oom_kill event",
        "404: not found",
        "[0]:",
        "  time      : 2026-11-15_14:41:26",
        "[Errno 2] No such file",
        "[Gloo] Rank 0 is connected",
        "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer",
        "loss | 0.3",
        '  File "x.py", line 3',
        "ERROR: it is bad",
    ],
)
def test_what_is_no_prefix_stays(raw: str) -> None:
    assert _split(raw) == Line(raw)


@pytest.mark.parametrize(
    ("label", "rank", "host"),
    [
        *[("3: ", 3, None), (" 3: ", 3, None), ("node-a: ", None, "node-a")],
        *[("server  | ", None, None), ("> ", None, None)],
    ],
)
def test_labels_are_learnt(label: str, rank: int | None, host: str | None) -> None:
    """`node-a: ` could be anything, until it stands before what can only follow a prefix."""
    assert _split(f"{label}ValueError: x").text == f"{label}ValueError: x"
    line = _split(f"{label}Traceback (most recent call last):", f"{label}ValueError: x")
    assert (line.rank, line.host, line.text) == (rank, host, "ValueError: x")
    assert _split(f"{label}[rank7]: x").rank == 7


def test_the_outermost_time_counts() -> None:
    line = _split("2026-11-15T14:36:19Z [E1115 09:36:18.1 socket.cpp:1] x")
    assert _time(line) == _TIME


@given(st.text(alphabet="[]0123456789:EW.-|rank _/,T", max_size=60))
def test_what_looks_like_prefixes_can_be_split(raw: str) -> None:
    line = Prefixes().split(raw)
    assert raw.endswith(line.text)
    if line.stamp is not None:
        line.stamp.resolve(_NEAR)


# Times -----------------------------------------------------------------------------------------------------


def test_midnight_without_dates_is_one_second_long() -> None:
    before = datetime(2026, 11, 15, 23, 59, 59)
    assert Stamp(timedelta(0)).resolve(before) - before == timedelta(seconds=1)


def test_a_leap_day_without_a_year() -> None:
    assert Stamp(timedelta(0), None, 2, 29).resolve(datetime(2025, 3, 1)) == datetime(2024, 2, 29)
    assert Stamp(timedelta(0), None, 2, 30).resolve(_NEAR) == _NEAR  # there is no such day in any year


@given(
    st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1)),
    st.timedeltas(timedelta(days=-150), timedelta(days=150)),
)
def test_a_stamp_without_its_year_is_found_again(moment: datetime, distance: timedelta) -> None:
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    stamp = Stamp(moment - midnight, None, moment.month, moment.day)
    near = moment + distance
    leap_day = (moment.month, moment.day) == (2, 29)
    assert leap_day or stamp.resolve(near) == moment


@given(st.integers(0, 4_000_000_000))
def test_seconds_and_stamps(seconds: int) -> None:
    assert complete_stamp(seconds).resolve(_NEAR) == datetime(1970, 1, 1) + timedelta(seconds=seconds)
