"""Events as lines: what is written is read again, nothing breaks the reader; and those found in snapshots."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import rolls
from rallypoint.store.rollcall.events import (
    BarrierComplete,
    Connected,
    Erred,
    Event,
    Hung,
    Joined,
    Left,
    Lost,
    RoundPlanned,
    SnapshotChanges,
    Stalled,
    Started,
    Stopped,
    Waited,
    Waiting,
    to_line,
)
from rallypoint.store.rollcall.identity import NOBODY, Identity, Role, Source
from rallypoint.store.rollcall.plan import Plan, PlannedMachine
from rallypoint.store.rollcall.question import KEYS_NAMED
from rallypoint.store.rollcall.snapshot import Client, Snapshot
from startups import from_line

pytestmark = pytest.mark.windows

EVENTS: list[Event] = [
    Started(1.5, "node-a", 12, "0.1.0", "libuv", "relay"),
    Connected(2.0, 1, "10.0.0.1:4242"),
    Joined(3.25, 1, Identity("node-a", 12, 3, 1, 8, Role.RANK, Source.HELLO)),
    Joined(3.5, 2, Identity()),
    Left(4.0, 1),
    Left(4.0, 1, "it sent what is no request"),
    Waiting(5.0, 1, ("a", "b"), 4.0, 1.0, 2),
    Waited(6.0, 1, ("a", "b"), 4.0, 2.0, 2, 7, True),
    BarrierComplete(7.0, "store_based_barrier_key:1", 8, 0.5, 3),
    RoundPlanned(8.0, Plan(2, (PlannedMachine("node-a", 0, 4), PlannedMachine("node-b", 4, 4)))),
    Stalled(9.0, 30.0, "no progress for 30 s\n  missing: 3"),
    Hung(9.5, "rank 3 is in torch.save\n  since 40 s"),
    Hung(9.75),
    Erred(10.0, "10.0.0.9:1", "no VALIDATE"),
    Stopped(11.0),
    Lost(12.0, 17),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_what_is_written_is_read_again(event: Event) -> None:
    line = to_line(event, 12)
    assert "\n" not in line
    assert from_line(line) == event
    assert from_line(line.encode() + b"\n") == event


def test_a_line_is_what_other_programs_can_read() -> None:
    event = Waited(1790000041.25, 5, ("default_pg/0//cpu//0/3",), 1790000001.25, 40.0, by=4)
    assert json.loads(to_line(event, 12)) == {
        "time": 1790000041.25,
        "event": "waited",
        "pid": 12,
        "client": 5,
        "keys": ["default_pg/0//cpu//0/3"],
        "began": 1790000001.25,
        "seconds": 40.0,
        "by": 4,
    }


def test_what_is_not_known_is_left_out_but_for_what_every_line_has() -> None:
    line = json.loads(to_line(Joined(3.5, 2, Identity(rank=0)), 12))
    assert line == {"time": 3.5, "event": "joined", "pid": 12, "client": 2, "who": {"rank": 0}}


def test_later_versions_may_say_more() -> None:
    line = json.dumps({**json.loads(to_line(EVENTS[1], 12)), "colour": "red", "more": [1, {}]})
    assert from_line(line) == EVENTS[1]
    assert from_line('{"time": 1, "event": "teleported", "client": 1}') is None


def test_long_texts_are_cut_and_so_are_many_keys() -> None:
    many = Waited(6.0, 1, tuple(f"{number}" + "k" * 100_000 for number in range(100)), 4.0, 2.0, 100)
    read = from_line(to_line(many, 12))
    assert isinstance(read, Waited)
    assert len(read.keys) == KEYS_NAMED
    assert all(mine.startswith(cut) for mine, cut in zip(many.keys, read.keys, strict=False))
    assert read == replace(many, keys=read.keys)
    assert len(to_line(many, 12)) < 20_000
    assert len(to_line(Stalled(1.0, 1.0, "x" * 1_000_000), 12)) < 3_000


NO_EVENTS = [
    *("", "{", "[]", "null", "{}", '{"time": 1}', '{"event": "stop"}', '{"time": 1, "event": ["stop"]}'),
    *('{"time": -1, "event": "stop"}', '{"time": 1e12, "event": "stop"}', '{"time": 1, "event": "left"}'),
    '{"time": 1, "event": "left", "client": -1}',
    '{"time": 1, "event": "joined", "client": 1, "who": {"role": "king"}}',
    '{"time": 1, "event": "round", "plan": {"round": 0, "machines": [["a", 5, 1]]}}',
    '{"time": 1, "event": "stop", "x": ' + "[" * 100_000,
]


def test_what_is_no_event_is_a_value_error_and_nothing_else() -> None:
    for line in NO_EVENTS:
        with pytest.raises(ValueError, match="no event"):
            from_line(line)


# What has happened behind relays, from one snapshot to the next

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


def test_what_a_relay_said_before_was_so_before() -> None:
    """One that is away tells nothing new: its ranks have waited longer, and have not begun again."""
    ear = Ear()
    ear.hear(head(100.0, client(wait=2.0)))
    for seconds in (1.0, 2.0, 3.0):
        away = replace(head(100.0, client(wait=2.0)).relays[0], present=False, part_seconds=seconds)
        assert ear.hear(replace(server(100.0 + seconds), relays=(away,))) == []
