"""Rounds, plans and remarks: what else a snapshot means, and what in it means nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rallypoint.errors import ProtocolError
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.plan import MOST_RANKS, JobRound, Plan
from rallypoint.store.rollcall.snapshot import Upstream
from rolls import client, part, plan, rank, relay, snapshot

pytestmark = pytest.mark.windows

# Meetings


MEMBERS = [{"id": host, "host": host, "pid": 1} for host in ("node-a", "node-b", "node-c")]
ROSTER = {
    "round": 2,
    "complete": True,
    "closed": "",
    "present": MEMBERS[:2],
    "members": MEMBERS,
    "waiting": [MEMBERS[0]],
    "lost": [MEMBERS[2]],
    "gone": [],
    "told": ["node-c: it failed"],
    "store": "node-a:4711",
}


def meetings(roster: object) -> tuple[JobRound, ...]:
    return judge(snapshot(rosters=(("job", json.dumps(roster)),))).meetings


def test_a_complete_round_has_its_members() -> None:
    (found,) = meetings(ROSTER)
    assert (found.job, found.round, found.expected) == ("job", 2, 3)
    assert (found.joined, found.waiting, found.lost) == (("node-a", "node-b"), ("node-a",), ("node-c",))
    assert (found.told, found.closed, found.store) == (("node-c: it failed",), "", "node-a:4711")


@pytest.mark.parametrize(("size", "expected"), [({}, -1), ({"least": 3, "most": 4}, 3)])
def test_an_open_round_expects_the_least_number(size: dict[str, int], expected: int) -> None:
    (found,) = meetings({**ROSTER, "complete": False, "members": [], **size})
    assert found.expected == expected


NO_ROSTERS: list[object] = [
    *(None, [], {}, {**ROSTER, "round": 1 << 40}, {**ROSTER, "least": -2}),
    *({**ROSTER, "present": [{"host": 5}]}, {**ROSTER, "told": [5]}, {**ROSTER, "complete": 1}),
]


def test_what_is_no_roster_is_left_out() -> None:
    assert [junk for junk in NO_ROSTERS if meetings(junk) != ()] == []


def test_a_roster_of_any_size_is_bounded() -> None:
    (found,) = meetings({**ROSTER, "present": MEMBERS * 10_000, "told": ["x" * 10_000] * 100})
    assert len(found.joined) == 1 << 14
    assert len(found.told) == 64
    assert len(found.told[0]) == 500


def test_a_plan_is_a_round() -> None:
    (found,) = judge(snapshot(plan=plan(("node-a", 4), ("node-b", 4), number=3))).meetings
    assert found == JobRound("", 3, 2, ("node-a", "node-b"))


# Plans


NO_PLANS = [
    *("", "{}", '{"round":0,"machines":[]}', '{"round":0,"machines":[["a",0,0]]}'),
    *('{"round":-1,"machines":[["a",0,4]]}', '{"round":0,"machines":[["a",1,4]]}'),
    '{"round":0,"machines":[["a",0,4],["b",5,4]]}',
    '{"round":0,"machines":[["a",0,4],["b",3,4]]}',
    '{"round":0,"machines":[["a",0,8],["b",8,-4]]}',
    '{"round":0,"machines":[["a",0]]}',
    f'{{"round":0,"machines":[["a",0,{MOST_RANKS + 1}]]}}',
    f'{{"round":0,"machines":[["a",0,{MOST_RANKS}]]}}',  # of one machine
]


def test_what_is_no_plan_is_remarked() -> None:
    for text in NO_PLANS:
        assert Plan.from_json(text) is None, text[:100]
        roll = judge(snapshot(plan=text))
        assert roll.expected == -1
        assert len(roll.remarks) == bool(text)


def test_machines_of_a_plan_may_come_in_any_order() -> None:
    found = Plan.from_json('{"round":0,"machines":[["b",4,4],["a",0,4]]}')
    assert found is not None
    assert (found.world_size, found.hosts[3], found.hosts[4]) == (8, "a", "b")
    assert Plan.from_json(found.to_json()) == found


# Remarks


@pytest.mark.parametrize(
    ("silent", "text"),
    [
        (relay(7, None), "the relay at 10.0.1.7:4000 has told nothing of its clients yet"),
        (
            relay(7, part("node-b"), part_seconds=60.0),
            "the relay at 10.0.1.7:4000 on node-b told of its clients 60 s ago for the last time",
        ),
        (
            relay(7, part("node-b"), present=False),
            "the relay at 10.0.1.7:4000 on node-b has lost its connection, "
            "and told of its clients 0 s ago for the last time",
        ),
    ],
)
def test_a_silent_relay_is_remarked(silent: Any, text: str) -> None:
    assert judge(snapshot(relays=(silent,))).remarks == (text,)


def test_what_could_not_be_told_is_remarked() -> None:
    told = part("node-b", incomplete="its own relays")
    roll = judge(snapshot(relays=(relay(7, told),), incomplete="all keys"))
    assert roll.remarks == (
        "the server on node-a could not tell all: all keys",
        "the relay on node-b could not tell all: its own relays",
    )


def test_ranks_that_several_processes_claim_are_remarked() -> None:
    clients = (client(1, rank(3, "node-a")), client(2, rank(3, "node-b")), client(3, rank(3)))
    assert judge(snapshot(clients=clients)).remarks == (
        "rank 3 is claimed by process 103 on node-a and process 103 on node-b: do two jobs use this store?",
    )


def test_remarks_are_bounded() -> None:
    roll = judge(snapshot(relays=tuple(relay(number, None) for number in range(100))))
    assert len(roll.remarks) == 17
    assert roll.remarks[-1] == "and 84 more remarks"


@pytest.mark.parametrize("place", ["nonsense", "node-a:", ":x"])
def test_places_of_a_relays_store_that_are_none_are_an_error_of_the_relay(place: str) -> None:
    with pytest.raises(ProtocolError, match="no HOST:PORT"):
        _ = Upstream((place,)).addresses
