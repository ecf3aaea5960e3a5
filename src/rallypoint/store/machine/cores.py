"""How many cores this process may use."""

from __future__ import annotations

import os
from typing import Final

_GROUP_QUOTAS: Final = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Where a container is told for how much of which time it may run, by the two versions of control groups."""


def usable_cores() -> int:
    """The cores of this machine that are for this process; those of its container, if these are fewer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for paths in _GROUP_QUOTAS:
        try:
            words = [word for path in paths for word in _read(path).split()]
            quota, period = map(int, words)
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
        if quota > 0:
            cores = min(cores, max(quota // period, 1))
    return cores


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
