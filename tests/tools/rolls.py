"""Snapshots for tests of what they mean: clients, relays and jobs in a few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rallypoint.store.rollcall.identity import NOBODY, Identity, Role, Source
from rallypoint.store.rollcall.plan import Plan, PlannedMachine
from rallypoint.store.rollcall.snapshot import Client, ClientWait, Relay, Snapshot

GLOO = "default_pg/0//cpu//0/{}"


def snapshot(**told: Any) -> Snapshot:
    """One of a server that has been up for a minute."""
    server = Snapshot("server", "0.7.0", "node-a", 4242, "libuv", 1_000_000.0, 60.0, 41.0)
    return replace(server, **told)


def part(host: str, **told: Any) -> Snapshot:
    """What a relay tells of itself."""
    return snapshot(kind="relay", host=host, **told)


def relay(number: int, told: Snapshot | None, **known: Any) -> Relay:
    """A relay that has just told of itself."""
    present = Relay(number, f"10.0.1.{number}:4000", 60.0, True, told, 0.1 if told else -1.0)
    return replace(present, **known)


def client(number: int, who: Identity = NOBODY, *waits: ClientWait, **known: Any) -> Client:
    return replace(Client(number, f"10.0.0.{number}:4000", 50.0, who, waits=waits), **known)


def rank(number: int, host: str = "", **known: Any) -> Identity:
    """A rank that has said who it is."""
    who = Identity(host, 100 + number if host else 0, number, role=Role.RANK, source=Source.HELLO)
    return replace(who, **known)


def ranks(numbers: Iterable[int], host: str = "", **known: Any) -> tuple[Client, ...]:
    """A client for each rank; their ids are one more than their ranks."""
    return tuple(client(number + 1, rank(number, host, **known)) for number in numbers)


def wait(*keys: str, seconds: float = 41.0) -> ClientWait:
    return ClientWait(keys, len(keys), seconds)


def plan(*machines: tuple[str, int], number: int = 0) -> str:
    """A plan as a launcher writes it."""
    return planned(*machines, number=number).to_json()


def planned(*machines: tuple[str, int], number: int = 0) -> Plan:
    """Machines with as many ranks each."""
    first, found = 0, []
    for host, count in machines:
        found.append(PlannedMachine(host, first, count))
        first += count
    return Plan(number, tuple(found))


def big_job(size: int, absent: Sequence[int], per_machine: int = 8) -> Snapshot:
    """A planned job in which all wait for the first of those who are absent."""
    machines = [(f"node-{number}", per_machine) for number in range(size // per_machine)]
    keys = [GLOO.format(number) for number in absent][:8]
    missing = set(absent)
    clients = tuple(
        client(
            number + 1,
            rank(number, f"node-{number // per_machine}", world_size=size),
            ClientWait(tuple(keys), len(absent), 41.0),
        )
        for number in range(size)
        if number not in missing
    )
    return snapshot(clients=clients, plan=plan(*machines))
