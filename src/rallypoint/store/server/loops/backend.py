"""Chooses the backend: by the argument `use_libuv`, else `?use_libuv=` in a URL, else the variable USE_LIBUV,
else by what is installed. A requested libuv that is missing causes a warning, never a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING

from rallypoint.errors import UsageError

if TYPE_CHECKING:
    from rallypoint.store.server.loops.loop import Loop

VARIABLE = "USE_LIBUV"

LOOP_PACKAGE = "winloop" if sys.platform == "win32" else "uvloop"
"""The package that binds libuv on this platform."""

_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


class Choice(str, Enum):
    """The requested backend."""

    AUTO = "auto"
    LIBUV = "libuv"
    LEGACY = "legacy"


def choose(
    argument: bool | None = None, query: str | None = None, environ: Mapping[str, str] | None = None
) -> Choice:
    """The choice by argument, query or variable; UsageError for a text that is no switch."""
    if argument is not None:
        return _choice_of(bool(argument))
    if query is not None:
        return _choice_of(parse_switch(query, "use_libuv in the URL"))
    text = (os.environ if environ is None else environ).get(VARIABLE, "")
    return _choice_of(parse_switch(text, f"the variable {VARIABLE}")) if text else Choice.AUTO


def parse_switch(text: str, source: str) -> bool:
    """True for 1, true, on; False for 0, false, off; in any case. `source` is for the error."""
    try:
        return _SWITCH[text.strip().lower()]
    except KeyError:
        raise UsageError(
            f"{source} is {text!r}, which is no switch", hint="write one of 0, 1, true, false, on, off"
        ) from None


def make_loop(choice: Choice) -> tuple[Loop, str]:
    """The loop for a choice, and a warning if it is not what was asked for (else an empty text)."""
    from rallypoint.store.server.loops.loop import LegacyLoop, LibuvLoop  # late: a client only chooses

    if choice is Choice.LEGACY:
        return LegacyLoop(), ""
    try:
        return LibuvLoop(LOOP_PACKAGE), ""
    except ImportError as error:
        warning = (
            f"libuv was asked for, but {LOOP_PACKAGE} cannot be imported ({error}); "
            f"serving with the legacy backend. hint: pip install {LOOP_PACKAGE}"
        )
        return LegacyLoop(), warning if choice is Choice.LIBUV else ""


def load_loop() -> None:
    """Import the package of the requested loop ahead, so that `make_loop` is quick."""
    try:
        if choose() is not Choice.LEGACY:
            import_module(LOOP_PACKAGE)
    except (ImportError, UsageError):
        pass  # `make_loop` and `choose` report it


def _choice_of(use_libuv: bool) -> Choice:
    return Choice.LIBUV if use_libuv else Choice.LEGACY
