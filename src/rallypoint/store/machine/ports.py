"""Who listens on ports, which ports the system gives to clients, and how many of them may wait."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from rallypoint.text import shown

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")

# What systems give to clients unless told otherwise; only Linux says by a file what it has been told.
_OF_LINUX = (32_768, 60_999)
_OF_OTHERS = (49_152, 65_535)

_LONGEST_COMMAND = 120


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


def _number_in(path: str) -> int | None:
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
