"""What the system knows: about itself, its limits, and the processes under measurement. For Linux."""

from __future__ import annotations

import os
import platform
import socket
import sys
import sysconfig
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import rallypoint
from rallypoint.errors import UsageError

SPARE_FILES: Final = 256
"""What a process may open besides its connections."""

_LOOKUPS: Final = 64
_STALL_S: Final = 1.0


def check_system() -> None:
    """UsageError where the measurements cannot run."""
    if sys.platform != "linux":
        raise UsageError(
            f"rallypoint bench needs Linux, and this is {platform.system()}",
            hint="it reads CPU times and memory from /proc, and simulates ranks with epoll",
        )


def raise_open_file_limit() -> None:
    """Allow as many open files as may be: the servers and the processes of the load inherit it."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# Processes


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    spent = 0
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            with open(f"{task.path}/schedstat") as text:
                spent += int(text.read().split()[0])
    except OSError:  # a system without schedstat: coarser, but there
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent / 1e9


def resident_bytes(pid: int) -> int:
    """The memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended, and that nobody has asked about yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def open_files(pid: int) -> int:
    """How many file descriptors a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))


# Limits


def most_connections() -> int:
    """How many connections a process here may have."""
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES


def client_ports() -> tuple[int, int]:
    """The first and the last port that the system gives to clients."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(low), int(high)


def room_for_files() -> int:
    """How many files may still be opened on this system."""
    opened, _, most = Path("/proc/sys/fs/file-nr").read_text().split()
    return int(most) - int(opened)


def available_bytes() -> int:
    """How much memory there is for new processes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62  # a kernel that does not say


def cores() -> int:
    """How many cores there are for this process."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def dropped_connects() -> int:
    """How many connects this system has dropped so far because a backlog was full; they try again later."""
    names, values = Path("/proc/net/netstat").read_text().splitlines()[:2]
    return int(dict(zip(names.split(), values.split(), strict=True))["ListenOverflows"])


@dataclass(frozen=True)
class LookUps:
    """How long reverse look-ups took, of the address that torch's own socket sees a local client under."""

    count: int
    seconds: float

    @property
    def stall(self) -> bool:
        """Whether one of them had no answer in time: resolvers lose some, or answer none."""
        return self.seconds > _STALL_S

    def __str__(self) -> str:
        return f"{self.count} look-ups of ::ffff:127.0.0.1 took {self.seconds:.3g} s"


def look_up() -> LookUps:
    """Some reverse look-ups, until one stalls."""
    begun, count, taken = time.monotonic(), 0, 0.0
    while count < _LOOKUPS and taken <= _STALL_S:
        try:
            socket.getnameinfo(("::ffff:127.0.0.1", 9, 0, 0), 0)
        except OSError:
            pass  # no name is an answer: what counts is when
        count, taken = count + 1, time.monotonic() - begun
    return LookUps(count, taken)


# Facts


def facts() -> dict[str, str]:
    """The machine, in words."""
    return {
        "cores": str(cores()),
        "processor": _processor(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def versions() -> dict[str, str]:
    """What takes part, and in which version; redis tells its own when it is started."""
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    optimised = "with" if "--enable-optimizations" in arguments else "without"
    return {
        "rallypoint": rallypoint.__version__,
        "python": f"{platform.python_version()}, built {optimised} --enable-optimizations",
        "torch": installed("torch"),
        "uvloop": installed("uvloop"),
    }


def installed(package: str) -> str:
    """The version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def limits() -> dict[str, str]:
    """What bounds the measurements."""
    low, high = client_ports()
    return {
        "open files per process": f"{most_connections() + SPARE_FILES:,}",
        "backlog (somaxconn)": Path("/proc/sys/net/core/somaxconn").read_text().strip(),
        "SYN backlog": Path("/proc/sys/net/ipv4/tcp_max_syn_backlog").read_text().strip(),
        "ports for clients": f"{high - low + 1:,}",
    }
