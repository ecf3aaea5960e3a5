"""py-spy, where it is installed and allowed: the stack of a process that cannot answer by itself.

It reads the memory of a process from outside, without pausing it. So it also sees one that is stopped, or
sits in a driver.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any, Final

from rallypoint.launch.stacks.bounded import output_of
from rallypoint.launch.stacks.frames import MOST_FRAMES, Frame

_SECONDS: Final = 5.0
_MOST_CHARACTERS: Final = 200


def program() -> str | None:
    """Where it is: on the path, or beside this Python."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))


def look_into(pid: int) -> tuple[Frame, ...]:
    """The stack of the main thread; empty if that cannot be had."""
    found = program()
    if found is None:
        return ()
    # A pause would interrupt system calls, and continue a process that is stopped.
    options = ("--nonblocking", "--full-filenames", "--json", "--pid", str(pid))
    text = output_of([found, "dump", *options], _SECONDS)
    try:
        main = next(
            each
            for each in json.loads(text)
            if each["thread_name"] == "MainThread" or each["os_thread_id"] == pid
        )
        return tuple(map(_frame, main["frames"][:MOST_FRAMES]))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return ()


def _frame(found: dict[str, Any]) -> Frame:
    """The function is named as in the code, without its class, as everywhere."""
    name, line = str(found["name"]), found["line"]
    short = name.rpartition(".")[2][:_MOST_CHARACTERS]
    return Frame(str(found["filename"]), line if isinstance(line, int) else 0, short)
