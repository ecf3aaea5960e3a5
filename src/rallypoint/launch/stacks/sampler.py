"""Looking at the ranks of this machine every few seconds: a thread of the launcher.

It tells the store what they do, and keeps it for the report of a failure. When ranks have waited for others
for as long as is allowed, it looks closer for a moment. If they have not moved, it puts together what all
machines tell, and writes that into the store, once; the launcher that has rank 0 says it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Final, Protocol

from rallypoint.errors import RallypointError
from rallypoint.launch import reports
from rallypoint.launch.stacks.asking import HAS_PROC, Source, ask, maker_of, sources_in
from rallypoint.launch.stacks.flight import ask_recorders
from rallypoint.launch.stacks.gpus import gpus_of
from rallypoint.launch.stacks.py_spy import look_into
from rallypoint.launch.stacks.steps import read_step
from rallypoint.launch.stacks.system import (
    GONE,
    STOPPED,
    Process,
    children_of,
    killed_for_memory,
    load_per_core,
    look_at,
)
from rallypoint.launch.stacks.versions import versions_in
from rallypoint.stacks.activity import Child, MachineActivity, RankActivity, pack
from rallypoint.stacks.folding import fold
from rallypoint.stacks.frames import Frame
from rallypoint.stacks.grouping import Work, put_together
from rallypoint.stacks.movement import Movement
from rallypoint.stacks.words import stall_lines

logger = logging.getLogger("rallypoint.stacks")

EVERY_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 1.0
_CLOSER_LOOKS: Final = 8
_CLOSER_SECONDS: Final = 0.15
_THREADS_AFTER: Final = 30.0
"""Other threads and child processes are asked only of a rank that has stood still for so long."""
_MOST_CHILDREN: Final = 16
_GONE: Final = "its process is gone"
_KILLED: Final = "the kernel has killed it, as memory ran out"


class Channel(Protocol):
    """The job's store, as far as the sampler needs it. Each method may raise RallypointError."""

    @property
    def address(self) -> str:
        """Where others may look at it."""

    def tell(self, text: str) -> None:
        """Have this told to whoever looks at the store."""

    def work(self) -> Work:
        """What all machines tell."""

    def announce(self, text: str) -> None:
        """Write what a job that stands still does; if somebody else has done so, nothing happens."""

    def announced(self) -> str:
        """What has been announced; nothing: the job goes on."""

    def withdraw(self) -> None:
        """The job goes on."""


@dataclass
class _Known:
    """What is known of one rank."""

    source: Source
    movement: Movement
    process: Process = GONE
    looked: float = 0.0
    stack: tuple[Frame, ...] = ()
    answered: float = 0.0
    ended: str = ""
    left_behind: set[int] = field(default_factory=set)
    """Processes of the rank that are there when it has ended: none of them is the rank, started again."""
    threads: tuple[tuple[Frame, ...], ...] = ()
    threads_of: float = -1.0
    """When it had begun to stand still, at the time that its threads were asked."""
    children: tuple[Child, ...] = ()
    is_seen: bool = False
    """Whether it was looked into from outside, as it does not answer."""
    cores: float = -1.0
    step: int = -1
    stepped: float = 0.0


class Sampler:
    """The thread. `say` is given lines to print, `connect` makes the channel once the store is known."""

    def __init__(
        self,
        folder: Path,
        signals: Sequence[int],
        stall_seconds: float,
        connect: Callable[[], Channel | None],
        say: Callable[[list[str]], None],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`environ` is that of the ranks."""
        self._environ = environ
        self._folder = folder
        self._signals = tuple(signals)
        self._stall_seconds = stall_seconds
        self._every = max(min(EVERY_SECONDS, stall_seconds / 8), 0.5)
        self._threads_after = min(_THREADS_AFTER, stall_seconds / 2)
        self._connect = connect
        self._channel: Channel | None = None
        self._say = say
        self._said = ""
        self._has_announced = False
        self._known: dict[int, _Known] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rallypoint stacks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more. A question that is under way is given up."""
        self._stopped.set()
        self._thread.join(2 * _ANSWER_SECONDS)

    def _run(self) -> None:
        while not self._stopped.wait(self._every):
            try:
                self._turn()
            except RallypointError:
                self._channel = None  # the store is away, or gone: others report that
            except Exception:  # the job goes on without being watched
                logger.warning("what the ranks do is not looked at any more", exc_info=True)
                return

    def _turn(self) -> None:
        machine = self._look()
        if not machine.ranks:
            return
        if self._is_stalled(machine):
            machine = self._look_closer(machine)
        reports.report_activity(self._folder, machine)
        self._share(machine)

    # Looking ------------------------------------------------------------------------------------------------

    def _look(self) -> MachineActivity:
        """Ask each rank of this machine once."""
        now = time.monotonic()
        asked: list[tuple[Source, int, Process]] = []
        for rank, group in groupby(sources_in(self._folder), key=lambda each: each.rank):
            sources = list(group)
            processes = {each.pid: look_at(each.pid) if HAS_PROC else _UNKNOWN for each in sources}
            known = self._known.get(rank)
            if known is not None and not known.ended and not processes[known.source.pid].is_here:
                known.ended = _KILLED if killed_for_memory({known.source.pid}) else _GONE
                known.left_behind = {each.pid for each in sources}
            if known is not None and known.ended:
                sources = [each for each in sources if each.pid not in known.left_behind]
            source = maker_of(sources, processes) if HAS_PROC else sources[0]
            if source is None:
                continue
            if known is None or known.source != source:
                known = self._known[rank] = _Known(source, Movement(now))
            process = processes[source.pid]
            if known.looked:
                known.cores = max(process.cpu - known.process.cpu, 0.0) / (now - known.looked)
            known.process, known.looked = process, now
            known.step, known.stepped = read_step(self._folder, rank, source.pid)
            asked.append((source, source.pid, process))
        dumps = ask(asked, self._signals[0], _ANSWER_SECONDS)
        for source, pid, process in asked:
            known = self._known[source.rank]
            if pid in dumps:
                known.stack, known.answered, known.is_seen = dumps[pid].stack, now, False
            elif now - known.answered > self._threads_after and not known.is_seen:
                known.is_seen = True  # from outside, once
                known.stack = look_into(pid) or known.stack
            if known.stack:
                known.movement.note(now, known.stack, process.wakes, known.step)
            self._ask_family(known, now)
        ranks = tuple(_activity(rank, each, now) for rank, each in sorted(self._known.items()))
        return MachineActivity(socket.gethostname(), ranks, load_per_core())

    def _ask_family(self, known: _Known, now: float) -> None:
        """Ask for the other threads, once, and for the child processes of a rank that stands still."""
        still = known.movement.still_seconds(now)
        began = now - still
        if still < self._threads_after or known.process.state in STOPPED:
            if still < self._threads_after:
                known.threads, known.children = (), ()
            return
        if len(self._signals) > 1 and abs(known.threads_of - began) > _CLOSER_SECONDS:
            known.threads_of = began
            source = known.source
            dumps = ask([(source, source.pid, look_at(source.pid))], self._signals[1], _ANSWER_SECONDS)
            known.threads = dumps[source.pid].others if source.pid in dumps else ()
        if not fold(known.stack).waits:
            known.children = self._children(known.source)

    def _children(self, source: Source) -> tuple[Child, ...]:
        """The processes of a rank that answer: those that it has forked, and Pythons that it has started."""
        own = {each.pid: each for each in sources_in(self._folder) if each.rank == source.rank}
        looked = [(pid, look_at(pid)) for pid in children_of(source.pid)[:_MOST_CHILDREN]]
        asked = [(own.get(pid, source), pid, process) for pid, process in looked]
        dumps = ask(asked, self._signals[0], _ANSWER_SECONDS)
        return tuple(
            Child(pid, dumps[pid].stack, process.facts)
            for _, pid, process in asked
            if pid in dumps and any(fold(dumps[pid].stack).own)
        )

    def _is_stalled(self, machine: MachineActivity) -> bool:
        return put_together([machine]).is_stalled(self._stall_seconds)

    def _look_closer(self, machine: MachineActivity) -> MachineActivity:
        """A few looks in a row: a rank that trains is seen at more than one place then."""
        if self._has_announced:
            return machine
        for _ in range(_CLOSER_LOOKS):
            if self._stopped.wait(_CLOSER_SECONDS):
                break
            machine = self._look()
            if not self._is_stalled(machine):
                return machine
        gpus = gpus_of({each.pid for each in machine.ranks})
        recorded = ask_recorders((each.rank for each in machine.ranks), self._environ)
        ranks = (
            replace(
                each,
                facts=replace(each.facts, gpu=gpus.get(each.pid, "")),
                recorded=recorded.get(each.rank, ()),
            )
            for each in machine.ranks
        )
        return replace(machine, ranks=tuple(ranks), remarks=versions_in(machine))

    # Telling ------------------------------------------------------------------------------------------------

    def _share(self, machine: MachineActivity) -> None:
        is_stalled = self._is_stalled(machine)
        if self._channel is None:
            self._channel = self._connect()
        if self._channel is None:
            if any(each.rank == 0 for each in machine.ranks):
                self._tell("\n".join(stall_lines(put_together([machine]))) if is_stalled else "")
            return
        channel = self._channel
        channel.tell(pack(machine))
        if is_stalled and not self._has_announced:
            channel.announce("\n".join(stall_lines(channel.work())))
            self._has_announced = True
        elif self._has_announced and not is_stalled:
            channel.withdraw()
            self._has_announced = False
        if any(each.rank == 0 for each in machine.ranks):
            self._tell(channel.announced())

    def _tell(self, text: str) -> None:
        """Say it once, and once that it is over."""
        if text == self._said:
            return
        self._said = text
        reports.report_stall(self._folder, text)
        lines = text.splitlines() if text else ["the ranks go on"]
        if text and self._channel is not None:
            lines.append(f"see `rallypoint stacks {self._channel.address}`")
        self._say(lines)


_UNKNOWN: Final = Process("?", GONE.facts)
"""A process where the system tells nothing: it counts as being here."""


def _activity(rank: int, known: _Known, now: float) -> RankActivity:
    silent = now - known.answered if known.answered < known.looked and not known.ended else -1.0
    return RankActivity(
        rank,
        known.source.pid,
        known.stack,
        known.movement.still_seconds(now) if known.stack else 0.0,
        silent if known.answered else -1.0,
        known.ended,
        known.step,
        known.movement.steps_per_second,
        max(time.time() - known.stepped, 0.0) if known.step >= 0 else -1.0,
        replace(known.process.facts, cores=known.cores),
        known.threads,
        known.children,
    )
