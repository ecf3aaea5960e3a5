"""What a check found, on a machine (`doctor`) or in a build of torch (`builds`), and what will work. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from shlex import quote
from typing import Final


class State(str, Enum):
    """How good or bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Good to know; nothing is wrong."""
    WARNING = "warning"
    """It may work, or it will hurt under circumstances that the finding names."""
    FAILURE = "failure"
    """A job will fail because of it."""
    UNKNOWN = "unknown"
    """It could not be examined; the finding says why."""


@dataclass(frozen=True)
class Fix:
    """A setting for `rallypoint run` that mends something: an option, or a variable for the job."""

    table: str
    """Of rallypoint.toml: `run` or `env`."""
    key: str
    value: str

    @property
    def command(self) -> str:
        """A command that does for this shell what the fix does for `rallypoint run`."""
        if self.table == "env":
            return set_variable(self.key, self.value)
        return f"rallypoint run --{self.key.replace('_', '-')}={self.value} ..."


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    """Of the thing that was examined; several findings may have the same name."""
    state: State
    found: str
    hint: str = ""
    """What to do. A command can be pasted as it is; empty if there is nothing to do."""
    fix: Fix | None = None
    """The setting that `--fix` would write, if one helps."""
    seconds: float = 0.0
    """How long it took to find this out."""


ok: Final = partial(Finding, "", State.OK)
note: Final = partial(Finding, "", State.NOTE)
warning: Final = partial(Finding, "", State.WARNING)
failure: Final = partial(Finding, "", State.FAILURE)
unknown: Final = partial(Finding, "", State.UNKNOWN)
# Findings without a name: a judge says what it found, and the table that lists the judge says about what.


def named(name: str, findings: Iterable[Finding]) -> list[Finding]:
    return [replace(each, name=name) for each in findings]


def worst(findings: Iterable[Finding], name: str) -> Finding | None:
    """The worst finding of that name; None if there is none."""
    order = (State.FAILURE, State.WARNING, State.UNKNOWN, State.NOTE, State.OK)
    return min(
        (each for each in findings if each.name == name),
        key=lambda each: order.index(each.state),
        default=None,
    )


def set_variable(name: str, value: str) -> str:
    """A command that sets a variable, for this platform's usual shell."""
    return f'$env:{name} = "{value}"' if sys.platform == "win32" else f"export {name}={quote(value)}"


def unset_variable(*names: str) -> str:
    """A command that removes variables, for this platform's usual shell."""
    if sys.platform == "win32":
        return "Remove-Item " + ", ".join(f"Env:{name}" for name in names)
    return f"unset {' '.join(names)}"


# What will work ---------------------------------------------------------------------------------------------


class Prospect(str, Enum):
    """Whether it will work."""

    YES = "yes"
    WITH_HELP = "with Rallypoint"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Outlook:
    """One way to start a job, or one backend; and what prevents it, or helps."""

    name: str
    prospect: Prospect
    why: str


NO_GPU: Final = "there is no GPU for it"
"""How the finding about an NCCL that could not be tried ends."""

_YES: Final = (Prospect.YES, "")
_WAYS: Final = {
    "plain (env://, tcp://)": "rallypoint run -- python train.py, or USE_LIBUV=0",
    "torchrun": "rallypoint run train.py, or -- torchrun",
    "accelerate": "rallypoint run -- accelerate launch train.py",
}
"""The ways to start a job that need a TCPStore, and the command that helps if torch's store does not work."""


def look_ahead(findings: Sequence[Finding], packages: Mapping[str, str]) -> list[Outlook]:
    """What to expect of each way, or of all at once if torch cannot be used.

    `packages` has the versions of those that are installed.
    """
    torch = worst(findings, "torch")
    if torch is None or torch.state is State.UNKNOWN:
        return [Outlook("any job", Prospect.UNKNOWN, "torch gave no answer")]
    if torch.state is not State.OK:
        return [Outlook("any job", Prospect.NO, f"torch: {torch.found}")]
    found = {name: _judge_way(findings, name, command) for name, command in _WAYS.items()}
    if "accelerate" not in packages:
        found["accelerate"] = (Prospect.NO, "accelerate is not installed: pip install accelerate")
    for name, check in (("file init", "file-init"), ("gloo", "gloo"), ("NCCL", "nccl")):
        found[name] = _judge_backend(check, worst(findings, check))
    return [Outlook(name, *each) for name, each in found.items()]


def _judge_way(findings: Sequence[Finding], way: str, command: str) -> tuple[Prospect, str]:
    """A way that needs sockets, its endpoint, and a torch whose store works."""
    variables = ("variables",) if way.startswith("plain") else ()  # launchers set their own
    for name in (*variables, "endpoint", "store", "port", "loopback"):
        found = worst(findings, name)
        if found is not None and found.state is State.FAILURE:
            return Prospect.NO, found.found if name == "loopback" else f"{name}: {found.found}"
    libuv = worst(findings, "libuv")
    if libuv is None or libuv.state is State.UNKNOWN:
        return Prospect.UNKNOWN, libuv.found if libuv else "torch's store was not tried"
    return (Prospect.WITH_HELP, command) if libuv.state is not State.OK else _YES


def _judge_backend(name: str, found: Finding | None) -> tuple[Prospect, str]:
    if found is None and name == "nccl":
        return Prospect.NO, "this torch was built without it"
    if found is None or found.state is State.UNKNOWN:
        return Prospect.UNKNOWN, found.found if found else "it was not tried"
    if name == "nccl" and found.found.endswith(NO_GPU):
        return Prospect.NO, NO_GPU
    return _YES if found.state in (State.OK, State.NOTE) else (Prospect.NO, found.found)
