"""Who holds a port, where the system tells (Linux; elsewhere nobody is named), and which are for clients."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"
_PROC = Path("/proc")

# What systems give to clients unless told otherwise; only Linux says by a file what it has been told.
_OF_LINUX = (32_768, 60_999)
_OF_OTHERS = (49_152, 65_535)


def client_ports() -> tuple[int, int]:
    """The first and the last port that the system gives to clients (its ephemeral range)."""
    if sys.platform != "linux":
        return _OF_OTHERS
    try:
        low, high = (_PROC / "sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _OF_LINUX


def holder_of(port: int) -> str | None:
    """The process that listens on `port`, as `process 123 (python train.py)`, or None if it is not known."""
    inodes = {inode for inode, listening_port in _listening_sockets() if listening_port == port}
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in _PROC.iterdir():
        if process.name.isdigit() and _holds(process, wanted):
            return f"process {process.name} ({_command_of(process)})"
    return None


def listening_ports() -> set[int]:
    """The ports on which somebody on this machine listens, as far as the system tells."""
    return {port for _, port in _listening_sockets()}


def _listening_sockets() -> Iterator[tuple[str, int]]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            column = line.split()
            if column[3] == _LISTENING:
                yield column[9], int(column[1].rpartition(":")[2], 16)


def _holds(process: Path, wanted: set[str]) -> bool:
    try:
        with os.scandir(process / "fd") as entries:
            return any(_target_of(entry.path) in wanted for entry in entries)
    except OSError:  # it has ended, or is another user's
        return False


def _target_of(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def _command_of(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "ended"
    # Of a program on the command line (python -c), the first line.
    text = " ".join(word.decode(errors="replace").partition("\n")[0] for word in words)
    return " ".join(text.split())[:120]
