"""`rallypoint explain`: what it reads, what it prints, and how it ends."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import Outcome, invoke
from rallypoint.errors import UsageError
from rallypoint.explain.knowledge import knowledge

pytestmark = pytest.mark.windows

_ERROR = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 8, in train
[rank3]:     check(lr)
[rank3]: ValueError: learning rate 3.0 is out of range [0, 1]
"""
_FINE = "step 1 loss 0.5\nstep 2 loss 0.4\nTraining finished\n"


def _explain(*arguments: str, text: str = "") -> Outcome:
    return invoke("explain", *arguments, text=text)


def test_standard_input_of_a_real_process() -> None:
    """What it prints need not be UTF-8 there, and its input is a pipe."""
    command = [sys.executable, "-m", "rallypoint", "explain"]
    done = subprocess.run(command, input=_ERROR, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("unknown error: rank 3: ValueError\n  | ValueError: learning rate 3.0")
    assert "  at train.py:8, in train (standard input, line 4)\n" in done.stdout
    assert "  1. Look at train.py:8, in train: check(lr)\n" in done.stdout
    assert done.stderr == ""


def test_nothing_wrong_is_exit_code_0(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(_FINE)
    done = _explain(str(path))
    assert (done.exit_code, done.stdout) == (0, "No failure in 3 lines; last: Training finished\n")


def test_json() -> None:
    done = _explain("--json", text=_ERROR)
    content = json.loads(done.stdout)
    assert (done.exit_code, content["found"], content["lines"]) == (1, True, 4)
    assert content["verdict"]["headline"] == "ValueError: learning rate 3.0 is out of range [0, 1]"
    assert "flight" not in content


def test_the_list_is_whole() -> None:
    ids = [entry.id for entry in knowledge().entries]
    assert [line.split()[0] for line in _explain("--list").stdout.splitlines()] == ids
    content = json.loads(_explain("--list", "--json").stdout)
    assert [entry["id"] for entry in content] == ids
    assert all(entry["patterns"] and entry["title"] for entry in content)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such.log",), "cannot read no-such.log: no such file"),
        (("--list", "x.log"), "--list takes no files"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str) -> None:
    done = _explain(*arguments)
    assert isinstance(done.exception, UsageError)
    assert (done.exit_code, done.exception.message) == (2, message)
    assert done.exception.hint
    assert (done.stdout, done.stderr) == ("", "")


def test_a_file_that_cannot_be_read_is_an_error_only_if_there_is_no_other(tmp_path: Path) -> None:
    damaged = tmp_path / "rank1.log.gz"
    damaged.write_bytes(gzip.compress(_FINE.encode() * 99)[:-20])
    alone = _explain(str(damaged))
    assert alone.exit_code == 2
    assert alone.exception is not None
    assert alone.exception.message.startswith(f"cannot read {damaged}: ")
    (tmp_path / "rank0.log").write_text(_ERROR)
    done = _explain(str(tmp_path))
    assert done.exit_code == 1
    assert done.stdout.startswith("unknown error: rank 3: ValueError\n")
    assert "Not read: " in done.stdout
    assert [each["name"] for each in json.loads(_explain("--json", str(tmp_path)).stdout)["unreadable"]] == [
        str(damaged)
    ]


# Flight Recorder -------------------------------------------------------------------------------------------


def _dump(operation: str) -> str:
    entry = {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 7,
        "profiling_name": operation,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "time_created_ns": 7,
        "frames": [{"name": "step", "filename": "train.py", "line": 88}],
    }
    return json.dumps({"entries": [entry], "pg_config": {"0": {"ranks": "[0, 1, 2]"}}})


def test_dumps_are_part_of_the_explanation(tmp_path: Path) -> None:
    for rank, operation in enumerate(("nccl:all_reduce", "nccl:barrier", "nccl:all_reduce")):
        (tmp_path / f"nccl_trace_rank_{rank}.json").write_text(_dump(operation))
    done = _explain(str(tmp_path))
    assert done.exit_code == 1
    assert "    rank 1: nccl:barrier of [4, 2] Float, at train.py, line 88, in step\n" in done.stdout
    assert "The log is empty" not in done.stdout
    (tmp_path / "train.log").write_text("step 1\nstep 2\n")
    document = json.loads(_explain("--json", str(tmp_path)).stdout)
    assert (document["flight"]["ranks"], document["lines"]) == ([0, 1, 2], 2)
    assert (document["verdict"]["rank"], document["verdict"]["log"]) == (1, None)
    assert "\n\nunknown error: rank 1: " in _explain(str(tmp_path)).stdout


def test_dumps_without_a_difference_are_fine(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"nccl_trace_rank_{rank}.json").write_text(_dump("nccl:barrier"))
    assert _explain(str(tmp_path)).exit_code == 0
