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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Final, Protocol

from rallypoint.errors import RallypointError
from rallypoint.launch import reports
from rallypoint.launch.stacks.asking import HAS_PROC, Asked, Source, ask, rank_among, sources_in
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
    opens,
)
from rallypoint.launch.stacks.versions import versions_in
from rallypoint.stacks.activity import Child, MachineActivity, RankActivity, pack
from rallypoint.stacks.folding import fold
from rallypoint.stacks.frames import Dump, Frame
from rallypoint.stacks.grouping import Work, put_together
from rallypoint.stacks.movement import Movement
from rallypoint.stacks.words import stall_lines

logger = logging.getLogger("rallypoint.stacks")

_EVERY_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 2.0
_CLOSER_LOOKS: Final = 3
_CLOSER_SECONDS: Final = 0.1
_FAMILY_AFTER: Final = 30.0
"""Child processes are asked only of a rank that has stood still for so long."""
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

    def announce(self, text: str) -> bool:
        """Write what a job that stands still does; False if somebody else has done so."""

    def announced(self) -> str:
        """What has been announced; nothing: the job goes on."""

    def withdraw(self) -> None:
        """The job goes on."""

    def close(self) -> None:
        """It is not needed any more."""


@dataclass
class _Known:
    """What is known of one rank."""

    source: Source
    movement: Movement
    process: Process = GONE
    looked: float = 0.0
    stack: tuple[Frame, ...] = ()
    threads: tuple[tuple[Frame, ...], ...] = ()
    answered: float = 0.0
    ended: str = ""
    left_behind: set[int] = field(default_factory=set)
    """Processes of the rank that are there when it has ended: none of them is the rank, started again."""
    children: tuple[Child, ...] = ()
    is_seen: bool = False
    """Whether it was looked into from outside, as it does not answer."""
    cores: float = -1.0
    step: int = -1
    stepped: float = 0.0

    def note(self, process: Process, now: float) -> None:
        """How its process stands now."""
        if self.looked and process.began:
            self.cores = max(process.cpu - self.process.cpu, 0.0) / (now - self.looked)
        self.process, self.looked = process, now


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
        self._every = max(min(_EVERY_SECONDS, stall_seconds / 8), 0.5)
        self._family_after = min(_FAMILY_AFTER, stall_seconds / 2)
        self._reports = reports.Reports(folder)
        self._connect = connect
        self._channel: Channel | None = None
        self._say = say
        self._said = ""
        self._is_gathered = False
        self._has_announced = False
        self._known: dict[int, _Known] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rallypoint stacks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more. What is under way has no effect any more."""
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)
        self._leave_channel()

    def _run(self) -> None:
        pause = self._every
        while not self._stopped.wait(pause):
            try:
                pause = self._turn()
            except RallypointError:
                self._leave_channel()  # the store is away, or gone: others report that
            except Exception:  # the job goes on without being watched
                logger.warning("what the ranks do is not looked at any more", exc_info=True)
                return

    def _turn(self) -> float:
        """Look once, and say what there is to say; how long to wait before the next time."""
        machine = self._look()
        if not machine.ranks:
            return self._every
        if not self._is_stalled(machine):
            self._is_gathered = False
        elif not self._is_gathered:
            machine = self._look_closer(machine)
        if not self._stopped.is_set():
            reports.report_activity(self._folder, machine)
            self._share(machine)
        # The next look comes when the time of a rank is over that stands still, and not a while later.
        left = [self._stall_seconds - each.still_seconds for each in machine.ranks]
        return min([self._every, *(each + _CLOSER_SECONDS for each in left if each > 0)])

    def _leave_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    # Looking ------------------------------------------------------------------------------------------------

    def _look(self) -> MachineActivity:
        """Ask each rank of this machine once."""
        now = time.monotonic()
        joined = self._reports.joined()
        asked = []
        for rank, group in groupby(sources_in(self._folder), key=lambda each: each.rank):
            pids = [each.pid for each in joined if each.rank == rank]
            known = self._find(rank, list(group), pids, now)
            if known is not None:
                known.step, known.stepped = read_step(self._folder, rank, known.source.pid)
                asked.append(Asked(known.source, known.source.pid, known.process))
        dumps = ask(asked, self._signals)
        for each in asked:
            self._note(self._known[each.source.rank], dumps.get(each.pid), now)
        ranks = tuple(_activity(rank, each, now) for rank, each in sorted(self._known.items()))
        world = max((each.world_size for each in joined), default=-1)
        return MachineActivity(socket.gethostname(), ranks, load_per_core(), world_size=world)

    def _find(self, rank: int, sources: list[Source], joined: list[int], now: float) -> _Known | None:
        """The process that is a rank, as it stands now; None if it has ended."""
        known = self._known.get(rank)
        if not HAS_PROC:
            process, source = _UNKNOWN, sources[-1]
        else:
            if known is not None and not known.ended:
                process = look_at(known.source.pid)
                if process.is_here and process.began == known.process.began:
                    known.note(process, now)
                    return known
                known.ended = _KILLED if killed_for_memory({known.source.pid}) else _GONE
                known.left_behind = {each.pid for each in sources}
            behind = known.left_behind if known is not None else set()
            sources = [each for each in sources if each.pid not in behind and _is_open(each)]
            processes = {each.pid: look_at(each.pid) for each in sources}
            found = rank_among(sources, processes, joined)
            if found is None:
                return None
            process, source = processes[found.pid], found
        if known is None or known.source != source:
            known = self._known[rank] = _Known(source, Movement(now))
        known.note(process, now)
        return known

    def _note(self, known: _Known, dump: Dump | None, now: float) -> None:
        """What a rank has answered, if it has."""
        if dump is not None:
            known.stack, known.threads = dump.stack, dump.others
            known.answered, known.is_seen = now, False
        elif now - known.answered > self._family_after and not known.is_seen:
            known.is_seen = True  # from outside, once
            known.stack = look_into(known.source.pid) or known.stack
        if known.stack:
            known.movement.note(now, known.stack, known.process.wakes, known.step)
        is_still = known.movement.still_seconds(now) >= self._family_after
        known.children = ()
        if is_still and known.process.state not in STOPPED and not fold(known.stack).waits:
            known.children = self._children(known.source)

    def _children(self, source: Source) -> tuple[Child, ...]:
        """The processes of a rank that answer: those that it has forked, and Pythons that it has started."""
        own = {each.pid: each for each in sources_in(self._folder) if each.rank == source.rank}
        looked = [(pid, look_at(pid)) for pid in children_of(source.pid)[:_MOST_CHILDREN]]
        dumps = ask([Asked(own.get(pid, source), pid, process) for pid, process in looked], self._signals)
        return tuple(Child(pid, dumps[pid].stack, process.facts) for pid, process in looked if pid in dumps)

    def _is_stalled(self, machine: MachineActivity) -> bool:
        return put_together([machine]).is_stalled(self._stall_seconds)

    def _look_closer(self, machine: MachineActivity) -> MachineActivity:
        """A few looks in a row: a rank that trains is seen at more than one place then.

        If it is a stall, what takes long is asked, once.
        """
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
        self._is_gathered = True
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
        if is_stalled and not self._has_announced and not channel.announced():
            work = channel.work()
            if work.main is None:  # a look may not show who tells, as behind a relay
                work = put_together([machine])
            self._has_announced = channel.announce("\n".join(stall_lines(work)))
        elif self._has_announced and not is_stalled:
            channel.withdraw()
            self._has_announced = False
        if any(each.rank == 0 for each in machine.ranks):
            self._tell(channel.announced())

    def _tell(self, text: str) -> None:
        """Say it once, and once that it is over."""
        if text == self._said or self._stopped.is_set():
            return
        self._said = text
        reports.report_stall(self._folder, text)
        lines = text.splitlines() if text else ["the ranks go on"]
        if text and self._channel is not None:
            lines.append(f"see `rallypoint stacks {self._channel.address}`")
        self._say(lines)


def _is_open(source: Source) -> bool:
    """Whether its process is there; else its file is removed, as the number may be used again."""
    if opens(source.pid, source.file, source.path):
        return True
    with suppress(OSError):
        source.path.unlink()
    return False


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
