"""What a check found: on a machine (`doctor`) or in a build of torch (`builds`). Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from shlex import quote


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


def ok(name: str, found: str) -> Finding:
    return Finding(name, State.OK, found)


def note(name: str, found: str, hint: str = "") -> Finding:
    return Finding(name, State.NOTE, found, hint)


def warning(name: str, found: str, hint: str = "", fix: Fix | None = None) -> Finding:
    return Finding(name, State.WARNING, found, hint, fix)


def failure(name: str, found: str, hint: str = "", fix: Fix | None = None) -> Finding:
    return Finding(name, State.FAILURE, found, hint, fix)


def unknown(name: str, found: str, hint: str = "") -> Finding:
    return Finding(name, State.UNKNOWN, found, hint)


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
