"""What a browser is shown, and how one picture becomes the next."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.store.rollcall.identity import Source
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.roll import RankState, Standing
from rallypoint.store.rollcall.snapshot import Mishap, Relay, Snapshot
from rallypoint.watch.web.picture import (
    MOST_ERRORS,
    MOST_RANGES,
    MOST_WAITS,
    PROBLEM,
    Json,
    ReportReader,
    details,
    picture,
    ranges,
    runs,
    troubled,
)
from rallypoint.watch.web.poller import difference, settle
from web_stores import NOW, ScriptedStore, job

pytestmark = pytest.mark.windows

EIGHT = {"node-a": 4, "node-b": 4}
LARGEST = {f"node-{number:04d}": 8 for number in range(2048)}


def apply(target: Any, patch: Any) -> Any:
    """A merge patch as RFC 7396 defines it; the page has its own, in JavaScript."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = apply(result.get(name), value)
    return result


def shown(snapshot: Snapshot) -> Json:
    return picture(snapshot, judge(snapshot), ReportReader().read(snapshot))


def size_of(content: Json) -> int:
    return len(json.dumps(content, separators=(",", ":")))


# Patches

names = st.sampled_from(["a", "b", "since", "__proto__", "", "7"])
scalars = st.booleans() | st.integers(-3, 3) | st.text(max_size=2)
moments = st.floats(0, 9)
pictures = st.recursive(
    st.dictionaries(names, scalars | st.lists(scalars, max_size=2), max_size=4),
    lambda inner: st.dictionaries(names, scalars | inner, max_size=4),
    max_leaves=12,
)


@given(pictures, pictures)
def test_a_patch_makes_one_picture_of_another(before: Json, after: Json) -> None:
    assert apply(before, difference(before, after)) == after
    assert difference(after, after) == {}
    assert difference({"a": 1}, {"a": True}) == {"a": True}, "though they are equal in Python"


@given(moments, moments)
def test_a_moment_stays_unless_it_is_another(old: float, new: float) -> None:
    settled = settle({"x": {"since": old}}, {"x": {"since": new}})
    assert settled["x"]["since"] == (old if abs(new - old) < 1 else new)


def test_a_moment_that_was_not_there_is_taken_over() -> None:
    after = {"x": {"since": 4.0}, "y": {"since": 5.0}}
    assert settle({"x": {}}, after) == after


# Ranks as text


@given(st.sets(st.integers(0, 60)))
def test_ranges_tell_every_rank(ranks: set[int]) -> None:
    told: list[int] = []
    for each in ranges(sorted(ranks)):
        first, _, last = each.partition("-")
        told += range(int(first), int(last or first) + 1)
    assert told == sorted(ranks)


def test_ranges_and_runs() -> None:
    assert len({state.value[0] for state in RankState}) == len(RankState), "each has a letter of its own"
    assert list(ranges([0, 1, 2, 4, 6, 7])) == ["0-2", "4", "6-7"]
    assert runs([RankState.JOINED] * 3 + [RankState.LATE, RankState.WAITING, RankState.WAITING]) == "j3lw2"


# The picture


def test_ranks_stand_under_their_machines() -> None:
    told = shown(job(EIGHT, late=[7], gone={3: "reset"}, waits={0: ("key", 41.0)}))
    assert told["machines"] == {
        "node-a": {"ranks": "0-3", "states": "wj2g"},
        "node-b": {"ranks": "4-7", "states": "j3l"},
    }
    states = {"joined": 5, "waiting": 1, "late": 1, "unseen": 0, "gone": 1}
    sums = {"expected": 8, "present": 6, "unknown": 0, "complete": False}
    assert told["counts"] == {**states, **sums, "waits": 1, "barriers": 0, "meetings": 1}
    assert told["missing"] == "7 on node-b; gone: 3 on node-a"


def test_waits_and_barriers() -> None:
    told = shown(job(EIGHT, waits={0: ("key", 41.0), 2: ("key", 12.0)}, barrier=("step", [4, 5])))
    wait, barrier = told["waits"]["key"], told["barriers"]["step"]
    assert (wait["ranks"], wait["count"], wait["since"]) == ("0,2", 2, NOW - 41)
    assert told["waits"]["step"]["barrier"] is True
    assert (barrier["arrived"], barrier["size"], barrier["missing"]) == (2, 8, "0-3,6-7")
    told = shown(job(EIGHT, late=[7], gone={3: ""}, waits={0: ("key", 1.0)}, barrier=("step", [1])))
    assert "null" not in json.dumps(told)
    assert json.loads(json.dumps(told)) == told


def test_a_second_later_only_the_clock_has_changed() -> None:
    store = ScriptedStore(job(EIGHT, late=[7], waits={0: ("key", 41.0)}, barrier=("step", [1])))
    before, after = (shown(store.look(Question())) for _ in range(2))
    assert difference(before, settle(before, after)) == {"time": before["time"] + 1}


def test_the_largest_job_is_small_and_one_change_in_it_is_tiny() -> None:
    before = shown(job(LARGEST))
    after = settle(before, shown(job(LARGEST, late=[8000])))
    assert size_of(before) < 200_000
    assert size_of(difference(before["machines"], after["machines"])) < 60
    assert size_of(difference(before, after)) < 2_000


def test_what_a_job_can_make_long_is_cut_and_counted() -> None:
    waits = {rank: (f"key/{rank}", float(rank)) for rank in range(600)}
    snapshot = job({"node-a": 2000}, waits=waits)
    errors = tuple(Mishap(NOW + each, "peer", f"reason {each}") for each in range(90))
    told = shown(replace(snapshot, errors=errors, error_count=200))
    assert len(told["waits"]) == MOST_WAITS
    assert next(iter(told["waits"])) == "key/599"
    assert told["counts"]["waits"] == 600
    assert len(told["errors"]) == MOST_ERRORS
    assert told["errors"][":200"]["reason"] == "reason 89"
    scattered = dict.fromkeys(range(0, 2000, 2), ("key", 1.0))
    told = shown(job({"node-a": 2000}, waits=scattered))
    assert told["waits"]["key"]["count"] == 1000
    assert told["waits"]["key"]["ranks"].count(",") == MOST_RANGES
    assert told["waits"]["key"]["ranks"].endswith(",…")


def test_relays_of_all_levels_are_told_and_their_clients_counted() -> None:
    whole = job({"node-a": 4})
    lowest = replace(job({}), kind="relay", host="node-c", clients=whole.clients[:1], plan="")
    below = (Relay(7, "10.0.0.3:1", 5.0, True, lowest, 0.5),)
    middle = replace(lowest, host="node-b", clients=whole.clients[1:3], relays=below)
    relays = (Relay(2, "10.0.0.2:1", 5.0, True, middle, 60.0), Relay(3, "10.0.0.4:1", 9.0, False, None))
    snapshot = replace(whole, clients=whole.clients[3:], relays=relays)
    told = shown(snapshot)
    assert list(told["relays"]) == ["3", "2", "2/7"]
    assert told["relays"]["2"]["clients"] == 2
    assert "heard" in told["relays"]["2"]
    assert "heard" not in told["relays"]["2/7"]
    assert told["store"]["connections"] == 4
    assert [each for each in told["errors"] if each.startswith("2/7:")]


def test_a_store_that_does_not_answer_leaves_its_last_picture_and_why() -> None:
    before = shown(job(EIGHT))
    first = troubled(before, "cannot reach it", "is it up?", 100.0)
    assert first == {**before, PROBLEM: {"message": "cannot reach it", "hint": "is it up?", "since": 100.0}}
    later = troubled(first, "still not", "", 105.0)[PROBLEM]
    assert later == {"message": "still not", "hint": "", "since": 100.0}


def test_details_of_a_rank() -> None:
    who: dict[str, Any] = {"rank": 3, "host": "node-a", "pid": 77, "local_rank": 3}
    figures: dict[str, Any] = {"operations": 9, "received": 10, "sent": 20}
    standing = Standing(
        **who,
        **figures,
        state=RankState.WAITING,
        source=Source.HELLO,
        seconds=60.0,
        waits=("key",),
        wait_seconds=41.0,
    )
    told = {"state": "waiting", "source": "hello", "waits": ("key",), "why": ""}
    moments = {"since": NOW - 60, "wait_since": NOW - 41}
    assert details(standing, job(EIGHT), None) == {**who, **figures, **told, **moments}
    assert not {"since", "wait_since"} & set(details(Standing(3, RankState.LATE), job(EIGHT), None))
