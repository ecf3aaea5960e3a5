"""What makes a machine unfit to take part in a job: a part of it is broken, or full.

The launcher asks before each round, so only what is certain is a failure here: a machine that is called unfit
is left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rallypoint.diagnose.doctor import network
from rallypoint.diagnose.doctor.checks import CHECKS, Check
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, failure, ok, unknown
from rallypoint.text import size

_GPU_SECONDS: Final = 60.0
_LEAST_FREE: Final = 16 << 20  # less than a launcher, a store and a rank write in passing
_DEVICES: Final = "/dev/nvidiactl"  # only examined: where it is, a driver for GPUs is loaded
_BROKEN: Final = {8: "power", 9: "the driver", 10: "an interrupt", 15: "a GPU that has fallen off the bus"}
"""Exit codes of nvidia-smi, and what is wrong. Others say little: with 6, a scheduler may hide all GPUs."""
_QUERY: Final = "index,name,ecc.errors.uncorrected.volatile.total"


def check_gpus(_: Situation) -> Iterator[Finding]:
    """Whether all GPUs answer, and none has met an error of its memory that it could not correct."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield failure("gpus", f"nvidia-smi gave no answer within {_GPU_SECONDS:g} s: the driver hangs")
    except OSError as error:
        yield unknown("gpus", f"nvidia-smi cannot be started: {error.strerror}")
    else:
        yield judge_gpus(ended.returncode, ended.stdout, is_loaded=Path(_DEVICES).exists())


def judge_gpus(code: int, told: str, *, is_loaded: bool) -> Finding:
    """By what nvidia-smi has printed; `is_loaded`: there is a driver, without which it can tell nothing."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    if code != 0:
        said = lines[-1] if lines else f"nvidia-smi ended with {code}"
        judge = failure if is_loaded and code in _BROKEN else unknown
        return judge(
            "gpus", f"the GPUs cannot be asked: {said}", "nvidia-smi; then reset them, or the machine"
        )
    rows = [[word.strip() for word in line.split(",")] for line in lines]
    broken = [
        f"GPU {row[0]} ({row[1]}): {row[2]}"
        for row in rows
        if len(row) == 3 and row[2].isdecimal() and int(row[2])  # else it has no such counter
    ]
    if broken:
        what = f"errors of memory that could not be corrected: {', '.join(broken)}"
        return failure("gpus", what, "nvidia-smi --gpu-reset, or have the GPU replaced")
    return ok("gpus", f"{len(rows)} GPUs answer, no errors of their memory")


def check_room(situation: Situation) -> Iterator[Finding]:
    """Whether a job can write at all: to its folder, to temporary files, to shared memory."""
    shared = ["/dev/shm"] if sys.platform == "linux" else []  # noqa: S108 - it is only examined
    for folder in dict.fromkeys([str(situation.folder.absolute()), tempfile.gettempdir(), *shared]):
        try:
            usage = shutil.disk_usage(folder)
        except OSError as error:
            yield unknown("room", f"{folder} cannot be examined: {error.strerror}")
            continue
        # The image of a container is read-only, and has no room. Some file systems do not know, and say 0.
        if os.access(folder, os.W_OK) and usage.total:
            yield judge_room(folder, usage.free)


def judge_room(folder: str, free: int) -> Finding:
    what = f"{folder} has {size(free)} free"
    if free < _LEAST_FREE:
        return failure("room", f"{what}: it is full", "remove what is not needed there")
    return ok("room", what)


QUICK: Final = (
    Check("gpus", check_gpus, 2.0),
    Check("room", check_room, 2.0),
    Check("host-name", network.check_host_name, 2.0),
    Check("interfaces", network.check_interfaces, 2.0),
)
"""What takes less than a launcher waits for it. Who does not answer so soon is not known to be unfit."""

_LONGER: Final = ("loopback", "interface", "store", "shared-memory", "open-files")

FULL: Final = (
    *(Check(each.name, each.examine, _GPU_SECONDS + 1) for each in QUICK),
    *(each for each in CHECKS if each.name in _LONGER),
)
"""What takes longer: GPUs whose driver is slow, and a store on this machine, too."""

EXAMINATIONS: Final = {"quick": QUICK, "full": FULL}
