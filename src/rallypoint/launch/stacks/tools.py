"""Programs of others that know about processes: nvidia-smi, py-spy. Where one is missing, nothing is known.

py-spy reads the memory of a process from outside, without pausing it. So it also sees one that is stopped, or
hangs in a driver.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from rallypoint.launch.stacks.frames import MOST_FRAMES, Frame


def output_of(command: Sequence[str], seconds: float) -> str:
    """What a program prints; nothing if it cannot be started, or takes too long.

    One that sits in a driver does not even end when it is killed: nobody waits for that.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return ""
    try:
        return process.communicate(timeout=seconds)[0]
    except (subprocess.SubprocessError, ValueError):
        process.kill()
        return ""


_NVIDIA_SMI_SECONDS: Final = 3.0


def gpus_of(pids: Collection[int]) -> dict[int, str]:
    """By process: `GPU 3 at 100 %`."""
    if not pids or shutil.which("nvidia-smi") is None:
        return {}
    busy = {}
    for uuid, index, share in _rows("--query-gpu=uuid,index,utilization.gpu", 3):
        busy[uuid] = f"GPU {index} at {share} %"
    users = _rows("--query-compute-apps=pid,gpu_uuid", 2)
    return {
        int(pid): busy[uuid] for pid, uuid in users if pid.isdigit() and int(pid) in pids and uuid in busy
    }


def _rows(query: str, width: int) -> Iterator[list[str]]:
    for line in output_of(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"], _NVIDIA_SMI_SECONDS
    ).splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == width:
            yield words


_PY_SPY_SECONDS: Final = 5.0
_MOST_CHARACTERS: Final = 200


def py_spy_program() -> str | None:
    """Where it is: on the path, or beside this Python."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))


def py_spy_stack(pid: int) -> tuple[Frame, ...]:
    """The stack of the main thread; empty if that cannot be had."""
    found = py_spy_program()
    if found is None:
        return ()
    # A pause would interrupt system calls, and continue a process that is stopped.
    options = ("--nonblocking", "--full-filenames", "--json", "--pid", str(pid))
    text = output_of([found, "dump", *options], _PY_SPY_SECONDS)
    try:
        main = next(
            each
            for each in json.loads(text)
            if each["thread_name"] == "MainThread" or each["os_thread_id"] == pid
        )
        return tuple(map(_frame, main["frames"][:MOST_FRAMES]))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return ()


def _frame(found: dict[str, Any]) -> Frame:
    """The function is named as in the code, without its class, as everywhere."""
    name, line = str(found["name"]), found["line"]
    short = name.rpartition(".")[2][:_MOST_CHARACTERS]
    return Frame(str(found["filename"]), line if isinstance(line, int) else 0, short)
