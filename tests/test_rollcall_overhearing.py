"""What has happened behind relays, from one snapshot to the next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rallypoint.rollcall.events import Connected, Event, Joined, Left, Waited, Waiting
from rallypoint.rollcall.identity import NOBODY, Identity, Role
from rallypoint.rollcall.relay_events import Overheard
from rallypoint.rollcall.snapshot import Client, Relay, Snapshot, Wait

RANK = Identity(host="node-b", pid=7, rank=3, role=Role.RANK)


def client(number: int = 1, seconds: float = 1.0, who: Identity = RANK, wait: float | None = None) -> Client:
    waits = () if wait is None else (Wait(("key",), 1, wait),)
    return Client(number, "127.0.0.1:5", seconds, who, waits=waits)


def place(time: float, *clients: Client, relays: tuple[Relay, ...] = (), kind: str = "relay") -> Snapshot:
    return Snapshot(kind, "1", "node-b", 1, "libuv", time, 9.0, 0.0, clients=clients, relays=relays)


def head(time: float, *clients: Client) -> Snapshot:
    """A server whose only relay has such clients."""
    relay = Relay(4, "10.0.0.2:1", 5.0, present=True, part=place(time, *clients))
    return place(time, client(99), relays=(relay,), kind="server")


class Ear:
    """Hears one snapshot after the other."""

    def __init__(self, *keys: str) -> None:
        self.overheard = Overheard()
        self.keys = set(keys)

    def hear(self, snapshot: Snapshot) -> list[Event]:
        return list(self.overheard.hear(snapshot, self.keys.__contains__))


def test_who_comes_came_when_it_says() -> None:
    connected, joined = Ear().hear(head(100.0, client(seconds=2.5)))
    assert isinstance(connected, Connected)
    assert (connected.time, connected.peer) == (97.5, "127.0.0.1:5")
    assert joined == Joined(100.0, connected.client, RANK)


def test_clients_of_the_server_itself_are_seen_by_itself() -> None:
    assert Ear().hear(place(100.0, client(), kind="server")) == []


def test_clients_of_different_relays_are_told_apart_and_tools_are_none() -> None:
    below = Relay(1, "127.0.0.1:9", 5.0, present=True, part=place(100.0, client(1)))
    relay = Relay(4, "10.0.0.2:1", 5.0, present=True, part=place(100.0, client(1), relays=(below,)))
    tool = client(2, who=replace(NOBODY, role=Role.TOOL))
    other = Relay(5, "10.0.0.3:1", 5.0, present=True, part=place(100.0, client(1), tool))
    found = Ear().hear(place(100.0, relays=(relay, other), kind="server"))
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
    assert ear.hear(place(101.0, relays=(away,), kind="server")) == []


def test_what_a_relay_said_before_was_so_before() -> None:
    """One that is away tells nothing new: its ranks have waited longer, and have not begun again."""
    ear = Ear()
    ear.hear(head(100.0, client(wait=2.0)))
    for seconds in (1.0, 2.0, 3.0):
        away = replace(head(100.0, client(wait=2.0)).relays[0], present=False, part_seconds=seconds)
        assert ear.hear(place(100.0 + seconds, relays=(away,), kind="server")) == []
