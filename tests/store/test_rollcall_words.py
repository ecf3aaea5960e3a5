"""The roll in words, bounded and safe for a terminal; and its rounds, plans and remarks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import ProtocolError
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.plan import MOST_RANKS, JobRound, Plan
from rallypoint.store.rollcall.roll import (
    Awaited,
    RankState,
    Roll,
    Standing,
    headline,
    missing_text,
    owed_text,
    stall_text,
    unseen_text,
    wait_text,
)
from rallypoint.store.rollcall.snapshot import Gone, Upstream
from rallypoint.text import duration, ranks_text, shown
from rolls import GLOO, big_job, client, part, plan, rank, ranks, relay, snapshot, wait

pytestmark = pytest.mark.windows

EMPTY = judge(snapshot())


def job(*absent: int, waiting: tuple[int, ...] = (0,)) -> Roll:
    """Eight ranks of two machines, of which some are absent, and some wait for the first absentee."""
    present = [number for number in range(8) if number not in absent]
    pending = {number: (wait(GLOO.format(absent[0])),) for number in waiting} if absent else {}
    clients = tuple(client(number + 1, rank(number), *pending.get(number, ())) for number in present)
    return judge(snapshot(clients=clients, plan=plan(("node-a", 3), ("node-b", 5))))


# The headline


STRANGERS = judge(snapshot(clients=(*ranks([0, 1], world_size=4), client(9), client(10))))


@pytest.mark.parametrize(
    ("roll", "line"),
    [
        (
            job(3, 7),
            "6 of 8 ranks joined; missing: 3 and 7 on node-b; "
            "rank 0 waits for `default_pg/0//cpu//0/3` for 41 s",
        ),
        (job(), "all 8 ranks joined"),
        (judge(snapshot(clients=ranks([0], world_size=1))), "1 of 1 ranks joined"),
        (EMPTY, "0 ranks joined; how many are expected is not known"),
        (
            replace(EMPTY, meetings=(JobRound("j", 0, 2, ("node-a",)),)),
            "1 of 2 machines connected: node-a",
        ),
        (
            judge(snapshot(clients=(client(1), *ranks([1])))),
            "1 rank joined, and 1 client whose rank is not known; how many are expected is not known",
        ),
        (
            STRANGERS,
            "2 of 4 ranks joined, and 2 clients whose rank is not known; "
            "not seen: 2 and 3 (machine not known)",
        ),
    ],
)
def test_the_headline(roll: Roll, line: str) -> None:
    assert headline(roll) == line


# Who is missing


def test_the_missing_are_named_by_machine_and_those_without_one_last() -> None:
    standings = tuple(
        Standing(number, RankState.LATE, host)
        for number, host in [
            (0, ""),
            (3, "node-b"),
            (7, "node-b"),
            *((each, "node-c") for each in range(9, 16)),
        ]
    )
    assert missing_text(replace(EMPTY, ranks=standings)) == (
        "3 and 7 on node-b; 9 to 15 on node-c; 0 (machine not known)"
    )


def test_those_who_have_gone_are_told_from_those_who_never_came() -> None:
    gone = (Gone(1, rank(1, "node-a"), 3.0, ""), Gone(2, rank(2, "node-b"), 3.0, ""))
    roll = judge(snapshot(gone=gone, plan=plan(("node-a", 2), ("node-b", 2)), clients=ranks([3])))
    assert missing_text(roll) == "0 on node-a; gone: 1 on node-a; 2 on node-b"


def test_of_very_many_missing_the_first_are_named() -> None:
    roll = judge(big_job(16_384, range(5, 16_384, 97)))
    text = missing_text(roll)
    assert text.startswith("5 on node-0; 102 on node-12; 199 on node-24; ")
    assert text.endswith("; and 153 more")


# Who waits


@pytest.mark.parametrize(
    ("awaited", "text"),
    [
        (Awaited("k", (0,), 0, 41.0), "rank 0 waits for `k` for 41 s"),
        (Awaited("k", (0, 1, 2, 5), 0, 41.0), "ranks 0 to 2 and 5 wait for `k` for 41 s"),
        (Awaited("k", (1,), 2, 41.0), "rank 1 and 2 clients wait for `k` for 41 s"),
        (Awaited("k", (), 1, 41.0), "1 client waits for `k` for 41 s"),
        (Awaited("b", (0, 1), 0, -1.0, is_barrier=True), "ranks 0 and 1 wait at the barrier `b`"),
        (
            Awaited("k", tuple(range(0, 2000, 2)), 0, 1.0),
            "ranks 0, 2, 4 and 997 more wait for `k` for 1.0 s",
        ),
    ],
)
def test_a_wait(awaited: Awaited, text: str) -> None:
    assert wait_text(awaited) == text


def test_who_owes_a_key_may_be_unknown_or_no_rank() -> None:
    assert owed_text(EMPTY, Awaited("k", (0,), 0, 41.0)) == ""
    agent = Awaited("k", (0,), 0, 41.0, owed="the agent of machine 1")
    assert owed_text(EMPTY, agent) == "the agent of machine 1 should write it"
    barrier = Awaited("b", (0,), 0, 41.0, is_barrier=True, owed_by=3, owed="rank 3")
    assert owed_text(EMPTY, barrier) == "rank 3 should come"


def test_a_stall_is_told_in_a_few_lines() -> None:
    assert stall_text(job(3, 7, waiting=(0, 1)), 65.0).splitlines() == [
        "no progress for 1 min 5 s: 6 of 8 ranks joined",
        "  missing: 3 and 7 on node-b",
        "  ranks 0 and 1 wait for `default_pg/0//cpu//0/3` for 41 s; "
        "rank 3 on node-b should write it: it has not come",
    ]


# Names and numbers


DURATIONS = [
    (-1.0, "0.0 s"),
    (0.04, "0.0 s"),
    (5.94, "5.9 s"),
    (41.4, "41 s"),
    (59.4, "59 s"),
    (59.6, "1 min 0 s"),
    (200.0, "3 min 20 s"),
    (7_500.0, "2 h 5 min"),
]


def test_durations() -> None:
    assert [(seconds, duration(seconds)) for seconds, _ in DURATIONS] == DURATIONS


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_duration_that_is_no_number_is_a_long_one(seconds: float) -> None:
    assert duration(seconds) == duration(1e10)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([3, 4], "3 and 4"),
        ([3, 4, 5], "3 to 5"),
        ([0, 1, 3], "0, 1 and 3"),
        ([0, 2, 4, 6, 8, 10, 12, 14, 16, 17, 18], "0, 2, 4, 6, 8, 10, 12, 14 and 3 more"),
    ],
)
def test_numbers_of_ranks(numbers: list[int], text: str) -> None:
    assert ranks_text(numbers) == text


def test_a_long_name_loses_its_middle() -> None:
    name = shown("a" * 500 + "end")
    assert len(name) == 80
    assert name.startswith("aaa")
    assert name.endswith("aend")
    assert "..." in name


NAMES = st.text(max_size=300)
NUMBERS = st.integers(0, 1 << 20)
STANDINGS = st.lists(
    st.builds(Standing, NUMBERS, st.sampled_from(RankState), NAMES),
    max_size=40,
    unique_by=lambda each: each.rank,
)
AWAITED = st.lists(
    st.builds(
        Awaited,
        NAMES,
        st.lists(NUMBERS, unique=True, max_size=50).map(lambda each: tuple(sorted(each))),
        NUMBERS,
        st.floats(),
        st.booleans(),
        NUMBERS,
        NAMES,
    ),
    max_size=20,
)


@given(STANDINGS, AWAITED, st.integers(-1, 1 << 20), NUMBERS, st.floats())
def test_whatever_the_names_texts_are_short_and_no_terminal_obeys_them(
    standings: list[Standing], awaited: list[Awaited], expected: int, unknown: int, seconds: float
) -> None:
    ordered = tuple(sorted(standings, key=lambda each: each.rank))
    roll = replace(EMPTY, expected=expected, ranks=ordered, unknown=unknown, awaited=tuple(awaited))
    assert len(missing_text(roll)) <= 300
    assert len(unseen_text(roll)) <= 300
    assert len(headline(roll)) <= 1200
    lines = stall_text(roll, seconds).split("\n")
    assert len(lines) <= 12
    for text in (headline(roll), missing_text(roll), unseen_text(roll), *lines):
        assert text.isprintable()


# Rounds, plans and remarks

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
