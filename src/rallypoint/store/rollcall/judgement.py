"""Turns a snapshot into a `Roll`: who is present, who is missing, who waits for what. Pure.

A client's rank comes from its hello, else from its process, else from a key that only this rank writes. How
many ranks are expected comes from a launcher's plan, else from what most ranks state. A rank is

    waiting   if it has a client here, and one of its clients waits for a key or at a barrier
    joined    if it has a client here; or its key came through a relay that has enough clients of unknown rank
    gone      if it has left, and has no client here
    unseen    if it is expected, or its key was written, and it may be a client of unknown rank: one on its
              machine, or on a machine that the plan does not have, or one of a relay that is silent
    gone      if none of this holds, and its key was written
    late      if none of this holds, and it is expected

Nothing is guessed: what cannot be known is a remark.

A barrier is either our operation BARRIER, or one that torch makes of a counter and of a key that the last
arrival sets. A rank that waits for that key has arrived; the size is known only of a barrier for all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from rallypoint.store.rollcall.clients import (
    Crowd,
    KnownClient,
    Node,
    doubtful_hosts,
    gather,
    is_heard,
    sizes_told,
)
from rallypoint.store.rollcall.identity import Source
from rallypoint.store.rollcall.plan import Plan, believed_size, is_believable, meetings_of
from rallypoint.store.rollcall.question import KEYS_NAMED, barrier_of, is_of_all, owing_rank, owing_whom
from rallypoint.store.rollcall.roll import Awaited, Gathering, MachineRanks, RankState, Roll, Standing
from rallypoint.store.rollcall.snapshot import Gone, Relay, Replication, Snapshot
from rallypoint.text import LONGEST_SENTENCE, counted, duration, joined_by_and, shown

_RELIABILITY: Final = {source: order for order, source in enumerate(Source)}
_SECONDS: Final = itemgetter(1)
_AWAY_SECONDS: Final = 1.0
_ENGINE_ADVICE: Final = (
    "look at its processes and their logs; `rallypoint doctor --engine URL` examines it. The store goes on "
    "by itself when the engine answers"
)
_STORE_ADVICE: Final = "without --name, `rallypoint status` lists the stores that are here"
_UPSTREAM_ADVICE: Final = "is a process that serves the store up at one of these places? its log says why not"


def judge(snapshot: Snapshot) -> Roll:
    """The roll of the job whose store this is."""
    crowd = gather(snapshot)
    plan = Plan.from_json(snapshot.plan) if snapshot.plan else None
    expected = _expected(snapshot, crowd, plan)
    ranks = _standings(crowd, plan, expected)
    awaited, gatherings = waits_in(crowd, expected)
    trouble, advice = trouble_of(snapshot)
    return Roll(
        expected=expected,
        ranks=ranks,
        unknown=crowd.unknown,
        machines=_machines(ranks),
        awaited=awaited,
        gatherings=gatherings,
        meetings=meetings_of(plan, snapshot.rosters),
        remarks=remarks_on(snapshot, crowd, plan, expected),
        trouble=trouble,
        advice=advice,
    )


def trouble_of(snapshot: Snapshot) -> tuple[str, str]:
    """What keeps a store from answering, and advice; both empty if it answers."""
    kept, upstream = snapshot.replication, snapshot.upstream
    if kept is not None and kept.away_seconds >= _AWAY_SECONDS:
        return trouble_with_engine(kept)
    if kept is not None and kept.unknown_store:
        return f"there is no store named {shown(kept.unknown_store)} here", _STORE_ADVICE
    if upstream is not None and upstream.down_seconds >= _AWAY_SECONDS:
        if upstream.trouble:
            return shown(upstream.trouble, 3 * LONGEST_SENTENCE), shown(upstream.advice, LONGEST_SENTENCE)
        why = shown(upstream.error, LONGEST_SENTENCE)
        away = duration(upstream.down_seconds)
        return f"the relay has had no connection to the store for {away}: {why}", _UPSTREAM_ADVICE
    return "", ""


def trouble_with_engine(kept: Replication) -> tuple[str, str]:
    """A sentence on an engine that does not answer, and advice."""
    why = shown(kept.error.removeprefix(f"{kept.engine}: "), LONGEST_SENTENCE)
    engine = shown(kept.engine, LONGEST_SENTENCE)
    return (
        f"the engine of the store, {engine}, has not answered for {duration(kept.away_seconds)}: {why}",
        shown(kept.hint, LONGEST_SENTENCE) or _ENGINE_ADVICE,
    )


def _expected(snapshot: Snapshot, crowd: Crowd, plan: Plan | None) -> int:
    """How many ranks are expected: by the launcher's plan, else by what most ranks state."""
    if snapshot.kind == "relay":
        return -1  # only some of them come to a relay, and nobody tells it which
    if plan is not None:
        return plan.world_size
    return believed_size(sizes_told(crowd), crowd.witnesses)


def _standings(crowd: Crowd, plan: Plan | None, expected: int) -> tuple[Standing, ...]:
    hosts = plan.hosts if plan is not None else {}
    found = {rank: _of_presences(rank, known, hosts.get(rank, "")) for rank, known in crowd.by_rank.items()}
    for rank, host in crowd.behind.items():
        found[rank] = Standing(rank, RankState.JOINED, host or hosts.get(rank, ""), source=Source.KEYS)
    for rank, gone in crowd.gone.items():
        if expected < 0 or rank < expected:  # or it was of a larger job, or of a round before
            found[rank] = _of_gone(gone, hosts.get(rank, ""))
    _add_absent(found, crowd, hosts, expected)
    return tuple(found[rank] for rank in sorted(found))


def _of_presences(rank: int, known: Sequence[KnownClient], planned: str) -> Standing:
    """One rank, from all its connections. Its identity is that of the most reliable source."""
    best = known[0] if len(known) == 1 else min(known, key=lambda each: _RELIABILITY[each.who.source])
    waits = [wait for each in known for wait in waits_of(each)]
    waits.sort(key=_SECONDS, reverse=True)
    return Standing(
        rank=rank,
        state=RankState.WAITING if waits else RankState.JOINED,
        host=best.who.host or planned,
        pid=best.who.pid,
        local_rank=best.who.local_rank,
        source=best.who.source,
        seconds=max(each.client.seconds for each in known),
        waits=tuple(dict.fromkeys(key for key, _ in waits))[:KEYS_NAMED],
        wait_seconds=waits[0][1] if waits else -1.0,
        operations=sum(each.client.operations for each in known),
        received=sum(each.client.received for each in known),
        sent=sum(each.client.sent for each in known),
    )


def _of_gone(gone: Gone, planned: str) -> Standing:
    who = gone.who
    return Standing(
        rank=who.rank,
        state=RankState.GONE,
        host=who.host or planned,
        pid=who.pid,
        local_rank=who.local_rank,
        source=who.source,
        seconds=gone.seconds,
        why=gone.why,
    )


def _add_absent(found: dict[int, Standing], crowd: Crowd, hosts: dict[int, str], expected: int) -> None:
    """Ranks without a known client: they have left, never connected, or may be clients of unknown rank."""
    doubtful = doubtful_hosts(crowd)
    # A client on a machine that the plan does not have may be any rank: machines can have several names.
    anywhere = not doubtful <= set(hosts.values())
    left = {rank for rank in crowd.left if expected < 0 or rank < expected}
    for rank in left.union(range(expected)).difference(found):
        host = hosts.get(rank, "")
        if anywhere or (doubtful and host in doubtful):
            found[rank] = Standing(rank, RankState.UNSEEN, host)
        else:
            found[rank] = Standing(rank, RankState.GONE if rank in crowd.left else RankState.LATE, host)


def _machines(ranks: Sequence[Standing]) -> tuple[MachineRanks, ...]:
    """By their first ranks; those whose machine is not known come last."""
    found: dict[str, list[int]] = defaultdict(list)
    for each in ranks:
        found[each.host].append(each.rank)
    return tuple(
        MachineRanks(host, tuple(theirs))
        for host, theirs in sorted(found.items(), key=lambda item: (not item[0], item[1][0]))
    )


_MOST: Final = 16
_MOST_NAMED: Final = 3


def remarks_on(snapshot: Snapshot, crowd: Crowd, plan: Plan | None, expected: int) -> tuple[str, ...]:
    """What cannot be known, and why; only the first remarks, if there are many."""
    found = list(_remarks(snapshot, crowd, plan, expected))
    more = [f"and {len(found) - _MOST:,} more remarks"] if len(found) > _MOST else []
    return tuple(found[:_MOST] + more)


def _remarks(snapshot: Snapshot, crowd: Crowd, plan: Plan | None, expected: int) -> Iterator[str]:
    if snapshot.kind == "relay":
        yield "this is a relay: it knows its own clients, and not who is expected; ask its server for all"
    if snapshot.plan and plan is None:
        yield "what the key rallypoint/roll holds is no plan of machines, and was not used"
    for node in crowd.nodes:
        told = node.told
        if told.incomplete:
            what = shown(told.incomplete, LONGEST_SENTENCE)
            yield f"the {shown(told.kind)} on {shown(told.host)} could not tell all: {what}"
    for relay in crowd.relays:
        if not is_heard(relay):
            yield _on_silence(relay)
    for meeting in meetings_of(None, snapshot.rosters):
        if meeting.store:
            job, store = shown(meeting.job), shown(meeting.store)
            yield f"here machines meet; the ranks of the job {job} are at {store}: ask there"
    yield from _on_sizes(crowd, plan, expected)
    yield from _on_claims(crowd)


def _on_silence(relay: Relay) -> str:
    name = f"the relay at {shown(relay.peer)}" + (f" on {shown(relay.part.host)}" if relay.part else "")
    told = f"told of its clients {relay.part_seconds:.0f} s ago for the last time"
    how = "has told nothing of its clients yet" if relay.part is None else told
    return f"{name} {'' if relay.present else 'has lost its connection, and '}{how}"


def _on_sizes(crowd: Crowd, plan: Plan | None, expected: int) -> Iterator[str]:
    sizes = sorted(sizes_told(crowd))
    if sizes and not is_believable(sizes[-1], crowd.witnesses):
        known = counted(crowd.witnesses, "client")
        yield f"a rank says that there are {sizes[-1]:,} of them, which is not believed of {known}"
    if len(sizes) > 1:
        yield f"ranks disagree about how many they are: {_listed([f'{size:,}' for size in sizes])}"
    elif plan is not None and sizes and sizes[0] != plan.world_size:
        yield f"{plan.world_size:,} ranks are planned, but they say that they are {sizes[0]:,}"
    beyond = sorted(rank for rank in crowd.by_rank if rank >= expected >= 0)
    if beyond:
        ranks = _listed([str(rank) for rank in beyond])
        yield f"beyond the {expected:,} ranks that are expected, there are: {ranks}"


def _on_claims(crowd: Crowd) -> Iterator[str]:
    """Ranks that several processes claim to be."""
    for rank in sorted(crowd.by_rank):
        whos = [each.who for each in crowd.by_rank[rank]]
        claims = sorted({(who.host, who.pid) for who in whos if who.pid})
        if len(claims) > 1:
            names = _listed(
                [f"process {pid} on {shown(host) or 'a machine not known'}" for host, pid in claims]
            )
            yield f"rank {rank} is claimed by {names}: do two jobs use this store?"


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return joined_by_and([*names[:_MOST_NAMED], *([f"{more:,} more"] if more > 0 else [])])


_UNKNOWN: Final = -1
_BARRIERS_LISTED: Final = 16
"""For how many barriers the missing ranks are listed. Each list may be as long as there are ranks."""


@dataclass
class _Waiting:
    """The clients that wait for the same key, or at the same barrier."""

    ranks: set[int] = field(default_factory=set)
    others: int = 0
    seconds: float = -1.0
    told: int = 0
    """How many a server counts there, those behind its relays included."""

    @property
    def count(self) -> int:
        return max(self.told, len(self.ranks) + self.others)

    def add(self, rank: int, seconds: float) -> None:
        if rank == _UNKNOWN:
            self.others += 1
        else:
            self.ranks.add(rank)
        if seconds > self.seconds:
            self.seconds = seconds


_Keys = dict[str, _Waiting]
_Barriers = dict[tuple[str, int], _Waiting]
"""By key and size."""


def waits_of(here: KnownClient) -> Iterator[tuple[str, float]]:
    """What a client waits for, barriers included, and for how many seconds."""
    for wait in here.client.waits:
        for key in wait.keys:
            yield key, wait.seconds
    yield from here.barriers


def waits_in(crowd: Crowd, expected: int) -> tuple[tuple[Awaited, ...], tuple[Gathering, ...]]:
    """Keys and barriers for which somebody waits, then the barriers by themselves; longest first."""
    keys = _keys(crowd)
    barriers = _barriers(crowd)
    for key in [key for key in keys if barrier_of(key)]:
        name = barrier_of(key)
        barriers[name, expected if is_of_all(name) else _UNKNOWN] = keys.pop(key)
    known = expected if all(map(is_heard, crowd.relays)) else _UNKNOWN
    longest = sorted(barriers.items(), key=lambda item: -item[1].seconds)
    gatherings = [
        _gathering(*name, each, known if at < _BARRIERS_LISTED else _UNKNOWN)
        for at, (name, each) in enumerate(longest)
        if each.count
    ]
    awaited = [*(_awaited(key, each) for key, each in keys.items()), *map(_awaited_barrier, gatherings)]
    return (
        tuple(sorted(awaited, key=lambda each: (-each.seconds, each.owed_by, each.key))),
        tuple(sorted(gatherings, key=lambda each: (-each.seconds, each.key, each.size))),
    )


def _everybody(crowd: Crowd) -> Iterator[tuple[int, KnownClient]]:
    """All clients, with their ranks."""
    for rank, known in crowd.by_rank.items():
        for here in known:
            yield rank, here
    for node in crowd.nodes:
        for here in node.unknown:
            yield _UNKNOWN, here


def _keys(crowd: Crowd) -> _Keys:
    """Who waits for keys. A silent relay stands for the clients that it has not reported."""
    found: _Keys = defaultdict(_Waiting)
    for rank, here in _everybody(crowd):
        for wait in here.client.waits:
            for key in wait.keys:
                found[key].add(rank, wait.seconds)
    for node in crowd.nodes:
        for relay in node.told.relays:
            if not is_heard(relay):
                _add_waits_of(relay, node.below.get(relay.id), found)
    return found


def _add_waits_of(relay: Relay, below: Node | None, found: _Keys) -> None:
    told = {
        key
        for node in (below.with_all_below() if below else ())
        for client in node.told.clients
        for wait in client.waits
        for key in wait.keys
    }
    for wait in relay.waits:
        for key in set(wait.keys) - told:
            found[key].add(_UNKNOWN, wait.seconds)


def _barriers(crowd: Crowd) -> _Barriers:
    """Who waits at barriers. Each client is counted where it is connected; the total at the top is `told`."""
    found: _Barriers = defaultdict(_Waiting)
    ranks = {id(here.client): rank for rank, here in _everybody(crowd)}
    for node in crowd.nodes:
        _add_barriers(found, node, ranks)
    return found


def _add_barriers(found: _Barriers, node: Node, ranks: dict[int, int]) -> None:
    by_id = {each.id: ranks[id(each)] for each in node.told.clients if id(each) in ranks}
    for barrier in node.told.barriers:
        waiting = found[barrier.key, barrier.size]
        if node.relay is None:
            waiting.told = barrier.arrived
        for member, seconds in barrier.members:
            waiting.seconds = max(waiting.seconds, seconds)
            if member in by_id:
                waiting.add(by_id[member], seconds)


def _gathering(key: str, size: int, here: _Waiting, expected: int) -> Gathering:
    """Missing ranks are known if the barrier is for all ranks and each waiting client's rank is known."""
    known = 0 <= size == expected and len(here.ranks) == here.count
    missing = tuple(sorted(set(range(expected)) - here.ranks)) if known else None
    return Gathering(key, size, here.count, tuple(sorted(here.ranks)), missing, here.seconds)


def _awaited(key: str, each: _Waiting) -> Awaited:
    ranks = tuple(sorted(each.ranks))
    return Awaited(key, ranks, each.others, each.seconds, owed_by=owing_rank(key), owed=owing_whom(key))


def _awaited_barrier(each: Gathering) -> Awaited:
    others = each.arrived - len(each.ranks)
    last = each.missing[0] if each.missing is not None and len(each.missing) == 1 else -1
    return Awaited(
        each.key,
        each.ranks,
        others,
        each.seconds,
        is_barrier=True,
        owed_by=last,
        owed=f"rank {last}" if last >= 0 else "",
    )
