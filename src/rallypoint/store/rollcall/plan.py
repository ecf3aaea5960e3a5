"""What launchers write: which machine has which ranks (`Plan`), and the state of a rendezvous (`JobRound`).

Every client of the store can write them, so they are validated and bounded. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from rallypoint.codec import Within, at_most, from_text, to_text

MOST_RANKS: Final = 1 << 17
"""No job has more ranks."""
_RANKS_WITHOUT_PROOF: Final = 4096
_RANKS_PER_WITNESS: Final = 64
_MOST_ROUNDS: Final = (1 << 31) - 1
_MOST_CHARACTERS: Final = 255
_MOST_MEETINGS: Final = 64


def is_believable(size: int, witnesses: int) -> bool:
    """Whether a job may have `size` ranks; `witnesses` is how many clients or machines of it are known.

    Each rank that is expected, and not here, is listed as missing. Any client can claim any number, and this
    must not cost much more than what is there.
    """
    return size <= min(MOST_RANKS, _RANKS_WITHOUT_PROOF + _RANKS_PER_WITNESS * witnesses)


def believed_size(told: Mapping[int, int], witnesses: int) -> int:
    """How many ranks there are, as most ranks say, and the larger number if they are divided; -1: not known.

    `told` has the numbers, and how many ranks say each of them.
    """
    sizes = [size for size in told if is_believable(size, witnesses)]
    return max(sizes, key=lambda size: (told[size], size), default=-1)


class PlannedMachine(NamedTuple):
    """A machine, its first rank, and how many ranks it has."""

    host: Annotated[str, at_most(_MOST_CHARACTERS)]
    first: int
    size: Annotated[int, Within(0, MOST_RANKS)]

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.size)


def _whole(machines: tuple[PlannedMachine, ...]) -> tuple[PlannedMachine, ...]:
    """Refuse machines that do not have each rank of a job, from 0 on, exactly once."""
    free = 0
    for each in sorted(machines, key=lambda each: (each.first, each.size)):
        if each.first != free:
            raise ValueError(f"rank {free} is on no machine, or on two")
        free += each.size
    if not free or not is_believable(free, len(machines)):
        raise ValueError(f"{free} ranks are none, or too many")
    return machines


@dataclass(frozen=True)
class Plan:
    """All machines of a round. Rounds count from 0: the number is how often the job has restarted."""

    round: Annotated[int, Within(0, _MOST_ROUNDS)]
    machines: Annotated[tuple[PlannedMachine, ...], _whole]

    @property
    def world_size(self) -> int:
        return sum(each.size for each in self.machines)

    @property
    def hosts(self) -> dict[int, str]:
        """The machine of each rank."""
        return {rank: each.host for each in self.machines for rank in each.ranks}

    def to_json(self) -> str:
        return to_text(self)

    @staticmethod
    def from_json(text: str) -> Plan | None:
        """None if the text is not a valid plan: every client of a store can write its keys."""
        try:
            return from_text(Plan, text)
        except ValueError:
            return None


# Rounds of the jobs whose rendezvous is in a store


@dataclass(frozen=True)
class JobRound:
    """A round of a rendezvous: the machines of one job."""

    job: str
    """Its id; empty: the job whose store this is."""
    round: int
    """From 0: how often the job has restarted."""
    expected: int
    """The least number of machines; -1: unknown."""
    joined: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    """Machines' reports of failures."""
    closed: str = ""
    store: str = ""
    """The address of the ranks' store, if it is another one: HOST:PORT."""
    name: str = ""
    """The name of that store, if it is at the same server as the rendezvous."""
    spares: tuple[str, ...] = ()
    """Standby machines."""
    most: int = -1
    """The most machines, while it waits for more of them; else -1."""
    sick: tuple[str, ...] = ()
    """Machines that failed their health check, each with the reason."""


_Text = Annotated[str, at_most(500)]


@dataclass(frozen=True)
class _RosterMember:
    host: _Text


@dataclass(frozen=True)
class _RosterSick:
    host: _Text
    reason: _Text


_Members = Annotated[tuple[_RosterMember, ...], at_most(1 << 14)]


@dataclass(frozen=True)
class _RosterView:
    """The part of a roster that is shown to people; `rallypoint.launch` has the whole."""

    round: Annotated[int, Within(0, _MOST_ROUNDS)]
    complete: bool
    members: _Members
    present: _Members
    waiting: _Members
    lost: _Members
    told: Annotated[tuple[_Text, ...], at_most(64)]
    closed: _Text
    store: _Text = ""
    least: Annotated[int, Within(-1, _MOST_ROUNDS)] = -1
    most: Annotated[int, Within(-1, _MOST_ROUNDS)] = -1
    spares: Annotated[int, Within(0, _MOST_ROUNDS)] = 0
    sick: Annotated[tuple[_RosterSick, ...], at_most(16)] = ()


@dataclass(frozen=True)
class _DigestView:
    """The part of a rendezvous' digest that names the key of its roster."""

    names: _Text


def names_key(digest: str) -> bytes:
    """The key of the roster that a digest names, after a `/`; empty if it names none."""
    try:
        return b"/" + from_text(_DigestView, digest).names.encode(errors="replace")
    except ValueError:
        return b""


def meetings_of(plan: Plan | None, rosters: Sequence[tuple[str, str]]) -> tuple[JobRound, ...]:
    """The round whose store this is, then those of the jobs whose rendezvous is here."""
    own = []
    if plan is not None:
        hosts = tuple(each.host for each in plan.machines)
        own = [JobRound("", plan.round, len(hosts), hosts)]
    read = (_meeting(job, text) for job, text in rosters[:_MOST_MEETINGS])
    return (*own, *(each for each in read if each is not None))


def only_store(rosters: Sequence[tuple[str, str]]) -> str:
    """The name of the only job's store at this server; empty if there is no such job, or several."""
    names = [each.name for each in meetings_of(None, rosters) if each.name and not each.closed]
    return names[0] if len(names) == 1 else ""


def _meeting(job: str, text: str) -> JobRound | None:
    """None for an invalid roster."""
    try:
        roster = from_text(_RosterView, text)
    except ValueError:
        return None
    store, _, name = roster.store.partition("/")
    waiting, spares = _hosts(roster.waiting), roster.spares if roster.complete else 0
    return JobRound(
        job=job[:500],
        round=roster.round,
        expected=len(roster.members) if roster.complete else roster.least,
        most=-1 if roster.complete else roster.most,
        joined=_hosts(roster.present),
        waiting=waiting[spares:],
        spares=waiting[:spares],
        lost=_hosts(roster.lost),
        sick=tuple(f"{each.host}: {each.reason}" for each in roster.sick),
        told=roster.told,
        closed=roster.closed,
        store=store,
        name=name,
    )


def _hosts(members: Sequence[_RosterMember]) -> tuple[str, ...]:
    return tuple(each.host for each in members)
