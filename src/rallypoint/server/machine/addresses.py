"""What the addresses of a connection tell: whether it stays within this machine."""

from __future__ import annotations

import socket
from typing import Any

Address = Any
"""As `getsockname` gives it: a tuple of two or of four."""


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
