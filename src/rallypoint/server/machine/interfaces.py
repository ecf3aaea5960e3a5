"""The network interfaces of this machine, and their addresses."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_VIRTUAL: Final = (
    *("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman", "lxcbr", "lxdbr", "kube-"),
    *("dummy", "tun", "tap", "wg", "tailscale", "zt", "utun", "vEthernet", "ifb", "awdl", "llw"),
)
_LINK_LOCAL: Final = ("fe80", "169.254.")


@dataclass(frozen=True)
class Interface:
    """An interface that is there; its addresses may be none."""

    name: str
    is_up: bool
    addresses: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        return any(address.startswith("127.") or address == "::1" for address in self.addresses)

    @property
    def is_virtual(self) -> bool:
        """Whether it most likely leads to containers of this machine, and not to other machines."""
        return self.name.startswith(_VIRTUAL)

    @property
    def leads_out(self) -> bool:
        """Whether other machines may be reached through it."""
        return self.is_up and bool(self.addresses) and not self.is_loopback and not self.is_virtual


def interfaces() -> list[Interface]:
    """All interfaces. OSError where the system does not let us look."""
    import psutil  # late: few commands need it

    try:
        states, found = psutil.net_if_stats(), psutil.net_if_addrs()
    except (psutil.Error, RuntimeError) as error:
        raise OSError(str(error)) from error
    return [
        Interface(name, states[name].isup if name in states else False, _addresses(entries))
        for name, entries in found.items()
    ]


def _addresses(entries: Sequence[object]) -> tuple[str, ...]:
    """IPv4 first; without those of one link, which lead nowhere else."""
    found = [
        (getattr(entry, "family", None) == socket.AF_INET6, str(getattr(entry, "address", "")))
        for entry in entries
        if getattr(entry, "family", None) in (socket.AF_INET, socket.AF_INET6)
    ]
    ordered = sorted(found, key=lambda pair: pair[0])  # the first of its family stays the first
    return tuple(address for _, address in ordered if not address.lower().startswith(_LINK_LOCAL))
