"""py-spy, where it is installed and allowed: the stack of a process that cannot answer by itself.

It reads the memory of a process from outside. So it also sees one that is stopped, or sits in a driver; and
the calls of C code that a rank is in, which Python does not know.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from itertools import takewhile
from typing import Any, Final

from rallypoint.launch.stacks.bounded import output_of
from rallypoint.stacks.frames import MOST_FRAMES, Frame

_SECONDS: Final = 5.0
_UNNAMED: Final = "0x"
_TEMPLATE: Final = re.compile(r"<.+>")
_MOST_CHARACTERS: Final = 200

_Found = list[dict[str, Any]]


def program() -> str | None:
    """Where it is: on the path, or beside this Python."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))


def look_into(pid: int) -> tuple[Frame, ...]:
    """The stack of the main thread; empty if that cannot be had."""
    # Not blocking: a process that is stopped would be continued.
    return tuple(_frame(each) for each in _main_thread(pid, "--nonblocking")[:MOST_FRAMES])


def look_into_c(pid: int) -> tuple[Frame, ...]:
    """The calls of C code that the main thread is in, below Python's; empty if that cannot be had.

    The process is paused for it, for less than a second.
    """
    inner = takewhile(lambda each: each["module"] is not None, _main_thread(pid, "--native"))
    named = [each for each in inner if not str(each["name"]).startswith(_UNNAMED)]
    return tuple(_frame(each) for each in named[:MOST_FRAMES])


def _main_thread(pid: int, option: str) -> _Found:
    """The frames of the main thread, as py-spy has them."""
    found = program()
    if found is None:
        return []
    text = output_of([found, "dump", option, "--full-filenames", "--json", "--pid", str(pid)], _SECONDS)
    try:
        threads: _Found = json.loads(text)
        main = next(
            each for each in threads if each["thread_name"] == "MainThread" or each["os_thread_id"] == pid
        )
        frames: _Found = main["frames"]
        return [each for each in frames if {"name", "filename", "line", "module"} <= each.keys()]
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return []


def _frame(found: dict[str, Any]) -> Frame:
    """Python's functions by the name that stands in the code, as everywhere; C++'s without their types."""
    name, line = str(found["name"]), found["line"]
    short = name.rpartition(".")[2] if found["module"] is None else _TEMPLATE.sub("<...>", name)
    return Frame(str(found["filename"]), line if isinstance(line, int) else 0, short[:_MOST_CHARACTERS])
