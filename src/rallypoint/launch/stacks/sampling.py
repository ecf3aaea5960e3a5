"""Sampling the ranks of this machine: which process each of them is, what it does, and for how long.

The previous sample shows whether a rank has moved, and is reported for one that does not answer any more.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Final

from rallypoint.frames import Stack
from rallypoint.launch import reports
from rallypoint.launch.blame import RankIdentity
from rallypoint.launch.stacks import system
from rallypoint.launch.stacks.activity import Child, MachineActivity, ProcessFacts, RankActivity
from rallypoint.launch.stacks.frames import Dump, fold
from rallypoint.launch.stacks.progress import Movement, Pace
from rallypoint.launch.stacks.requesting import Source, StackRequest, rank_among, request_stacks, sources_in
from rallypoint.launch.stacks.steps import read_step
from rallypoint.text import named_ranks

_MOST_CHILDREN: Final = 16
_HOOKS: Final = "rallypoint_hooks.py"
_HOOK: Final = "hook"
_GONE: Final = "its process is gone"
_KILLED: Final = "the kernel has killed it, as memory ran out"
_TRANSFER: Final = 64 * 1024
"""Bytes per second: a rank that moves more is making progress. One that polls a store moves less."""
_TRANSFER_SECONDS: Final = 1.0


@dataclass
class _SampledRank:
    """One rank, and the process that it is."""

    source: Source
    movement: Movement
    process: system.Process = system.GONE
    sampled: float = 0.0
    """When `process` was read."""
    stack: Stack = ()
    seen: float = 0.0
    """When that was its stack."""
    threads: tuple[Stack, ...] = ()
    lock_holder: Stack = ()
    answered: float = 0.0
    ended: str = ""
    left_behind: set[int] = field(default_factory=set)
    """Processes of the rank that are there when it has ended: none of them is the rank, started again."""
    children: tuple[Child, ...] = ()
    is_spied: bool = False
    """Whether py-spy has read its stack, as it does not answer."""
    cores: float = -1.0
    step: int = -1
    stepped: float = 0.0
    moved: tuple[float, int] | None = None
    """When the bytes that it had moved were counted last, and how many they were."""

    @property
    def facts(self) -> ProcessFacts:
        return replace(self.process.facts, cores=self.cores)

    @property
    def place(self) -> Stack:
        """The calls of which one has to change for the rank to have moved."""
        return (*self.lock_holder, *self.stack)

    def note_process(self, process: system.Process, now: float) -> None:
        """Its process as it is now."""
        if self.sampled and process.began:
            self.cores = max(process.cpu - self.process.cpu, 0.0) / (now - self.sampled)
        self.process, self.sampled = process, now

    def note_stack(self, stack: Stack, now: float) -> None:
        self.stack, self.seen = stack, now

    def activity(self, now: float) -> RankActivity:
        """For the report."""
        is_late = self.answered and self.answered < self.sampled and not self.ended
        return RankActivity(
            self.source.rank,
            self.source.pid,
            self.stack,
            self.movement.still_seconds(now) if self.stack else 0.0,
            now - self.answered if is_late else -1.0,
            self.ended,
            self.step,
            self.movement.steps_per_second,
            max(time.time() - self.stepped, 0.0) if self.step >= 0 else -1.0,
            self.facts,
            self.threads,
            self.children,
            stack_seconds=now - self.seen if self.seen < self.sampled and self.stack else -1.0,
            lock_holder=self.lock_holder,
            idle_seconds=self.movement.idle_seconds(now),
        )


class RankSampler:
    """The ranks of this machine, sample by sample; they write into `folder`."""

    def __init__(self, folder: Path, signals: Sequence[int], stall_seconds: float) -> None:
        self._folder = folder
        self._signals = tuple(signals)
        self._reports = reports.Reports(folder)
        self._known: dict[int, _SampledRank] = {}
        self._joined = 0
        self._ending: list[str] = []
        """The files of ranks that wait for a sample before they end."""
        self.pace = Pace(stall_seconds)

    def sample(self, *, is_brief: bool = False) -> MachineActivity:
        """Request the stacks of each rank once. A brief sample leaves out what may take long."""
        now = time.monotonic()
        joined = self._read_joined()
        sampled = []
        failed = self._failed()
        for rank, group in groupby(sources_in(self._folder), key=lambda each: each.rank):
            pids = [each.pid for each in joined if each.rank == rank]
            known = self._find(rank, list(group), pids, now)
            if known is not None:
                known.step, known.stepped = read_step(self._folder, rank, known.source.pid)
                sampled.append(known)
        self._find_transfers(sampled, now)
        requests = [StackRequest(each.source, each.source.pid, each.process) for each in sampled]
        dumps = request_stacks([each for each in requests if each.pid not in failed], self._signals)
        failed = self._failed()  # some may have failed meanwhile
        for known in sampled:
            pid = known.source.pid
            if pid in failed:
                self._note_failed(known, failed[pid], now)
            else:
                self._note(known, dumps.get(pid), now)
                self._examine(known, now, is_brief)
        has_ended = any(each.ended for each in self._known.values())
        self.pace = self.pace._replace(has_ended=has_ended)
        ranks = tuple(known.activity(now) for _, known in sorted(self._known.items()))
        world = max((each.world_size for each in joined), default=-1)
        return MachineActivity(socket.gethostname(), ranks, world_size=world)

    def alarm(self) -> str | None:
        """Why to take a sample now; None: no reason. Empty if ranks end only because another one does.

        Ranks whose time-out has struck, and those that have lost their connection to one of these, wait for
        the sample, two seconds at most: when the first of them ends, torchrun ends all others.
        """
        try:
            self._ending = [name for name in os.listdir(self._folder) if name.startswith(reports.ENDING)]
        except OSError:
            self._ending = []
        if not self._ending:
            return None
        pids = {int(name.rpartition("-")[2]) for name in self._ending}
        failures = (each for each in self._reports.failures() if each.who.pid in pids)
        ranks = sorted({each.who.rank for each in failures if each.is_timeout})
        return f"a time-out has struck {named_ranks(ranks)}" if ranks else ""

    def release_failed(self) -> None:
        """Let the ranks end that caused the last alarm."""
        for name in self._ending:
            with suppress(OSError):
                (self._folder / name).unlink()
        self._ending = []

    def update_timeouts(self) -> None:
        """Read the time-outs of ranks that joined since then; they may make the next sample due earlier."""
        if self._reports.count_joined() != self._joined:
            self._read_joined()

    def _read_joined(self) -> list[RankIdentity]:
        self._joined = self._reports.count_joined()
        joined = self._reports.joined()
        last_try = max((each.tries for each in joined), default=0)
        timeouts = (each.timeout_seconds for each in joined if each.tries == last_try)
        self.pace = self.pace._replace(timeout=min(filter(None, timeouts), default=inf))
        return joined

    def _failed(self) -> dict[int, Stack]:
        """Where processes have failed: they are about to end, and their stacks are gone."""
        return {each.who.pid: each.stack for each in self._reports.failures()}

    def _find(self, rank: int, sources: list[Source], joined: list[int], now: float) -> _SampledRank | None:
        """The process that is a rank, as it stands now; None if it has ended."""
        known = self._known.get(rank)
        if known is not None and not known.ended:
            process = system.read_process(known.source.pid)
            is_here = process.is_here and process.began == known.process.began
            # Another process may have joined as this rank: the first one has only started it.
            is_outdone = known.source.pid not in joined and any(each.pid in joined for each in sources)
            if is_here and not is_outdone:
                known.note_process(process, now)
                return known
            if not is_here:
                known.ended = _KILLED if system.killed_for_memory(known.source.pid) else _GONE
                known.left_behind = {each.pid for each in sources}
        behind = known.left_behind if known is not None else set()
        sources = [each for each in sources if each.pid not in behind and _is_open(each)]
        processes = {each.pid: system.read_process(each.pid) for each in sources}
        source = rank_among(sources, processes, joined)
        if source is None:
            return None
        if known is None or known.source != source:
            known = self._known[rank] = _SampledRank(source, Movement(now))
        known.note_process(processes[source.pid], now)
        return known

    def _note(self, known: _SampledRank, dump: Dump | None, now: float) -> None:
        """What a rank has answered, if it has."""
        if dump is not None:
            known.answered, known.is_spied = now, False
            if not _is_failing(dump.stack):
                known.note_stack(dump.stack, now)
                known.threads, known.lock_holder = dump.others, dump.lock_holder
        # A thread that waits for the GIL is woken all the time.
        wakes = -1 if known.lock_holder else known.process.wakes
        computes = known.facts.computes or self._has_busy_child(known, now)
        known.movement.note(now, known.place, wakes, known.step, computes=computes)
        known.children = ()

    def _has_busy_child(self, known: _SampledRank, now: float) -> bool:
        """Whether a rank that has long been at one place has a process that computes for it."""
        if known.movement.same_seconds(now) < self.pace.family_after:
            return False
        return any(process.state == "R" for _, process in _children(known.source.pid))

    def _note_failed(self, known: _SampledRank, stack: Stack, now: float) -> None:
        """Its stack is that of its exception; what it does now is to end."""
        known.answered = now
        if fold(known.stack).place != fold(stack).place:
            known.note_stack(stack, now)
            known.movement.note(now, stack, -1, known.step)

    def _examine(self, known: _SampledRank, now: float, is_brief: bool) -> None:
        """Collect what is of interest only for a rank that does not answer, or stands still."""
        if is_brief:
            return
        after = self.pace.family_after
        if now - known.answered > after and not known.is_spied:
            known.is_spied = True
            if stack := system.py_spy_stack(known.source.pid):
                known.note_stack(stack, now)
                known.movement.restate(known.place)
        is_still = known.movement.still_seconds(now) >= after and not fold(known.stack).waits
        if is_still and not known.process.is_stopped:
            known.children = self._read_children(known.source)

    def _find_transfers(self, ranks: Sequence[_SampledRank], now: float) -> None:
        """Find ranks that have long been at one place, but move data meanwhile: that is progress."""
        long_there = [
            known
            for known in ranks
            if known.movement.same_seconds(now) >= self.pace.family_after
            and (known.moved is None or now - known.moved[0] >= _TRANSFER_SECONDS)
        ]
        by_socket = system.bytes_by_socket() if long_there else {}
        for known in long_there:
            before, known.moved = known.moved, (now, system.bytes_moved(known.source.pid, by_socket))
            if before is not None and known.moved[1] - before[1] >= _TRANSFER * (now - before[0]):
                known.movement.advance(now)

    def _read_children(self, source: Source) -> tuple[Child, ...]:
        """The Python processes of a rank: those that it has forked, and those that answer by themselves.

        Of a forked one that does not answer, only its state in the system is known.
        """
        own = {each.pid: each for each in sources_in(self._folder) if each.rank == source.rank}
        found = _children(source.pid)
        dumps = request_stacks(
            [StackRequest(own.get(pid, source), pid, process) for pid, process in found], self._signals
        )
        return tuple(
            Child(pid, dumps[pid].stack if pid in dumps else (), process.facts)
            for pid, process in found
            if pid in dumps or system.opens(pid, source.path)
        )


def _children(pid: int) -> list[tuple[int, system.Process]]:
    return [(child, system.read_process(child)) for child in system.children_of(pid)[:_MOST_CHILDREN]]


def _is_failing(stack: Stack) -> bool:
    """Whether an exception is being reported: what the rank did before is what matters."""
    return any(each.function == _HOOK and each.file.endswith(_HOOKS) for each in stack)


def _is_open(source: Source) -> bool:
    """Whether its process is there; else its file is removed, as the number may be used again."""
    if not system.HAS_PROC or system.read_process(source.pid).is_here:
        return True
    with suppress(OSError):
        source.path.unlink()
    return False


def forget_all(folder: Path) -> None:
    """Remove what ranks that are no more have left, and what was seen of them."""
    for pattern in ("stack-*", "step-*", f"{reports.ENDING}*", "activity.json", "stall.json"):
        for each in folder.glob(pattern):
            with suppress(OSError):
                each.unlink()
