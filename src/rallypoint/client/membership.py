"""The members of a file store, and whether its file is of this run.

A file may stay behind when its run crashes, and would feed the next run old values. Nothing in it tells
runs apart for certain, so a newcomer is refused when the members it would join cannot be waiting for it:
because none of them lives, or because their world is complete. Whether a process lives can be told only on
its own machine, between two boots and in one namespace of process numbers; elsewhere it is taken to live.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rallypoint.codec import from_text
from rallypoint.errors import RallypointError
from rallypoint.text import shown

_PROC = Path("/proc")
_ENDED = "ZX"  # states of processes that are only kept for their parents
_MEMBERS_SHOWN = 8
_TEXT_SHOWN = 80


@dataclass
class Member:
    """A process that has opened the store, told apart from all others that ever had its number."""

    host: str
    boot: str  # of the host, and the namespace of its process numbers; empty where Linux is not there to tell
    pid: int
    started: int  # on Linux in clock ticks after the boot, elsewhere in milliseconds; 0 if it is not told
    world_size: int | None = None
    """As the process named it."""
    left: bool = False

    @classmethod
    def current(cls, world_size: int | None) -> Member:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _boot(), pid, _start_of(pid) or 0, world_size)

    def is_dead(self) -> bool:
        """Whether it is known to have ended."""
        if (self.host, self.boot) != (socket.gethostname(), _boot()):
            return False
        started = _start_of(self.pid)
        return started is None or (started != 0 and started != self.started)

    @property
    def is_gone(self) -> bool:
        return self.left or self.is_dead()

    @classmethod
    def from_json(cls, text: bytes) -> Member:
        """Raises RallypointError if that is no member."""
        try:
            return from_text(cls, text)
        except ValueError as error:
            raise RallypointError(f"{text[:_TEXT_SHOWN]!r} describes no member of a file store") from error

    def __str__(self) -> str:
        state = "has left" if self.left else "dead" if self.is_dead() else "alive, as far as is known"
        return f"process {self.pid} on {shown(self.host)} ({state})"


def refusal(members: Collection[Member], world_size: int | None) -> str | None:
    """Why a newcomer with this world size may not join these members; None if it may."""
    if not members:
        return None
    if all(member.is_gone for member in members):
        return "its run has crashed, as those of its members that have not left are dead"
    known = next((member.world_size for member in members if member.world_size is not None), None)
    size = known if known is not None else world_size
    if size is not None and len(members) >= size:
        left = sum(member.left for member in members)
        places = f"all {size} places of its world are taken"
        return f"its run is over or ending: {places}, and {left} have left again" if left else places
    if world_size not in (None, size):
        return f"its world has {size} members, not {world_size}"
    return None


def describe(members: Collection[Member]) -> str:
    """The members and their state, in one line."""
    named = [str(member) for member in list(members)[:_MEMBERS_SHOWN]]
    more = len(members) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _start_of(pid: int) -> int | None:
    """When a process started; 0 if that is not told, and None if it has ended."""
    return _start_on_linux(pid) if sys.platform == "linux" else _start_elsewhere(pid)


def _start_on_linux(pid: int) -> int | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0 if _exists(pid) else None
    # The name stands before these, in brackets, and may itself hold brackets and spaces.
    columns = text.rpartition(")")[2].split()
    return None if columns[0] in _ENDED else int(columns[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _start_elsewhere(pid: int) -> int | None:
    import psutil  # late: Linux does without

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1000)
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:  # another user's
        return 0


@lru_cache(maxsize=1)
def _boot() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""
