"""The members of a start-up: ranks with all their connections, and clients that may be ranks. Pure.

A job may have been started several times at one server. Only the last try counts: a rank begins a new try
when it comes again as another process, after all its connections were closed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

from rallypoint.store.rollcall.identity import Identity, Role, Source
from rallypoint.store.rollcall.torch_keys import owing_rank
from rallypoint.watch.timeline.records import ClientRecord, RunRecord, WaitEnding, WaitRecord

_NO_RANKS: Final = (Role.TOOL, Role.AGENT)
_STAY: Final = 1.0
"""Seconds: a client that left sooner, and neither waited nor ended a wait, only had a look."""


@dataclass
class Participant:
    """A member in the making: the connections of one process, or of one rank, as they came."""

    clients: list[ClientRecord] = field(default_factory=list)

    @property
    def who(self) -> Identity:
        return next((each.who for each in self.clients if each.who.is_rank), self.clients[0].who)

    def has_left(self, time: float) -> bool:
        """Whether all its connections were closed by this time."""
        return all(each.left is not None and each.left <= time for each in self.clients)


@dataclass(frozen=True)
class Participants:
    """The members of the last try."""

    parties: list[Participant]
    tries: int
    """How often the ranks were started, as far as clients are known as ranks."""
    others: int
    """Connections that belong to no member of the last try."""


def gather(record: RunRecord, expected: int) -> Participants:
    """Find the members of the last try."""
    candidates = [each for each in record.clients.values() if each.who.role not in _NO_RANKS]
    candidates.sort(key=lambda each: came(record, each))
    tries = _tries(record, (each for each in candidates if each.who.is_rank))
    ranks = tries[-1] if tries else []
    others = [each for each in candidates if not each.who.is_rank]
    strangers = [] if 0 <= expected <= len(ranks) else _strangers(record, others, _began(record, ranks))
    parties = [*ranks, *strangers]
    return Participants(parties, len(tries), len(record.clients) - sum(len(each.clients) for each in parties))


def name_by_keys(record: RunRecord) -> RunRecord:
    """The same record, in which a client that has written the key of one rank is known to be that rank."""
    nameless = {each.id for each in record.clients.values() if each.who.rank < 0 and not each.who.role}
    wrote: dict[int, set[int]] = defaultdict(set)
    for wait in record.waits if nameless else ():
        if wait.by in nameless and wait.ending is WaitEnding.MET and len(wait.keys) == wait.key_count == 1:
            wrote[wait.by].add(owing_rank(wait.keys[0]))
    clients = dict(record.clients)
    for number, ranks in wrote.items():
        ranks.discard(-1)
        if len(ranks) == 1:  # a relay writes those of several
            client = clients[number]
            who = replace(client.who, rank=ranks.pop(), source=Source.KEYS)
            clients[number] = replace(client, who=who)
    return replace(record, clients=clients)


def came(record: RunRecord, client: ClientRecord) -> float:
    """When a client connected; if that is not in the file, when the file begins."""
    return record.first if client.connected is None else client.connected


def _began(record: RunRecord, ranks: Sequence[Participant]) -> float:
    return min((came(record, client) for each in ranks for client in each.clients), default=record.first)


def _tries(record: RunRecord, clients: Iterable[ClientRecord]) -> list[list[Participant]]:
    """The ranks of each try, of clients in the order in which they came."""
    tries: list[dict[int, Participant]] = []
    for client in clients:
        party = tries[-1].get(client.who.rank) if tries else None
        if party is not None and not _is_new_life(record, party, client):
            party.clients.append(client)
            continue
        if party is not None or not tries:
            tries.append({})
        tries[-1][client.who.rank] = Participant([client])
    return [list(each.values()) for each in tries]


def _is_new_life(record: RunRecord, party: Participant, client: ClientRecord) -> bool:
    pids = {each.who.pid for each in party.clients}
    return client.who.pid not in pids and 0 not in pids and party.has_left(came(record, client))


def _strangers(record: RunRecord, clients: Sequence[ClientRecord], since: float) -> list[Participant]:
    """Clients that may be ranks: those of one process together, else each connection by itself."""
    active = _active_clients(record)
    found: dict[tuple[str, int], Participant] = defaultdict(Participant)
    for each in clients:
        left = record.last if each.left is None else each.left
        if left < since or (each.id not in active and left - came(record, each) < _STAY):
            continue
        place = (each.who.host, each.who.pid) if each.who.pid else ("", -each.id)
        found[place].clients.append(each)
    return list(found.values())


def _active_clients(record: RunRecord) -> set[int]:
    """The clients that waited, or ended the wait of another client."""
    active = {each.last for each in record.barriers}
    for wait in [*record.waits, *record.open_waits]:
        active.add(wait.client)
        active.add(wait.by)
    return active


def name_of(party: Participant) -> str:
    """`rank 3`, `process 12`, or its address; its machine is named apart."""
    who, first = party.who, party.clients[0]
    if who.is_rank:
        return f"rank {who.rank}"
    if who.pid:
        return f"process {who.pid}"
    return first.peer or f"client {first.id}"


_QUIET: Final = 10.0
"""Seconds: when all members have come, and none has waited for this long, the start-up is over."""

_beginning: Final = attrgetter("began")


@dataclass(frozen=True)
class Course:
    """A start-up; its times are unix times."""

    record: RunRecord
    parties: Sequence[Participant]
    waits: Sequence[Sequence[WaitRecord]]
    """The waits of each party during the start-up, by their beginnings."""
    origin: float
    """When the first party came."""
    end: float


def follow(record: RunRecord, parties: Sequence[Participant], *, is_whole: bool) -> Course:
    """The start-up of these parties; if some are missing, it lasts until the events end."""
    arrivals = [came(record, each.clients[0]) for each in parties]
    waits = _waits_of(record, parties)
    end = _end(max(arrivals, default=record.last), waits) if is_whole else record.last
    within = [theirs[: bisect_right(theirs, end, key=_beginning)] for theirs in waits]
    return Course(record, parties, within, min(arrivals, default=record.first), end)


def owners_of(parties: Sequence[Participant]) -> dict[int, int]:
    """The party, by its number, of each client."""
    return {client.id: at for at, each in enumerate(parties) for client in each.clients}


def union(waits: Sequence[WaitRecord], since: float, until: float) -> float:
    """For how long at least one of the waits lasted. The waits are in the order of their beginnings."""
    total, covered = 0.0, since
    for wait in waits:
        begin, end = wait.began, wait.ended
        if begin < covered:
            begin = covered
        if end > until:
            end = until
        if end > begin:
            total += end - begin
            covered = end
    return total


def _waits_of(record: RunRecord, parties: Sequence[Participant]) -> list[list[WaitRecord]]:
    owners = owners_of(parties)
    found: list[list[WaitRecord]] = [[] for _ in parties]
    for wait in [*record.waits, *record.open_waits]:
        owner = owners.get(wait.client)
        if owner is not None:
            found[owner].append(wait)
    for theirs in found:
        theirs.sort(key=_beginning)
    return found


def _end(last_came: float, waits: Sequence[Sequence[WaitRecord]]) -> float:
    end = last_came
    for begin, after in sorted(span for theirs in waits for span in merged(theirs, _QUIET)):
        if begin > end + _QUIET:
            break
        end = max(end, after)
    return end


def merged(waits: Sequence[WaitRecord], gap: float) -> Iterator[tuple[float, float]]:
    """The waits of one party as spans; waits with no more than `gap` between them are one span."""
    if not waits:
        return
    begin, end = waits[0].began, waits[0].ended
    for wait in waits:
        if wait.began > end + gap:
            yield begin, end
            begin = wait.began
            end = wait.ended
        elif wait.ended > end:
            end = wait.ended
    yield begin, end
