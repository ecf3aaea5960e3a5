"""All ranks of a job, put together by what they do: the odd ones first. Pure."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from rallypoint.launch.stacks.activity import MachineActivity, RankActivity, unpack
from rallypoint.launch.stacks.folding import NOTHING, Doing, fold
from rallypoint.launch.stacks.frames import Frame
from rallypoint.store.rollcall.clients import gather, reporting_clients
from rallypoint.store.rollcall.judgement import waits_of
from rallypoint.store.rollcall.question import owing_rank
from rallypoint.store.rollcall.snapshot import Client, Snapshot
from rallypoint.text import shown

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
    hosts: dict[int, str] = field(default_factory=dict)
    """By rank, in order: its machine."""
    members: list[RankActivity] = field(default_factory=list)
    ended: str = ""
    """How they have ended, if they have."""
    is_silent: bool = False
    """Whether they do not answer: what they do is what they did before."""

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

    odd: tuple[Group, ...]
    """Those that do something else than the others, the oddest first."""
    main: Group | None
    """What most do; None: nothing is known of any rank."""
    size: int
    """How many ranks are known."""
    unknown: tuple[int, ...] = ()
    """Ranks of the job that no launcher reports."""

    @property
    def groups(self) -> list[Group]:
        """All of them, the odd ones first."""
        return [*self.odd, *([self.main] if self.main is not None else [])]

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


NO_ACTIVITY: Final = JobActivity((), None, 0)
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
    keys = set((awaited or {}).values())
    owing = {owing_rank(key) for key in keys}
    store_wait = f"store.wait() for `{shown(min(keys))}`" if len(keys) == 1 else "store.wait()"
    seen: set[int] = set()
    groups: dict[tuple[Hashable, str, bool], Group] = {}
    world_size = 0
    known: dict[tuple[Frame, ...], Doing] = {}
    for machine in machines:
        world_size = max(world_size, min(machine.world_size, _MOST_RANKS))
        folded: dict[int, Doing] = {}  # ranks of a machine share their stacks, and to hash those takes long
        for each in machine.ranks:
            if each.rank in seen:
                continue
            seen.add(each.rank)
            doing = folded.get(id(each.stack))
            if doing is None:
                doing = known.get(each.stack)
                if doing is None:
                    doing = known[each.stack] = fold(each.stack) if each.stack else NOTHING
                folded[id(each.stack)] = doing
            if awaited and each.rank in awaited and not doing.waits and _is_at_socket(each):
                doing = Doing(store_wait, True, doing.own)
            silent = (each.silent_seconds >= SILENT_SECONDS or each.facts.is_stopped) and not each.ended
            key = (doing.place, each.ended, silent)
            group = groups.get(key)
            if group is None:
                group = groups[key] = Group(doing, ended=each.ended, is_silent=silent)
            group.hosts[each.rank] = machine.host
            group.members.append(each)
    for group in groups.values():
        group.hosts = dict(sorted(group.hosts.items()))
        group.members.sort(key=lambda each: each.rank)
    found = sorted(groups.values(), key=lambda each: _oddity(each, owing))
    main = _main(found)
    odd = tuple(each for each in found if each is not main)
    unknown = tuple(rank for rank in range(world_size) if rank not in seen)
    return JobActivity(odd, main, len(seen), unknown)


def _is_at_socket(each: RankActivity) -> bool:
    """Whether its main thread may be the one that waits at the store."""
    return _ON_SOCKET.fullmatch(each.facts.call) is not None


def _main(groups: Sequence[Group]) -> Group | None:
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
