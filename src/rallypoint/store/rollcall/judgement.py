"""What a snapshot means: who is here, who is missing, who waits for what. Pure.

What is not known stays unknown. A rank is late only if it is expected and cannot be one of the clients whose
rank nobody knows; else it is unseen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final

from rallypoint.store.rollcall.clients import Crowd, KnownClient, doubtful_hosts, gather, is_heard, sizes_told
from rallypoint.store.rollcall.identity import Source
from rallypoint.store.rollcall.plan import Plan, believed_size, is_believable, meetings_of
from rallypoint.store.rollcall.question import KEYS_NAMED
from rallypoint.store.rollcall.roll import MachineRanks, RankState, Roll, Standing
from rallypoint.store.rollcall.snapshot import Gone, Relay, Replication, Snapshot
from rallypoint.store.rollcall.waits import waits_in, waits_of
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
    """What keeps a store from answering, and what to look at; nothing if it answers."""
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
    """That an engine is away, and what to look at."""
    why = shown(kept.error.removeprefix(f"{kept.engine}: "), LONGEST_SENTENCE)
    engine = shown(kept.engine, LONGEST_SENTENCE)
    return (
        f"the engine of the store, {engine}, has not answered for {duration(kept.away_seconds)}: {why}",
        shown(kept.hint, LONGEST_SENTENCE) or _ENGINE_ADVICE,
    )


def _expected(snapshot: Snapshot, crowd: Crowd, plan: Plan | None) -> int:
    """How many ranks should be here: as the launcher planned, else as most ranks say."""
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
    """One rank, from all its connections. Its name comes from the most reliable of them."""
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
    """Those of whom no client is known: they have left, have not come, or cannot be told from strangers."""
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
    """The first of them, if there are many."""
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
    """Ranks that several processes say they are."""
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
