"""Making the processes that this one starts use Rallypoint: through their environment. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from rallypoint.launch.endpoint import Endpoint
from rallypoint.store.connect.connection import RELAY_VARIABLE, STORE_VARIABLE
from rallypoint.store.machine.interfaces import (
    GLOO_INTERFACE,
    NCCL_INTERFACE,
    address_of_gloo,
    interfaces,
    interfaces_to_name,
)

INJECTION = Path(__file__).parents[1] / "pytorch" / "injection"
"""The folder whose `sitecustomize` every process of a job runs first."""


def put_on_path(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment with a folder in front of PYTHONPATH, once."""
    path = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    kept = [entry for entry in path if entry != str(folder)]
    return {**environ, "PYTHONPATH": os.pathsep.join([str(folder), *kept])}


def inject(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for processes that are to use Rallypoint, and those that they start in turn.

    It takes no effect on interpreters that are told to ignore their environment (-E, -I, a `._pth` file) or
    site (-S). If Rallypoint is installed for them, torch loads it all the same (`pytorch.autoload`).
    """
    return put_on_path(environ, INJECTION)


def isolating_file(program: Path) -> Path | None:
    """The `python311._pth` that keeps a program's Python from finding Rallypoint; None if there is none.

    Such a file stands beside the `python.exe` that comes with an application, and lists all that is to be on
    its path: PYTHONPATH is ignored. The program is that Python, or a script in a folder below.
    """
    for folder in (program.parent, program.parent.parent):
        for file in folder.glob("python*._pth"):
            text = file.read_text(encoding="utf-8", errors="replace")
            lines = [line.partition("#")[0].strip() for line in text.splitlines()]
            if "import site" in lines:
                lines.append("Lib/site-packages")
            packages = [folder / line / "rallypoint" / "__init__.py" for line in lines if line]
            return None if any(package.is_file() for package in packages) else file
    return None


def name_relay(environ: MutableMapping[str, str], relay: Endpoint | None, store: Endpoint) -> None:
    """Put the relay of this machine, and the store that it is for, into an environment; None: no relay."""
    if relay is not None:
        environ[RELAY_VARIABLE], environ[STORE_VARIABLE] = str(relay), str(store)
    elif environ.pop(STORE_VARIABLE, ""):  # then there was a relay in the round before
        del environ[RELAY_VARIABLE]


def name_interfaces(environ: MutableMapping[str, str], address: str) -> str:
    """Name the interface for gloo and NCCL in an environment, where they would take one that is wrong.

    Other machines reach this one at `address`. Returns what was done, in a line; mostly nothing.
    """
    gloo = address_of_gloo()
    try:
        named = interfaces_to_name(address, gloo, interfaces(), environ)
    except OSError:  # the system does not tell them
        return ""
    environ.update(named)
    reasons = {
        GLOO_INTERFACE: f"gloo would listen at {gloo}, the address of this machine's name",
        NCCL_INTERFACE: "NCCL would take a bridge to containers",
    }
    return "; ".join(
        f"{name}={value}, by which this machine reaches the others: {reasons[name]}"
        for name, value in named.items()
    )


_OF_A_RANK = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    }
)


def is_of_a_rank(name: str) -> bool:
    """Whether a variable says which rank of which job a process is."""
    return name in _OF_A_RANK or name.startswith("TORCHELASTIC_")


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without another launcher's variables of a rank: for a launcher of other ranks."""
    dropped = {name for name in environ if is_of_a_rank(name)}
    if STORE_VARIABLE in environ:  # else the relay's variable is the user's choice for `rallypoint run`
        dropped |= {RELAY_VARIABLE, STORE_VARIABLE}
    return {name: value for name, value in environ.items() if name not in dropped}
