"""Programs of others that know about ranks: nvidia-smi, py-spy, and torch's Flight Recorder.

Where one is missing, nothing is known. py-spy reads the memory of a process from outside, without pausing it.
So it also sees one that is stopped, or hangs in a driver.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rallypoint.errors import UsageError
from rallypoint.frames import MOST_FRAMES, Frame
from rallypoint.launch.stacks.activity import Recorded
from rallypoint.launch.stacks.flight_dumps import MOST_BYTES, last_calls, read_dump


def output_of(command: Sequence[str], seconds: float) -> str:
    """What a program prints; nothing if it cannot be started, or takes too long.

    One that hangs in a driver does not even end when it is killed, so its end is not awaited.
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


# torch's Flight Recorder -----------------------------------------------------------------------------------

# torch watches a pipe for each rank, if a variable names it, and dumps the last collectives when something is
# written there. The dump goes where the user or torch wants it. With torch 2.11 it is there within a second.

PIPES: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_SIZES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PLACES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_NAMES: Final = ("comm_lib_trace_rank_", "nccl_trace_rank_")
_SECONDS: Final = 3.0
_LOOK_SECONDS: Final = 0.05


def with_pipes(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment in which torch's recorder can be asked, if it is on, and the pipes are not in use."""
    is_on = hasattr(os, "mkfifo") and any(environ.get(name, "0").strip() not in ("", "0") for name in _SIZES)
    return {PIPES: str(folder / "flight-"), **environ} if is_on else dict(environ)


def read_recorders(ranks: Iterable[int], environ: Mapping[str, str]) -> dict[int, tuple[Recorded, ...]]:
    """The last collectives by rank, of those whose recorder answers."""
    asked = [rank for rank in ranks if _request(rank, environ)]
    # The clock of files is coarse. A dump of a moment before would be as good.
    began = time.time() - 1.0
    deadline = time.monotonic() + _SECONDS
    found: dict[int, tuple[Recorded, ...]] = {}
    while asked and time.monotonic() < deadline:
        for rank in list(asked):
            path = _fresh_dump(rank, environ, began)
            if path is not None and (calls := _read(rank, path)) is not None:
                found[rank] = calls
                asked.remove(rank)
        time.sleep(_LOOK_SECONDS)
    return found


def _request(rank: int, environ: Mapping[str, str]) -> bool:
    if not (stem := environ.get(PIPES)):
        return False
    try:
        pipe = os.open(f"{stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        with open(pipe, "wb", buffering=0) as file:
            file.write(b"1\n")
    except OSError:  # there is none, or nobody reads it
        return False
    return True


def _fresh_dump(rank: int, environ: Mapping[str, str], since: float) -> Path | None:
    for stem in _stems(environ):
        path = Path(f"{stem}{rank}")
        try:
            if path.stat().st_mtime >= since:
                return path
        except OSError:
            continue
    return None


def _stems(environ: Mapping[str, str]) -> Iterator[str]:
    yield from (environ[name] for name in _PLACES if environ.get(name))
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for name in _NAMES:
        yield os.path.join(cache, "torch", name)
        yield os.path.join("/tmp", name)  # noqa: S108 - where older torches write it


def _read(rank: int, path: Path) -> tuple[Recorded, ...] | None:
    """None while it is being written."""
    try:
        with path.open("rb") as file:
            return last_calls(read_dump(rank, file.read(MOST_BYTES)))
    except (OSError, UsageError):
        return None
