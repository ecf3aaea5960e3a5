"""Ctrl-C and Ctrl-Break end a command in good order. Windows sends them to the processes of a console."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

from processes import is_wine
from windows.test_launching import run_to_files

pytestmark = pytest.mark.windows

_SECONDS = 60

# It has a console to itself, without a window, which it shares with the command. Ctrl-C is for the whole
# console, so it ignores that; Ctrl-Break can be sent to one group of processes.
_AT_A_CONSOLE = f"""
import json, os, signal, subprocess, sys
is_break = sys.argv[1] == "CTRL_BREAK_EVENT"
process = subprocess.Popen(
    [sys.executable, "-m", "rallypoint", *sys.argv[2:]],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    creationflags=subprocess.CREATE_NEW_PROCESS_GROUP if is_break else 0,
)
signal.signal(signal.SIGINT, signal.SIG_IGN)
line = process.stdout.readline()
os.kill(process.pid if is_break else 0, getattr(signal, sys.argv[1]))
rest, log = process.communicate(timeout={_SECONDS})
json.dump([process.returncode, line, rest, log], sys.stdout)
"""


class Said(NamedTuple):
    code: int
    line: str
    rest: str
    log: str


def press(key: str, *words: str) -> Said:
    """Run a command of ours until it has printed a line, then press a key: how it ended, and what it said."""
    command = [sys.executable, "-c", _AT_A_CONSOLE, key, *words]
    done = run_to_files(command, 2 * _SECONDS, {}, flags=getattr(subprocess, "CREATE_NO_WINDOW", 0))
    assert done.returncode == 0, done.stderr
    return Said(*json.loads(done.stdout))


ends_processes = pytest.mark.skipif(is_wine(), reason="at Ctrl-Break, Wine asks no handler of Python")


@pytest.mark.parametrize(
    ("backend", "key"),
    [
        ("libuv", "CTRL_C_EVENT"),
        ("legacy", "CTRL_C_EVENT"),
        pytest.param("libuv", "CTRL_BREAK_EVENT", marks=ends_processes),
        pytest.param("legacy", "CTRL_BREAK_EVENT", marks=ends_processes),
    ],
)
def test_a_key_ends_serve(backend: str, key: str) -> None:
    said = press(key, "serve", "--port", "0", "--backend", backend)
    assert said.line.startswith("rallypoint: serving on ")
    assert (said.code, said.rest) == (0, "")
    assert "Traceback" not in said.log


@pytest.mark.parametrize("key", ["CTRL_C_EVENT", pytest.param("CTRL_BREAK_EVENT", marks=ends_processes)])
def test_a_key_ends_the_page(key: str) -> None:
    said = press(key, "web", "--store", "127.0.0.1:1")
    assert said.line.startswith("rallypoint: page on ")
    assert (said.code, said.rest, said.log) == (0, "", "")
