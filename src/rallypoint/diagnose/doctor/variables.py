"""The variables that say who a rank is and where it meets the others: set, sane, and of one mind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from rallypoint.diagnose.doctor.shell import set_variable, unset_variable
from rallypoint.diagnose.doctor.situation import EVERYWHERE, Situation, is_loopback, number_in
from rallypoint.diagnose.findings import Finding, failure, ok, warning
from rallypoint.errors import UsageError
from rallypoint.launch.switches import CLIENT_VARIABLE, PATCH_VARIABLE, Patch, client_of, patch_of
from rallypoint.server.loops.backend import VARIABLE as LIBUV_VARIABLE
from rallypoint.server.loops.backend import parse_switch
from rallypoint.server.machine.ports import client_ports

_PLACE: Final = ("MASTER_ADDR", "MASTER_PORT")
_RANK: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_BELOW: Final = (
    ("RANK", "WORLD_SIZE"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),
)
_NOT_ABOVE: Final = (("LOCAL_RANK", "RANK"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
_SWITCHES: Final = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)
_TOLD: Final = (*_PLACE, *_RANK, LIBUV_VARIABLE, PATCH_VARIABLE, CLIENT_VARIABLE, *_SWITCHES)
_PREFIXES: Final = ("PET_", "TORCHELASTIC_")

_RENAMED: Final = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
}

_NAME: Final = "variables"
_NAME_ONE: Final = "set MASTER_ADDR to the first machine's address, the same on all (hostname -I)"


def check_variables(situation: Situation) -> Iterator[Finding]:
    """One finding for all that are set, if they are sane; else one for each that is not."""
    environ = situation.environ
    problems = [
        *_check_address(environ, situation.machines),
        *_check_port(environ),
        *_check_numbers(environ),
        *_check_switches(environ),
        *_check_completeness(environ),
    ]
    if problems:
        yield from problems
        return
    told = [name for name in environ if name in _TOLD or name.startswith(_PREFIXES)]
    texts = [f"{name}={environ[name]}" for name in sorted(told)]
    yield ok(_NAME, ", ".join(texts) if texts else "none that concerns a job is set: the launcher sets them")


def _check_address(environ: Mapping[str, str], machines: int) -> Iterator[Finding]:
    address = environ.get("MASTER_ADDR")
    if address is None:
        return
    if not address.strip():
        yield failure(_NAME, "MASTER_ADDR is set, but empty", unset_variable("MASTER_ADDR"))
    elif address.startswith("[") or address.endswith("]"):
        bare, _, rest = address.lstrip("[").partition("]")
        port = rest.removeprefix(":")
        yield failure(
            _NAME,
            f"MASTER_ADDR is {address}: torch takes the brackets for a part of the name",
            "; ".join(
                [set_variable("MASTER_ADDR", bare), *([set_variable("MASTER_PORT", port)] if port else [])]
            ),
        )
    elif "://" in address or "/" in address:
        yield failure(
            _NAME,
            f"MASTER_ADDR is {address}, which is a URL and no host",
            set_variable("MASTER_ADDR", _host_in(address)),
        )
    elif address != address.strip():
        yield failure(
            _NAME,
            f"MASTER_ADDR is {address!r}, with spaces around it",
            set_variable("MASTER_ADDR", address.strip()),
        )
    elif re.fullmatch(r"[^:]+:\d+", address):
        host, _, port = address.rpartition(":")
        yield failure(
            _NAME,
            f"MASTER_ADDR is {address}: a port belongs into MASTER_PORT",
            f"{set_variable('MASTER_ADDR', host)}; {set_variable('MASTER_PORT', port)}",
        )
    elif address in EVERYWHERE:
        yield from _check_everywhere(address, machines)
    else:
        yield from _check_reach(address, machines)


def _check_everywhere(address: str, machines: int) -> Iterator[Finding]:
    what = f"MASTER_ADDR is {address}, which leads every machine to itself"
    if machines > 1:
        yield failure(_NAME, what, _NAME_ONE)
    else:
        yield warning(_NAME, f"{what}; it does for jobs on one", set_variable("MASTER_ADDR", "127.0.0.1"))


def _check_reach(address: str, machines: int) -> Iterator[Finding]:
    if machines > 1 and is_loopback(address):
        what = f"MASTER_ADDR is {address}, which each of the {machines} machines takes for itself"
        yield failure(_NAME, what, _NAME_ONE)


def _check_port(environ: Mapping[str, str]) -> Iterator[Finding]:
    text = environ.get("MASTER_PORT")
    if text is None:
        return
    port = number_in(environ, "MASTER_PORT")
    low, high = client_ports()
    if port is None or not 0 <= port <= 65_535:
        yield failure(
            _NAME,
            f"MASTER_PORT is {text!r}: ports are numbers from 1 to 65535",
            set_variable("MASTER_PORT", "29500"),
        )
    elif port == 0:
        yield warning(
            _NAME,
            "MASTER_PORT is 0: every process would take a free port of its own, and they would not meet",
            set_variable("MASTER_PORT", "29500"),
        )
    elif port < 1024:
        yield warning(
            _NAME,
            f"MASTER_PORT is {port}: ports below 1024 are for administrators",
            set_variable("MASTER_PORT", "29500"),
        )
    elif low <= port <= high:
        yield warning(
            _NAME,
            f"MASTER_PORT is {port}, of the range {low} to {high} that the system gives to clients: "
            "any program may hold it by chance",
            set_variable("MASTER_PORT", "29500"),
        )


def _check_numbers(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in _RANK:
        text = environ.get(name)
        number = number_in(environ, name)
        least = 1 if name.endswith("SIZE") else 0
        if text is not None and (number is None or number < least):
            yield failure(
                _NAME, f"{name} is {text!r}: it has to be a number from {least} on", unset_variable(name)
            )
    for small, large in _BELOW:
        first, second = number_in(environ, small), number_in(environ, large)
        if first is not None and second is not None and first >= second > 0:
            yield failure(
                _NAME,
                f"{small} is {first}, but {large} is {second}: ranks go from 0 to {second - 1}",
                unset_variable(small, large),
            )
    for small, large in _NOT_ABOVE:
        first, second = number_in(environ, small), number_in(environ, large)
        if first is not None and second is not None and first > second >= 0:
            yield failure(
                _NAME, f"{small} is {first}, but {large} is only {second}", unset_variable(small, large)
            )


def _check_switches(environ: Mapping[str, str]) -> Iterator[Finding]:
    for read in (patch_of, client_of):
        try:
            read(environ)
        except UsageError as error:
            yield failure(_NAME, error.message, error.hint)
    if environ.get(LIBUV_VARIABLE):
        try:
            parse_switch(environ[LIBUV_VARIABLE], f"the variable {LIBUV_VARIABLE}")
        except UsageError as error:
            yield warning(_NAME, error.message, error.hint)
    if environ.get(PATCH_VARIABLE, "").strip().lower() == Patch.NEVER.value:
        yield warning(
            _NAME,
            f"{PATCH_VARIABLE}=never: where torch has no libuv, Rallypoint may not help",
            unset_variable(PATCH_VARIABLE),
        )
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield warning(
            _NAME,
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0: what `rallypoint enable` set up is not loaded",
            f"{unset_variable('TORCH_DEVICE_BACKEND_AUTOLOAD')}, or start jobs with rallypoint run",
        )
    for old, new in _RENAMED.items():
        if old in environ and new not in environ:
            yield warning(
                _NAME,
                f"{old} is an old name that newer torch warns about",
                f"{set_variable(new, environ[old])}; {unset_variable(old)}",
            )


def _check_completeness(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A rank that knows only a part of what env:// asks for fails; a shell that knows nothing is as usual."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environ]
    if "RANK" in environ and missing:
        yield failure(
            _NAME,
            f"RANK is {environ['RANK']}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "not set: init_process_group would fail",
            f"{unset_variable('RANK')}, and start the job with rallypoint run, which sets all of them",
        )


def _host_in(address: str) -> str:
    place = (address.partition("://")[2] or address).partition("/")[0]
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.partition(":")[0] or "HOST"
