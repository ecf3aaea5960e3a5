"""The example with eight ranks: it gets through, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

_EXAMPLE = Path(__file__).parents[2] / "examples" / "eight_ranks.py"
_SECONDS = 180


def _start() -> subprocess.Popen[str]:
    environ = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120"}
    return subprocess.Popen(
        [sys.executable, str(_EXAMPLE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        start_new_session=True,
    )


@pytest.mark.slow
def test_eight_ranks_meet() -> None:
    with _start() as demo:
        try:
            output, _ = demo.communicate(timeout=_SECONDS)
        finally:
            demo.kill()
    assert demo.returncode == 0, output
    assert "ok: 8 of 8 ranks met" in output
    assert re.search(r"store server on 127\.0\.0\.1:\d+, backend \w+, process \d+", output)
    rows = re.findall(r"^ +(\d) +\d+(?: +\d+\.\d{3}){5} *$", output, flags=re.MULTILINE)
    assert rows == [str(rank) for rank in range(8)]
    assert "\x1b" not in output


@pytest.mark.skipif(sys.platform == "win32", reason="a process group is interrupted otherwise there")
def test_ctrl_c_ends_the_ranks_and_the_server() -> None:
    with _start() as demo:
        try:
            assert demo.stdout is not None
            first_line = demo.stdout.readline()
            server = psutil.Process(int(first_line.rpartition(" ")[2]))
            os.killpg(demo.pid, signal.SIGINT)
            output, _ = demo.communicate(timeout=_SECONDS)
        finally:
            demo.kill()
    assert demo.returncode == 130, output
    assert not server.is_running()
