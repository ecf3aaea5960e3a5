"""Asking processes for their stacks: a signal, and what they write into their files then.

First the interpreter is asked, which answers between two of its steps, with all threads. If it does not, the
main thread is in a call of C code, and has not left it since: then `faulthandler` writes its stack. Not
before: it may crash a thread that is about to enter a function. A main thread that waits for a lock of
Python's is woken by a third signal, and the interpreter answers the first one then. The others wake nobody:
system calls go on, as code of others may not expect that they are interrupted.

A signal that a process has no handler for would end it. So the launcher looks first whether the process is
the one that made the file, still has it open, and handles the signal. Of a process that is stopped, nothing
is asked: the signals would wait, and it would answer them all later.

Windows has no such signals. There, a thread of the rank waits for an event that has the name of its file, and
answers as soon as the interpreter lets it: not while a call of C code holds the interpreter lock.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rallypoint.launch.reports import ENDING
from rallypoint.launch.stacks.system import HAS_PROC, STOPPED, Process, began_at, look_at, opens
from rallypoint.stacks.frames import Dump, is_complete, read_dump

_NAME: Final = re.compile(r"stack-(?P<rank>\d{1,9})-(?P<pid>\d{1,9})-(?P<file>\d{1,9})\.txt")
_LOOK_SECONDS: Final = 0.005
_SETTLED_SECONDS: Final = 0.1
"""A file that has not grown for so long has the whole answer."""
INTERPRETER_SECONDS: Final = 0.15
"""How long the interpreter has to answer; it looks for signals thousands of times a second."""
_HAS_RUN_SECONDS: Final = 0.02
_MOST_BYTES: Final = 1 << 20
_MODIFY_EVENT: Final = 2


@dataclass(frozen=True)
class Source:
    """A file into which a process writes its stack."""

    rank: int
    pid: int
    """Of the process that has made it; those that it forks write into the same file."""
    file: int
    """The number of the open file in that process."""
    path: Path


@dataclass(frozen=True)
class Asked:
    """A process to ask: the maker of a file, or one that it has forked; and how it stands now."""

    source: Source
    pid: int
    process: Process


def sources_in(folder: Path) -> list[Source]:
    """The processes of a job on this machine that answer, by rank."""
    paths = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("stack-*.txt"))
    found = [
        Source(int(name["rank"]), int(name["pid"]), int(name["file"]), path) for path, name in paths if name
    ]
    return sorted(found, key=lambda each: (each.rank, each.pid))


def forget_all(folder: Path) -> None:
    """Remove what ranks that are no more have left, and what was seen of them."""
    for pattern in ("stack-*", "step-*", f"{ENDING}*", "activity.json", "stall.json"):
        for each in folder.glob(pattern):
            with suppress(OSError):
                each.unlink()


def ask(
    asked: Sequence[Asked], signals: Sequence[int], seconds: float = INTERPRETER_SECONDS
) -> dict[int, Dump]:
    """The stacks of processes, by their numbers, as far as they answer: each signal is given `seconds`.

    Those that share a file are asked one after the other.
    """
    dumps: dict[int, Dump] = {}
    waiting = list(asked)
    while waiting:
        turn: dict[Path, Asked] = {}
        for each in waiting:
            turn.setdefault(each.source.path, each)
        waiting = [each for each in waiting if turn[each.source.path] is not each]
        silent = _ask_turn(list(turn.values()), signals[0], seconds, dumps)
        if len(signals) > 1:
            _ask_turn([each for each in silent if _is_within_c(each, signals[0])], signals[1], seconds, dumps)
    return dumps


def ask_threads(each: Asked, signals: Sequence[int], seconds: float = INTERPRETER_SECONDS) -> Dump | None:
    """All threads of a process that has not answered the first signal, if it waits for a lock of Python's."""
    now = look_at(each.pid)
    if len(signals) < 3 or not now.waits_for_lock:
        return None
    dumps: dict[int, Dump] = {}
    _ask_turn([replace(each, process=now)], signals[2], seconds, dumps)
    return dumps.get(each.pid)


def _ask_turn(asked: Sequence[Asked], number: int, seconds: float, dumps: dict[int, Dump]) -> list[Asked]:
    """Ask processes, each with a file of its own; returns those that were asked, and did not answer."""
    sent = [each for each in asked if _send(each, number)]
    deadline = time.monotonic() + seconds
    silent = []
    for each in sent:
        text = _await_text(each.source.path, deadline)
        dump = read_dump(text) if text else None
        if dump is not None:
            dumps[each.pid] = dump
        else:
            silent.append(each)
        _clear(each.source.path)
    return silent


def _is_within_c(each: Asked, number: int) -> bool:
    """Whether a main thread that has not answered is in C code all the time, and was not just held up.

    It has got the signal, and since then it was asleep, or woken, or has run: in all that time it would have
    answered if it had come to a step of the interpreter.
    """
    now = look_at(each.pid)
    if not now.is_here or now.began != each.process.began or now.pending & (1 << (number - 1)):
        return False
    has_run = now.cpu - each.process.cpu >= _HAS_RUN_SECONDS
    return now.state == "S" or now.wakes > each.process.wakes or has_run


def rank_among(
    sources: Iterable[Source], processes: Mapping[int, Process], joined: Collection[int]
) -> Source | None:
    """The rank itself, among the processes that answer for its number, and have their file open.

    That is the one that has joined the store; before that, the one that no other of them has started.
    """
    here = {each.pid: each for each in sources if processes[each.pid].is_here}
    for pid in joined:
        if pid in here:
            return here[pid]
    for pid, each in here.items():
        parent = processes[pid].parent
        while parent > 1 and parent not in here:
            parent = look_at(parent).parent
        if parent <= 1:
            return each
    return None


def _send(each: Asked, number: int) -> bool:
    """Send the signal, if the process can take it."""
    process, pid, source = each.process, each.pid, each.source
    if HAS_PROC and not (
        process.is_here
        and process.state not in STOPPED
        and process.handles(number)
        and began_at(pid) == process.began
        and opens(pid, source.file, source.path)
    ):
        return False
    _clear(source.path)
    if sys.platform == "win32":
        return _set_event(f"{source.path.parent.name}-{source.path.name}")
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def _set_event(name: str) -> bool:
    """Windows: wake the thread that waits for this event; False if there is none, as its process is gone."""
    if sys.platform != "win32":
        return False
    import ctypes

    kernel = ctypes.WinDLL("kernel32")
    kernel.OpenEventW.restype = ctypes.c_void_p
    event = ctypes.c_void_p(kernel.OpenEventW(_MODIFY_EVENT, False, name))
    if not event:
        return False
    is_set = bool(kernel.SetEvent(event))
    kernel.CloseHandle(event)
    return is_set


def _await_text(path: Path, deadline: float) -> str:
    """What the file holds, as soon as it is complete."""
    text, grown = "", time.monotonic()
    while True:
        fresh = _read(path)
        now = time.monotonic()
        if fresh == text and text and (is_complete(text) or now - grown > _SETTLED_SECONDS):
            return text
        if now > deadline and not fresh:
            return ""
        if fresh != text:
            text, grown = fresh, now
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
