"""What events mean: who took part, who was last, for whom the others waited, and when it was over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.store.rollcall.events import (
    Connected,
    Event,
    Joined,
    Left,
    Lost,
    RoundPlanned,
    Started,
    Stopped,
    Waited,
)
from rallypoint.store.rollcall.identity import Identity, Role
from rallypoint.store.rollcall.plan import Plan, PlannedMachine
from rallypoint.watch.timeline.judgement import Timeline
from rallypoint.watch.timeline.records import WaitEnding
from startups import BEGIN, START, arrival, client_of, judged, key_of, open_wait, straggler, wait

pytestmark = pytest.mark.windows


def _names(timeline: Timeline) -> list[str]:
    return [each.name for each in timeline.members]


def _stragglers(timeline: Timeline) -> list[str]:
    return [each.name for each in timeline.straggling.members] if timeline.straggling else []


# The straggler


def test_who_comes_late_is_the_straggler() -> None:
    timeline = judged(*straggler(8, last=5, late=41.2))
    assert timeline.straggling is not None
    assert _stragglers(timeline) == ["rank 5"]
    assert timeline.straggling.waiters == 7
    assert timeline.straggling.waited == pytest.approx(7 * 41.2, rel=0.01)
    assert timeline.straggling.is_for_them
    first = timeline.members[0]
    assert (first.name, first.host, first.came_late) == ("rank 5", "node-0001", True)
    assert first.came == pytest.approx(41.2)
    assert timeline.origin == BEGIN
    assert timeline.seconds == pytest.approx(41.22)
    assert timeline.is_over


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


def test_who_is_less_than_a_second_late_is_no_straggler() -> None:
    assert judged(*straggler(8, last=5, late=0.9)).straggling is None
    assert judged(*straggler(8, last=5, late=1.1)).straggling is not None


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


def test_who_never_came_is_first_and_on_the_machine_of_the_plan() -> None:
    plan = RoundPlanned(BEGIN - 1, Plan(0, (PlannedMachine("node-a", 0, 2), PlannedMachine("node-b", 2, 2))))
    events: list[Event] = [plan, *arrival(0, 0.0), *arrival(1, 0.1), *arrival(2, 0.2, "node-b")]
    events += [open_wait(rank, 0.5, key_of(3)) for rank in range(3)]
    timeline = judged(START, *events, Stopped(BEGIN + 100))
    assert not timeline.is_over
    assert [(each.name, each.host) for each in timeline.missing] == [("rank 3", "node-b")]
    assert _names(timeline)[0] == "rank 3"
    assert timeline.straggling is not None
    assert timeline.straggling.members == timeline.missing
    assert timeline.straggling.waited == pytest.approx(3 * 99.5)
    assert timeline.straggling.is_for_them
    assert timeline.seconds == pytest.approx(100)
    assert {each.ending for each in timeline.present} == {WaitEnding.OPEN}


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


@pytest.mark.parametrize("role", [Role.TOOL, Role.AGENT])
def test_who_is_no_rank_is_left_out(role: Role) -> None:
    agent: list[Event] = [
        Connected(BEGIN - 900, 50, "x:1"),
        Joined(BEGIN - 900, 50, Identity("node-a", 5, role=role)),
    ]
    timeline = judged(START, *agent, *arrival(0, 0.0))
    assert (_names(timeline), timeline.others, timeline.origin) == (["rank 0"], 1, BEGIN)


def test_who_only_had_a_look_is_left_out() -> None:
    look: list[Event] = [Connected(BEGIN - 900, 50, "x:1"), Left(BEGIN - 899.9, 50)]
    timeline = judged(
        replace(START, time=BEGIN - 1000), *look, Connected(BEGIN, 51, "y:1"), Stopped(BEGIN + 9)
    )
    assert (_names(timeline), timeline.others) == (["y:1"], 1)


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
