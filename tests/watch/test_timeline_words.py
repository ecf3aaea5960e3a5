"""The timeline in words: who held up the others comes first, all fits a screen, and JSON has the rest."""

from __future__ import annotations

import json

import pytest

from rallypoint.store.rollcall.events import (
    BarrierComplete,
    Connected,
    Erred,
    Event,
    Hung,
    RoundPlanned,
    Stalled,
    Started,
    Stopped,
)
from rallypoint.store.rollcall.plan import Plan, PlannedMachine
from rallypoint.watch.timeline.words import as_text, headline, seconds
from startups import BEGIN, START, arrival, client_of, judged, key_of, open_wait, straggler, wait

pytestmark = pytest.mark.windows


def test_the_whole_of_it() -> None:
    events = [
        *straggler(4, last=3, late=20.0, per_machine=2),
        BarrierComplete(BEGIN + 20.5, "store_based_barrier_key:1", 4, 20.3, client_of(3)),
        Stalled(BEGIN + 15.0, 14.5, "no progress for 14 s: 3 of 4 ranks joined\n  missing: 3"),
        Hung(BEGIN + 12.0, "rank 3 is late"),
        Hung(BEGIN + 15.0, "rank 3 loads its data\n  since 15 s"),
        Hung(BEGIN + 20.0),
        Hung(BEGIN + 20.2, "rank 1 saves"),
        Erred(BEGIN + 2.0, "10.0.0.9:1", "no VALIDATE"),
        Erred(BEGIN + 3.0, "10.0.0.9:2", "no VALIDATE"),
    ]
    assert (
        as_text(judged(*events))
        == """\
rank 3 on node-0001 came 20.0 s after the first; 3 ranks waited for it, 59.8 s in sum

4 ranks on 2 machines: half had come after 0.04 s, the last after 20.0 s; ready after 20.0 s
server on node-a (process 7, rallypoint 0.1.0, libuv), started 2.00 s before the first came: \
2026-09-21 14:13:18 UTC

        machine      came  waited   ready
rank 3  node-0001  20.0 s  0.00 s  20.0 s
rank 2  node-0001  0.05 s  19.9 s  20.0 s
rank 1  node-0000  0.03 s  19.9 s  20.0 s
rank 0  node-0000  0.00 s  20.0 s  20.0 s

waits
   20.0 s  ranks 0 and 1 on node-0000 and rank 2 on node-0001 for `default_pg/0//cpu//0/3`, \
until rank 3 wrote it

barriers
   20.3 s  `store_based_barrier_key:1` of 4, the last was rank 3

stalls
   14.5 s  no progress for 14 s: 3 of 4 ranks joined
   8.00 s  rank 3 loads its data; then it went on
   0.30 s  rank 1 saves

errors
       2x  no VALIDATE (10.0.0.9:2)"""
    )


def test_who_never_came() -> None:
    plan = RoundPlanned(BEGIN - 1, Plan(0, (PlannedMachine("node-a", 0, 2), PlannedMachine("node-b", 2, 2))))
    events = [plan, *arrival(0, 0.0), *arrival(1, 0.1), open_wait(0, 0.5, key_of(2)), Stopped(BEGIN + 50)]
    text = as_text(judged(START, *events))
    assert text.startswith(
        "ranks 2 and 3 on node-b never came; "
        "1 rank waited for them, 49.5 s in sum, and still did when the events ended\n"
    )
    assert "2 of 4 ranks on 1 machine: " in text
    assert "the events end after 50.0 s" in text
    assert "rank 2  node-b    never\n" in text
    assert "not yet" in text


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], "nobody came"),
        ([*arrival(0, 0.0), *arrival(1, 0.25)], "no straggler: all came within 0.25 s"),
        (
            [*arrival(0, 0.0), *arrival(1, 0.25), *wait(0, 0.5, 30.0, "k", gave_up=True)],
            "all came within 0.25 s; rank 0 on node-a waited in vain",
        ),
        (
            [*arrival(0, 0.0), *arrival(1, 5.0)],
            "rank 1 on node-a came 5.00 s after the first; nobody is known to have waited",
        ),
        (
            [*arrival(0, 0.0, ""), *arrival(1, 5.0, ""), *wait(0, 0.0, 5.0, "x")],
            "rank 1 came 5.00 s after the first; 1 rank waited meanwhile, 5.00 s in sum",
        ),
        (
            [*arrival(0, 0.0), *arrival(1, 0.1), *wait(0, 0.5, 9.0, "x", by=1)],
            "rank 1 on node-a kept others waiting until 9.00 s after the first came; "
            "1 rank waited for it, 8.50 s in sum",
        ),
        (
            [Connected(BEGIN, 1, "10.0.0.1:1"), Connected(BEGIN + 5, 2, "10.0.0.2:1"), Stopped(BEGIN + 9)],
            "10.0.0.2:1 came 5.00 s after the first; nobody is known to have waited",
        ),
    ],
)
def test_headlines(events: list[Event], expected: str) -> None:
    assert headline(judged(START, *events)) == expected


def test_what_ended_a_wait() -> None:
    arrivals = [each for rank in range(3) for each in arrival(rank, 0.0)]

    def line(*events: Event) -> str:
        text = as_text(judged(START, *arrivals, *events))
        return text.partition("waits\n")[2].partition("\n")[0].strip()

    assert line(*wait(0, 0.5, 9.5, "k", by=1)) == "9.00 s  rank 0 on node-a for `k`, until rank 1 wrote it"
    assert line(*wait(0, 0.5, 9.5, key_of(2))).endswith(f"for `{key_of(2)}`, which rank 2 writes")
    assert line(*wait(0, 0.5, 9.5, "k", gave_up=True)).endswith("for `k`, in vain")
    assert line(*wait(0, 0.5, 9.5, "k")).endswith("for `k`")
    barrier = BarrierComplete(BEGIN + 9.5, "b", 3, 9.0, client_of(2))
    assert line(*wait(0, 0.5, 9.5, "b", by=2), barrier).endswith("for `b`, until rank 2 came there")
    still = line(open_wait(0, 0.5, key_of(2)), Stopped(BEGIN + 9.5))
    assert still.endswith(", which rank 2 writes, and still did when the events ended")


def test_several_stragglers_are_named_by_their_machines() -> None:
    def late(*places: tuple[int, str]) -> str:
        there = [each for rank in range(100, 120) for each in arrival(rank, 0.0)]
        return headline(
            judged(
                START, *there, *[each for rank, at in places for each in arrival(rank, 9.0 + 0.01 * rank, at)]
            )
        )

    assert late((1, "b"), (2, "b"), (3, "b")).startswith("ranks 1 to 3 on b came 9.01 s to 9.03 s after")
    assert late((1, "b"), (2, "c")).startswith("rank 2 on c and rank 1 on b came 9.01 s to 9.02 s after")
    assert late((1, "b"), (2, "c"), (3, "d")).startswith("ranks 1 to 3 on 3 machines came")


def test_seconds() -> None:
    values = [0.0, 0.414, 9.996, 41.23, 99.96, 65536]
    assert list(map(seconds, values)) == ["0.00 s", "0.41 s", "10.0 s", "41.2 s", "100 s", "65,536 s"]


def test_a_crowd_fits_a_screen() -> None:
    events = straggler(4_000, last=77, late=30.0)
    events += [BarrierComplete(BEGIN + 31, f"barrier-{at}", 4_000, 0.1 * at, 1) for at in range(500)]
    events += [Erred(BEGIN + 31, f"10.0.0.9:{at}", f"reason {at % 50}" + "x" * 5_000) for at in range(500)]
    events += [Stalled(BEGIN + 31, float(at), "text\n" * 100) for at in range(50)]
    events += [Hung(BEGIN + 31 + at, "text\n" * (at % 2)) for at in range(51)]
    for rank in range(0, 4_000, 2):
        events += wait(rank, 30.1, 40.0 + 0.001 * rank, f"{'k' * 500}{rank}", by=77)
    lines = as_text(judged(*events)).splitlines()
    assert len(lines) < 45
    assert max(map(len, lines)) < 240
    assert "and 3,992 more, the last of them after 0.10 s" in lines
    assert "  and 496 more" in lines  # barriers


def test_times_of_another_age_can_be_told() -> None:
    assert "1970-01-01 00:00:00 UTC" in as_text(judged(Started(0.0, "a", 1, "0", "libuv")))
    assert "5138-11-16" in as_text(judged(Started(99_999_999_999.0, "a", 1, "0", "libuv")))


# JSON


def test_json_has_all_of_it() -> None:
    barrier = BarrierComplete(BEGIN + 20.5, "b", 4, 20.3, client_of(3))
    hang = Hung(BEGIN + 15.0, "rank 3 is late")
    told = json.loads(json.dumps(judged(*straggler(300, last=3, late=20.0), barrier, hang).as_json()))
    assert told["origin"] == BEGIN
    assert told["is_over"] is True
    assert told["expected"] == 300
    assert told["straggling"] == {
        "members": ["rank 3"],
        "seconds": pytest.approx(20.02),
        "waiters": 299,
        "waited": pytest.approx(299 * 19.92, rel=0.01),
        "is_for_them": True,
    }
    assert len(told["members"]) == 300
    first = told["members"][0]
    assert (first["name"], first["rank"], first["came"], first["waits"]) == ("rank 3", 3, 20.0, [])
    assert told["members"][1]["waits"] == [
        {
            "began": pytest.approx(0.15, abs=0.001),
            "seconds": pytest.approx(19.87, abs=0.001),
            "keys": [key_of(3)],
            "key_count": 1,
            "ending": "met",
            "by": "rank 3",
        }
    ]
    assert told["barriers"] == [{"time": 20.5, "key": "b", "size": 4, "seconds": 20.3, "last": "rank 3"}]
    assert told["hangs"] == [{"time": 15.0, "text": "rank 3 is late"}]
    assert told["writers"][0]["host"] == "node-a"
    assert told["writers"][0]["time"] == -2.0
