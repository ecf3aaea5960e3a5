"""What this process may use: cores, memory and Python packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_GROUP_QUOTAS: Final = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Where a container is told for how much of which time it may run, by the two versions of control groups."""

_OWN_BYTES: Final = 48 << 20
"""What a server needs before it has clients: code, libraries, stacks."""
_GROUPS: Final = {
    "": ("sys/fs/cgroup", "memory.max"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
}
"""Where control groups are mounted and what the limit is called, by controller: versions 2 and 1."""
ABSENT: Final = "not installed"


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


def memory_bytes(root: Path = Path("/")) -> int | None:
    """The memory that is left for clients and values; None where the system does not tell.

    The least of the machine's memory, the limits of all control groups that this process is in, and its own
    limit of address space, without what every server needs. `root`: where /proc and /sys are.
    """
    known = [*_of_groups(root)]
    try:
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # Windows
        pass
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            known.append(soft)
    return max(min(known) - _OWN_BYTES, _OWN_BYTES) if known else None


def _of_groups(root: Path) -> Iterator[int]:
    """The limits of the control group of this process and of those around it.

    In a container, /proc may name a folder that only the host has: the container's own is mounted at the top.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & _GROUPS.keys():
            mount, name = _GROUPS[controller]
            folder = Path(path.lstrip("/"))
            for each in (folder, *folder.parents):
                try:
                    yield int((root / mount / each / name).read_text(encoding="utf-8"))
                except (OSError, ValueError):  # there is none, or it says "max"
                    pass


def installed(package: str) -> str:
    """The version of a package, or `ABSENT`; nothing is imported of it."""
    from importlib.metadata import PackageNotFoundError, version  # late: no server needs it

    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT
