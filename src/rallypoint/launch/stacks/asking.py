"""Asking processes for their stacks: a signal, and what they write into their files then. POSIX.

A signal that a process has no handler for would end it. So the launcher looks first whether the process is
the one that made the file, still has it open, and handles the signal. Of a process that is stopped, nothing
is asked: the signals would wait, and it would answer them all later.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.launch.stacks.system import STOPPED, Process, look_at, opens
from rallypoint.stacks.frames import Dump, is_complete, read_dump

_NAME: Final = re.compile(r"stack-(?P<rank>\d{1,9})-(?P<pid>\d{1,9})-(?P<file>\d{1,9})\.txt")
_LOOK_SECONDS: Final = 0.005
_SETTLED_SECONDS: Final = 0.1
"""A file that has not grown for so long has the whole answer."""
_MOST_BYTES: Final = 1 << 20
HAS_PROC: Final = sys.platform == "linux"


@dataclass(frozen=True)
class Source:
    """A file into which a process writes its stack."""

    rank: int
    pid: int
    """Of the process that has made it; those that it forks write into the same file."""
    file: int
    """The number of the open file in that process."""
    path: Path


def sources_in(folder: Path) -> list[Source]:
    """The processes of a job on this machine that answer, by rank."""
    paths = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("stack-*.txt"))
    found = [
        Source(int(name["rank"]), int(name["pid"]), int(name["file"]), path) for path, name in paths if name
    ]
    return sorted(found, key=lambda each: (each.rank, each.pid))


def forget_all(folder: Path) -> None:
    """Remove the files of ranks that are no more."""
    for each in folder.glob("st[ae][cp]*-*"):
        with suppress(OSError):
            each.unlink()


def ask(asked: Sequence[tuple[Source, int, Process]], signal_number: int, seconds: float) -> dict[int, Dump]:
    """The stacks of processes, by their numbers, as far as they answer in time.

    Each is a source, the process to ask (its maker, or one that it has forked) and how that stands now. Those
    that share a file are asked one after the other.
    """
    deadline = time.monotonic() + seconds
    dumps: dict[int, Dump] = {}
    waiting = list(asked)
    while waiting:
        turn: dict[Path, tuple[Source, int, Process]] = {}
        for each in waiting:
            turn.setdefault(each[0].path, each)
        waiting = [each for each in waiting if turn[each[0].path] is not each]
        sent = [each for each in turn.values() if _send(*each, signal_number)]
        for source, pid, _ in sent:
            text = _await_text(source.path, deadline)
            dump = read_dump(text) if text else None
            if dump is not None:
                dumps[pid] = dump
            _clear(source.path)
    return dumps


def maker_of(sources: Iterable[Source], processes: Mapping[int, Process]) -> Source | None:
    """The rank itself, among the processes of one rank that answer: the one that no other has started."""
    here = {each.pid: each for each in sources if processes[each.pid].is_here}
    for pid, each in here.items():
        parent = processes[pid].parent
        while parent > 1 and parent not in here:
            parent = look_at(parent).parent
        if parent <= 1:
            return each
    return None


def _send(source: Source, pid: int, process: Process, number: int) -> bool:
    """Send the signal, if the process can take it."""
    if HAS_PROC and not (
        process.is_here
        and process.state not in STOPPED
        and process.handles(number)
        and opens(pid, source.file, source.path)
        and look_at(pid).began == process.began
    ):
        return False
    _clear(source.path)
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def _await_text(path: Path, deadline: float) -> str:
    """What the file holds, as soon as it is complete."""
    text, grown = "", time.monotonic()
    while True:
        fresh = _read(path)
        now = time.monotonic()
        if fresh != text:
            text, grown = fresh, now
        if is_complete(text) or (text and now - grown > _SETTLED_SECONDS) or now > deadline:
            return text
        time.sleep(_LOOK_SECONDS)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("ascii", errors="replace")
    except OSError:
        return ""


def _clear(path: Path) -> None:
    """Empty the file; whoever appends to it begins anew."""
    with suppress(OSError):
        os.truncate(path, 0)
