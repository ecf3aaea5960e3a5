"""What ranks do, as the page has it: who is elsewhere, who is slow, and all that is told of one rank."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from rallypoint.frames import Frame
from rallypoint.launch.stacks.activity import Child, MachineActivity, ProcessFacts, RankActivity, pack
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.watch.web.metrics import encode
from rallypoint.watch.web.picture import (
    MOST_GROUPS,
    MOST_SLOW,
    MOST_STALL,
    MOST_THREADS,
    Json,
    ReportReader,
    details,
    picture,
)
from rallypoint.watch.web.poller import difference, settle
from web_stores import NOW, ScriptedStore, job, telling

pytestmark = pytest.mark.windows

EIGHT = {"node-a": 4, "node-b": 4}
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


def shown(snapshot: Snapshot, reader: ReportReader | None = None) -> Json:
    return picture(snapshot, judge(snapshot), (reader or ReportReader()).read(snapshot))


def size_of(content: Json) -> int:
    return len(json.dumps(content, separators=(",", ":")))


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


def test_a_second_later_only_the_clock_has_changed() -> None:
    store, reader = ScriptedStore(STALLED), ReportReader()
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


LARGEST = {f"node-{number:04d}": 8 for number in range(2048)}
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
