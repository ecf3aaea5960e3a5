"""`rallypoint enable`: torch uses Rallypoint in this Python environment by itself."""

from __future__ import annotations

import sys

from rallypoint.cli.command import command
from rallypoint.errors import RallypointError
from rallypoint.launch.switches import enabling_file


@command()
def enable() -> None:
    """Let every torch of this Python environment use Rallypoint where it was built without libuv.

    It writes one small file into the environment, and nothing into any package.
    """
    path = enabling_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("rallypoint disable removes this file\n")
    except OSError as error:
        raise RallypointError(
            f"cannot write {path}: {error.strerror}",
            hint="use `rallypoint run -- COMMAND` instead, or a virtual environment of your own",
        ) from error
    print(f"rallypoint: enabled for every torch under {sys.prefix}")
