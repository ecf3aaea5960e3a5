"""Who waits for which key, and at which barrier. Pure.

A barrier is an operation of ours, or one that torch makes of a counter and of a key that the last to arrive
sets: who waits for that key is there, but nobody says how many are to come, unless it is one for all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from rallypoint.store.rollcall.clients import Crowd, KnownClient, Node, is_heard
from rallypoint.store.rollcall.roll import Awaited, Gathering
from rallypoint.store.rollcall.snapshot import Relay
from rallypoint.store.rollcall.torch_keys import barrier_of, is_of_all, owing_rank, owing_whom

_UNKNOWN: Final = -1
_BARRIERS_LISTED: Final = 16
"""For how many barriers the missing ranks are listed. Each list may be as long as there are ranks."""


@dataclass
class _Waiting:
    """Who waits for the same."""

    ranks: set[int] = field(default_factory=set)
    others: int = 0
    seconds: float = -1.0
    told: int = 0
    """How many there are at least, as a server counts those behind its relays."""

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
    """Who waits for keys; instead of the clients that a silent relay has not told of, the relay."""
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
    """Who waits at barriers. Clients are counted where they are; the count at the top is `told`."""
    found: _Barriers = defaultdict(_Waiting)
    ranks = {id(here.client): rank for rank, here in _everybody(crowd)}
    for node in crowd.nodes:
        _take_barriers(found, node, ranks)
    return found


def _take_barriers(found: _Barriers, node: Node, ranks: dict[int, int]) -> None:
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
    """The missing ranks are known if all ranks are to come, and the rank of each waiting client is known."""
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
