"""Hosts, addresses and ports: how they are written, and which of them mean this machine.

A host is a name or an address as people write it, IPv6 with or without brackets. An address is what the
system has for one end of a socket.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any, Final

Address = Any
"""As `getsockname` returns it: a tuple of two or of four."""
_ENDED: Final = (b"\x07", b"\x08")  # CLOSE and CLOSE_WAIT

_EVERYWHERE: Final = ("", "*", "0.0.0.0", "::", "[::]")

# Windows has numbers of its own for sockets, and `os.strerror` knows none of them.
_OF_WINDOWS: Final = {
    10013: "Permission denied",
    10048: "Address already in use",
    10049: "Cannot assign requested address",
    10051: "Network is unreachable",
    10054: "Connection reset by peer",
    10060: "Connection timed out",
    10061: "Connection refused",
    10065: "No route to host",
}


def plain_host(address: Address) -> str:
    """The host without its scope; IPv4 in its own form, also on an IPv6 socket: the two ends may differ."""
    host: str = address[0]
    if ":" not in host:
        return host
    return host.removeprefix("::ffff:") if "." in host else host.partition("%")[0]


def is_within_machine(one: Address, other: Address) -> bool:
    """Whether a connection with these ends is within this machine, as far as they tell."""
    hosts = plain_host(one), plain_host(other)
    return hosts[0] == hosts[1] or any(map(_is_loopback_address, hosts))


def is_local(sock: socket.SocketType) -> bool:
    """Whether a connection is within this machine, as far as its addresses tell."""
    return is_within_machine(sock.getsockname(), sock.getpeername())


def has_left(sock: socket.SocketType) -> bool:
    """Whether the peer has closed its end, maybe after bytes that are not read yet, or has reset it."""
    if sys.platform != "linux":  # elsewhere, TCP_INFO is something else
        return False
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) in _ENDED
    except OSError:
        return False


def reason_of(code: int) -> str:
    """The system's words for an error; on Windows those of other systems."""
    return _OF_WINDOWS.get(code) or os.strerror(code)


# Hosts


def format_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, str]:
    """The inverse of `format_address`; an empty host if there is no port."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), port


def is_numeric(host: str) -> bool:
    """Whether a host is an address, which needs no look-up."""
    return bool(_canonical(host))


def is_loopback(host: str) -> bool:
    """Whether a host means loopback."""
    if host.lower() == "localhost":
        return True
    return _is_loopback_address(plain_host((_canonical(host),)))


def is_everywhere(host: str) -> bool:
    """Whether a host means every interface of this machine."""
    return host in _EVERYWHERE


def is_this_machine(host: str) -> bool:
    """Whether a host means this machine; a name that cannot be resolved does not."""
    if is_everywhere(host) or host.lower() in ("localhost", socket.gethostname().lower()):
        return True
    return any(map(is_own_address, addresses_of(host)))


def is_own_address(address: str) -> bool:
    """Whether an address is one of this machine."""
    try:
        with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def look_up(host: str, port: int | None = None) -> list[tuple[int, Any]]:
    """Socket families and addresses of a host. OSError if it has none; resolving a name may take seconds."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"it is no name: {error}") from error
    return [(family, address) for family, _, _, _, address in found]


def addresses_of(host: str) -> list[str]:
    """The addresses of a host, each once, with its scope; none if it does not resolve."""
    try:
        return list(dict.fromkeys(str(address[0]) for _, address in look_up(host)))
    except OSError:
        return []


def _canonical(host: str) -> str:
    """A numeric host as the system writes it, without its scope; empty for a name."""
    bare = host.strip("[]")
    for family, text in ((socket.AF_INET, bare), (socket.AF_INET6, bare.partition("%")[0])):
        try:
            return socket.inet_ntop(family, socket.inet_pton(family, text))
        except (OSError, ValueError):  # ValueError: of characters that no address has
            continue
    return ""


def _is_loopback_address(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
