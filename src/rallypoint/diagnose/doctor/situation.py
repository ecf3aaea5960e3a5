"""What the user has said of the job, by options and variables; whether these are set, sane and consistent."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rallypoint.diagnose.findings import (
    Finding,
    State,
    failure,
    note,
    ok,
    set_variable,
    unset_variable,
    warning,
)
from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import HOST, IPV6, Endpoint
from rallypoint.launch.switches import CLIENT_VARIABLE, PATCH_VARIABLE, Patch, client_of, patch_of
from rallypoint.store.machine.addresses import is_loopback
from rallypoint.store.machine.system import client_ports
from rallypoint.store.server.loops.backend import VARIABLE as LIBUV_VARIABLE
from rallypoint.store.server.loops.backend import parse_switch

MASTER_PORT: Final = 29_500
"""The port that most launchers take by default."""

EVERYWHERE: Final = ("0.0.0.0", "::")
"""Addresses that mean all addresses of a machine; as a goal they lead a machine to itself."""

MOST_RANKS: Final = 10_000_000
_NUMBER: Final = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class Situation:
    """The job that is to run here, as far as the user has told."""

    environ: Mapping[str, str]
    endpoint: Endpoint | None
    """Where the job is to meet: by option, or by MASTER_ADDR and MASTER_PORT; None if neither is given."""
    folder: Path
    """The folder for the file of a file init."""
    engine: str = field(default="", repr=False)
    """The URL of the engine that is to keep the store; it may hold a password."""
    acks: int = 0
    """How many replicas of Redis are to have a change before it counts."""

    @property
    def world_size(self) -> int | None:
        """How many ranks there will be; None if WORLD_SIZE gives no sensible number."""
        number = number_in(self.environ, "WORLD_SIZE")
        return number if number is not None and 0 < number <= MOST_RANKS else None

    @property
    def machines(self) -> int:
        """How many machines the variables speak of; at least two if the endpoint is another machine."""
        count = number_in(self.environ, "GROUP_WORLD_SIZE")
        whole, local = number_in(self.environ, "WORLD_SIZE"), number_in(self.environ, "LOCAL_WORLD_SIZE")
        if count is None and whole and local:
            count = whole // local
        host = self.endpoint.host if self.endpoint else "localhost"
        elsewhere = not is_loopback(host) and host not in EVERYWHERE
        return max(count or 1, 2 if elsewhere else 1)


def number_in(environ: Mapping[str, str], name: str) -> int | None:
    """The whole number in a variable; None if it is not set, or holds something else."""
    text = environ.get(name, "").strip()
    return int(text) if _NUMBER.fullmatch(text) else None


def leads_elsewhere(address: str) -> bool:
    """Whether an address can be another machine's: it is neither loopback nor link-local, nor for many."""
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    return not (found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified)


def endpoint_of(environ: Mapping[str, str]) -> Endpoint | None:
    """The endpoint in MASTER_ADDR and MASTER_PORT; None if they are not set, or make no sense."""
    host = environ.get("MASTER_ADDR", "").strip()
    port = number_in(environ, "MASTER_PORT") if "MASTER_PORT" in environ else MASTER_PORT
    if not re.fullmatch(rf"{HOST}|{IPV6}|\[{IPV6}\]", host) or port is None or not 0 < port < 65_536:
        return None
    return Endpoint(host.strip("[]"), port)


# Checking the variables -------------------------------------------------------------------------------------

_AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RANK: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_LIMITS: Final = {
    **dict.fromkeys(zip(_RANK[::2], _RANK[1::2], strict=True), "below"),
    ("LOCAL_RANK", "RANK"): "equal",
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"): "equal",
}
"""The first variable's number has to be below the second one's, or equal at most."""
_COUNTS: Final = {
    "WORLD_SIZE": "WORLD_SIZE is the number of ranks on all machines together, the same on each; or ",
    "LOCAL_WORLD_SIZE": "LOCAL_WORLD_SIZE is the number of ranks on this machine; or ",
    "GROUP_WORLD_SIZE": "GROUP_WORLD_SIZE is the number of machines, the same on each; or ",
}
_RENAMED: Final = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
}
_SHOWN: Final = (
    *("MASTER_ADDR", "MASTER_PORT", *_RANK, LIBUV_VARIABLE, PATCH_VARIABLE, CLIENT_VARIABLE),
    *(*_RENAMED.values(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", _AUTOLOAD),
)
_SHOWN_PREFIXES: Final = ("PET_", "TORCHELASTIC_")

_NOT_OBEYED: Final = (
    ": torch obeys it in a script that is started without a launcher (env://, tcp://); the stores that "
    "torchrun and accelerate make for their rendezvous do not"
)
_USE_FIRST_MACHINE: Final = "set MASTER_ADDR to the first machine's address, the same on all (hostname -I)"


def check_variables(situation: Situation) -> Iterator[Finding]:
    """One finding with all that are set, after notes about them; else one for each problem."""
    environ = situation.environ
    checks = (_check_port, _check_numbers, _check_switches, _check_completeness)
    problems = [
        *_check_address(environ, situation.machines),
        *(each for check in checks for each in check(environ)),
    ]
    yield from problems
    if any(each.state is not State.NOTE for each in problems):
        return
    shown = [name for name in environ if name in _SHOWN or name.startswith(_SHOWN_PREFIXES)]
    texts = [f"{name}={environ[name]}" for name in sorted(shown)]
    yield ok(", ".join(texts) or "none that concerns a job is set: the launcher sets them")


def _check_address(environ: Mapping[str, str], machines: int) -> Iterator[Finding]:
    address = environ.get("MASTER_ADDR")
    if address is None:
        return
    what = f"MASTER_ADDR is {address}"
    if not address.strip():
        yield failure("MASTER_ADDR is set, but empty", unset_variable("MASTER_ADDR"))
    elif address.startswith("[") or address.endswith("]"):
        bare, _, rest = address.lstrip("[").partition("]")
        what += ": torch takes the brackets for a part of the name"
        yield failure(what, _set_both(bare, rest.removeprefix(":")))
    elif "/" in address:
        yield failure(f"{what}, which is a URL and no host", _set_both(_host_in(address)))
    elif address != address.strip():
        yield failure(f"MASTER_ADDR is {address!r}, with spaces around it", _set_both(address.strip()))
    elif re.fullmatch(r"[^:]+:\d+", address):
        host, _, port = address.rpartition(":")
        yield failure(f"{what}: a port belongs into MASTER_PORT", _set_both(host, port))
    elif address in EVERYWHERE and machines == 1:
        what += ", which leads every machine to itself; it does for jobs on one"
        yield warning(what, _set_both("127.0.0.1"))
    elif address in EVERYWHERE:
        yield failure(f"{what}, which leads every machine to itself", _USE_FIRST_MACHINE)
    elif is_loopback(address) and machines > 1:
        yield failure(f"{what}, which each of the {machines} machines takes for itself", _USE_FIRST_MACHINE)


def _set_both(host: str, port: str = "") -> str:
    set_port = f"; {set_variable('MASTER_PORT', port)}" if port else ""
    return set_variable("MASTER_ADDR", host) + set_port


def _host_in(address: str) -> str:
    place = (address.partition("://")[2] or address).partition("/")[0]
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.partition(":")[0] or "HOST"


def _check_port(environ: Mapping[str, str]) -> Iterator[Finding]:
    text = environ.get("MASTER_PORT")
    if text is None:
        return
    port = number_in(environ, "MASTER_PORT")
    low, high = client_ports()
    state = State.WARNING
    if port is None or not 0 <= port <= 65_535:
        state, what = State.FAILURE, f"{text!r}: ports are numbers from 1 to 65535"
    elif port == 0:
        what = "0: every process would take a free port of its own, and they would not meet"
    elif port < 1024:
        what = f"{port}: ports below 1024 are for administrators"
    elif low <= port <= high:
        what = f"{port}, of the range {low} to {high} that the system gives to clients: "
        what += "any program may hold it by chance"
    else:
        return
    yield Finding("", state, f"MASTER_PORT is {what}", set_variable("MASTER_PORT", str(MASTER_PORT)))


def _check_numbers(environ: Mapping[str, str]) -> Iterator[Finding]:
    numbers = {name: number_in(environ, name) for name in _RANK}
    for name, number in numbers.items():
        least = 1 if name.endswith("SIZE") else 0
        if name in environ and (number is None or number < least):
            what = f"{name} is {environ[name]!r}: it has to be a number from {least} on"
            yield failure(what, unset_variable(name))
    for (small, large), most in _LIMITS.items():
        first, second = numbers[small], numbers[large]
        if first is None or second is None:
            continue
        if most == "below" and first >= second > 0:
            what = f"{small} is {first}, but {large} is {second}: ranks go from 0 to {second - 1}"
            yield failure(what, _correct(small, large))
        elif most == "equal" and first > second >= 0:
            yield failure(f"{small} is {first}, but {large} is only {second}", _correct(small, large))


def _correct(small: str, large: str) -> str:
    """Which of two numbers is wrong is not known here: a rank's may be right, and the size one machine's."""
    counts = _COUNTS.get(large, "")
    return f"{counts}let the launcher set them: {unset_variable(small, large)}"


def _check_switches(environ: Mapping[str, str]) -> Iterator[Finding]:
    for read in (patch_of, client_of):
        try:
            read(environ)
        except UsageError as error:
            yield failure(error.message, error.hint)
    if environ.get(LIBUV_VARIABLE):
        try:
            wanted = parse_switch(environ[LIBUV_VARIABLE], f"the variable {LIBUV_VARIABLE}")
        except UsageError as error:
            yield warning(error.message, error.hint)
        else:
            if not wanted:
                yield note(f"{LIBUV_VARIABLE}={environ[LIBUV_VARIABLE]}{_NOT_OBEYED}")
    if environ.get(PATCH_VARIABLE, "").strip().lower() == Patch.NEVER.value:
        what = f"{PATCH_VARIABLE}=never: where torch has no libuv, Rallypoint may not help"
        yield warning(what, unset_variable(PATCH_VARIABLE))
    if environ.get(_AUTOLOAD) == "0":
        what = f"{_AUTOLOAD}=0: what `rallypoint enable` set up is not loaded"
        yield warning(what, f"{unset_variable(_AUTOLOAD)}, or start jobs with rallypoint run")
    for old, new in _RENAMED.items():
        if old in environ and new not in environ:
            remedy = f"{set_variable(new, environ[old])}; {unset_variable(old)}"
            yield warning(f"{old} is an old name that newer torch warns about", remedy)


def _check_completeness(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A rank that has only some of the variables of env:// fails. A shell that has none of them is usual."""
    missing = [name for name in _NEEDED if name not in environ]
    if "RANK" in environ and missing:
        yield failure(
            f"RANK is {environ['RANK']}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "not set: init_process_group would fail",
            f"{unset_variable('RANK')}, and start the job with rallypoint run, which sets all of them",
        )
