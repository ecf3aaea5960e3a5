"""What a browser is shown, and how one picture becomes the next."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.frames import Frame
from rallypoint.launch.stacks.activity import Child, MachineActivity, ProcessFacts, RankActivity, pack
from rallypoint.store.rollcall.identity import Source
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.roll import RankState, Standing
from rallypoint.store.rollcall.snapshot import Mishap, Relay, Snapshot
from rallypoint.watch.web.metrics import encode
from rallypoint.watch.web.picture import (
    MOST_ERRORS,
    MOST_GROUPS,
    MOST_RANGES,
    MOST_SLOW,
    MOST_STALL,
    MOST_THREADS,
    MOST_WAITS,
    Json,
    ReportReader,
    details,
    picture,
    ranges,
    runs,
)
from rallypoint.watch.web.poller import difference, settle
from web_stores import NOW, ScriptedStore, job, telling

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


def shown(snapshot: Snapshot, reader: ReportReader | None = None) -> Json:
    return picture(snapshot, judge(snapshot), (reader or ReportReader()).read(snapshot))


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


@given(st.none() | moments, moments)
def test_a_moment_stays_unless_it_is_another(old: float | None, new: float) -> None:
    settled = settle({"x": {} if old is None else {"since": old}}, {"x": {"since": new}})
    assert settled["x"]["since"] == (new if old is None or abs(new - old) >= 1 else old)


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


# What ranks do

WAITING_JOB = job(EIGHT, late=[7], waits={0: ("key", 41.0)}, barrier=("step", [1]))
TORCH = "/opt/env/lib/python3.11/site-packages/torch"
WAITING = (
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"),
    Frame("/home/me/train.py", 41, "train"),
)
LOADING = (Frame("/home/me/data.py", 88, "load_batch"), Frame("/home/me/train.py", 33, "train"))
STILL = 252.0


def waiting(rank: int, rate: float = 2.0) -> RankActivity:
    facts = ProcessFacts("sleeps", "futex()", 3_000_000_000, cores=0.1)
    steps = {"step": 1204, "steps_per_second": rate, "step_seconds": STILL}
    return RankActivity(rank, 100 + rank, WAITING, STILL, facts=facts, **steps)  # type: ignore[arg-type]


ODD = RankActivity(
    2,
    102,
    LOADING,
    300.0,
    step=1203,
    steps_per_second=0.5,
    step_seconds=301.0,
    facts=ProcessFacts("sleeps", "read() of /mnt/shard-17.tar", 10, 2048, 0.0, "GPU 2 at 0 %"),
    threads=(LOADING[:1],) * (MOST_THREADS + 3),
    children=(Child(7, LOADING, ProcessFacts("is stopped", "read() of a pipe")),),
)
MACHINES = (
    MachineActivity("node-a", (waiting(0), waiting(1), ODD, waiting(3))),
    MachineActivity("node-b", tuple(map(waiting, range(4, 8)))),
)
STALLED = telling(replace(job(EIGHT), stall="7 of 8 ranks wait\n  rank 2 is elsewhere\n"), *MACHINES)


def test_the_odd_rank_comes_first_with_its_line_and_since_when() -> None:
    told = shown(STALLED)
    assert told["stall"] == "7 of 8 ranks wait\n  rank 2 is elsewhere"
    work = told["work"]
    assert (work["size"], work["count"]) == (8, 2)
    odd, main = work["groups"]["2"], work["groups"]["0"]
    assert (odd["place"], odd["main"], main["place"], main["main"]) == (0, False, 1, True)
    assert (odd["who"], odd["count"], odd["rank"]) == ("rank 2 on node-a", 1, 2)
    assert odd["where"] == "load_batch (data.py:88) <- train (train.py:33)"
    assert odd["since"] == NOW - 302, "the launcher said it two seconds ago"
    assert odd["system"] == "read() of /mnt/shard-17.tar, 2.00 KiB swapped out, GPU 2 at 0 %"
    assert odd["family"][-1].startswith("its process 7: load_batch (data.py:88)")
    assert (main["count"], main["waits"], main["steps"]) == (7, True, [1204, 1204])
    assert main["where"] == "all_reduce <- train (train.py:41)"


def test_one_that_moves_has_no_age_and_one_that_has_ended_is_said_to() -> None:
    moves = replace(ODD, still_seconds=0.0, silent_seconds=8.0)
    ended = replace(ODD, rank=3, ended="its process is gone")
    machine = MachineActivity("node-a", (waiting(0), waiting(1), moves, ended))
    groups = shown(telling(job(EIGHT), machine))["work"]["groups"]
    assert "since" not in groups["2"]
    assert groups["2"]["silent"] == {"since": NOW - 10}
    assert (groups["3"]["place"], groups["3"]["ended"]) == (0, "its process is gone")
    assert not {"since", "silent"} & set(groups["3"])


def test_the_slowest_come_first_beside_the_median() -> None:
    steps = shown(STALLED)["steps"]
    assert (steps["count"], steps["median"]) == (8, 2.0)
    assert next(iter(steps["ranks"].items())) == (
        "2",
        {"rate": 0.5, "host": "node-a", "step": 1203, "since": NOW - 303},
    )
    ranks = tuple(waiting(rank, rate=2.0 + rank / 1000) for rank in range(100))
    steps = shown(telling(job({"node-a": 100}), MachineActivity("node-a", ranks)))["steps"]
    assert list(steps["ranks"]) == [str(rank) for rank in range(MOST_SLOW)], "equally fast, for all one sees"
    assert steps["count"] == 100


def test_all_that_is_told_of_one_rank() -> None:
    roll, told = judge(STALLED), ReportReader().read(STALLED)
    standing = roll.standing(2)
    assert standing is not None
    doing = details(standing, STALLED, told.ranks.get(2))["doing"]
    assert (doing["host"], doing["pid"], doing["step"], doing["rate"]) == ("node-a", 102, 1203, 0.5)
    assert doing["stack"][0] == {"function": "load_batch", "at": "/home/me/data.py:88", "own": True}
    assert (doing["still_since"], doing["told_since"]) == (NOW - 302, NOW - 2)
    assert "silent_since" not in doing
    assert (len(doing["threads"]), doing["more_threads"]) == (MOST_THREADS, 3)
    assert doing["children"][0]["call"] == "read() of a pipe"
    assert json.loads(json.dumps(doing)) == doing
    waits = details(standing, STALLED, told.ranks.get(0))["doing"]
    assert [each["own"] for each in waits["stack"]] == [False, True]
    assert "doing" not in details(standing, STALLED, None)


def test_where_no_launcher_tells_there_is_nothing() -> None:
    for snapshot in (
        job(EIGHT),
        telling(job(EIGHT), *MACHINES, seconds=100.0),
        replace(STALLED, clients=tuple(replace(each, told=each.told[5:]) for each in STALLED.clients)),
    ):
        told = shown(snapshot)
        assert told["work"] == {"size": 0, "count": 0, "groups": {}}
        assert told["steps"] == {"count": 0, "median": 0.0, "ranks": {}}


def test_a_launcher_that_has_connected_anew_tells_once() -> None:
    old = telling(job(EIGHT), *MACHINES, seconds=12.0).clients[8:]
    twice = replace(STALLED, clients=(*STALLED.clients, *old))
    assert shown(twice)["work"] == shown(STALLED)["work"]
    assert ReportReader().read(twice).ranks[0].seconds == 2.0


@pytest.mark.parametrize("told", [STALLED, WAITING_JOB], ids=["by launchers", "by clients"])
def test_a_second_later_only_the_clock_has_changed(told: Snapshot) -> None:
    store, reader = ScriptedStore(told), ReportReader()
    before, after = (shown(store.look(Question()), reader) for _ in range(2))
    assert difference(before, settle(before, after)) == {"time": before["time"] + 1}


def test_names_are_text_and_bounded() -> None:
    evil = Frame("/x/\x1b[31m<b>.py", 1, "<img src=x>\x07\n" * 20)
    odd = replace(ODD, stack=(evil,) * 100, facts=ProcessFacts("\x1b", "read() of /tmp/\x1b]0;x\x07"))
    snapshot = telling(job(EIGHT), MachineActivity("\x1b[2J", (waiting(0), waiting(1), odd)))
    told = ReportReader().read(snapshot)
    standing = judge(snapshot).standing(2)
    assert standing is not None
    for content in (
        shown(snapshot)["work"],
        shown(snapshot)["steps"],
        details(standing, snapshot, told.ranks[2]),
    ):
        for text in texts_in(content):
            assert text.isprintable(), text
            assert len(text) < 1200
    assert len(shown(replace(snapshot, stall="x" * 99_999))["stall"]) == MOST_STALL


def texts_in(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return [text for each in inner for text in texts_in(each)]


def test_nothing_of_a_stack_is_in_the_metrics() -> None:
    told = encode((STALLED, judge(STALLED)))[0].decode()
    for name in ("load_batch", "data.py", "train", "shard", "elsewhere", "all_reduce"):
        assert name not in told


PLACES = 200


def busy(number: int, host: str, later: int = 0) -> MachineActivity:
    """A machine of the largest job, in full work: its ranks are at many places, each at its own step."""

    def rank_at(rank: int) -> RankActivity:
        place = (rank * 7919 + later) % PLACES
        stack = (*WAITING[:1], Frame("/home/me/train.py", 100 + place, f"part_{place}"), *LOADING[1:])
        busy = waiting(rank, rate=2.0 + (rank + later) % 9 / 100)
        return replace(busy, stack=stack, still_seconds=0.0, step=rank % 3 + later)

    return MachineActivity(host, tuple(rank_at(8 * number + local) for local in range(8)))


@pytest.mark.slow
def test_the_largest_job_is_small_and_made_quickly() -> None:
    reader = ReportReader()
    snapshot = telling(job(LARGEST), *(busy(*each) for each in enumerate(LARGEST)))
    roll = judge(snapshot)
    before = picture(snapshot, roll, reader.read(snapshot))
    assert before["work"]["count"] == PLACES
    assert len(before["work"]["groups"]) == MOST_GROUPS
    assert size_of(before) < 250_000
    # A second later: a tenth of the launchers have told something new.
    clients = list(snapshot.clients)
    for number, host in list(enumerate(LARGEST))[::10]:
        at = 8 * len(LARGEST) + number
        clients[at] = replace(clients[at], told=pack(busy(number, host, later=10)), told_seconds=0.0)
    again = replace(snapshot, clients=tuple(clients), time=NOW + 1)
    began = time.process_time()
    after = picture(again, roll, reader.read(again))
    assert time.process_time() - began < 2.0
    assert size_of(difference(before, settle(before, after))) < 25_000
