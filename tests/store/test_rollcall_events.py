"""Events as lines: what is written is read again, and nothing that is read breaks the reader."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

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
    Stalled,
    Started,
    Stopped,
    Waited,
    Waiting,
    to_line,
)
from rallypoint.store.rollcall.identity import Identity, Role, Source
from rallypoint.store.rollcall.plan import Plan, PlannedMachine
from rallypoint.store.rollcall.question import KEYS_NAMED
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
