"""What cannot be told of a job, or does not fit together: a few sentences, beside its roll. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from rallypoint.rollcall.clients import Crowd, is_heard, sizes_told
from rallypoint.rollcall.plan import MOST_RANKS, Plan
from rallypoint.rollcall.rounds import meetings_of
from rallypoint.rollcall.snapshot import Relay, Snapshot

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
    for place in crowd.places:
        if place.told.incomplete:
            yield f"{_name(place.told)} could not tell all: {place.told.incomplete}"
    for relay in crowd.relays:
        if not is_heard(relay):
            yield _on_silence(relay)
    for meeting in meetings_of(None, snapshot.rosters):
        if meeting.store:
            yield f"here machines meet; the ranks of the job {meeting.job} are at {meeting.store}: ask there"
    yield from _on_sizes(crowd, plan, expected)
    yield from _on_claims(crowd)


def _on_silence(relay: Relay) -> str:
    name = f"the relay at {relay.peer}" + (f" on {relay.part.host}" if relay.part else "")
    how = "has told nothing of its clients yet" if relay.part is None else _age(relay)
    return f"{name} {'' if relay.present else 'has lost its connection, and '}{how}"


def _age(relay: Relay) -> str:
    return f"told of its clients {relay.part_seconds:.0f} s ago for the last time"


def _name(told: Snapshot) -> str:
    return f"the {told.kind} on {told.host}"


def _on_sizes(crowd: Crowd, plan: Plan | None, expected: int) -> Iterator[str]:
    sizes = sorted(sizes_told(crowd))
    if sizes and sizes[-1] > MOST_RANKS:
        yield f"a rank says that there are {sizes[-1]:,} of them, which was not believed"
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
            names = _listed([f"process {pid} on {host or 'a machine not known'}" for host, pid in claims])
            yield f"rank {rank} is claimed by {names}: do two jobs use this store?"


def _listed(names: list[str]) -> str:
    shown = list(islice(names, _MOST_NAMED))
    if len(names) > len(shown):
        shown.append(f"{len(names) - len(shown):,} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
