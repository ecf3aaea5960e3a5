"""How much data a process has moved, as Linux counts it: a rank in a large transfer is not stuck."""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")
_DIAG: Final = 4  # NETLINK_SOCK_DIAG; its structures are those of linux/inet_diag.h and linux/tcp.h
_BY_FAMILY: Final = 20
_DUMP: Final = 0x301
_WITH_INFO: Final = 2
_ESTABLISHED: Final = 1 << 1
_DONE: Final = (2, 3)  # an error, or the end
_INODE_AT: Final = 16 + 68
_ATTRIBUTES_AT: Final = 16 + 72
_BYTES_AT: Final = 120


def bytes_moved(pid: int, by_socket: Mapping[int, int]) -> int:
    """Bytes that a process has read from files, and moved over the TCP connections it has, so far."""
    moved = 0
    folder = Path("/proc", str(pid))
    with suppress(OSError):  # it is gone, or of another user
        for each in (folder / "fd").iterdir():
            with suppress(FileNotFoundError):
                found = _SOCKET.fullmatch(os.readlink(each))
                moved += by_socket.get(int(found[1]), 0) if found else 0
        moved += int((folder / "io").read_text().split()[1])  # rchar, which leaves out sockets
    return moved


def bytes_by_socket() -> dict[int, int]:
    """By inode: the bytes that each TCP connection of this machine has moved so far."""
    found: dict[int, int] = {}
    if sys.platform == "linux":
        with suppress(OSError, struct.error):
            for family in (socket.AF_INET, socket.AF_INET6):
                _ask_kernel(family, found)
    return found


def _ask_kernel(family: int, found: dict[int, int]) -> None:
    assert sys.platform == "linux"
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _DIAG) as kernel:
        kernel.settimeout(1.0)
        asked = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, _WITH_INFO, _ESTABLISHED)
        kernel.send(struct.pack("=IHHII", 16 + len(asked), _BY_FAMILY, _DUMP, 0, 0) + asked)
        while True:
            data = kernel.recv(1 << 16)
            while data:
                size, kind = struct.unpack_from("=IH", data)
                if kind in _DONE:
                    return
                [inode] = struct.unpack_from("=I", data, _INODE_AT)
                found[inode] = _moved(data[_ATTRIBUTES_AT:size])
                data = data[(size + 3) & ~3 :]


def _moved(attributes: bytes) -> int:
    """The bytes that were acknowledged and received, of the attributes of a connection."""
    while len(attributes) >= 4:
        size, kind = struct.unpack_from("=HH", attributes)
        if kind == _WITH_INFO and size >= 4 + _BYTES_AT + 16:
            return sum(struct.unpack_from("=QQ", attributes, 4 + _BYTES_AT))
        attributes = attributes[max((size + 3) & ~3, 4) :]
    return 0
