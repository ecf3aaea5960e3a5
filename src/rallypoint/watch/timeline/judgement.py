"""From a record to a timeline: when the job had come up, and which members the others waited for. Pure.

A start-up is over when all members have come and none has waited for a while. A straggler may have come late;
or it came in time, but was late to write the keys that the others waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Final

from rallypoint.store.rollcall.plan import believed_size
from rallypoint.store.rollcall.torch_keys import owing_rank
from rallypoint.text import counted, duration
from rallypoint.watch.timeline.members import (
    Course,
    Participant,
    Participants,
    came,
    follow,
    gather,
    name_by_keys,
    name_of,
    owners_of,
    union,
)
from rallypoint.watch.timeline.records import RunRecord, WaitEnding, WaitRecord
from rallypoint.watch.timeline.timeline import StartupMember, Straggling, Timeline

_LATE: Final = 1.0
"""Seconds: a member that is late by less is no straggler."""
_NOTABLE: Final = 0.1
"""Seconds, and a part of the whole start-up: shorter waits do not matter."""
_GAP: Final = 0.2
"""Part of the time until the last member: after a gap of this length come the stragglers."""
_NEARLY_ALL: Final = 0.9

_ended: Final = attrgetter("ended")


def judge(record: RunRecord) -> Timeline:
    """The last start-up in a record."""
    record = name_by_keys(record)
    expected = _expected(record)
    gathered = gather(record, expected)
    missing = _missing(record, gathered.parties, expected)
    course = follow(record, gathered.parties, is_whole=not missing)
    blame = _blame(course, missing)
    members = _members(course, missing, blame)
    return Timeline(
        writers=tuple(record.writers),
        origin=course.origin,
        seconds=course.end - course.origin,
        is_over=bool(members) and not missing and all(each.ending is WaitEnding.MET for each in members),
        ended=record.last - course.origin,
        expected=expected,
        members=tuple(sorted(members, key=lambda each: (each.came is not None, -each.late))),
        straggling=_straggling(course, members, blame),
        barriers=tuple(record.barriers),
        stalls=tuple(record.stalls),
        hangs=tuple(record.hangs),
        errors=tuple(record.errors),
        names=_names(record, gathered.parties),
        others=gathered.others,
        remarks=_remarks(course, gathered, expected),
    )


# Members


def _expected(record: RunRecord) -> int:
    """How many ranks should come: as the launcher planned, else as most ranks say."""
    if record.plan is not None:
        return record.plan.world_size
    if record.writers and all(each.kind == "relay" for each in record.writers):
        return -1  # only some of them come to a relay
    ranks = (each.who for each in record.clients.values() if each.who.is_rank and each.who.world_size >= 0)
    return believed_size(Counter(who.world_size for who in ranks), len(record.clients))


def _missing(record: RunRecord, parties: Sequence[Participant], expected: int) -> list[int]:
    """Ranks that never came; none if they may be among the clients whose rank is not known."""
    ranks = {each.who.rank for each in parties if each.who.is_rank}
    if len(ranks) < len(parties) or not record.clients:
        return []
    return sorted(set(range(expected)) - ranks)


def _names(record: RunRecord, parties: Sequence[Participant]) -> dict[int, str]:
    names = {each.id: each.peer or f"client {each.id}" for each in record.clients.values()}
    for party in parties:
        names |= {client.id: name_of(party) for client in party.clients}
    return names


# Stragglers


@dataclass(frozen=True)
class _Verdict:
    """Which members are to blame for waits. Members are numbered: first those that came, then the missing."""

    until: dict[int, float]
    """Until when a member kept others waiting."""
    seconds: dict[tuple[int, int], float]
    """For how long one member waited for another: by the numbers of the two."""


def _blame(course: Course, missing: Sequence[int]) -> _Verdict:
    notable = max(_NOTABLE, _NOTABLE * (course.end - course.origin))
    ranks = {each.who.rank: at for at, each in enumerate(course.parties) if each.who.is_rank}
    ranks |= {rank: len(course.parties) + at for at, rank in enumerate(missing)}
    long_ones = [_longer(theirs, notable) for theirs in course.waits]
    blame = WaitBlame(owners_of(course.parties), ranks, long_ones)
    verdict = _Verdict({}, {})
    for owner, waits in enumerate(long_ones):
        for wait in waits:
            culprit = blame.culprit(wait, owner)
            if culprit >= 0:
                verdict.until[culprit] = max(verdict.until.get(culprit, 0.0), wait.ended)
                pair = (owner, culprit)
                verdict.seconds[pair] = verdict.seconds.get(pair, 0.0) + wait.seconds
    return verdict


def _longer(waits: Sequence[WaitRecord], least: float) -> list[WaitRecord]:
    return [each for each in waits if each.ended - each.began >= least]


def _members(course: Course, missing: Sequence[int], verdict: _Verdict) -> list[StartupMember]:
    hosts = course.record.plan.hosts if course.record.plan is not None else {}
    present = [
        _member(course, party, waits, verdict.until.get(at, 0.0), hosts)
        for at, (party, waits) in enumerate(zip(course.parties, course.waits, strict=True))
    ]
    late = course.end - course.origin
    absent = [StartupMember(f"rank {rank}", hosts.get(rank, ""), None, rank, late=late) for rank in missing]
    return [*present, *absent]


def _member(
    course: Course,
    party: Participant,
    waits: Sequence[WaitRecord],
    blamed_until: float,
    hosts: dict[int, str],
) -> StartupMember:
    record, who = course.record, party.who
    arrived = came(record, party.clients[0])
    joined = [each.joined for each in party.clients if each.joined is not None]
    gone = max(party.clients, key=lambda each: each.left or 0.0) if party.has_left(record.last) else None
    return StartupMember(
        name=name_of(party),
        host=who.host or hosts.get(who.rank, ""),
        came=arrived - course.origin,
        rank=who.rank if who.is_rank else -1,
        pid=who.pid,
        known=min(joined) - course.origin if joined else None,
        late=max(arrived, blamed_until) - course.origin,
        ready=max(arrived, max(map(_ended, waits), default=0.0)) - course.origin,
        waited=union(waits, course.origin, course.end),
        waits=tuple(waits),
        left=gone.left - course.origin if gone and gone.left else None,
        why=gone.why if gone else "",
    )


def _straggling(course: Course, members: Sequence[StartupMember], verdict: _Verdict) -> Straggling | None:
    last = _last_ones(members)
    if not last:
        return None
    until = course.origin + max(members[at].late for at in last)
    waited = [
        union(_longer(theirs, _NOTABLE), course.origin, until)
        for at, theirs in enumerate(course.waits)
        if at not in last
    ]
    for_them = sum(
        seconds
        for (owner, culprit), seconds in verdict.seconds.items()
        if culprit in last and owner not in last
    )
    return Straggling(
        members=tuple(sorted((members[at] for at in last), key=lambda each: -each.late)),
        waiters=sum(each > 0 for each in waited),
        waited=sum(waited),
        is_for_them=0 < _NEARLY_ALL * sum(waited) <= for_them,
    )


def _last_ones(members: Sequence[StartupMember]) -> set[int]:
    """The numbers of the stragglers.

    These are the members that never came. If all came: those behind the widest gap, at most half of all; or
    the last one alone, if there is no wide gap.
    """
    missing = {at for at, each in enumerate(members) if each.came is None}
    order = sorted(range(len(members)), key=lambda at: members[at].late)
    if missing or not order or members[order[-1]].late < _LATE:
        return missing
    late = [members[at].late for at in order]
    gaps = [(after - before, at + 1) for at, (before, after) in enumerate(pairwise(late))]
    widest, first = max(gaps[(len(order) - 1) // 2 :], default=(0.0, 0))
    return set(order[first:] if widest >= _GAP * late[-1] else order[-1:])


# Remarks


def _remarks(course: Course, gathered: Participants, expected: int) -> tuple[str, ...]:
    record = course.record
    later = [each.seconds for each in record.waits if each.began > course.end]
    strangers = sum(not each.who.is_rank for each in gathered.parties)
    unseen = expected - (len(gathered.parties) - strangers)
    remarks = []
    if len(clocks := {each.host for each in record.writers}) > 1:
        remarks.append(f"the times are of {len(clocks)} machines, whose clocks may differ")
    if not record.writers:
        remarks.append("the beginning of this run is not in the file any more: who came before is not known")
    if record.lost:
        remarks.append(f"{counted(record.lost, 'event')} could not be written, and are missing")
    if gathered.tries > 1:
        remarks.append(f"the ranks were started {gathered.tries} times; this is the last of them")
    if max(later, default=0.0) >= _LATE:
        remarks.append(
            f"after the start-up there were {counted(len(later), 'wait')} more, "
            f"the longest of {duration(max(later))}"
        )
    if strangers and unseen > 0:
        remarks.append(
            f"{counted(unseen, 'rank')} of {expected:,} may be among {counted(strangers, 'client')} "
            "whose rank is not known"
        )
    elif strangers:
        remarks.append(f"of {counted(strangers, 'client')} the rank is not known")
    return tuple(remarks)


_MOSTLY: Final = 0.5
"""A member that itself waited during this part of another's wait is not to blame for it."""


@dataclass(frozen=True)
class WaitBlame:
    """Finds the member that is to blame for a wait. Members are numbered."""

    owners: Mapping[int, int]
    """The member of each client."""
    ranks: Mapping[int, int]
    """The member of each rank."""
    waits: Sequence[Sequence[WaitRecord]]
    """The waits of each member that are long enough to matter; members that never came have no entry."""

    def culprit(self, wait: WaitRecord, owner: int) -> int:
        """The member that is to blame for a wait of the member `owner`; -1: not known."""
        seen = {owner}
        while True:
            member = self._ended_by(wait)
            if member < 0 or member in seen:
                return -1
            cause = self._cause(member, wait)
            if cause is None:
                return member
            seen.add(member)
            wait = cause

    def _ended_by(self, wait: WaitRecord) -> int:
        """The member that ended a wait, by the events; else the one that should, by the name of the key."""
        if wait.by:
            return self.owners.get(wait.by, -1)
        rank = owing_rank(wait.keys[0]) if wait.key_count == 1 and wait.keys else -1
        return self.ranks.get(rank, -1)

    def _cause(self, member: int, wait: WaitRecord) -> WaitRecord | None:
        """The wait of a member itself that lasted for most of the time in which another waited for it."""
        for each in self.waits[member] if member < len(self.waits) else ():
            if min(each.ended, wait.ended) - max(each.began, wait.began) >= _MOSTLY * wait.seconds:
                return each
        return None
