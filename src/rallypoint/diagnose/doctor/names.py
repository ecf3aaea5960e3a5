"""This machine's own name: what it resolves to, both ways, and how long that takes."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Iterator
from typing import Final

from rallypoint.diagnose.doctor.interfaces import GLOO_INTERFACE, use_interface
from rallypoint.diagnose.doctor.shell import apply
from rallypoint.diagnose.doctor.situation import Situation, is_loopback
from rallypoint.diagnose.findings import Finding, failure, note, ok, warning
from rallypoint.server.machine.names import LOCAL_CLIENT, look_up
from rallypoint.stores.client.patience import within

_PATIENCE_S: Final = 3.0
_SLOW_S: Final = 0.5

_HOSTS_FILE: Final = "the hosts file (/etc/hosts; on Windows, System32\\drivers\\etc\\hosts)"


def check_host_name(situation: Situation) -> Iterator[Finding]:
    """What the own name resolves to. gloo listens there, and the first machine is often named by it."""
    name = socket.gethostname()
    yield from _check_spelling(name)
    try:
        addresses, seconds = resolve(name)
    except TimeoutError:
        yield failure(
            "host-name", f"{name}: no answer within {_PATIENCE_S:g} s", f"add {name} to {_HOSTS_FILE}"
        )
        return
    except OSError as error:
        remedy = f"add {name} to {_HOSTS_FILE}"
        what = f"{name} does not resolve here ({error.strerror or error})"
        yield _loopback_only(what, remedy, situation.machines)
        return
    finding = judge_addresses(name, addresses, seconds, situation.machines)
    chosen = situation.environ.get(GLOO_INTERFACE)
    if finding.fix and chosen:
        finding = ok(
            "host-name", f"{name} is {', '.join(addresses)}; gloo takes {chosen}, by {GLOO_INTERFACE}"
        )
    yield finding


def judge_addresses(name: str, addresses: list[str], seconds: float, machines: int) -> Finding:
    """What to think of the addresses that the own name has."""
    what = f"{name} is {', '.join(addresses)}, found in {seconds * 1000:.0f} ms"
    if all(is_loopback(address) for address in addresses):
        return _loopback_only(what, f"give {name} its address in {_HOSTS_FILE}", machines)
    if seconds > _SLOW_S:
        return warning("host-name", f"{what}: slow", f"add {name} to {_HOSTS_FILE}")
    return ok("host-name", what)


def _loopback_only(what: str, otherwise: str, machines: int) -> Finding:
    """It does for one machine; and for several, gloo has to be told where to listen."""
    fix = use_interface()
    remedy = apply(fix) if fix else otherwise
    if machines == 1:
        return note("host-name", f"{what}: fine for jobs on this machine alone; for several: {remedy}")
    return warning("host-name", f"{what}: gloo would listen where no other machine reaches it", remedy, fix)


def _check_spelling(name: str) -> Iterator[Finding]:
    """Names that something on the way takes for something else."""
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]+", name):
        yield failure(
            "host-name",
            f"{name} is a number, and resolvers read it as the address {_as_address(name)}",
            "rename the host, or give its address as MASTER_ADDR or --rdzv-endpoint",
        )
    elif re.fullmatch(r"[0-9a-f]{12}", name):
        yield warning(
            "host-name",
            f"{name} looks like the id of a container, which no other machine knows as a name",
            "start the container with --hostname and --network=host, or use an address that others reach",
        )


def _as_address(name: str) -> str:
    try:
        return socket.inet_ntoa(socket.inet_aton(name))
    except OSError:
        return "of another machine"


def check_reverse(_: Situation) -> Iterator[Finding]:
    """torch's own server asks for the name of each client that connects, and serves nobody meanwhile."""
    answered: list[float] = []
    try:
        found = within(_PATIENCE_S, lambda: look_up(answered.append))
    except TimeoutError:
        what = f"after {len(answered)} look-ups of {LOCAL_CLIENT}, one had no answer in time"
        yield _stalling(f"{what} ({_PATIENCE_S:g} s in all)")
        return
    yield _stalling(str(found)) if found.stall else ok("reverse-look-up", str(found))


def _stalling(what: str) -> Finding:
    return warning(
        "reverse-look-up",
        f"{what}: torch's server does one for every client, and stands still meanwhile; so does each client. "
        "Rallypoint's server and client ask for no name: rallypoint run --client=python",
        f"echo '{LOCAL_CLIENT} localhost' | sudo tee -a /etc/hosts"
        if sys.platform != "win32"
        else f"add {LOCAL_CLIENT} localhost to {_HOSTS_FILE}",
    )


def resolve(name: str) -> tuple[list[str], float]:
    """The addresses of a name and how long it took; OSError or TimeoutError if there are none."""
    begun = time.monotonic()
    try:
        found = within(_PATIENCE_S, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except UnicodeError as error:
        raise OSError(f"it is no name: {error}") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found)), time.monotonic() - begun
