"""From a record to a timeline: when the job had come up, and which members the others waited for. Pure.

A job may have been started several times at one server. Only the last try counts: a rank begins a new try
when it connects again as another process, after all its connections were closed.

A start-up is over when all members have come and none has waited for a while. A straggler may have come late;
or it came in time, but was late to write the keys that the others waited for.

Times in records are unix times; in a timeline they are seconds since the first member came.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final

from rallypoint.store.rollcall.events import BarrierComplete, Erred, Hung, Stalled, Started
from rallypoint.store.rollcall.identity import Identity, Role, Source
from rallypoint.store.rollcall.plan import believed_size
from rallypoint.store.rollcall.question import owing_rank
from rallypoint.text import counted, duration
from rallypoint.watch.timeline.records import ClientRecord, RunRecord, WaitEnding, WaitRecord

_STAY: Final = 1.0
"""Seconds: a client that left sooner, and neither waited nor ended a wait, was only a probe."""
_QUIET: Final = 10.0
"""Seconds: when all members have come, and none has waited for this long, the start-up is over."""
_LATE: Final = 1.0
"""Seconds: a member that is late by less is no straggler."""
_LONG: Final = 1.0
"""Seconds: a wait that was given up sooner has stopped no member."""
_NOTABLE: Final = 0.1
"""Seconds, and a part of the whole start-up: shorter waits do not matter."""
_MOSTLY: Final = 0.5
"""A member that itself waited during this part of another's wait is not to blame for it."""
_GAP: Final = 0.2
"""Part of the time until the last member: after a gap of this length come the stragglers."""
_NEARLY_ALL: Final = 0.9
_CAME_LATE: Final = 0.9
"""Part of its lateness: a member that came only after that is late because it came late."""

_beginning: Final = attrgetter("began")
_ended: Final = attrgetter("ended")


@dataclass(frozen=True)
class StartupMember:
    """A rank, with all its connections; or a client that may be a rank, but it is not known which."""

    name: str
    """`rank 3`, `process 12`, or its address."""
    host: str
    """Its machine; empty: not known. For a member that never came, the machine in the plan."""
    came: float | None
    """When it connected; None: it never came."""
    rank: int = -1
    pid: int = 0
    known: float | None = None
    """When its client said which rank it is; None: never."""
    late: float = 0.0
    """Until when others waited for it: until it came, or until it wrote the keys that they waited for."""
    ready: float = 0.0
    """When its last wait of the start-up ended."""
    waited: float = 0.0
    """For how many seconds of the start-up it waited."""
    left: float | None = None
    """When its last connection was closed; None: not yet."""
    why: str = ""
    """Why the server closed it; empty if the member closed it itself."""
    waits: Sequence[WaitRecord] = ()
    """Its waits during the start-up, by their beginnings; their times are unix times."""

    @property
    def came_late(self) -> bool:
        """Whether it was late because it connected late; else it came in time, and then others waited."""
        return self.came is not None and self.came >= _CAME_LATE * self.late

    @property
    def ending(self) -> WaitEnding:
        """How its last long wait of the start-up ended; MET if it never waited for long."""
        long_ones = (each for each in self.waits if each.seconds >= _LONG)
        last = max(long_ones, key=_ended, default=None)
        return WaitEnding.MET if last is None else last.ending


@dataclass(frozen=True)
class Straggling:
    """The members that came last, and how long the others waited."""

    members: tuple[StartupMember, ...]
    """The last one first; several if they came together, long after all others. Or all that never came."""
    waiters: int
    """How many members waited meanwhile."""
    waited: float
    """For how many seconds they waited, in sum."""
    is_for_them: bool
    """Whether it is known that they waited for the stragglers; else they only waited at the same time."""

    def as_json(self) -> dict[str, Any]:
        return {
            "members": [each.name for each in self.members],
            "seconds": _round(self.members[0].late),
            "waiters": self.waiters,
            "waited": _round(self.waited),
            "is_for_them": self.is_for_them,
        }


@dataclass(frozen=True)
class Timeline:
    """One start-up."""

    record: RunRecord
    """The events of the whole run, which was judged."""
    origin: float
    """The unix time at which the first member came."""
    seconds: float
    """Until the start-up was over: all members had come, and none waited. Or until the events end."""
    is_over: bool
    """False: a member has not come, or has waited in vain and is not known to have gone on."""
    expected: int
    """How many ranks the job has; -1: not known."""
    members: tuple[StartupMember, ...]
    """First the members that never came, then the latest first."""
    straggling: Straggling | None
    """None: no member was late by a second."""
    names: Mapping[int, str]
    """The names of clients by their numbers, which are in `WaitRecord.by` and `BarrierComplete.last`."""
    others: int = 0
    """How many clients are no members: tools, launchers, and clients of earlier tries."""
    remarks: tuple[str, ...] = ()
    """Sentences on gaps in the events, and on what is therefore not known."""

    @property
    def ended(self) -> float:
        """When the events end."""
        return self.record.last - self.origin

    @property
    def missing(self) -> tuple[StartupMember, ...]:
        return tuple(each for each in self.members if each.came is None)

    @property
    def present(self) -> tuple[StartupMember, ...]:
        return tuple(each for each in self.members if each.came is not None)

    def as_json(self) -> dict[str, Any]:
        """All of it. Times are seconds since `origin`, which alone is a unix time."""
        record = self.record
        barriers = [self._event(each) | {"last": self.names.get(each.last, "")} for each in record.barriers]
        return {
            "origin": self.origin,
            "seconds": _round(self.seconds),
            "is_over": self.is_over,
            "ended": _round(self.ended),
            "expected": self.expected,
            "writers": [self._event(each) for each in record.writers],
            "straggling": self.straggling.as_json() if self.straggling else None,
            "members": [self._member(each) for each in self.members],
            "barriers": barriers,
            "stalls": [self._event(each) for each in record.stalls],
            "hangs": [self._event(each) for each in record.hangs],
            "errors": [self._event(each) for each in record.errors],
            "others": self.others,
            "remarks": list(self.remarks),
        }

    def _event(self, event: Started | BarrierComplete | Stalled | Hung | Erred) -> dict[str, Any]:
        return asdict(event) | {"time": _round(event.time - self.origin)}

    def _member(self, each: StartupMember) -> dict[str, Any]:
        facts = vars(each) | {"waits": [self._wait(wait) for wait in each.waits]}
        return {name: _round(value) if isinstance(value, float) else value for name, value in facts.items()}

    def _wait(self, wait: WaitRecord) -> dict[str, Any]:
        return {
            "began": _round(wait.began - self.origin),
            "seconds": _round(wait.seconds),
            "keys": wait.keys,
            "key_count": wait.key_count,
            "ending": wait.ending.value,
            "by": self.names.get(wait.by, ""),
        }


def _round(value: float) -> float:
    return round(value, 6)


def judge(record: RunRecord) -> Timeline:
    """The last start-up in a record, in which a client that wrote the key of one rank becomes that rank."""
    _name_by_keys(record)
    return _StartUp(record).judge()


# Members


Party = list[ClientRecord]
"""The connections of one rank, or of one process that may be a rank, in the order in which they came."""


def _name_by_keys(record: RunRecord) -> None:
    nameless = {each.id for each in record.clients.values() if each.who.rank < 0 and not each.who.role}
    wrote: dict[int, set[int]] = defaultdict(set)
    for wait in record.waits if nameless else ():
        if wait.by in nameless and wait.ending is WaitEnding.MET and len(wait.keys) == wait.key_count == 1:
            wrote[wait.by].add(owing_rank(wait.keys[0]))
    for number, ranks in wrote.items():
        ranks.discard(-1)
        if len(ranks) == 1:  # a relay writes those of several
            client = record.clients[number]
            client.who = replace(client.who, rank=ranks.pop(), source=Source.KEYS)


def _expected(record: RunRecord) -> int:
    """How many ranks should come: as the launcher planned, else as most ranks say."""
    if record.plan is not None:
        return record.plan.world_size
    if record.writers and all(each.kind == "relay" for each in record.writers):
        return -1  # only some of them come to a relay
    ranks = (each.who for each in record.clients.values() if each.who.is_rank and each.who.world_size >= 0)
    return believed_size(Counter(who.world_size for who in ranks), len(record.clients))


def _tries(record: RunRecord, clients: Sequence[ClientRecord]) -> list[list[Party]]:
    """The ranks of each try, of clients in the order in which they came."""
    tries: list[dict[int, Party]] = []
    for client in clients:
        party = tries[-1].get(client.who.rank) if tries else None
        if party is not None and not _is_new_life(party, client, record.came(client)):
            party.append(client)
            continue
        if party is not None or not tries:
            tries.append({})
        tries[-1][client.who.rank] = [client]
    return [list(each.values()) for each in tries]


def _is_new_life(party: Party, client: ClientRecord, came: float) -> bool:
    pids = {each.who.pid for each in party}
    return client.who.pid not in pids and 0 not in pids and _has_left(party, came)


def _has_left(party: Party, time: float) -> bool:
    """Whether all its connections were closed by this time."""
    return all(each.left is not None and each.left <= time for each in party)


def _strangers(record: RunRecord, clients: Sequence[ClientRecord], since: float) -> list[Party]:
    """Clients that may be ranks: those of one process together, else each connection by itself."""
    active = {each.last for each in record.barriers}
    for wait in [*record.waits, *record.open_waits]:
        active.update((wait.client, wait.by))
    found: dict[tuple[str, int], Party] = defaultdict(list)
    for each in clients:
        left = record.last if each.left is None else each.left
        if left >= since and (each.id in active or left - record.came(each) >= _STAY):
            found[(each.who.host, each.who.pid) if each.who.pid else ("", -each.id)].append(each)
    return list(found.values())


def _who(party: Party) -> Identity:
    return next((each.who for each in party if each.who.is_rank), party[0].who)


def _name(party: Party) -> str:
    who = _who(party)
    if who.is_rank:
        return f"rank {who.rank}"
    return f"process {who.pid}" if who.pid else _name_of_client(party[0])


def _name_of_client(client: ClientRecord) -> str:
    return client.peer or f"client {client.id}"


# Waits


def merged(waits: Sequence[WaitRecord], gap: float = 0.0) -> Iterator[tuple[float, float]]:
    """Waits, by their beginnings, as spans; waits with no more than `gap` between them are one span."""
    if not waits:
        return
    begin, end = waits[0].began, waits[0].ended
    for wait in waits:
        if wait.began > end + gap:
            yield begin, end
            begin, end = wait.began, wait.ended
        elif wait.ended > end:
            end = wait.ended
    yield begin, end


def _union(waits: Sequence[WaitRecord], since: float, until: float) -> float:
    """For how long at least one of the waits lasted."""
    return sum((max(min(end, until) - max(begin, since), 0.0) for begin, end in merged(waits)), 0.0)


def _longer(waits: Sequence[WaitRecord], least: float) -> list[WaitRecord]:
    return [each for each in waits if each.ended - each.began >= least]


# The start-up


class _StartUp:
    """The start-up while it is judged. Members have numbers: first those that came, then the missing."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.expected = _expected(record)
        self._find_members()
        arrivals = [record.came(each[0]) for each in self.parties]
        self.origin = min(arrivals, default=record.first)
        waits = self._waits_by_party()
        self.end = record.last if self.missing else _end(max(arrivals, default=record.last), waits)
        self.waits = [theirs[: bisect_right(theirs, self.end, key=_beginning)] for theirs in waits]
        self._find_blame()

    def _find_members(self) -> None:
        record = self.record
        clients = [each for each in record.clients.values() if each.who.role not in (Role.TOOL, Role.AGENT)]
        clients.sort(key=record.came)
        self.tries = _tries(record, [each for each in clients if each.who.is_rank])
        ranks = self.tries[-1] if self.tries else []
        self.strangers: list[Party] = []
        if not 0 <= self.expected <= len(ranks):
            began = min((record.came(client) for each in ranks for client in each), default=record.first)
            nameless = [each for each in clients if not each.who.is_rank]
            self.strangers = _strangers(record, nameless, began)
        self.parties = ranks + self.strangers
        self.owners = {client.id: at for at, each in enumerate(self.parties) for client in each}
        self.ranks = {_who(each).rank: at for at, each in enumerate(ranks)}
        is_known = record.clients and not self.strangers  # else the missing may be among the strangers
        self.missing = sorted(set(range(self.expected)) - set(self.ranks)) if is_known else []
        self.ranks |= {rank: len(self.parties) + at for at, rank in enumerate(self.missing)}

    def _waits_by_party(self) -> list[list[WaitRecord]]:
        found: list[list[WaitRecord]] = [[] for _ in self.parties]
        for wait in [*self.record.waits, *self.record.open_waits]:
            owner = self.owners.get(wait.client)
            if owner is not None:
                found[owner].append(wait)
        for theirs in found:
            theirs.sort(key=_beginning)
        return found

    def _find_blame(self) -> None:
        """Until when each member kept others waiting, and for how long one member waited for another."""
        notable = max(_NOTABLE, _NOTABLE * (self.end - self.origin))
        self.long_waits = [_longer(theirs, notable) for theirs in self.waits]
        self.blamed_until: dict[int, float] = defaultdict(float)
        self.waited_for: dict[tuple[int, int], float] = defaultdict(float)
        for owner, waits in enumerate(self.long_waits):
            for wait in waits:
                if (culprit := self._culprit(wait, owner)) >= 0:
                    self.blamed_until[culprit] = max(self.blamed_until[culprit], wait.ended)
                    self.waited_for[owner, culprit] += wait.seconds

    def _culprit(self, wait: WaitRecord, owner: int) -> int:
        """The member that is to blame for a wait of the member `owner`; -1: not known.

        A member that was waiting itself passes the blame on to the one that it waited for.
        """
        seen = {owner}
        while (member := self._ended_by(wait)) >= 0 and member not in seen:
            cause = self._cause(member, wait)
            if cause is None:
                return member
            seen.add(member)
            wait = cause
        return -1

    def _ended_by(self, wait: WaitRecord) -> int:
        """The member that ended a wait, by the events; else the one that should, by the name of the key."""
        if wait.by:
            return self.owners.get(wait.by, -1)
        rank = owing_rank(wait.keys[0]) if wait.key_count == 1 and wait.keys else -1
        return self.ranks.get(rank, -1)

    def _cause(self, member: int, wait: WaitRecord) -> WaitRecord | None:
        """The wait of a member itself that lasted for most of the time in which another waited for it."""
        for each in self.long_waits[member] if member < len(self.parties) else ():
            if min(each.ended, wait.ended) - max(each.began, wait.began) >= _MOSTLY * wait.seconds:
                return each
        return None

    def judge(self) -> Timeline:
        record, members = self.record, self._members()
        names = {each.id: _name_of_client(each) for each in record.clients.values()}
        names |= {number: members[at].name for number, at in self.owners.items()}
        return Timeline(
            record=record,
            origin=self.origin,
            seconds=self.end - self.origin,
            is_over=bool(members)
            and not self.missing
            and all(each.ending is WaitEnding.MET for each in members),
            expected=self.expected,
            members=tuple(sorted(members, key=lambda each: (each.came is not None, -each.late))),
            straggling=self._straggling(members),
            names=names,
            others=len(record.clients) - len(self.owners),
            remarks=tuple(self._remarks()),
        )

    def _members(self) -> list[StartupMember]:
        hosts = self.record.plan.hosts if self.record.plan is not None else {}
        late = self.end - self.origin
        present = [self._member(at, hosts) for at in range(len(self.parties))]
        return present + [
            StartupMember(f"rank {rank}", hosts.get(rank, ""), None, rank, late=late) for rank in self.missing
        ]

    def _member(self, at: int, hosts: Mapping[int, str]) -> StartupMember:
        party, waits, origin = self.parties[at], self.waits[at], self.origin
        who, came = _who(party), self.record.came(party[0])
        joined = [each.joined for each in party if each.joined is not None]
        gone = max(party, key=lambda each: each.left or 0.0) if _has_left(party, self.record.last) else None
        return StartupMember(
            name=_name(party),
            host=who.host or hosts.get(who.rank, ""),
            came=came - origin,
            rank=who.rank if who.is_rank else -1,
            pid=who.pid,
            known=min(joined) - origin if joined else None,
            late=max(came, self.blamed_until.get(at, 0.0)) - origin,
            ready=max(came, max(map(_ended, waits), default=0.0)) - origin,
            waited=_union(waits, origin, self.end),
            waits=waits,
            left=gone.left - origin if gone and gone.left else None,
            why=gone.why if gone else "",
        )

    def _straggling(self, members: Sequence[StartupMember]) -> Straggling | None:
        last = _last_ones(members)
        if not last:
            return None
        until = self.origin + max(members[at].late for at in last)
        waited = [
            _union(_longer(theirs, _NOTABLE), self.origin, until)
            for at, theirs in enumerate(self.waits)
            if at not in last
        ]
        for_them = sum(
            seconds
            for (owner, culprit), seconds in self.waited_for.items()
            if culprit in last and owner not in last
        )
        return Straggling(
            members=tuple(sorted((members[at] for at in last), key=lambda each: -each.late)),
            waiters=sum(each > 0 for each in waited),
            waited=sum(waited),
            is_for_them=0 < _NEARLY_ALL * sum(waited) <= for_them,
        )

    def _remarks(self) -> Iterator[str]:
        record, strangers = self.record, len(self.strangers)
        later = [each.seconds for each in record.waits if each.began > self.end]
        unseen = self.expected - (len(self.parties) - strangers)
        if len(clocks := {each.host for each in record.writers}) > 1:
            yield f"the times are of {len(clocks)} machines, whose clocks may differ"
        if not record.writers:
            yield "the beginning of this run is not in the file any more: who came before is not known"
        if record.lost:
            yield f"{counted(record.lost, 'event')} could not be written, and are missing"
        if len(self.tries) > 1:
            yield f"the ranks were started {len(self.tries)} times; this is the last of them"
        if max(later, default=0.0) >= _LATE:
            waits, longest = counted(len(later), "wait"), duration(max(later))
            yield f"after the start-up there were {waits} more, the longest of {longest}"
        if strangers and unseen > 0:
            ranks, clients = counted(unseen, "rank"), counted(strangers, "client")
            yield f"{ranks} of {self.expected:,} may be among {clients} whose rank is not known"
        elif strangers:
            yield f"of {counted(strangers, 'client')} the rank is not known"


def _end(last_came: float, waits: Sequence[Sequence[WaitRecord]]) -> float:
    """When all had come, and none had waited for a while."""
    end = last_came
    for begin, after in sorted(span for theirs in waits for span in merged(theirs, _QUIET)):
        if begin > end + _QUIET:
            break
        end = max(end, after)
    return end


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
