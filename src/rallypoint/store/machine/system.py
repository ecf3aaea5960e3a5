"""Ports, cores, memory, packages and files of this machine, as the operating system tells and opens them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rallypoint.text import shown

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")

# What systems give to clients unless told otherwise; only Linux says by a file what it has been told.
_OF_LINUX: Final = (32_768, 60_999)
_OF_OTHERS: Final = (49_152, 65_535)

_LONGEST_COMMAND: Final = 120

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

# Ports


def client_ports() -> tuple[int, int]:
    """The first and the last port that the system gives to clients (its ephemeral range)."""
    if sys.platform != "linux":
        return _OF_OTHERS
    try:
        low, high = _RANGE_FILE.read_text(encoding="utf-8").split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _OF_LINUX


def accept_backlog() -> int | None:
    """How many clients may wait on one socket to be accepted, at most (somaxconn)."""
    return _number_in("/proc/sys/net/core/somaxconn")


def syn_backlog() -> int | None:
    """How many connections may be half open on one socket."""
    return _number_in("/proc/sys/net/ipv4/tcp_max_syn_backlog")


def _number_in(path: str | Path) -> int | None:
    """None if there is no such file, or it says `max`."""
    try:
        return int(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def free_port() -> int:
    """A port of loopback that is free now; another program may take it before the caller does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def holder_of(port: int) -> str | None:
    """The process that listens on `port`, as `process 123 (python train.py)`, or None if it is not known."""
    pid = _listening().get(port)
    return f"process {pid} ({_command_of(pid)})" if pid is not None else None


def holder_has(port: int, library: str) -> bool:
    """Whether the process that listens on `port` has loaded a library; True if that is not told."""
    try:
        return library.encode() in Path(f"/proc/{_listening()[port]}/maps").read_bytes()
    except (KeyError, OSError):
        return True


def out_of_files(port: int) -> str | None:
    """The process that listens on `port`, if it may open no more files; only Linux tells its limit."""
    import psutil

    try:
        process = psutil.Process(_listening()[port] or 0)
        most = process.rlimit(psutil.RLIMIT_NOFILE)[0]
        if process.num_fds() < most:
            return None
    except (KeyError, AttributeError, psutil.Error, OSError):
        return None
    return f"process {process.pid} ({_command_of(process.pid)}) has all of its {most} files open"


def listening_ports() -> set[int]:
    """The ports on which processes of this machine listen, as far as the system tells."""
    return set(_listening())


def _listening() -> dict[int, int | None]:
    """Each port on which somebody listens, and the process, if the system tells."""
    import psutil  # late: few commands need it

    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError, RuntimeError):  # macOS tells only root
        return {}
    found: dict[int, int | None] = {}
    for each in connections:
        if each.status == psutil.CONN_LISTEN and each.laddr and found.get(each.laddr.port) is None:
            found[each.laddr.port] = each.pid
    return found


def _command_of(pid: int) -> str:
    import psutil

    try:
        words = psutil.Process(pid).cmdline()
    except (psutil.Error, OSError):
        return "ended"
    # Of a program on the command line (python -c), the first line.
    text = " ".join(word.partition("\n")[0] for word in words)
    return shown(" ".join(text.split()), _LONGEST_COMMAND)


# Cores, memory and packages


def usable_cores() -> int:
    """The cores of this machine that are for this process; those of its container, if these are fewer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for paths in _GROUP_QUOTAS:
        try:
            words = [word for path in paths for word in Path(path).read_text(encoding="utf-8").split()]
            quota, period = map(int, words)
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
        if quota > 0:
            cores = min(cores, max(quota // period, 1))
    return cores


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
                limit = _number_in(root / mount / each / name)
                if limit is not None:
                    yield limit


def installed(package: str) -> str:
    """The version of a package, or `ABSENT`; nothing is imported of it."""
    from importlib.metadata import PackageNotFoundError, version  # late: no server needs it

    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


# Files that can be renamed and removed while they are open, and that several processes append to. So it is
# everywhere but on Windows, where whoever opens a file has to allow that.

if sys.platform == "win32":
    import _winapi
    import msvcrt

    _SHARE_ALL = 7  # others may read it, write to it, and rename or remove it
    _OPEN_ALWAYS = 4
    _APPEND_DATA = 4  # without the right to write elsewhere: then the system itself finds the end

    def open_movable(path: str | os.PathLike[str], flags: int) -> int:
        """As `os.open`, to read and write, or to append; with O_CREAT, the file is made if there is none."""
        writing = _APPEND_DATA if flags & os.O_APPEND else _winapi.GENERIC_WRITE
        disposition = _OPEN_ALWAYS if flags & os.O_CREAT else _winapi.OPEN_EXISTING
        handle = _winapi.CreateFile(
            os.fspath(path),
            _winapi.GENERIC_READ | writing,
            _SHARE_ALL,
            _winapi.NULL,
            disposition,
            0,
            _winapi.NULL,
        )
        return msvcrt.open_osfhandle(handle, flags | os.O_BINARY | os.O_NOINHERIT)

else:

    def open_movable(path: str | os.PathLike[str], flags: int) -> int:
        """As `os.open`, to read and write, or to append; with O_CREAT, the file is made if there is none."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666)
