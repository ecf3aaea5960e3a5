"""Facts from the system: the machine, its limits, and the processes under measurement. For Linux."""

from __future__ import annotations

import os
import platform
import sysconfig
from pathlib import Path
from typing import Final

import psutil

import rallypoint
from rallypoint.build import in_use
from rallypoint.store.machine.system import accept_backlog, client_ports, installed, syn_backlog

SPARE_FILES: Final = 256
"""Files of a process besides its connections."""

CORES_PER_PROCESS: Final = 4


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    spent = 0
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            with open(f"{task.path}/schedstat", encoding="utf-8") as text:
                spent += int(text.read().split()[0])
    except OSError:  # a system without schedstat: coarser, but there
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    return spent / 1e9


def resident_bytes(pid: int) -> int:
    """The memory that a process holds."""
    return psutil.Process(pid).memory_info().rss


def open_files(pid: int) -> int:
    """How many file descriptors a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def raise_open_file_limit() -> None:
    """Raise the limit of open files to its maximum: the servers and the processes of the load inherit it."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """How many connections a process here may have."""
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES


def available_bytes() -> int:
    """How much memory there is for new processes."""
    return psutil.virtual_memory().available


def spare_processes() -> int:
    """How many processes a load may have, so that enough cores are left for the server."""
    return max(1, len(os.sched_getaffinity(0)) // CORES_PER_PROCESS)


def facts() -> dict[str, str]:
    """The machine, in words."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": next(models, "unknown"),
        "memory": f"{psutil.virtual_memory().total / (1 << 30):.0f} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """The versions of the software that takes part."""
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    optimised = "with" if "--enable-optimizations" in arguments else "without"
    return {
        "rallypoint": f"{rallypoint.__version__} ({in_use()})",
        "python": f"{platform.python_version()}, built {optimised} --enable-optimizations",
        "torch": installed("torch"),
        "uvloop": installed("uvloop"),
    }


def limits() -> dict[str, str]:
    """The limits of this system that bound the measurements."""
    low, high = client_ports()
    return {
        "open files per process": f"{most_connections() + SPARE_FILES:,}",
        "backlog (somaxconn)": str(accept_backlog()),
        "SYN backlog": str(syn_backlog()),
        "ports for clients": f"{high - low + 1:,}",
    }
