"""The processes of a build: the ninja that works in a folder, and what its compilers take."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Final

import psutil

from rallypoint.diagnose.builds.progress import Load

_NAMES: Final = re.compile(r"(?:ninja|ninja-build|samu)(?:\.exe)?", re.IGNORECASE)


def find_ninja(build: Path) -> psutil.Process | None:
    """The ninja that works in a folder: with -C, it has gone there."""
    for process in psutil.process_iter(["name"]):
        if not _NAMES.fullmatch(process.info["name"] or ""):
            continue
        try:
            if not is_gone(process) and os.path.realpath(process.cwd()) == str(build):
                return process
        except (psutil.Error, OSError):  # it has ended, or is somebody else's
            continue
    return None


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended, also if nobody has taken note of it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


class Meter:
    """What a ninja and its descendants take: the first time since it has begun, then since the last time."""

    def __init__(self, ninja: psutil.Process) -> None:
        self._ninja = ninja
        self._moment = ninja.create_time()
        self._seconds = 0.0
        """Of processors, until then."""

    def read(self) -> Load | None:
        """None if it has just ended."""
        try:
            steps, members = len(self._ninja.children()), self._ninja.children(recursive=True)
        except psutil.Error:
            return None
        usage = [use for process in (self._ninja, *members) if (use := _use(process))]
        seconds, now = sum(cpu for cpu, _ in usage), time.time()
        percent = 100 * (seconds - self._seconds) / max(now - self._moment, 0.01)
        self._seconds, self._moment = seconds, now
        return Load(steps, round(max(0.0, percent), 1), sum(memory for _, memory in usage))


def _use(process: psutil.Process) -> tuple[float, int] | None:
    """Seconds of processors and bytes of memory. Linux also tells the time of children that have ended."""
    try:
        times, memory = process.cpu_times(), process.memory_info().rss
    except psutil.Error:
        return None
    ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return times.user + times.system + ended, memory
