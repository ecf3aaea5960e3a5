"""The user's choice of the server and the client that torch gets. Imports no torch.

The variables reach every process of a job, so the launcher, the workers and what they spawn agree.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from rallypoint.errors import UsageError

PATCH_VARIABLE = "RALLYPOINT_PATCH"
CLIENT_VARIABLE = "RALLYPOINT_CLIENT"
START_VARIABLE = "RALLYPOINT_START"
PRELOAD_VARIABLE = "RALLYPOINT_PRELOAD"


class Patch(str, Enum):
    """When a store server that torch is asked for becomes Rallypoint's."""

    AUTO = "auto"
    """Where this torch refuses, because it was built without libuv or its store does not work."""

    ALWAYS = "always"
    NEVER = "never"


class ClientChoice(str, Enum):
    """Which client a torch process talks to the store with."""

    AUTO = "auto"
    """torch's own in C++, unless it does not work at all."""

    TORCH = "torch"
    PYTHON = "python"


class Start(str, Enum):
    """How torchrun's agent starts ranks."""

    AUTO = "auto"
    """By a fork, on Linux."""

    FORK = "fork"
    SPAWN = "spawn"


_Switch = TypeVar("_Switch", Patch, ClientChoice, Start)


def patch_of(environ: Mapping[str, str] = os.environ) -> Patch:
    """What RALLYPOINT_PATCH says; UsageError if it says nothing that is known."""
    return _choice_of(Patch, PATCH_VARIABLE, "auto", environ)


def client_of(environ: Mapping[str, str] = os.environ) -> ClientChoice:
    """What RALLYPOINT_CLIENT says; UsageError if it says nothing that is known."""
    return _choice_of(ClientChoice, CLIENT_VARIABLE, "auto", environ)


def can_fork(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks may be forked here, as far as the user and the system are concerned.

    torchrun spawns, unless RALLYPOINT_START says something else; UsageError if that is nothing known.
    """
    return sys.platform == "linux" and _choice_of(Start, START_VARIABLE, "spawn", environ) is not Start.SPAWN


def enabling_file() -> Path:
    """If this file exists, every torch of this Python environment uses Rallypoint where it has to."""
    return Path(sys.prefix) / "etc" / "rallypoint" / "enabled"


def _choice_of(kind: type[_Switch], variable: str, default: str, environ: Mapping[str, str]) -> _Switch:
    return parse_choice(kind, environ.get(variable) or default, f"the variable {variable}")


def parse_choice(kind: type[_Switch], text: str, source: str) -> _Switch:
    """The member of `kind` with this name; UsageError that names `source`."""
    try:
        return kind(text.strip().lower())
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise UsageError(f"{source} is {text!r}, which is not known", hint=f"write one of {known}") from None
