"""How long the command line takes to start, against an empty Python in the same run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from processes import serving
from rallypoint.cli.main import COMMANDS
from rallypoint.client.tcp import TCPStore
from raw import SECONDS

resource = pytest.importorskip("resource", reason="nobody counts the time of children here")

_ROUNDS = 7
_EMPTY = ["-c", "pass"]
_VERSION = ["-m", "rallypoint", "--version"]


def _cpu_seconds(words: Sequence[str]) -> float:
    """Of a process: unlike the time that passes, other processes of the machine hardly change it."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], env=environ, capture_output=True, timeout=SECONDS, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return float(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def test_a_command_waits_for_little_but_python(tmp_path: Path) -> None:
    """Measured: 1.6 and 5.2 times as long as an empty Python."""
    with (tmp_path / "log").open("w+") as log, serving("auto", log) as server:
        with TCPStore("localhost", server.port) as store:
            store.set("key", "value")
        get = ["-m", "rallypoint", "kv", "get", "key", "--store", f"localhost:{server.port}"]
        kinds = (_EMPTY, _VERSION, get)
        for words in kinds:
            _cpu_seconds(words)  # which writes the bytecode
        rounds = [[_cpu_seconds(words) for words in kinds] for _ in range(_ROUNDS)]
    empty, version, value = (statistics.median(each) for each in zip(*rounds, strict=True))
    assert version < 4 * empty
    assert value < 8 * empty


def test_the_table_imports_no_command() -> None:
    program = "import sys, rallypoint.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert {f"rallypoint.cli.{name}" for name in COMMANDS}.isdisjoint(imported)
    assert {"argparse", "typing", "re", "json"}.isdisjoint(imported)
