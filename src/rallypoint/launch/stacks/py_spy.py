"""py-spy, where it is installed and allowed: the stack of a process that cannot answer by itself.

It reads the memory of a process from outside. So it also sees one that is stopped, or sits in a driver.
"""

from __future__ import annotations

import json
import shutil
from typing import Any, Final

from rallypoint.launch.stacks.bounded import output_of
from rallypoint.stacks.frames import MOST_FRAMES, Frame

_SECONDS: Final = 5.0


def look_into(pid: int) -> tuple[Frame, ...]:
    """The stack of the main thread; empty if that cannot be had."""
    program = shutil.which("py-spy")
    if program is None:
        return ()
    # Not blocking: a process that is stopped would be continued.
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        threads: list[dict[str, Any]] = json.loads(output_of(command, _SECONDS))
        main = next(
            each for each in threads if each["thread_name"] == "MainThread" or each["os_thread_id"] == pid
        )
        return tuple(
            Frame(str(each["filename"]), int(each["line"]), str(each["name"]))
            for each in main["frames"][:MOST_FRAMES]
        )
    except (ValueError, KeyError, TypeError, StopIteration):
        return ()
