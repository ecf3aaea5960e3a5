"""What a check found: of a machine (`doctor`) or of a build of torch (`builds`). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rallypoint.codec import to_json


class State(str, Enum):
    """How good it is."""

    OK = "ok"
    NOTE = "note"
    """Good to know; nothing is wrong."""
    WARNING = "warning"
    """It may do, or it will hurt under circumstances that the finding names."""
    FAILURE = "failure"
    """A job will fail because of it."""
    UNKNOWN = "unknown"
    """It could not be looked at; the finding says why."""


@dataclass(frozen=True)
class Fix:
    """A setting for `rallypoint run` that mends something: an option, or a variable for the job."""

    table: str
    """Of rallypoint.toml: `run` or `env`."""
    key: str
    value: str


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    """Of what was looked at; several findings may have the same."""
    state: State
    found: str
    hint: str = ""
    """What to do, ready to be pasted where it is a command; empty where there is nothing to do."""
    fix: Fix | None = None
    """What `--fix` would write, if that mends it."""
    seconds: float = 0.0
    """How long it took until this was known."""

    def as_json(self) -> dict[str, Any]:
        return {**to_json(self), "seconds": round(self.seconds, 3)}


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
    """The finding of that name which is worst; None if there is none."""
    order = (State.FAILURE, State.WARNING, State.UNKNOWN, State.NOTE, State.OK)
    return min(
        (each for each in findings if each.name == name),
        key=lambda each: order.index(each.state),
        default=None,
    )
