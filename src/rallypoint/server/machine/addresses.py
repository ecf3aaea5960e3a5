"""What the addresses of a connection tell: whether it stays within this machine."""

from __future__ import annotations

import socket
import sys

TELLS_OWNERS = sys.platform == "linux"
"""Whether the system tells whose process is at the other end of a connection within this machine."""


def is_local(sock: socket.SocketType) -> bool:
    """Whether both ends of a connection are on this machine, as far as their addresses tell."""
    ours, theirs = _host(sock.getsockname()), _host(sock.getpeername())
    return ours == theirs or _is_loopback(theirs)


def goes_plain(sock: socket.SocketType) -> bool:
    """Whether a process with a secret connects without TLS: the system tells who is at the other end."""
    return TELLS_OWNERS and is_local(sock)


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach a listening socket."""
    return _is_loopback(_host(listener.getsockname()))


def _host(name: tuple[str, int]) -> str:
    return name[0].removeprefix("::ffff:")


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
