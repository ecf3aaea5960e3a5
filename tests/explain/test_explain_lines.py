"""Who wrote a line, when, and how serious it is: told from what launchers and loggers put before it."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.explain.events import NOBODY, Process
from rallypoint.explain.lines import Line, Prefixes, decode, load, rows

pytestmark = pytest.mark.windows

_DAY = 86_400
_TIME = "2026-11-15 14:36:19"
_ROWS = load("prefixes.toml")


def _split(*lines: str) -> Line:
    """The last of some lines of a log, which begins with a date."""
    split = Prefixes()
    return [split.split(line) for line in (f"[{_TIME}] a", *lines)][-1]


def _shown(line: Line) -> str:
    return "" if line.time is None else str(datetime.fromtimestamp(line.time, timezone.utc))[:19]


# The tables ------------------------------------------------------------------------------------------------


def _cases(kind: str, field: str) -> list[Any]:
    return [(at, case) for at, entry in enumerate(_ROWS[kind]) for case in entry.get(field, ())]


def test_each_entry_has_examples() -> None:
    assert all(entry["examples"] for kind in ("prefix", "severity") for entry in _ROWS[kind])


@pytest.mark.parametrize(("at", "example"), _cases("prefix", "examples"))
def test_a_prefix_leaves_the_rest_of_its_examples(at: int, example: tuple[str, str]) -> None:
    line, rest = example
    found = rows("prefix")[at].pattern.match(line)
    assert found is not None
    assert line[found.end() :] == rest


@pytest.mark.parametrize(("at", "line"), _cases("prefix", "not"))
def test_a_prefix_leaves_other_lines_alone(at: int, line: str) -> None:
    assert rows("prefix")[at].pattern.match(line) is None


@pytest.mark.parametrize(("at", "text"), _cases("severity", "examples"))
def test_words_tell_a_level(at: int, text: str) -> None:
    assert _split(text).level == rows("severity")[at].level_of(text) != ""


@pytest.mark.parametrize(("at", "text"), _cases("severity", "not"))
def test_words_that_tell_no_level(at: int, text: str) -> None:
    assert rows("severity")[at].level_of(text) == ""


# Prefixes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "process", "when", "text"),
    [
        ("[default1]:step 0", Process(local=1), "", "step 0"),
        ("[default1]:[rank9]:   File", Process(9), "", "  File"),
        ("[rank0]:[E1115 14:36:19.123456789 PG.cpp:616] [Rank 0] Watchdog", Process(0), _TIME, "Watchdog"),
        ("[E727 23:07:54.322 PG.cpp:629] [Rank 3] x", Process(3), "2026-07-27 23:07:54", "x"),
        ("E1115 14:36:19.123000 12345 torch/x/api.py:869] failed", Process(pid=12345), _TIME, "failed"),
        (f"[{_TIME},123] [INFO] [logging.py:96:log_dist] [Rank 2] x", Process(2), _TIME, "x"),
        (f"[{_TIME}] node-a:12:34 [0] NCCL WARN x", Process(host="node-a", pid=12), _TIME, "NCCL WARN x"),
        (f"{_TIME},123 - my.module - ERROR - bad", NOBODY, _TIME, "bad"),
        ("11/15/2026 14:36:19 - INFO - __main__ - bad", NOBODY, _TIME, "bad"),
        ("26/11/15 14:36:19 ERROR Executor: bad", NOBODY, _TIME, "bad"),
        ("2026-11-15T14:36:19.123456789Z stderr F [rank1]: x", Process(1), _TIME, "x"),
        ("2026-11-15T15:36:19.1+01:00   File", NOBODY, _TIME, "  File"),
        ("[1,12]<stderr>:[rank3]: x", Process(3), "", "x"),
        ("(TrainWorker pid=123, ip=10.0.0.1) x", Process(host="10.0.0.1", pid=123), "", "x"),
        (
            "Nov 15 14:36:19 node-a kernel: [123.456789] Out of memory",
            Process(host="node-a"),
            _TIME,
            "Out of memory",
        ),
        ("[Sun Nov 15 14:36:19 2026] Out of memory", NOBODY, _TIME, "Out of memory"),
        ("[14:36:19] bad", NOBODY, _TIME, "bad"),
        ("(Worker pid=7) bad [repeated 3x across cluster] (more)", Process(pid=7), "", "bad"),
        ("Epoch 0:  6%|#  | 3/50 [6:28<94:39, 1.37it/s, loss=2][E PG.cpp:4] [Rank 7] x", Process(7), "", "x"),
    ],
)
def test_prefixes_nest(raw: str, process: Process, when: str, text: str) -> None:
    line = _split(raw)
    assert (line.process, _shown(line), line.text) == (process, when, text)


@pytest.mark.parametrize(
    ("raw", "level"),
    [
        ("[W1115 14:36:19.123 socket.cpp:601] [c10d] x", "warning"),
        ("[rank0]:[E1115 14:36:19.123456789 PG.cpp:616] [Rank 0] x", "error"),
        (f"{_TIME},475 - Tuner - INFO - [rank7]: AssertionError", ""),
        ("[F socket.cpp:922] [c10d] x", "fatal"),
        (f"{_TIME}.123456: E tensorflow/core/x_ops.cc:59] x", ""),
        (f"[{_TIME},123] torch.distributed.x.api: [ERROR] x", "error"),
        (f"[{_TIME},123: ERROR/MainProcess] x", "error"),
        (f"[{_TIME},123: WARNING/ForkPoolWorker-1] x", ""),
        (f"{_TIME} INFO [E1115 14:36:19.1 socket.cpp:1] x", "error"),
        ("node-a:12:34 [0] NCCL INFO x", "info"),
        ("node-a:12:34 [0] socket.cc:5 NCCL WARN x", ""),
        (f"{_TIME},123 - ERROR - x failed, retrying", "warning"),
        (f"{_TIME},123 - DEBUG - x", "debug"),
        ("[main] [CRITICAL] x", "fatal"),
        ("time=1 level=warn msg=x", "warning"),
        ('{"msg": "x", "severity": "Error"}', "error"),
        ("RuntimeError: x", ""),
    ],
)
def test_level(raw: str, level: str) -> None:
    assert _split(raw).level == level


def test_what_kind_of_record_it_is() -> None:
    marked, logged = _split("[rank0]: x"), _split("[rank0]:E1115 14:36:19.1 7 torch/x.py:8] bad")
    assert (marked.record, marked.marked) == (False, True)
    assert (logged.record, logged.marked) == (True, False)


@pytest.mark.parametrize(
    "raw",
    [
        "RuntimeError: CUDA error: x",
        "socket.gaierror: [Errno -2] Name or service not known",
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
    ],
)
def test_what_is_no_prefix_stays(raw: str) -> None:
    assert _split(raw) == Line(raw)


@pytest.mark.parametrize(
    ("label", "process"),
    [
        *[("3: ", Process(3)), (" 3: ", Process(3)), ("node-a: ", Process(host="node-a"))],
        *[("server  | ", NOBODY), ("> ", NOBODY)],
    ],
)
def test_names_before_lines_are_learnt(label: str, process: Process) -> None:
    """`node-a: ` could be anything, until it stands before what can only follow a prefix."""
    assert _split(f"{label}ValueError: x").text == f"{label}ValueError: x"
    line = _split(f"{label}Traceback (most recent call last):", f"{label}ValueError: x")
    assert (line.process, line.text) == (process, "ValueError: x")
    assert _split(f"{label}[rank7]: x").process.rank == 7


def test_colours_are_no_part_of_a_line() -> None:
    assert decode(b"\x1b[31mbad\x1b[0m and \xe2\x9d\xb1 ^[[1;32mgood \xff\r") == "bad and ❱ good �"


@given(st.text(alphabet="[]0123456789:EW.-|rank _/,T", max_size=60))
def test_any_line_can_be_split(raw: str) -> None:
    assert raw.endswith(Prefixes().split(raw).text)


# Times -----------------------------------------------------------------------------------------------------


def _times(*lines: str) -> list[float]:
    split = Prefixes()
    return [when for line in lines if (when := split.split(line).time) is not None]


def test_the_outermost_time_counts() -> None:
    assert _shown(_split("2026-11-15T14:36:19Z [E1115 09:36:18.1 socket.cpp:1] x")) == _TIME


def test_midnight_without_dates_is_one_second_long() -> None:
    first, *later = _times("[23:59:59] a", "[00:00:00] b", "[23:59:59] c")
    assert [each - first for each in later] == [1, 0]


def test_a_time_of_day_is_of_the_day_of_the_dates_before_it() -> None:
    dated, later = _times(f"[{_TIME}] a", "[14:36:21] b")
    assert later - dated == 2


def test_the_new_year_without_years_is_one_second_long() -> None:
    before, after = _times("[12-31 23:59:59] a", "[01-01 00:00:00] b")
    assert after - before == 1


def test_a_leap_day_without_a_year() -> None:
    (leap_day,) = _times("[02-29 00:00:00] a")
    assert datetime.fromtimestamp(leap_day, timezone.utc).day == 29


@given(
    st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1), timezones=st.just(timezone.utc)),
    st.floats(-150 * _DAY, 150 * _DAY),
)
def test_a_time_without_its_year_is_found_again(moment: datetime, distance: float) -> None:
    moment = moment.replace(microsecond=0)
    before = moment + timedelta(seconds=distance)
    _, found = _times(f"[{before:%Y-%m-%d %H:%M:%S}] a", f"[{moment:%m-%d %H:%M:%S}] b")
    assert (moment.month, moment.day) == (2, 29) or found == moment.timestamp()


# Speed -----------------------------------------------------------------------------------------------------


def test_an_ordinary_line_costs_little() -> None:
    """Some ten microseconds; the bound is for slow machines."""
    split, line = Prefixes(), "step 12: the loss of the model is 0.25, which is fine"
    began = time.thread_time()
    for _ in range(1_000):
        split.split(line)
    assert time.thread_time() - began < 0.1
