"""The place where a job is to meet: what its name means, and whether its port can be had."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Final

from rallypoint.diagnose.doctor.names import resolve
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, Fix, failure, ok, warning
from rallypoint.errors import BindError, PortInUseError
from rallypoint.launch.endpoint import Endpoint
from rallypoint.server.machine.ports import client_ports
from rallypoint.server.process.binding import is_this_machine, try_port

_USUAL_PORT: Final = 29_500


def check_endpoint(situation: Situation) -> Iterator[Finding]:
    """Whether the endpoint's name resolves, and whether it is this machine's."""
    endpoint = situation.endpoint
    if endpoint is None:
        return
    host = endpoint.host
    try:
        addresses, seconds = resolve(host)
    except OSError as error:  # a time-out is one
        yield failure(
            "endpoint",
            f"{host} does not resolve here ({getattr(error, 'strerror', None) or error})",
            _remedy_for_name(host),
        )
        return
    whose = "this machine" if is_this_machine(host) else "another machine"
    known = "" if addresses == [host] else f" is {', '.join(addresses)}, found in {seconds * 1000:.0f} ms,"
    yield ok("endpoint", f"{host}{known} {'and ' if known else 'is '}{whose}")
    yield from judge_reach(host, addresses, whose == "this machine")


def judge_reach(host: str, addresses: list[str], is_here: bool) -> Iterator[Finding]:
    """A name that leads each machine to itself."""
    loops = [each for each in addresses if ipaddress.ip_address(each.partition("%")[0]).is_loopback]
    if is_here and loops == addresses and host not in ("localhost", *addresses):
        yield warning(
            "endpoint",
            f"{host} is a loopback address on this machine: torch connects to that, others cannot",
            "for several machines, name the endpoint by an address that all of them reach",
        )


def _remedy_for_name(host: str) -> str:
    if host.endswith(".local"):
        return f"mDNS names need a resolver for them: use the address of {host}"
    return f"use its address, or add {host} to the hosts file; in a cluster its DNS entry may come late"


def check_port(situation: Situation) -> Iterator[Finding]:
    """Whether the port can be listened on, if that is for this machine to do; else who has it."""
    endpoint = situation.endpoint
    if endpoint is None or not endpoint.port or not is_this_machine(endpoint.host):
        return
    try:
        try_port(endpoint.host, endpoint.port)
    except PortInUseError as error:
        yield warning(
            "port",
            f"{endpoint.port} is in use" + (f" by {error.holder}" if error.holder else ""),
            "right if that is the store of this job; else end that process, or take another port: "
            f"{_free_port(endpoint)}",
        )
        return
    except BindError as error:
        yield failure("port", error.message, error.hint or f"take another one: {_USUAL_PORT}")
        return
    low, high = client_ports()
    if low <= endpoint.port <= high:
        free = _free_port(endpoint)
        yield warning(
            "port",
            f"{endpoint.port} is free, but of the range {low} to {high} that the system gives to clients: "
            "any program may hold it by chance when the job begins",
            f"take one below {low}: {free}",
            _move_to(endpoint, free),
        )
    else:
        yield ok("port", f"{endpoint.port} is free")


def _move_to(endpoint: Endpoint, port: int) -> Fix | None:
    return Fix("run", "rdzv-endpoint", str(endpoint._replace(port=port))) if port else None


def _free_port(endpoint: Endpoint) -> int:
    """A usual port that is free now, below those for clients."""
    low, _ = client_ports()
    # The usual ones; and lower ones, for systems that give even those to clients.
    candidates: list[int] = [*range(_USUAL_PORT, _USUAL_PORT + 50), *range(20_000, 20_050)]
    for port in candidates:
        if port == endpoint.port or port >= low:
            continue
        try:
            try_port(endpoint.host, port)
        except (PortInUseError, BindError):
            continue
        return port
    return 0
