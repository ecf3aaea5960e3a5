"""All checks of one machine, running them side by side, and the few that say whether it is fit for a job."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rallypoint.diagnose.doctor import engine, machine, network, stores, torch
from rallypoint.diagnose.doctor.situation import Situation, check_variables
from rallypoint.diagnose.findings import Finding, failure, ok, unknown
from rallypoint.text import size


@dataclass(frozen=True)
class Check:
    """One thing to examine. It may have several findings, or none if it does not apply."""

    name: str
    examine: Callable[[Situation], Iterable[Finding]]
    seconds: float = 8.0
    """The time limit; findings made by then count."""


CHECKS: Final = (
    Check("python", machine.check_python),
    Check("packages", machine.check_packages),
    Check("event-loop", machine.check_event_loop),
    Check("torch", torch.check_torch, torch.SECONDS),
    Check("variables", check_variables),
    Check("host-name", network.check_host_name),
    Check("reverse-look-up", network.check_reverse),
    Check("address-families", network.check_families),
    Check("interfaces", network.check_interfaces),
    Check("endpoint", stores.check_endpoint),
    Check("port", stores.check_port),
    Check("loopback", stores.check_loopback, 20.0),
    Check("interface", stores.check_interface, 20.0),
    Check("store", stores.check_store, 20.0),
    Check("engine", engine.check_engine, 30.0),
    Check("open-files", machine.check_open_files),
    Check("backlog", machine.check_backlog),
    Check("shared-memory", machine.check_shared_memory),
    Check("file-init", machine.check_file_init, 15.0),
    Check("clock", machine.check_clock),
    Check("proxies", network.check_proxies),
)
"""In the order in which their findings are shown."""

_Results = queue.SimpleQueue[tuple[Check, Finding | None]]


def run_checks(checks: Sequence[Check], situation: Situation) -> Iterator[tuple[Check, Sequence[Finding]]]:
    """Run all checks at the same time. Yield the findings of each when it ends, or when its time is over.

    Each check has a daemon thread. A thread whose time is over is left alone: the system's resolver, a file
    system or a GPU may never answer.
    """
    begun = time.monotonic()
    results: _Results = queue.SimpleQueue()
    for check in checks:
        work = (check, situation, results)
        threading.Thread(target=_run_check, args=work, daemon=True, name=f"check-{check.name}").start()
    found: dict[Check, list[Finding]] = {check: [] for check in checks}
    while found:
        next_over = min(found, key=lambda check: check.seconds)
        left = begun + next_over.seconds - time.monotonic()
        if left <= 0:
            late = unknown(f"there was no answer within {next_over.seconds:g} s")
            yield next_over, [*found.pop(next_over), replace(late, name=next_over.name)]
            continue
        try:
            check, finding = results.get(timeout=left)
        except queue.Empty:
            continue
        if check in found and finding is not None:
            seconds = round(time.monotonic() - begun, 3)
            found[check].append(replace(finding, name=finding.name or check.name, seconds=seconds))
        elif check in found:
            yield check, found.pop(check)


def _run_check(check: Check, situation: Situation, results: _Results) -> None:
    try:
        for finding in check.examine(situation):
            results.put((check, finding))
    except Exception as error:  # a check that breaks says so, and the others go on
        reason = " ".join(str(error).split()) or type(error).__name__
        results.put((check, unknown(f"it could not be looked at: {reason}")))
    results.put((check, None))


# Fit for a job ----------------------------------------------------------------------------------------------
# A machine is unfit if a part of it is broken, or full. The launcher asks before each round, and leaves out
# what is unfit, so only what is certain is a failure here.

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
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield failure(f"nvidia-smi gave no answer within {_GPU_SECONDS:g} s: the driver hangs")
    except OSError as error:
        yield unknown(f"nvidia-smi cannot be started: {error.strerror}")
    else:
        yield judge_gpus(done.returncode, done.stdout, is_loaded=Path(_DEVICES).exists())


def judge_gpus(code: int, output: str, *, is_loaded: bool) -> Finding:
    """By the output of nvidia-smi; `is_loaded`: there is a driver, without which it can tell nothing."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if code != 0:
        said = lines[-1] if lines else f"nvidia-smi ended with {code}"
        judge = failure if is_loaded and code in _BROKEN else unknown
        return judge(f"the GPUs cannot be asked: {said}", "nvidia-smi; then reset them, or the machine")
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    broken = [
        f"GPU {row[0]} ({row[1]}): {row[2]}"
        for row in rows
        if len(row) == 3 and row[2].isdecimal() and int(row[2])  # else it has no such counter
    ]
    if broken:
        what = f"errors of memory that could not be corrected: {', '.join(broken)}"
        return failure(what, "nvidia-smi --gpu-reset, or have the GPU replaced")
    return ok(f"{len(rows)} GPUs answer, no errors of their memory")


def check_room(situation: Situation) -> Iterator[Finding]:
    """Whether a job can write at all: to its folder, to temporary files, to shared memory."""
    shared = ["/dev/shm"] if sys.platform == "linux" else []  # noqa: S108 - it is only examined
    for folder in dict.fromkeys([str(situation.folder.absolute()), tempfile.gettempdir(), *shared]):
        try:
            usage = shutil.disk_usage(folder)
        except OSError as error:
            yield unknown(f"{folder} cannot be examined: {error.strerror}")
            continue
        # The image of a container is read-only, and has no room. Some file systems do not know, and say 0.
        if os.access(folder, os.W_OK) and usage.total:
            yield judge_room(folder, usage.free)


def judge_room(folder: str, free: int) -> Finding:
    what = f"{folder} has {size(free)} free"
    return (
        failure(f"{what}: it is full", "remove what is not needed there") if free < _LEAST_FREE else ok(what)
    )


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
