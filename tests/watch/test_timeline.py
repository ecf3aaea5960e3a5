"""What events mean: who took part, who was last, for whom the others waited; and that in words and JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
)
from rallypoint.store.rollcall.identity import Identity, Role
from rallypoint.store.rollcall.plan import Plan, PlannedMachine
from rallypoint.watch.timeline.judgement import Timeline
from rallypoint.watch.timeline.words import as_text, headline, seconds
from startups import BEGIN, START, arrival, client_of, judged, key_of, open_wait, straggler, wait

pytestmark = pytest.mark.windows
PLAN = RoundPlanned(BEGIN - 1, Plan(0, (PlannedMachine("node-a", 0, 2), PlannedMachine("node-b", 2, 2))))


def _names(timeline: Timeline) -> list[str]:
    return [each.name for each in timeline.members]


def _stragglers(timeline: Timeline) -> list[str]:
    return [each.name for each in timeline.straggling.members] if timeline.straggling else []


# The straggler


def test_a_machine_that_comes_late_is_named_as_a_whole() -> None:
    late = {4, 5, 6, 7}
    events: list[Event] = [START]
    for rank in range(16):
        came = 30.0 + 0.1 * rank if rank in late else 0.01 * rank
        events += arrival(rank, came, f"node-{rank // 4}", 16)
        if rank not in late:
            events += wait(rank, came, 30.8, key_of(7), by=7)
    timeline = judged(*events)
    assert _stragglers(timeline) == ["rank 7", "rank 6", "rank 5", "rank 4"]
    assert timeline.straggling is not None
    assert timeline.straggling.waiters == 12


def _arrivals(*times: float) -> list[Event]:
    return [event for rank, came in enumerate(times) for event in arrival(rank, came)]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param(_arrivals(*range(30)), ["rank 29"], id="of many that come one by one, the last"),
        pytest.param(_arrivals(0, 61, 62, 63, 64), ["rank 4"], id="at most half"),
        pytest.param(straggler(8, last=5, late=0.9)[1:], [], id="nobody by less than a second"),
        pytest.param(straggler(8, last=5, late=1.1)[1:], ["rank 5"], id="by more than a second"),
        pytest.param(
            [*_arrivals(0, 0, 0), *wait(0, 0.5, 9, key_of(2)), *wait(1, 0.5, 9, key_of(2))],
            ["rank 2"],
            id="by the name of the key, if nothing tells who wrote it",
        ),
        pytest.param(
            [*_arrivals(0, 0), *wait(0, 0.5, 30, "a", by=1), *wait(1, 0.5, 30, "b", by=0)],
            [],
            id="none of two that wait for each other",
        ),
    ],
)
def test_stragglers(events: list[Event], expected: list[str]) -> None:
    assert _stragglers(judged(START, *events)) == expected


def test_who_waits_itself_is_not_to_blame() -> None:
    """Rank 2 is late; rank 0 waits for it, and then lets the others go on."""
    events = [*_arrivals(0, 0.1, 0.2, 0.3, 0.4), *wait(0, 0.5, 30.0, "ready", by=2)]
    for rank in (1, 3, 4):
        events += wait(rank, 0.5, 30.1, "go", by=0)
    timeline = judged(START, *events)
    assert _stragglers(timeline) == ["rank 2"]
    assert timeline.straggling is not None
    assert timeline.straggling.is_for_them


def test_overlapping_waits_of_one_rank_count_once() -> None:
    events = [*arrival(0, 0.0), *arrival(1, 10.0), *wait(0, 0.0, 10.0, "a", by=1), *wait(0, 5.0, 9.0, "b")]
    assert judged(START, *events).members[-1].waited == pytest.approx(10.0)


# Who never came


def test_without_a_plan_the_ranks_themselves_say_how_many_they_are() -> None:
    timeline = judged(START, *arrival(0, 0.0, size=3), *arrival(2, 0.1, size=3))
    assert (timeline.expected, [each.rank for each in timeline.missing]) == (3, [1])


def test_who_may_be_here_unknown_is_not_missing() -> None:
    stranger = Connected(BEGIN + 0.5, 9, "10.0.0.9:1")
    timeline = judged(START, *arrival(0, 0.0, size=2), stranger, Stopped(BEGIN + 100))
    assert timeline.missing == ()
    assert _names(timeline) == ["10.0.0.9:1", "rank 0"]
    assert "1 rank of 2 may be among 1 client whose rank is not known" in timeline.remarks


# Who takes part


def test_all_connections_of_a_rank_are_one_member() -> None:
    _, joined = arrival(0, 0.0)
    assert isinstance(joined, Joined)
    more: list[Event] = [Connected(BEGIN + 5, 77, "10.0.0.1:2"), replace(joined, time=BEGIN + 5, client=77)]
    waits = Waited(BEGIN + 7, 77, ("k",), BEGIN + 5.5, 1.5)
    timeline = judged(START, *arrival(0, 0.0), *more, waits, Left(BEGIN + 6, 1))
    assert _names(timeline) == ["rank 0"]
    assert (timeline.members[0].came, timeline.members[0].left) == (0.0, None)
    assert timeline.members[0].waited == pytest.approx(1.5)


def test_processes_without_a_rank_are_named_by_their_number() -> None:
    who = Identity("node-c", 4242)
    events: list[Event] = [
        Connected(BEGIN, 1, "10.0.0.1:1"),
        Joined(BEGIN, 1, who),
        Connected(BEGIN, 2, "10.0.0.1:2"),
    ]
    timeline = judged(START, *events, Joined(BEGIN, 2, who), Stopped(BEGIN + 5))
    assert [(each.name, each.host) for each in timeline.members] == [("process 4242", "node-c")]


@pytest.mark.parametrize(
    "more",
    [
        Joined(BEGIN - 900, 50, Identity("node-a", 5, role=Role.TOOL)),
        Joined(BEGIN - 900, 50, Identity("node-a", 5, role=Role.AGENT)),
        Left(BEGIN - 899.9, 50),
    ],
    ids=["a tool", "an agent", "one that only had a look"],
)
def test_who_is_no_rank_is_left_out(more: Event) -> None:
    start = replace(START, time=BEGIN - 1000)
    timeline = judged(start, Connected(BEGIN - 900, 50, "x:1"), more, *arrival(0, 0.0))
    assert (_names(timeline), timeline.others, timeline.origin) == (["rank 0"], 1, BEGIN)


def test_who_wrote_the_key_of_a_rank_is_that_rank() -> None:
    """torch's own client on another machine says nothing of itself."""
    events = [Connected(BEGIN + rank, client_of(rank), f"10.0.0.{rank}:1") for rank in range(3)]
    timeline = judged(START, *events, *wait(0, 0.1, 2.1, key_of(2), by=2))
    assert _stragglers(timeline) == ["rank 2"]
    assert sorted(_names(timeline)) == ["10.0.0.0:1", "10.0.0.1:1", "rank 2"]


def test_who_wrote_the_keys_of_several_ranks_is_a_relay() -> None:
    relay, waiter = Connected(BEGIN, 1, "relay:1"), Connected(BEGIN, 2, "10.0.0.1:1")
    waits = [Waited(BEGIN + 3 + rank, 2, (key_of(rank),), BEGIN + 1, 2.0 + rank, by=1) for rank in (4, 5)]
    assert "relay:1" in _names(judged(START, relay, waiter, *waits))


def test_the_last_try_counts() -> None:
    """All ranks come, one fails, all come again; the second time another one is late."""
    events: list[Event] = [START]
    for rank in range(4):
        events += [*arrival(rank, 0.1 * rank + (20 if rank == 1 else 0)), Left(BEGIN + 100, client_of(rank))]
    for rank in range(4):
        connected, joined = arrival(rank, 200.0 + 0.1 * rank + (7 if rank == 2 else 0), pid=900 + rank)
        assert isinstance(connected, Connected)
        assert isinstance(joined, Joined)
        client = 100 + rank
        events += [replace(connected, client=client), replace(joined, client=client)]
    timeline = judged(*events)
    assert _stragglers(timeline) == ["rank 2"]
    assert timeline.origin == BEGIN + 200
    assert timeline.others == 4
    assert any("started 2 times" in each for each in timeline.remarks)


def test_a_child_of_a_rank_begins_no_new_try() -> None:
    """It has the environment of its parent, and so its rank, but another process."""
    connected, joined = arrival(0, 5.0, pid=999)
    assert isinstance(connected, Connected)
    assert isinstance(joined, Joined)
    child: list[Event] = [replace(connected, client=50), replace(joined, client=50)]
    timeline = judged(START, *arrival(0, 0.0), *arrival(1, 0.1), *child)
    assert sorted(_names(timeline)) == ["rank 0", "rank 1"]
    assert not any("times" in each for each in timeline.remarks)


def test_a_relay_does_not_know_how_many_there_are() -> None:
    timeline = judged(replace(START, kind="relay"), *arrival(0, 0.0, size=8))
    assert (timeline.expected, timeline.missing) == (-1, ())


# When it was over


def test_what_comes_later_is_no_start_up() -> None:
    events = straggler(4, last=3, late=5.0)
    later = [*wait(0, 500.0, 900.0, "checkpoint", by=1), Stopped(BEGIN + 1000)]
    timeline = judged(*events, *later)
    assert timeline.seconds == pytest.approx(5.02)
    assert timeline.ended == pytest.approx(1000)
    assert all(wait.began < BEGIN + 10 for each in timeline.members for wait in each.waits)
    assert any("1 wait more, the longest of 6 min 40 s" in each for each in timeline.remarks)


def test_waits_one_after_the_other_belong_to_it() -> None:
    events = [*arrival(0, 0.0), *arrival(1, 0.0)]
    for at in range(5):
        events += wait(0, 10.0 * at + 9, 10.0 * at + 10, f"k{at}", by=1)
    assert judged(START, *events).seconds == pytest.approx(50.0)


def test_what_is_missing_in_the_file_is_told() -> None:
    remarks = judged(*arrival(0, 0.0), Lost(BEGIN + 1, 3)).remarks
    assert any("the beginning of this run is not in the file any more" in each for each in remarks)
    assert any("3 events could not be written" in each for each in remarks)
    other = Started(BEGIN, "node-b", 1, "0.1.0", "libuv", "relay")
    assert any("2 machines, whose clocks may differ" in each for each in judged(START, other).remarks)


# Whatever the events


_RANKS = st.integers(0, 5)
_SECONDS = st.floats(0, 100)
_ANY: st.SearchStrategy[list[Event]] = st.one_of(
    st.builds(arrival, _RANKS, _SECONDS, st.sampled_from(["", "a", "b"]), st.integers(-1, 8)),
    st.builds(wait, _RANKS, _SECONDS, st.floats(100, 200), st.sampled_from([key_of(1), "x"]), _RANKS),
    st.builds(wait, _RANKS, _SECONDS, st.floats(100, 200), st.just("y"), gave_up=st.booleans()),
    st.builds(lambda *args: [open_wait(*args)], _RANKS, _SECONDS, st.sampled_from([key_of(2), "z"])),
    st.builds(lambda time, rank: [Left(BEGIN + time, client_of(rank))], _SECONDS, _RANKS),
    st.builds(lambda time, rank: [Connected(BEGIN + time, client_of(rank), f"x:{rank}")], _SECONDS, _RANKS),
)


@settings(deadline=None)
@given(parts=st.lists(_ANY, max_size=25))
def test_whatever_happens_the_figures_fit_together(parts: list[list[Event]]) -> None:
    timeline = judged(START, *[event for part in parts for event in part])
    assert len(set(_names(timeline))) == len(timeline.members)
    assert {each.rank for each in timeline.missing}.isdisjoint(each.rank for each in timeline.present)
    assert min((each.came for each in timeline.present if each.came is not None), default=0.0) == 0.0
    for each in timeline.present:
        assert each.came is not None
        assert 0.0 <= each.came <= each.late <= timeline.seconds + 1e-6
        assert 0.0 <= each.waited <= timeline.seconds + 1e-6
        assert each.came <= each.ready <= timeline.seconds + 1e-6
    if timeline.straggling is not None:
        assert 0.0 <= timeline.straggling.waited <= timeline.straggling.waiters * timeline.seconds + 1e-6
        assert timeline.straggling.members[0].late == max(each.late for each in timeline.members)
    late = [(each.came is not None, -each.late) for each in timeline.members]
    assert late == sorted(late)


# In words


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
    events = [PLAN, *arrival(0, 0.0), *arrival(1, 0.1), open_wait(0, 0.5, key_of(2)), Stopped(BEGIN + 50)]
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
