"""Address families and network interfaces: which there are, which lead out, and which the variables name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final

from rallypoint.diagnose.doctor.shell import set_variable
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, Fix, failure, ok, unknown, warning
from rallypoint.server.machine.interfaces import Interface, interfaces

GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"

_ELSEWHERE: Final = "198.51.100.1"
"""An address that is nobody's, kept for examples."""


def check_families(_: Situation) -> Iterator[Finding]:
    """Whether sockets of both families can be had."""
    has = {"IPv4": _can_bind(socket.AF_INET, "127.0.0.1"), "IPv6": _can_bind(socket.AF_INET6, "::1")}
    if all(has.values()):
        yield ok("address-families", "IPv4 and IPv6")
    elif has["IPv4"]:
        yield ok("address-families", "IPv4 only; torch warns about IPv6 (errno 97), which does no harm")
    elif has["IPv6"]:
        yield warning(
            "address-families", "IPv6 only", "name machines by names or IPv6 addresses, without brackets"
        )
    else:
        yield failure(
            "address-families",
            "no socket can be bound, not even on loopback",
            "file:// needs none for the store",
        )


def _can_bind(family: socket.AddressFamily, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def check_interfaces(situation: Situation) -> Iterator[Finding]:
    """Which interfaces lead to other machines, and whether the variables name real ones."""
    try:
        found = interfaces()
    except OSError as error:
        yield unknown("interfaces", f"the system does not tell them: {error}")
        return
    out = [f"{each.name} ({', '.join(each.addresses)})" for each in found if each.leads_out]
    if out:
        yield ok("interfaces", ", ".join(out))
    else:
        yield warning("interfaces", "none leads to other machines: jobs on this machine alone")
    for variable in (GLOO_INTERFACE, "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        text = situation.environ.get(variable)
        if text:
            yield judge_interface(variable, text, [each.name for each in found if each.is_up])


def judge_interface(variable: str, text: str, there: list[str]) -> Finding:
    """Whether a variable names interfaces that are there.

    NCCL's is a list of prefixes, of which one has to fit; `^` in front excludes them, `=` makes them names.
    """
    names = [name for name in text.lstrip("^=").split(",") if name]
    is_nccl = variable.startswith("NCCL")
    if is_nccl and text.startswith("^"):
        return ok("interfaces", f"{variable}={text}: all but these")
    if is_nccl and not text.startswith("="):
        real = [name for name in names if any(each.startswith(name.partition(":")[0]) for each in there)]
    else:
        real = [name for name in names if name.partition(":")[0] in there]
    good = bool(real) if is_nccl else names and len(real) == len(names)
    if good:
        return ok("interfaces", f"{variable}={text}")
    return failure(
        "interfaces",
        f"{variable}={text}, but the interfaces that are up are {', '.join(there)}",
        set_variable(variable, next((each for each in there if each != "lo"), "lo")),
    )


def way_out() -> Interface | None:
    """The interface through which other machines are most likely reached."""
    try:
        candidates = [each for each in interfaces() if each.leads_out]
    except OSError:
        return None
    address = _address_of_default_route()
    usual = (each for each in candidates if address in each.addresses)
    return next(usual, candidates[0] if candidates else None)


def _address_of_default_route() -> str:
    """The address from which this machine would talk to the world; nothing is sent for that."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((_ELSEWHERE, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def use_interface() -> Fix | None:
    """What makes gloo listen where others reach it; None if there is no such place."""
    found = way_out()
    return Fix("env", GLOO_INTERFACE, found.name) if found else None
