"""The network interfaces of this machine, and those that gloo and NCCL choose by themselves.

Also how long reverse look-ups take: torch's own server makes one on each accept.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rallypoint.store.machine.addresses import addresses_of, is_loopback, is_own_address

GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE: Final = "NCCL_SOCKET_IFNAME"

_VIRTUAL: Final = (
    *("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman", "lxcbr", "lxdbr", "kube-"),
    *("dummy", "tun", "tap", "wg", "tailscale", "zt", "utun", "vEthernet", "ifb", "awdl", "llw"),
)
"""Prefixes of interfaces that most likely lead to containers of this machine."""
_LINK_LOCAL: Final = ("fe80", "169.254.")
_NOT_NCCLS: Final = ("lo", "docker")
"""Prefixes of interfaces that NCCL takes only if there is no other."""

LOCAL_CLIENT: Final = "::ffff:127.0.0.1"
"""A local client's address, as torch's dual-stack socket sees it."""

_LOOKUPS: Final = 64
_STALL_S: Final = 1.0


@dataclass(frozen=True)
class Interface:
    """A network interface. It may have no address."""

    name: str
    is_up: bool
    addresses: tuple[str, ...]
    """IPv4 first; without link-local ones."""

    @property
    def is_virtual(self) -> bool:
        return self.name.startswith(_VIRTUAL)

    @property
    def leads_out(self) -> bool:
        """Whether other machines may be reached through it."""
        real = not self.is_virtual and not any(map(is_loopback, self.addresses))
        return self.is_up and bool(self.addresses) and real


def interfaces() -> list[Interface]:
    """All interfaces, in the system's order. OSError if it does not list them."""
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
    found = [
        str(getattr(entry, "address", ""))
        for family in (socket.AF_INET, socket.AF_INET6)
        for entry in entries
        if getattr(entry, "family", None) == family
    ]
    return tuple(address for address in found if not address.lower().startswith(_LINK_LOCAL))


def address_of_gloo() -> str:
    """Where gloo listens without a configured interface: at the host name's address, else at loopback."""
    return next(filter(is_own_address, addresses_of(socket.gethostname())), "127.0.0.1")


def interfaces_to_name(
    address: str, gloo: str, found: Sequence[Interface], environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables that gloo and NCCL need, if other machines reach this one at `address`; mostly none.

    `gloo` is where gloo listens by itself. NCCL gets an interface only where it would choose a bridge to
    containers or virtual machines: among several real ones, its own choice may be the faster one.
    """
    ours = next((each for each in found if address in each.addresses), None)
    if ours is None or is_loopback(address):
        return {}
    needed = {}
    if gloo not in ours.addresses:
        needed[GLOO_INTERFACE] = ours.name
    if _choice_of_nccl(found).is_virtual and not ours.is_virtual:
        needed[NCCL_INTERFACE] = f"={ours.name}"
    return {name: value for name, value in needed.items() if not environ.get(name)}


def _choice_of_nccl(found: Sequence[Interface]) -> Interface:
    """The first that is up and has an address: InfiniBand first, loopback and Docker last."""
    usable = [each for each in found if each.is_up and each.addresses]
    return min(usable, key=lambda each: (not each.name.startswith("ib"), each.name.startswith(_NOT_NCCLS)))


@dataclass(frozen=True)
class LookUps:
    """The duration of reverse look-ups."""

    count: int
    seconds: float

    @property
    def stall(self) -> bool:
        """Whether one had no answer in time: resolvers lose some, or answer none."""
        return self.seconds > _STALL_S

    def __str__(self) -> str:
        return f"{self.count} look-ups of {LOCAL_CLIENT} took {self.seconds:.3g} s"


def time_look_ups(answered: Callable[[float], object] = lambda _: None) -> LookUps:
    """Time reverse look-ups of a local client's address, until one stalls; call `answered` after each."""
    begun, count, taken = time.monotonic(), 0, 0.0
    while count < _LOOKUPS and taken <= _STALL_S:
        try:
            socket.getnameinfo((LOCAL_CLIENT, 9, 0, 0), 0)
        except OSError:
            pass  # no name is an answer as well
        count, taken = count + 1, time.monotonic() - begun
        answered(taken)
    return LookUps(count, taken)
