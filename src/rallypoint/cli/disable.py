"""`rallypoint disable`: torch does not use Rallypoint by itself any more."""

from __future__ import annotations

import sys

from rallypoint.cli.command import command
from rallypoint.errors import RallypointError
from rallypoint.launch.switches import enabling_file


@command()
def disable() -> None:
    """Undo `rallypoint enable`."""
    path = enabling_file()
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise RallypointError(f"cannot remove {path}: {error.strerror}") from error
    print(f"rallypoint: not enabled for torch under {sys.prefix}; `rallypoint run` works as before")
