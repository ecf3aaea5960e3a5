"""Findings about the ways between machines, and the matrix of machines that reach each other. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from rallypoint.diagnose.doctor.exchange import Card, Gathered
from rallypoint.diagnose.findings import Finding, failure, ok, warning
from rallypoint.store.machine.addresses import is_loopback
from rallypoint.text import fine_duration

_CLOCK_S: Final = 2.0
_NAMED: Final = 8


def judge_machines(gathered: Gathered) -> list[Finding]:
    """All findings about an exchange; of many of one kind, the first few."""
    ways = tuple(way for way in gathered.ways if {way.start, way.goal} <= gathered.cards.keys())
    gathered = replace(gathered, ways=ways)
    judges = (_judge_presence, _judge_ways, _judge_detours, _judge_names, _judge_translation, _judge_gloo)
    return [
        *(finding for judge_one in judges for finding in _some(judge_one(gathered))),
        *_judge_versions(gathered.cards),
        *_judge_clocks(gathered),
    ]


def _some(findings: Iterable[Finding]) -> list[Finding]:
    """The first few findings of one kind, and how many more there are."""
    found = list(findings)
    left = found[_NAMED:]
    if not left:
        return found
    return [*found[:_NAMED], replace(left[0], found=f"{len(left):,} more findings of this kind", hint="")]


def _judge_presence(gathered: Gathered) -> Iterator[Finding]:
    if gathered.missing:
        yield failure(
            "machines",
            f"{len(gathered.cards)} of {gathered.count} came; missing: {_listed(gathered.missing)}",
            "look at their logs, and at what they have as endpoint",
        )
    else:
        whole = "the only one came" if gathered.count == 1 else f"all {gathered.count} came"
        yield ok("machines", f"{whole}: {_listed([gathered.name(each) for each in sorted(gathered.cards)])}")
    for number in gathered.silent:
        yield failure("machines", f"{gathered.name(number)} came, but went away again", "look at its log")


def _judge_ways(gathered: Gathered) -> Iterator[Finding]:
    broken = [way for way in gathered.ways if way.error]
    for way in broken:
        start, goal = gathered.cards[way.start], gathered.cards[way.goal]
        yield failure(
            "ways",
            f"{start.name} does not reach {goal.name}: {way.error}",
            f"let {goal.name} accept connections from {start.addresses[0]} on every port: gloo, NCCL and "
            "stores choose theirs",
        )
    trips = [way.round_trip for way in gathered.ways if not way.error]
    if trips and not broken:
        least, most = fine_duration(min(trips)), fine_duration(max(trips))
        took = least if least == most else f"{least} to {most}"
        yield ok("ways", f"every machine reaches every other, in {took}")


def _judge_detours(gathered: Gathered) -> Iterator[Finding]:
    for way in gathered.ways:
        first = gathered.cards[way.goal].addresses[0]
        if not way.error and way.address != first and not is_loopback(first):
            yield warning(
                "ways",
                f"{gathered.name(way.start)} reaches {gathered.name(way.goal)} at {way.address}, "
                f"but not at {first}",
                "name an interface that all share: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
            )


def _judge_names(gathered: Gathered) -> Iterator[Finding]:
    """Names that other machines do not know, or resolve to another machine; one finding for each name."""
    for goal in dict.fromkeys(way.goal for way in gathered.ways):
        card, ways = gathered.cards[goal], [way for way in gathered.ways if way.goal == goal]
        strangers = [way for way in ways if not set(way.resolved) & set(card.addresses)]
        if strangers and not all(_is_same_machine(gathered.cards[way.start], card) for way in ways):
            seen = ", ".join(strangers[0].resolved) or "nothing"
            yield warning(
                "names",
                f"{card.host} resolves to {seen} on {gathered.name(strangers[0].start)}, "
                f"but has {', '.join(card.addresses)}",
                f"as endpoint, use {card.addresses[0]} and not the name {card.host}",
            )


def _judge_translation(gathered: Gathered) -> Iterator[Finding]:
    for way in gathered.ways:
        known = gathered.cards[way.start].addresses
        if way.seen_as and way.seen_as not in known and not is_loopback(way.seen_as):
            yield warning(
                "names",
                f"{gathered.name(way.goal)} sees {gathered.name(way.start)} as {way.seen_as}, "
                "which is none of its addresses: something between them translates addresses",
                "gloo and NCCL publish the machine's own addresses: they must be reachable as they are",
            )


def _judge_gloo(gathered: Gathered) -> Iterator[Finding]:
    """gloo publishes the address that a machine's own name has on that machine."""
    for card in gathered.cards.values():
        others = [each for each in gathered.cards.values() if not _is_same_machine(each, card)]
        if others and (not card.gloo or is_loopback(card.gloo)):
            yield warning(
                "gloo",
                f"on {card.name}, its own name is {card.gloo or 'not known'}: gloo would publish an "
                "address that leads the others to themselves",
                "set GLOO_SOCKET_IFNAME there to the interface that others reach (ip -brief address)",
            )


def _judge_versions(cards: dict[int, Card]) -> Iterator[Finding]:
    differing = []
    for package in sorted({name for card in cards.values() for name in card.versions}):
        having = defaultdict(list)
        for card in cards.values():
            having[card.versions.get(package, "?")].append(card)
        if len(having) > 1:
            texts = [
                f"{version} on {found[0].name}" + (f" and {len(found) - 1} more" if len(found) > 1 else "")
                for version, found in having.items()
            ]
            differing.append(f"{package}: {', '.join(texts)}")
    if differing:
        yield warning("versions", "; ".join(differing), "install the same everywhere")
    elif cards:
        first = next(iter(cards.values())).versions
        yield ok("versions", "equal: " + ", ".join(f"{name} {version}" for name, version in first.items()))


def _judge_clocks(gathered: Gathered) -> Iterator[Finding]:
    good = [way for way in gathered.ways if not way.error]
    furthest = max(good, key=lambda way: abs(way.clock), default=None)
    if furthest is None:
        return
    apart = abs(furthest.clock)
    if apart > _CLOCK_S:
        start, goal = gathered.cards[furthest.start], gathered.cards[furthest.goal]
        yield warning(
            "clocks",
            f"those of {start.name} and {goal.name} are {apart:.1f} s apart",
            "timedatectl set-ntp true",
        )
    else:
        yield ok("clocks", f"at most {fine_duration(apart)} apart")


def _is_same_machine(one: Card, other: Card) -> bool:
    shared = set(one.addresses) & set(other.addresses)
    alone = all(map(is_loopback, (*one.addresses, *other.addresses)))  # no network at all
    return one.host == other.host and (alone or any(not is_loopback(address) for address in shared))


def _listed(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:_NAMED]))
    return f"{shown} and {len(items) - _NAMED} more" if len(items) > _NAMED else shown


def matrix(gathered: Gathered) -> list[list[str]]:
    """A row for each machine: the round trip to each other one, or `no`; `?` if it did not say."""
    cells = {
        (way.start, way.goal): "no" if way.error else fine_duration(way.round_trip) for way in gathered.ways
    }
    numbers = range(gathered.count)
    return [
        [str(start), *("-" if start == goal else cells.get((start, goal), "?") for goal in numbers)]
        for start in numbers
    ]
