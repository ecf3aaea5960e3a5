"""Requesting stacks from processes: a signal to their helper threads, and what they write into their files.

No signal is ever sent to another thread, as it would interrupt its system call: even with SA_RESTART, many
calls fail or return early then (signal(7)). First the helper thread is signalled, which waits for the first
signal, and writes the stacks of all threads once it has the interpreter lock (GIL). If it does not get it,
another thread keeps the GIL in C code. Then the second signal has `faulthandler` write the stacks, still in
the helper thread. Only then: a thread that runs Python changes its frames while they are read.

A signal without a handler would end the process. So before each one, /proc must say that the helper thread
waits for the first signal, or handles the second. A process that is stopped gets none: the signals would
wait, and it would answer them all later. Neither is one without a helper thread, such as a fork of C code.

Windows has no such signals. There, a thread of the rank waits for an event that has the name of its file, and
answers as soon as the interpreter lets it: not while a call of C code holds the GIL.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from rallypoint.launch.stacks import system
from rallypoint.launch.stacks.frames import Dump, is_complete, read_dump

_NAME: Final = re.compile(r"stack-(?P<rank>\d{1,9})-(?P<pid>\d{1,9})\.txt")
_LOOK_SECONDS: Final = 0.005
_SETTLED_SECONDS: Final = 0.1
"""A file that has not grown for so long has the whole answer."""
INTERPRETER_SECONDS: Final = 0.15
"""How long the helper thread has to answer; threads that run Python give the GIL away after 5 ms."""
_WAITS_FOR_SIGNAL: Final = "rt_sigtimedwait"
_USUAL: Final = 0b100_0000_0000_0011
"""SIGHUP, SIGINT and SIGTERM: the helper thread blocks them, and others hardly do."""
_RUN_SECONDS: Final = 0.005
_CHECK_SECONDS: Final = 0.5
_WINDOW_SECONDS: Final = 0.05
_LOCK_BYTES: Final = 128
_STATE_BYTES: Final = 512
_LEAST_ADDRESS: Final = 1 << 16
_MOST_BYTES: Final = 1 << 20
_MODIFY_EVENT: Final = 2


@dataclass(frozen=True)
class Source:
    """A file into which a process writes its stack."""

    rank: int
    pid: int
    """Of the process that has made it; those that it forks write into the same file."""
    path: Path


@dataclass(frozen=True)
class StackRequest:
    """A process whose stack is wanted, as it stands now: the maker of a file, or one that it has forked."""

    source: Source
    pid: int
    process: system.Process

    @cached_property
    def helper(self) -> int:
        """The number of its helper thread; 0: it has none."""
        return system.helper_of(self.pid)


def sources_in(folder: Path) -> list[Source]:
    """The processes of a job on this machine that answer, by rank."""
    paths = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("stack-*.txt"))
    found = [Source(int(name["rank"]), int(name["pid"]), path) for path, name in paths if name]
    return sorted(found, key=lambda each: (each.rank, each.pid))


def rank_among(
    sources: Iterable[Source], processes: Mapping[int, system.Process], joined: Collection[int]
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
            parent = system.read_process(parent).parent
        if parent <= 1:
            return each
    return None


def request_stacks(
    requests: Sequence[StackRequest], signals: Sequence[int], seconds: float = INTERPRETER_SECONDS
) -> dict[int, Dump]:
    """The stacks of processes, by their numbers, as far as they answer: each signal is given `seconds`.

    Those that share a file have their turns one after the other.
    """
    dumps: dict[int, Dump] = {}
    waiting = list(requests)
    while waiting:
        turn: dict[Path, StackRequest] = {}
        for each in waiting:
            turn.setdefault(each.source.path, each)
        waiting = [each for each in waiting if turn[each.source.path] is not each]
        silent = _request_turn(list(turn.values()), signals[0], seconds, dumps)
        for second in signals[1:]:
            held = _with_lock_held(silent, dumps)
            # The signal would end a process that does not handle it any more.
            masks = [(each, system.mask_of(each.pid, each.helper)) for each, _ in held]
            able = [each for each, mask in masks if mask.caught & 1 << (second - 1)]
            _request_turn(able, second, seconds, dumps)
            for each, tasks in held:
                if each.pid in dumps:
                    dumps[each.pid] = _with_holder(dumps[each.pid], each, tasks)
    return dumps


def _request_turn(
    requests: Sequence[StackRequest], number: int, seconds: float, dumps: dict[int, Dump]
) -> list[StackRequest]:
    """Signal processes, each with a file of its own; returns those that were signalled and did not answer."""
    sent = [each for each in requests if _send(each, number)]
    deadline = time.monotonic() + seconds
    for each in sent:
        dump = read_dump(_await_text(each.source.path, deadline))
        if dump is not None:
            dumps[each.pid] = dump
        _clear(each.source.path)
    return [each for each in sent if each.pid not in dumps]


def _send(each: StackRequest, number: int) -> bool:
    """Send the signal, if the process can take it."""
    process, pid, source = each.process, each.pid, each.source
    if system.HAS_PROC:
        now = system.read_process(pid)
        if not process.is_here or process.is_stopped or now.began != process.began:
            return False
        _clear(source.path)
        mask, bit = system.mask_of(pid, each.helper), 1 << (number - 1)
        if mask.caught & bit:
            is_safe = not mask.pending & bit and system.opens(pid, source.path)
        elif mask.blocked & bit:  # it has not answered an earlier request yet
            return True
        else:
            is_safe = mask.blocked & _USUAL == _USUAL  # all are, but for the one that it waits for
        return is_safe and system.signal_thread(pid, each.helper, number)
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


# Who keeps the GIL -----------------------------------------------------------------------------------------


def _with_lock_held(
    silent: Sequence[StackRequest], dumps: dict[int, Dump]
) -> list[tuple[StackRequest, list[system.Task]]]:
    """The processes in which a thread keeps the GIL in C code; with their threads.

    Their helper threads have waited for the GIL in vain. A process may still answer meanwhile.
    """
    found = []
    once: set[int] = set()  # the helper thread may have requested the GIL late in a window: two are needed
    waiting = [(each, system.tasks_of(each.pid)) for each in silent]
    deadline = time.monotonic() + _CHECK_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(_WINDOW_SECONDS)
        still = []
        for each, before in waiting:
            tasks = system.tasks_of(each.pid)
            call = next((task.call for task in tasks if task.tid == each.helper), "")
            if call == _WAITS_FOR_SIGNAL and (dump := read_dump(_read(each.source.path))):
                dumps[each.pid] = dump
                continue
            is_in_c = call == "futex" and _is_in_c(each.helper, before, tasks)
            if is_in_c and each.pid in once:
                found.append((each, tasks))
            else:
                once = once | {each.pid} if is_in_c else once - {each.pid}
                still.append((each, tasks))
        waiting = still
    return found


def _is_in_c(helper: int, before: Sequence[system.Task], tasks: Sequence[system.Task]) -> bool:
    """Whether no thread can have run Python between two moments, while the helper thread waited for the GIL.

    The helper thread has run, and so has requested the GIL: a thread that runs Python gives it away at once.
    So if a single thread was busy, that was in C code. If two were, they may have handed the GIL over.
    """
    ran = {task.tid: task.seconds for task in before}
    busy = [task for task in tasks if task.seconds - ran.get(task.tid, 0.0) > _RUN_SECONDS]
    asleep = all(task.state == "S" for task in tasks if task not in busy)
    has_requested = any(task.tid == helper and task.seconds > ran.get(helper, task.seconds) for task in tasks)
    return has_requested and asleep and len(busy) <= 1


def _with_holder(dump: Dump, each: StackRequest, tasks: Sequence[system.Task]) -> Dump:
    """A dump with the thread that holds the GIL, unless that is the main thread.

    The helper thread waits for the GIL inside a structure of Python's that begins with a pointer to the
    state of the holder; that state has the number that stands in the dump. So no offset needs to be known.
    """
    lock = next((task.argument for task in tasks if task.tid == each.helper), 0)
    for pointer in system.memory_words(each.pid, lock // 8 * 8 - _LOCK_BYTES, _LOCK_BYTES):
        state = system.memory_words(each.pid, pointer, _STATE_BYTES) if pointer > _LEAST_ADDRESS else ()
        found = [at for at, ident in enumerate(dump.idents) if ident in state]
        if len(found) == 1:
            is_main = found[0] == len(dump.threads) - 1
            return dump if is_main else replace(dump, lock_holder=dump.threads[found[0]])
    return dump
