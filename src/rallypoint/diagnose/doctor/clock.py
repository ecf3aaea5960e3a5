"""The clock: logs of several machines are put in order by it, and torch's own rendezvous compares clocks."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import rallypoint
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, failure, note, ok, warning

_REMEDY: Final = "timedatectl set-ntp true"
_SLACK_S: Final = 86_400.0  # a file's time may be that of a file server, or of another zone
_ERROR: Final = 5  # of adjtimex: the clock is not synchronised
_STRUCTURE_BYTES: Final = 512  # more than any Linux has for it; all zero, it only asks


def check_clock(situation: Situation) -> Iterator[Finding]:
    yield judge_clock(time.time(), _installed_at(), _is_synchronised(), situation.machines)


def judge_clock(now: float, installed_at: float, is_synchronised: bool | None, machines: int = 1) -> Finding:
    """What to think of a time, knowing when this package was put here."""
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < installed_at - _SLACK_S:
        since = time.strftime("%Y-%m-%d", time.gmtime(installed_at))
        return failure("clock", f"{text} lies before Rallypoint was installed, {since}", _REMEDY)
    if is_synchronised is False:
        worse = warning if machines > 1 else note
        return worse(
            "clock",
            f"{text}; the system says that it is not synchronised: times of several machines may not compare",
            f"{_REMEDY}, on the machine itself if this is a container",
        )
    return ok("clock", f"{text}, synchronised" if is_synchronised else text)


def _installed_at() -> float:
    try:
        return Path(str(rallypoint.__file__)).stat().st_mtime
    except OSError:
        return 0.0


def _is_synchronised() -> bool | None:
    """What the kernel knows of it; None where it cannot be asked."""
    if sys.platform != "linux":
        return None
    try:
        state: int = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_STRUCTURE_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _ERROR
