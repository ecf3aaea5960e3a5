"""Commands to paste, in the words of this platform's usual shell."""

from __future__ import annotations

import sys
from shlex import quote

from rallypoint.diagnose.findings import Fix


def set_variable(name: str, value: str) -> str:
    """A command that sets a variable for what is started next."""
    return f'$env:{name} = "{value}"' if sys.platform == "win32" else f"export {name}={quote(value)}"


def apply(fix: Fix) -> str:
    """A command that does for this shell what a fix does for `rallypoint run`."""
    if fix.table == "env":
        return set_variable(fix.key, fix.value)
    return f"rallypoint run --{fix.key.replace('_', '-')}={fix.value} ..."


def unset_variable(*names: str) -> str:
    """A command that makes variables unknown."""
    if sys.platform == "win32":
        return "Remove-Item " + ", ".join(f"Env:{name}" for name in names)
    return f"unset {' '.join(names)}"
