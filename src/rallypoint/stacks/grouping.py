"""All ranks of a job, put together by what they do: the odd ones first. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from rallypoint.rollcall.clients import tellers
from rallypoint.rollcall.snapshot import Client, Snapshot
from rallypoint.stacks.activity import MachineActivity, RankActivity, unpack
from rallypoint.stacks.folding import NOTHING, Doing, fold
from rallypoint.stacks.frames import Frame

SILENT_SECONDS: Final = 4.0
"""A rank of a busy machine may take a while to answer."""
MUCH: Final = 0.5
"""Of a core: who takes more computes."""
_MOST_RANKS: Final = 1 << 20
_LATE_SECONDS: Final = 60.0
"""A machine that has told nothing for so long tells what was, not what is."""


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
class Work:
    """What all ranks of a job are doing."""

    odd: tuple[Group, ...]
    """Those that do something else than the others, the oddest first."""
    main: Group | None
    """What most do; None: nothing is known of any rank."""
    size: int
    """How many ranks are known."""
    remarks: tuple[str, ...] = ()
    unknown: tuple[int, ...] = ()
    """Ranks of the job of which nobody tells."""

    @property
    def groups(self) -> list[Group]:
        """All of them, the odd ones first."""
        return [*self.odd, *([self.main] if self.main is not None else [])]

    def is_stalled(self, seconds: float, waiting: float = inf) -> bool:
        """Whether all ranks, of several, have not moved for so long; or some have waited for others.

        Those that wait may have less time.
        """
        living = [each for each in self.groups if not each.ended]
        most = min(seconds, waiting)
        if any(each.doing.waits and each.example.still_seconds >= most for each in living):
            return True
        members = [rank for each in living for rank in each.members]
        # One that computes for long in a single call is not woken either.
        return len(members) > 1 and all(
            each.still_seconds >= seconds and each.facts.cores < MUCH for each in members
        )


def told_lately(snapshot: Snapshot) -> list[Client]:
    """The launchers that have told what their ranks do now: each once, by its newest connection."""
    newest: dict[tuple[str, int], Client] = {}
    for client in tellers(snapshot):
        if client.told_seconds < _LATE_SECONDS:
            who = client.who
            key = (who.host, who.pid) if who.pid else (client.peer, client.id)
            before = newest.get(key)
            if before is None or client.told_seconds < before.told_seconds:
                newest[key] = client
    return list(newest.values())


def machines_of(snapshot: Snapshot) -> list[MachineActivity]:
    """What the launchers of a job have told of their machines."""
    machines = (unpack(client.told) for client in told_lately(snapshot))
    return [machine for machine in machines if machine is not None]


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


def put_together(machines: Iterable[MachineActivity]) -> Work:
    """The ranks of these machines, by what they do. Of a rank that is told twice, the first counts."""
    seen: set[int] = set()
    groups: dict[tuple[Hashable, str, bool], Group] = {}
    remarks: list[str] = []
    world_size = 0
    known: dict[tuple[Frame, ...], Doing] = {}
    for machine in machines:
        world_size = max(world_size, min(machine.world_size, _MOST_RANKS))
        remarks += (f"{machine.host}: {each}" for each in machine.remarks)
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
            silent = each.silent_seconds >= SILENT_SECONDS and not each.ended
            key = (doing.place, each.ended, silent)
            group = groups.get(key)
            if group is None:
                group = groups[key] = Group(doing, ended=each.ended, is_silent=silent)
            group.hosts[each.rank] = machine.host
            group.members.append(each)
    for group in groups.values():
        group.hosts = dict(sorted(group.hosts.items()))
        group.members.sort(key=lambda each: each.rank)
    found = sorted(groups.values(), key=_oddity)
    main = _main(found)
    odd = tuple(each for each in found if each is not main)
    unknown = tuple(rank for rank in range(world_size) if rank not in seen)
    return Work(odd, main, len(seen), tuple(remarks), unknown)


def _main(groups: Sequence[Group]) -> Group | None:
    """What the ranks do that wait for the others; if none waits, what most do."""
    waiting = [each for each in groups if each.doing.waits and not each.ended and not each.is_silent]
    return max(waiting or groups, key=lambda each: (len(each.members), -each.members[0].rank), default=None)


def _oddity(group: Group) -> tuple[bool, bool, bool, int, int]:
    """The order of groups: who has ended, who does not answer, who does not wait; then the small ones."""
    return (
        *(not group.ended, not group.is_silent, group.doing.waits),
        *(len(group.members), group.members[0].rank),
    )
