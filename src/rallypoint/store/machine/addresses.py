"""Whether a connection stays within this machine, and whether its peer has left."""

from __future__ import annotations

import socket
import sys
from typing import Any, Final

Address = Any
"""As `getsockname` gives it: a tuple of two or of four."""
_ENDED: Final = (b"\x07", b"\x08")  # CLOSE and CLOSE_WAIT


def plain_host(address: Address) -> str:
    """The host, without its scope. IPv4 as it is, also on a socket of IPv6: the ends may differ in that."""
    host: str = address[0]
    if ":" not in host:
        return host
    return host.removeprefix("::ffff:") if "." in host else host.partition("%")[0]


def is_within_machine(one: Address, other: Address) -> bool:
    """Whether a connection with these ends is within this machine, as far as they tell."""
    hosts = plain_host(one), plain_host(other)
    return hosts[0] == hosts[1] or any(map(is_loopback, hosts))


def is_local(sock: socket.SocketType) -> bool:
    """Whether a connection is within this machine, as far as its addresses tell."""
    return is_within_machine(sock.getsockname(), sock.getpeername())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host == "::1" or host.startswith("127.")


def has_left(sock: socket.SocketType) -> bool:
    """Whether the peer has closed its end, behind what is not read yet, or has reset the connection."""
    if sys.platform != "linux":  # what others call TCP_INFO looks different
        return False
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) in _ENDED
    except OSError:
        return False
