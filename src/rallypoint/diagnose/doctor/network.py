"""This machine's network: address families, interfaces, its own name, look-ups, and proxies on the way."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, Fix, failure, note, ok, set_variable, unknown, warning
from rallypoint.store.connect.deadline import within
from rallypoint.store.machine.addresses import is_loopback, is_own_address, look_up
from rallypoint.store.machine.interfaces import (
    GLOO_INTERFACE,
    LOCAL_CLIENT,
    NCCL_INTERFACE,
    Interface,
    interfaces,
    time_look_ups,
)
from rallypoint.store.machine.system import listening_ports

_ELSEWHERE: Final = "198.51.100.1"
"""An address reserved for examples: no machine has it."""

_PATIENCE_S: Final = 3.0
_SLOW_S: Final = 0.5
_HOSTS_FILE: Final = "the hosts file (/etc/hosts; on Windows, System32\\drivers\\etc\\hosts)"


# Interfaces ------------------------------------------------------------------------------------------------


def interfaces_out() -> list[Interface]:
    """The interfaces that lead to other machines, the usual one first; none if the system does not tell."""
    try:
        found = [each for each in interfaces() if each.leads_out]
    except OSError:
        return []
    usual = _address_of_default_route()
    return sorted(found, key=lambda each: usual not in each.addresses)


def addresses_on(name: str) -> tuple[str, ...]:
    """The addresses of an interface; none if it is not there, or the system does not tell."""
    try:
        return next((each.addresses for each in interfaces() if each.name == name), ())
    except OSError:
        return ()


def _address_of_default_route() -> str:
    """The address from which this machine would talk to the world. Nothing is sent to find out."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((_ELSEWHERE, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def use_interface() -> Fix | None:
    """A fix that makes gloo listen where others reach it; None if no interface leads out."""
    found = interfaces_out()
    return Fix("env", GLOO_INTERFACE, found[0].name) if found else None


def check_interfaces(situation: Situation) -> Iterator[Finding]:
    """Which interfaces lead to other machines, and whether the variables name existing ones."""
    try:
        found = interfaces()
    except OSError as error:
        yield unknown(f"the system does not tell them: {error}")
        return
    out = [f"{each.name} ({', '.join(each.addresses)})" for each in found if each.leads_out]
    yield ok(", ".join(out)) if out else warning("none leads to other machines: jobs on this machine alone")
    for variable in (GLOO_INTERFACE, NCCL_INTERFACE, "TP_SOCKET_IFNAME"):
        if text := situation.environ.get(variable):
            yield judge_interface(variable, text, [each.name for each in found if each.is_up])


def judge_interface(variable: str, text: str, there: list[str]) -> Finding:
    """Whether a variable names interfaces that are up.

    NCCL's is a list of prefixes, one of which has to fit; `^` in front excludes them, `=` makes them names.
    """
    names = [name.partition(":")[0] for name in text.lstrip("^=").split(",") if name]
    is_nccl = variable.startswith("NCCL")
    if is_nccl and text.startswith("^"):
        return ok(f"{variable}={text}: all but these")
    by_prefix = is_nccl and not text.startswith("=")
    real = [any(each.startswith(name) if by_prefix else each == name for each in there) for name in names]
    if any(real) if is_nccl else real and all(real):
        return ok(f"{variable}={text}")
    found = f"{variable}={text}, but the interfaces that are up are {', '.join(there)}"
    return failure(found, set_variable(variable, next((each for each in there if each != "lo"), "lo")))


FAMILIES: Final = {
    (True, True): ok("IPv4 and IPv6"),
    (True, False): ok("IPv4 only; torch warns about IPv6 (errno 97), which does no harm"),
    (False, True): warning("IPv6 only", "name machines by names or IPv6 addresses, without brackets"),
    (False, False): failure(
        "no socket can be bound, not even on loopback", "file:// needs none for the store"
    ),
}
"""By whether IPv4 and IPv6 work."""


def check_families(_: Situation) -> Iterator[Finding]:
    yield FAMILIES[is_own_address("127.0.0.1"), is_own_address("::1")]


# Names -----------------------------------------------------------------------------------------------------


def resolve(name: str) -> tuple[list[str], float]:
    """The addresses of a name, and the seconds it took. OSError, also as TimeoutError, if it has none."""
    begun = time.monotonic()
    found = within(_PATIENCE_S, lambda: look_up(name))
    return list(dict.fromkeys(str(address[0]) for _, address in found)), time.monotonic() - begun


def addresses_of(name: str) -> tuple[str, ...]:
    """The addresses of a name; none if it does not resolve."""
    try:
        return tuple(resolve(name)[0])
    except OSError:
        return ()


def check_host_name(situation: Situation) -> Iterator[Finding]:
    """Whether the own name resolves well: gloo listens there, and the first machine is often named by it."""
    name = socket.gethostname()
    yield from judge_spelling(name)
    remedy = f"add {name} to {_HOSTS_FILE}"
    try:
        addresses, seconds = resolve(name)
    except TimeoutError:
        yield failure(f"{name}: no answer within {_PATIENCE_S:g} s", remedy)
        return
    except OSError as error:
        yield _loopback_only(
            f"{name} does not resolve here ({error.strerror or error})", remedy, situation.machines
        )
        return
    finding = judge_addresses(name, addresses, seconds, situation.machines)
    chosen = situation.environ.get(GLOO_INTERFACE)
    if finding.fix and chosen:
        finding = ok(f"{name} is {', '.join(addresses)}; gloo takes {chosen}, by {GLOO_INTERFACE}")
    yield finding


def judge_addresses(name: str, addresses: list[str], seconds: float, machines: int) -> Finding:
    """Whether other machines, and gloo, can use the addresses of this machine's own name."""
    what = f"{name} is {', '.join(addresses)}, found in {seconds * 1000:.0f} ms"
    if all(map(is_loopback, addresses)):
        return _loopback_only(what, f"give {name} its address in {_HOSTS_FILE}", machines)
    return warning(f"{what}: slow", f"add {name} to {_HOSTS_FILE}") if seconds > _SLOW_S else ok(what)


def _loopback_only(what: str, otherwise: str, machines: int) -> Finding:
    """That is enough for one machine. For several, gloo has to be told where to listen."""
    fix = use_interface()
    remedy = fix.command if fix else otherwise
    if machines == 1:
        return note(f"{what}: fine for jobs on this machine alone; for several: {remedy}")
    return warning(f"{what}: gloo would listen where no other machine reaches it", remedy, fix)


def judge_spelling(name: str) -> Iterator[Finding]:
    """A name that resolvers take for an address, or that only this container knows."""
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]+", name):
        try:
            address = socket.inet_ntoa(socket.inet_aton(name))
        except OSError:
            address = "of another machine"
        yield failure(
            f"{name} is a number, and resolvers read it as the address {address}",
            "rename the host, or give its address as MASTER_ADDR or --rdzv-endpoint",
        )
    elif re.fullmatch(r"[0-9a-f]{12}", name):
        yield warning(
            f"{name} looks like the id of a container, which no other machine knows as a name",
            "start the container with --hostname and --network=host, or use an address that others reach",
        )


def check_reverse(_: Situation) -> Iterator[Finding]:
    """torch's own server asks for the name of each client that connects, and serves no client meanwhile."""
    answered: list[float] = []
    try:
        found = within(_PATIENCE_S, lambda: time_look_ups(answered.append))
        stalls, what = found.stall, str(found)
    except TimeoutError:
        stalls, what = True, f"after {len(answered)} look-ups of {LOCAL_CLIENT}, one had no answer in time"
        what += f" ({_PATIENCE_S:g} s in all)"
    if not stalls:
        yield ok(what)
        return
    on_windows = f"add {LOCAL_CLIENT} localhost to {_HOSTS_FILE}"
    yield warning(
        f"{what}: torch's server does one for every client, and stands still meanwhile; so does each client. "
        "Rallypoint's server and client ask for no name: rallypoint run --client=python",
        on_windows
        if sys.platform == "win32"
        else f"echo '{LOCAL_CLIENT} localhost' | sudo tee -a /etc/hosts",
    )


# Proxies ---------------------------------------------------------------------------------------------------

_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_ISTIO_PATHS: Final = ("/etc/istio/proxy", "/var/run/secrets/istio")
_MESHES: Final = (
    ("Istio", "ISTIO_", {15_001, 15_006, 15_090}, _ISTIO_PATHS, 'sidecar.istio.io/inject: "false"'),
    ("Linkerd", "LINKERD", {4_140, 4_143, 4_191}, ("/var/run/linkerd",), "linkerd.io/inject: disabled"),
)
"""Service meshes: how their variables begin, ports and paths of their sidecars, and the switch for those."""


def check_proxies(situation: Situation) -> Iterator[Finding]:
    """HTTP proxies, and the sidecars of service meshes: both step in without being asked."""
    found = [*judge_proxies(situation), *judge_meshes(situation.environ, listening_ports())]
    yield from found or [ok("no proxy is set, and no sidecar of a service mesh is to be seen")]


def judge_proxies(situation: Situation) -> Iterator[Finding]:
    """Stores do not use them; etcd, downloads and experiment loggers do."""
    environ = {name.lower(): value for name, value in situation.environ.items()}
    is_set = [name for name in _PROXIES if environ.get(name)]
    if not is_set:
        return
    host = situation.endpoint.host if situation.endpoint else ""
    what = f"{', '.join(is_set)} {'is' if len(is_set) == 1 else 'are'} set: stores and gloo do not use it"
    if not host or _is_excepted(host, environ.get("no_proxy", "")):
        yield ok(what)
        return
    found = f"{what}, but what asks {host} over HTTP would (etcd, model servers)"
    yield warning(found, set_variable("no_proxy", ",".join(filter(None, (environ.get("no_proxy"), host)))))


def _is_excepted(host: str, exceptions: str) -> bool:
    names = [name.strip().lstrip("*").lstrip(".") for name in exceptions.split(",") if name.strip()]
    return exceptions.strip() == "*" or any(host == name or host.endswith(f".{name}") for name in names)


def judge_meshes(environ: Mapping[str, str], listening: Collection[int]) -> Iterator[Finding]:
    for mesh, variables, ports, paths, switch in _MESHES:
        signs = [
            *(f"the variable {name}" for name in environ if name.startswith(variables)),
            *(f"port {port}" for port in sorted(ports & set(listening))),
            *(path for path in paths if os.path.exists(path)),
        ]
        if signs:
            yield warning(
                f"a sidecar of {mesh} seems to be here ({', '.join(signs[:3])}): it takes over "
                "connections, resets those that are no HTTP, and accepts what nobody listens to",
                f"annotate the pods with {switch}",
            )
