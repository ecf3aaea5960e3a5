"""Findings about the ways between machines, and the matrix of machines that reach each other. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from rallypoint.diagnose.doctor.exchange import Gathered
from rallypoint.diagnose.doctor.probes import Card
from rallypoint.diagnose.findings import Finding, failure, named, ok, warning
from rallypoint.store.machine.addresses import is_loopback
from rallypoint.text import fine_duration

_CLOCK_S: Final = 2.0
_NAMED: Final = 8


def judge_machines(gathered: Gathered) -> list[Finding]:
    """All findings about an exchange; of many of one kind, the first few, and how many more there are."""
    ways = tuple(way for way in gathered.ways if {way.start, way.goal} <= gathered.cards.keys())
    findings = []
    for name, judge in _JUDGES:
        found = list(judge(replace(gathered, ways=ways)))
        if left := found[_NAMED:]:
            more = f"{len(left):,} more findings of this kind"
            found[_NAMED:] = [replace(left[0], found=more, hint="")]
        findings += named(name, found)
    return findings


def _judge_presence(gathered: Gathered) -> Iterator[Finding]:
    if gathered.missing:
        yield failure(
            f"{len(gathered.cards)} of {gathered.count} came; missing: {_listed(gathered.missing)}",
            "look at their logs, and at what they have as endpoint",
        )
    else:
        whole = "the only one came" if gathered.count == 1 else f"all {gathered.count} came"
        yield ok(f"{whole}: {_listed([gathered.name(each) for each in sorted(gathered.cards)])}")
    for number in gathered.silent:
        yield failure(f"{gathered.name(number)} came, but went away again", "look at its log")


def _judge_ways(gathered: Gathered) -> Iterator[Finding]:
    for way in gathered.ways:
        if way.error:
            start, goal = gathered.cards[way.start], gathered.cards[way.goal]
            yield failure(
                f"{start.name} does not reach {goal.name}: {way.error}",
                f"let {goal.name} accept connections from {start.addresses[0]} on every port: gloo, NCCL and "
                "stores choose theirs",
            )
    if gathered.ways and not any(way.error for way in gathered.ways):
        trips = [way.round_trip for way in gathered.ways]
        least, most = fine_duration(min(trips)), fine_duration(max(trips))
        yield ok(f"every machine reaches every other, in {least if least == most else f'{least} to {most}'}")


def _judge_detours(gathered: Gathered) -> Iterator[Finding]:
    for way in gathered.ways:
        first = gathered.cards[way.goal].addresses[0]
        if not way.error and way.address != first and not is_loopback(first):
            start, goal = gathered.name(way.start), gathered.name(way.goal)
            yield warning(
                f"{start} reaches {goal} at {way.address}, but not at {first}",
                "name an interface that all share: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
            )


def _judge_names(gathered: Gathered) -> Iterator[Finding]:
    """Names that other machines do not know, or resolve to another machine; one finding for each name."""
    for goal in dict.fromkeys(way.goal for way in gathered.ways):
        card, ways = gathered.cards[goal], [way for way in gathered.ways if way.goal == goal]
        strangers = [way for way in ways if not set(way.resolved) & set(card.addresses)]
        if strangers and not all(_is_same_machine(gathered.cards[way.start], card) for way in ways):
            seen = ", ".join(strangers[0].resolved) or "nothing"
            has = f"but has {', '.join(card.addresses)}"
            yield warning(
                f"{card.host} resolves to {seen} on {gathered.name(strangers[0].start)}, {has}",
                f"as endpoint, use {card.addresses[0]} and not the name {card.host}",
            )


def _judge_translation(gathered: Gathered) -> Iterator[Finding]:
    for way in gathered.ways:
        known = gathered.cards[way.start].addresses
        if way.seen_as and way.seen_as not in known and not is_loopback(way.seen_as):
            yield warning(
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
                f"on {card.name}, its own name is {card.gloo or 'not known'}: gloo would publish an "
                "address that leads the others to themselves",
                "set GLOO_SOCKET_IFNAME there to the interface that others reach (ip -brief address)",
            )


def _judge_versions(gathered: Gathered) -> Iterator[Finding]:
    cards, differing = gathered.cards.values(), list[str]()
    for package in sorted({name for card in cards for name in card.versions}):
        having = defaultdict(list)
        for card in cards:
            having[card.versions.get(package, "?")].append(card.name)
        if len(having) > 1:
            texts = [
                f"{version} on {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
                for version, names in having.items()
            ]
            differing.append(f"{package}: {', '.join(texts)}")
    if differing:
        yield warning("; ".join(differing), "install the same everywhere")
    elif cards:
        first = next(iter(cards)).versions
        yield ok("equal: " + ", ".join(f"{name} {version}" for name, version in first.items()))


def _judge_clocks(gathered: Gathered) -> Iterator[Finding]:
    good = [way for way in gathered.ways if not way.error]
    furthest = max(good, key=lambda way: abs(way.clock), default=None)
    if furthest is None:
        return
    apart = abs(furthest.clock)
    if apart > _CLOCK_S:
        start, goal = gathered.name(furthest.start), gathered.name(furthest.goal)
        yield warning(f"those of {start} and {goal} are {apart:.1f} s apart", "timedatectl set-ntp true")
    else:
        yield ok(f"at most {fine_duration(apart)} apart")


_JUDGES: Final = (
    ("machines", _judge_presence),
    ("ways", _judge_ways),
    ("ways", _judge_detours),
    ("names", _judge_names),
    ("names", _judge_translation),
    ("gloo", _judge_gloo),
    ("versions", _judge_versions),
    ("clocks", _judge_clocks),
)
"""The names of findings, and what makes them, in the order of the report."""


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
