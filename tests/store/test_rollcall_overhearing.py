"""What has happened behind relays, from one snapshot to the next."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rolls
from rallypoint.store.rollcall.events import Connected, Event, Joined, Left, SnapshotChanges, Waited, Waiting
from rallypoint.store.rollcall.identity import NOBODY, Identity, Role
from rallypoint.store.rollcall.snapshot import Client, Snapshot

pytestmark = pytest.mark.windows

RANK = Identity(host="node-b", pid=7, rank=3, role=Role.RANK)


def client(number: int = 1, seconds: float = 1.0, who: Identity = RANK, wait: float | None = None) -> Client:
    waits = () if wait is None else (rolls.wait("key", seconds=wait),)
    return rolls.client(number, who, *waits, seconds=seconds)


def server(time: float, *parts: Snapshot) -> Snapshot:
    """A server with a client of its own, and relays that have told of themselves. It started at 50."""
    relays = tuple(rolls.relay(number, each, part_seconds=0.0) for number, each in enumerate(parts, 4))
    return rolls.snapshot(time=time, seconds=time - 50.0, clients=(client(99),), relays=relays)


def head(time: float, *clients: Client) -> Snapshot:
    """A server whose only relay has these clients."""
    return server(time, rolls.part("node-b", clients=clients))


class Ear:
    """Hears one snapshot after the other."""

    def __init__(self, *keys: str) -> None:
        self.changes = SnapshotChanges()
        self.keys = set(keys)

    def hear(self, snapshot: Snapshot) -> list[Event]:
        return list(self.changes.read(snapshot, self.keys.__contains__))


def test_who_comes_came_when_it_says() -> None:
    connected, joined = Ear().hear(head(100.0, client(seconds=2.5)))
    assert isinstance(connected, Connected)
    assert (connected.time, connected.peer) == (97.5, "10.0.0.1:4000")
    assert joined == Joined(100.0, connected.client, RANK)


def test_clients_of_the_server_itself_are_seen_by_itself() -> None:
    assert Ear().hear(server(100.0)) == []


def test_clients_of_different_relays_are_told_apart_and_tools_are_none() -> None:
    below = rolls.relay(1, rolls.part("node-c", clients=(client(1),)))
    tool = client(2, who=replace(NOBODY, role=Role.TOOL))
    parts = (
        rolls.part("node-b", clients=(client(1),), relays=(below,)),
        rolls.part("node-d", clients=(client(1), tool)),
    )
    found = Ear().hear(server(100.0, *parts))
    numbers = {event.client for event in found if isinstance(event, Connected)}
    assert len(numbers) == 3
    assert min(numbers) > 1 << 40


def test_a_name_that_becomes_known_is_told_once() -> None:
    ear = Ear()
    assert len(ear.hear(head(100.0, client(who=NOBODY)))) == 1
    assert [type(each) for each in ear.hear(head(101.0, client()))] == [Joined]
    assert ear.hear(head(102.0, client())) == []


def test_a_wait_is_told_when_it_is_long_and_when_it_ends() -> None:
    ear = Ear()
    ear.hear(head(100.0, client(wait=0.4)))
    (waiting,) = ear.hear(head(101.0, client(wait=1.4001)))
    assert isinstance(waiting, Waiting)
    assert waiting.keys == ("key",)
    assert waiting.began == pytest.approx(99.6)
    assert ear.hear(head(102.0, client(wait=2.399))) == []
    (waited,) = ear.hear(head(103.0, client()))
    assert isinstance(waited, Waited)
    assert waited.seconds == pytest.approx(3.4)
    assert not waited.gave_up


@pytest.mark.parametrize("hour", [3600.0, -3600.0])
def test_the_length_of_a_wait_does_not_depend_on_the_time_of_day(hour: float) -> None:
    """The clock is set, by an hour, while a client waits."""
    ear = Ear()
    ear.hear(head(10_000.0, client(wait=0.4)))
    after = replace(head(10_001.0, client(wait=1.4)), time=10_001.0 + hour)
    (waiting,) = ear.hear(after)
    assert isinstance(waiting, Waiting)
    (waited,) = ear.hear(replace(head(10_002.0, client()), time=10_002.0 + hour))
    assert isinstance(waited, Waited)
    assert waiting.seconds == pytest.approx(1.4)
    assert waited.seconds == pytest.approx(2.4)
    assert waiting.began == waited.began == pytest.approx(9_999.6)
    assert waited.time == 10_002.0 + hour


def test_another_wait_ends_the_one_before() -> None:
    ear = Ear()
    ear.hear(head(100.0, client(wait=2.0)))
    (waited,) = ear.hear(head(103.0, client(wait=0.25)))
    assert isinstance(waited, Waited)
    assert waited.began == pytest.approx(98.0)
    assert waited.time == pytest.approx(102.75)


@pytest.mark.parametrize("came", [True, False])
def test_who_leaves_while_it_waits_waited_in_vain_if_the_key_has_not_come(came: bool) -> None:
    ear = Ear(*(["key"] if came else []))
    ear.hear(head(100.0, client(wait=2.0)))
    waited, left = ear.hear(head(101.0))
    assert isinstance(waited, Waited)
    assert waited.gave_up is not came
    assert isinstance(left, Left)
    assert left.client == waited.client
    assert ear.hear(head(102.0)) == []


def test_a_relay_that_says_nothing_new_has_lost_nobody() -> None:
    ear = Ear()
    ear.hear(head(100.0, client()))
    away = replace(head(101.0, client()).relays[0], present=False)
    assert ear.hear(replace(server(101.0), relays=(away,))) == []


def test_what_a_relay_said_before_was_so_before() -> None:
    """One that is away tells nothing new: its ranks have waited longer, and have not begun again."""
    ear = Ear()
    ear.hear(head(100.0, client(wait=2.0)))
    for seconds in (1.0, 2.0, 3.0):
        away = replace(head(100.0, client(wait=2.0)).relays[0], present=False, part_seconds=seconds)
        assert ear.hear(replace(server(100.0 + seconds), relays=(away,))) == []
