"""Which ranks make progress: one rank, sample by sample, and all ranks of a job, put together. Pure.

A rank that trains is often seen at the same line, the one that takes longest. So its stack alone does not
tell: a rank stands still if its main thread was also hardly ever woken between two samples, as one is that
waits in one and the same call. Where a script calls `rallypoint.step`, a new step is a move, whatever else.

Standing still and making no progress are different questions:

    seen between two samples                              stands still    makes no progress
    another stack, another step, much data moved          no              no
    the same stack, the main thread was woken often       no              yes: it polls for something
    the same stack, it uses half a core or more           yes             no, but for PATIENCE times as long
    the same stack, and nothing else                      yes             yes

The bound on computing is there because an endless loop looks like a long computation.

Of a job, the ranks that do the same are a group, and those that wait for others are not odd. A job stands
still when no rank of it makes progress while one waits for others.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, NamedTuple

from rallypoint.frames import Stack
from rallypoint.launch.stacks.activity import MachineActivity, RankActivity, unpack
from rallypoint.launch.stacks.frames import Doing, fold
from rallypoint.store.rollcall.clients import gather, reporting_clients
from rallypoint.store.rollcall.judgement import waits_of
from rallypoint.store.rollcall.question import owing_rank
from rallypoint.store.rollcall.snapshot import Client, Snapshot
from rallypoint.text import shown

_WAKES: Final = 4
_WAKES_PER_SECOND: Final = 2.0
"""Wake-ups that are no move: by the request for the stack, and by waits with a time-out."""
_STEPS_KEPT: Final = 7
PATIENCE: Final = 3
"""A rank that computes in one place may take this many times as long as one that does nothing."""


class Movement:
    """One rank, sample by sample. Times are of one clock, in seconds."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._arrived = now
        self._computed = now
        self._before = now
        self._stack: Stack = ()
        self._wakes = -1
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS_KEPT)

    def note(self, now: float, stack: Stack, wakes: int, step: int, *, computes: bool = False) -> None:
        """A sample: its stack, how often its main thread has been woken so far (-1: not known), its step, and
        whether it computes.
        """
        most = _WAKES + _WAKES_PER_SECOND * (now - self._before)
        is_busy = min(wakes, self._wakes) >= 0 and wakes - self._wakes > most
        is_new_step = bool(self._steps) and step != self._steps[-1][1]
        if stack != self._stack or is_new_step:
            self.advance(now)
        if is_busy:
            self._since = now
        if computes:
            self._computed = now
        self._stack, self._wakes, self._before = stack, wakes, now
        if step >= 0:
            if self._steps and step < self._steps[-1][1]:
                self._steps.clear()  # it has begun again
            self._steps.append((now, step))

    def advance(self, now: float) -> None:
        """It has made progress: besides what `note` finds, it has moved much data."""
        self._since = self._arrived = now

    def restate(self, stack: Stack) -> None:
        """Its place as another tool describes it, which is no progress."""
        self._stack = stack

    def still_seconds(self, now: float) -> float:
        """For how long it has not moved."""
        return now - self._since

    def same_seconds(self, now: float) -> float:
        """For how long it has been at the same place."""
        return now - self._arrived

    def idle_seconds(self, now: float) -> float:
        """For how long it has made no progress, if nothing but its own work holds it up."""
        return max(now - max(self._arrived, self._computed), self.same_seconds(now) / PATIENCE)

    @property
    def steps_per_second(self) -> float:
        """Over the last samples; -1: not known."""
        if len(self._steps) < 2:
            return -1.0
        (began, first), (ended, last) = self._steps[0], self._steps[-1]
        return (last - first) / (ended - began) if ended > began else -1.0


_EVERY_SECONDS: Final = 10.0
_LEAST_SECONDS: Final = 0.5
_SAMPLES: Final = 8
"""Samples within the time that a rank may wait: only they show for how long it has waited."""
_BEFORE_TIMEOUT: Final = 0.75
_AFTER_END_SECONDS: Final = 30.0
"""A rank that waits for one that has ended waits in vain; but one of another group may only be slow."""
_FAMILY_SECONDS: Final = 30.0


class Pace(NamedTuple):
    """For how long the ranks of a job may wait, and how often to sample them."""

    stall: float
    """For how long ranks may stand still, as the user says."""
    timeout: float = inf
    """The time-out of its process groups."""
    has_ended: bool = False
    """Whether a rank has ended while others go on."""

    @property
    def before_timeout(self) -> float:
        """A rank that has waited for so long will soon be ended by the time-out."""
        return _BEFORE_TIMEOUT * self.timeout

    @property
    def urgent(self) -> float:
        """For how long a rank may wait for others, even while those make progress."""
        return min(_AFTER_END_SECONDS if self.has_ended else inf, self.before_timeout)

    @property
    def waiting(self) -> float:
        """For how long a rank may wait for others."""
        return min(self.stall, self.urgent)

    @property
    def every(self) -> float:
        """Between two samples."""
        return max(min(_EVERY_SECONDS, self.waiting / _SAMPLES), _LEAST_SECONDS)

    @property
    def family_after(self) -> float:
        """A rank that has stood still for so long is examined further: its threads, its processes."""
        return min(_FAMILY_SECONDS, self.waiting / 2)


# All ranks of a job ----------------------------------------------------------------------------------------

SILENT_SECONDS: Final = 4.0
"""A rank of a busy machine may take a while to answer."""
_MOST_RANKS: Final = 1 << 20
_ON_SOCKET: Final = re.compile(r"|poll\(\)|\w+\(\) of a (?:connection to|socket)\b.*")
"""The system calls in which torch's client waits for the store; empty where the system does not tell."""
_LATE_SECONDS: Final = 60.0
"""A report that is older than this says what was, not what is."""


@dataclass
class Group:
    """Ranks that do the same."""

    doing: Doing
    ended: str = ""
    """How they have ended, if they have."""
    is_silent: bool = False
    """Whether they do not answer: what they do is what they did before."""
    members: list[RankActivity] = field(default_factory=list)
    """By rank."""
    hosts: dict[int, str] = field(default_factory=dict)
    """By rank, in order: its machine."""

    @property
    def ranks(self) -> list[int]:
        return list(self.hosts)

    @property
    def example(self) -> RankActivity:
        """The rank that has stood still for longest."""
        return max(self.members, key=lambda each: (each.still_seconds, -each.rank))

    @property
    def still_seconds(self) -> float:
        """For how long all of them have stood still."""
        return min(each.still_seconds for each in self.members)

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step that they are in; -1: not known of all."""
        steps = [each.step for each in self.members]
        return min(steps), max(steps)


@dataclass(frozen=True)
class JobActivity:
    """What all ranks of a job are doing."""

    odd: tuple[Group, ...] = ()
    """Those that do something else than the others, the oddest first."""
    main: Group | None = None
    """What most do; None: nothing is known of any rank."""
    unknown: tuple[int, ...] = ()
    """Ranks of the job that no launcher reports."""

    @property
    def groups(self) -> list[Group]:
        """All of them, the odd ones first."""
        return [*self.odd, *([self.main] if self.main is not None else [])]

    @property
    def members(self) -> list[RankActivity]:
        """The ranks that are known, group by group."""
        return [each for group in self.groups for each in group.members]

    def member(self, rank: int) -> RankActivity | None:
        return next((each for each in self.members if each.rank == rank), None)

    @property
    def living(self) -> list[Group]:
        return [each for each in self.groups if not each.ended]

    @property
    def waiting_seconds(self) -> float:
        """The longest time for which a rank has waited for others; -1: none waits."""
        return max((each.example.still_seconds for each in self.living if each.doing.waits), default=-1.0)

    @property
    def idle_seconds(self) -> float:
        """For how long no rank has made progress."""
        is_awaited = self.waiting_seconds >= 0
        ranks = ((rank, each.doing.waits) for each in self.living for rank in each.members)
        return min((_idle_seconds(rank, waits, is_awaited) for rank, waits in ranks), default=inf)

    def is_stalled(self, seconds: float) -> bool:
        """Whether no rank has made progress for so long while one waits for others, or of several ranks."""
        is_several = self.waiting_seconds >= 0 or sum(len(each.members) for each in self.living) > 1
        return is_several and self.idle_seconds >= seconds


def _idle_seconds(rank: RankActivity, waits: bool, is_awaited: bool) -> float:
    """For how long a rank has made no progress.

    One that waits for others may spin, so its CPU time is none. One that polls while nobody waits for it is a
    server that is idle, and one that computes then may do so for as long as it likes.
    """
    idle = rank.idle_seconds if rank.idle_seconds >= 0 else rank.still_seconds
    if waits:
        return rank.still_seconds
    if is_awaited:
        return idle
    return 0.0 if rank.facts.computes else min(rank.still_seconds, idle)


NO_ACTIVITY: Final = JobActivity()
"""Where no launcher reports what the ranks do."""


def recent_reporters(snapshot: Snapshot) -> list[Client]:
    """The launchers that report what their ranks do now: each once, by its newest connection."""
    newest: dict[tuple[str, int], Client] = {}
    for client in reporting_clients(snapshot):
        if client.told_seconds < _LATE_SECONDS:
            who = client.who
            key = (who.host, who.pid) if who.pid else (client.peer, client.id)
            before = newest.get(key)
            if before is None or client.told_seconds < before.told_seconds:
                newest[key] = client
    return list(newest.values())


def machine_activities(snapshot: Snapshot) -> list[MachineActivity]:
    """What the launchers of a job report of their machines."""
    machines = (unpack(client.told) for client in recent_reporters(snapshot))
    return [machine for machine in machines if machine is not None]


def activity_of(snapshot: Snapshot) -> JobActivity:
    """What all ranks of a job are doing, as its launchers and the store know it."""
    return put_together(machine_activities(snapshot), awaited_keys(snapshot))


def awaited_keys(snapshot: Snapshot) -> dict[int, str]:
    """The key for which each rank has waited longest at the store."""
    waits = {
        rank: [wait for each in clients for wait in waits_of(each)]
        for rank, clients in gather(snapshot).by_rank.items()
    }
    return {rank: max(found, key=lambda wait: wait[1])[0] for rank, found in waits.items() if found}


def only(machines: Iterable[MachineActivity], wanted: Sequence[range]) -> list[MachineActivity]:
    """These ranks alone; the others are not missed."""
    return [
        replace(
            machine,
            ranks=tuple(each for each in machine.ranks if any(each.rank in some for some in wanted)),
            world_size=-1,
        )
        for machine in machines
    ]


def put_together(
    machines: Iterable[MachineActivity], awaited: Mapping[int, str] | None = None
) -> JobActivity:
    """The ranks of these machines, by what they do. Of a rank that is reported twice, the first counts.

    `awaited` has the keys for which ranks wait at the store; torch's client is C++, so no stack shows it.
    """
    awaited = awaited or {}
    keys = set(awaited.values())
    owing = {owing_rank(key) for key in keys}
    store_wait = f"store.wait() for `{shown(min(keys))}`" if len(keys) == 1 else "store.wait()"
    ranks: dict[int, tuple[RankActivity, str]] = {}
    world_size = 0
    for machine in machines:
        world_size = max(world_size, min(machine.world_size, _MOST_RANKS))
        for each in machine.ranks:
            ranks.setdefault(each.rank, (each, machine.host))
    groups: dict[tuple[Hashable, str, bool], Group] = {}
    folded: dict[int, Doing] = {}  # by identity: ranks of a machine share stacks, and hashing is slow
    for rank, (each, host) in sorted(ranks.items()):
        doing = folded.get(id(each.stack))
        if doing is None:
            doing = folded[id(each.stack)] = fold(each.stack)
        if rank in awaited and not doing.waits and _ON_SOCKET.fullmatch(each.facts.call):
            doing = Doing(store_wait, True, doing.own)  # its main thread may be the one that waits there
        silent = (each.silent_seconds >= SILENT_SECONDS or each.facts.is_stopped) and not each.ended
        key = (doing.place, each.ended, silent)
        group = groups.get(key) or groups.setdefault(key, Group(doing, each.ended, silent))
        group.members.append(each)
        group.hosts[rank] = host
    main = _main(groups.values())
    found = sorted(groups.values(), key=lambda each: _oddity(each, owing))
    odd = tuple(each for each in found if each is not main)
    return JobActivity(odd, main, tuple(rank for rank in range(world_size) if rank not in ranks))


def _main(groups: Iterable[Group]) -> Group | None:
    """What the ranks do that wait for the others; if none waits, what most do."""
    waiting = [each for each in groups if each.doing.waits and not each.ended and not each.is_silent]
    return max(waiting or groups, key=lambda each: (len(each.members), -each.members[0].rank), default=None)


def _oddity(group: Group, owing: set[int]) -> tuple[bool, bool, bool, bool, int, int]:
    """The order of groups: who has ended, who does not answer, who does not wait, who owes a key that others
    wait for; then the small ones.
    """
    return (
        *(not group.ended, not group.is_silent, group.doing.waits, owing.isdisjoint(group.hosts)),
        *(len(group.members), group.members[0].rank),
    )
