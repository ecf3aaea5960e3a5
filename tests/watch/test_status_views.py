"""The lines of `rallypoint status`: one screen, the missing first, and nothing that a terminal obeys."""

from __future__ import annotations

import struct
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.frames import Frame
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.stacks.activity import Child, MachineActivity, ProcessFacts, RankActivity, pack
from rallypoint.store.rollcall.identity import Identity, Role, Source
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.plan import JobRound
from rallypoint.store.rollcall.roll import MachineRanks, RankState, Standing
from rallypoint.store.rollcall.snapshot import Barrier, Gone, Key, Mishap, Operation, Second, Snapshot
from rallypoint.watch.status.report import RollReport, StatusRequest
from rallypoint.watch.status.torch_store import ForeignStore, describe, describe_keys, host_of
from rallypoint.watch.status.views import all_keys, all_waits, one_rank, summary
from rolls import GLOO, big_job, client, part, plan, rank, ranks, relay, snapshot, wait

pytestmark = pytest.mark.windows

TWO_NODES = plan(("node-a", 3), ("node-b", 5))
HELD = wait(GLOO.format(3))
STALLED = snapshot(
    clients=tuple(
        client(number + 1, rank(number, "node-a" if number < 3 else "node-b"), HELD)
        for number in (0, 1, 2, 4, 5, 6)
    ),
    plan=TWO_NODES,
)


def summary_of(told: Snapshot, width: int | None = None) -> list[str]:
    return summary(told, judge(told), width)


def test_the_summary_of_a_job_that_waits_for_two_ranks() -> None:
    told = replace(
        STALLED,
        barriers=(Barrier("epoch", 8, 2, ((1, 3.0), (2, 2.0))),),
        key_count=7,
        queue_count=1,
        stored_bytes=2048,
        workers=6,
        received=1536,
        sent=3072,
        operations=(Operation("GET", 10, 2.0), Operation("SET", 90, 40.0), Operation("PING", 1, 0.0)),
        history=(Second(1.0, 5, 0.0004, 6, 6), Second(2.0, 0, -1.0, 6, 6)),
        errors=(
            Mishap(1.0, "10.0.0.9:1", "first"),
            Mishap(999_988.0, "10.0.0.9:1", "an unknown operation, 200"),
        ),
        error_count=2,
    )
    assert summary_of(told) == [
        "6 of 8 ranks joined; missing: 3 and 7 on node-b; "
        "ranks 0 to 2 and 4 to 6 wait for `default_pg/0//cpu//0/3` for 41 s",
        "",
        "waits     41 s: ranks 0 to 2 and 4 to 6 for `default_pg/0//cpu//0/3`; "
        "rank 3 on node-b should write it: it has not come",
        "          3.0 s: ranks 0 and 1 at the barrier `epoch`",
        "barriers  `epoch`: 2 of 8 arrived, for 3.0 s; missing: 2 to 7",
        "machines  node-b: ranks 3 to 7: 3 waiting, 2 late",
        "          node-a: ranks 0 to 2: 3 waiting",
        "rounds    round 0, 2 of 2 machines; joined: node-a, node-b",
        "store     7 keys, 2.00 KiB, 1 queue; 6 clients; 6 workers counted in",
        "traffic   42/s; p99 400 us; received 1.50 KiB, sent 3.00 KiB; most: SET 40/s, GET 2.00/s",
        "errors    2; the last 12 s ago, 10.0.0.9:1: an unknown operation, 200",
        "server    up 1 min 0 s, last progress 41 s ago; process 4242 on node-a, Rallypoint 0.7.0, libuv",
    ]


def test_what_a_launcher_says_of_a_stall_is_below_as_it_is_but_obeyed_by_no_terminal() -> None:
    text = "rank 3 is in \x1b[2Jtorch.save\n\n  " + "x" * 100 + "\r\nserver    all is well\n"
    told = report(replace(STALLED, stall=text))
    assert told.lines(80) == report(STALLED).lines(80)
    empty, first, second, third, last = told.below
    assert [empty, first, second] == ["", "  rank 3 is in \\x1b[2Jtorch.save", ""]
    assert third == "    " + "x" * 100 + "\\r", "it is not cut"
    assert last == "  server    all is well", "it is not taken for a line of the summary"
    assert report(replace(STALLED, stall="x\n" * 1_000)).below[-1] == "  and 800 more lines"
    assert report(replace(STALLED, stall=" \n")).below == report(STALLED).below == []
    assert replace(told, request=replace(told.request, waits=True)).below == []
    assert told.essence != report(STALLED).essence
    assert told.content()["snapshot"]["stall"] == text


def test_a_round_is_told_with_all_that_went_wrong() -> None:
    hosts = ("node-a", "node-b", "node-c", "node-d")
    roll = replace(
        judge(snapshot()),
        meetings=(
            JobRound("job", 2, 5, hosts, ("node-e",), ("node-f",), ("first", "last"), "it is over", "a:1"),
            JobRound("x", 0, 1, (), most=2),
        ),
    )
    assert [line for line in summary(snapshot(), roll) if "round" in line] == [
        "rounds    job: round 2, 4 of 5 machines; its store: a:1; joined: node-a, node-b, node-c, "
        "and 1 more; waiting: node-e; lost: node-f; closed: it is over; told: last",
        "          x: round 0, 0 of 1 to 2 machines",
    ]


def test_sixteen_thousand_ranks_fit_on_a_screen() -> None:
    job = big_job(16_384, range(5, 16_384, 97))
    troubled = replace(
        job,
        errors=(Mishap(0.0, "10.0.0.9:1", "reason"),) * 9,
        error_count=9,
        relays=tuple(relay(number, None) for number in range(100, 120)),
        barriers=tuple(Barrier(f"b{number}", 16_384, 2, ((1, 9.0), (2, 9.0))) for number in range(30)),
        rosters=tuple(
            (
                f"job {number}",
                '{"round":0,"complete":false,"closed":"","present":[],"members":[],"waiting":[],"lost":[],"told":[]}',
            )
            for number in range(9)
        ),
    )
    roll = judge(troubled)
    for width in (80, 40, 200):
        lines = summary(troubled, roll, width)
        assert len(lines) <= 24
        assert all(len(line) <= width for line in lines)
        assert lines[0].startswith("16,215 of 16,384 ranks joined"[:width])
        assert any(line.strip().startswith("and 2,045 more") for line in lines)


# The whole of one thing


def test_all_waits() -> None:
    assert all_waits(judge(snapshot())) == ["nobody waits"]
    many = tuple(
        client(number, Identity(), wait(f"k{number}", seconds=float(number))) for number in range(1, 41)
    )
    lines = all_waits(judge(snapshot(clients=many)))
    assert len(lines) == 40
    assert lines[0] == "40 s: 1 client for `k40`"


def test_all_keys() -> None:
    assert all_keys(snapshot()) == ["0 keys found"]
    keys = (
        Key("a", 3, 0, 1, "rank 3"),
        Key("queue", 4096, 2),
        Key("long queue", -1, 20_000),
        Key("\x1b[2J", 0, 0, 2, "process 12 on node-a"),
    )
    assert all_keys(snapshot(keys=keys, keys_found=7)) == [
        "         size  last writer           key",
        "          3 B  rank 3                a",
        "4.00 KiB in 2  not known             queue",
        "20,000 queued  not known             long queue",
        "          0 B  process 12 on node-a  \\x1b[2J",
        "and 3 more",
    ]


WAITER = client(1, rank(0, "node-a", local_rank=0), HELD, operations=13, received=634, sent=600)
BROKE = Gone(1, rank(5), 3.0, "it broke the protocol")
BY_KEY = snapshot(relays=(relay(7, part("node-b", clients=(client(1),))),), group_writers=((5, 7),))


@pytest.mark.parametrize(
    ("told", "number", "lines"),
    [
        (
            snapshot(clients=(WAITER,)),
            0,
            [
                "rank 0: here, and waiting for 41 s",
                "machine   node-a, process 100, local rank 0",
                "known     it said so itself",
                "clients   10.0.0.1:4000, connected 50 s ago",
                "traffic   13 operations; received 634 B, sent 600 B, as the store sees it",
                "waits     for `default_pg/0//cpu//0/3`",
            ],
        ),
        (
            STALLED,
            3,
            [
                "rank 3: late: it is expected, and has not come",
                "machine   node-b",
                "owes      `default_pg/0//cpu//0/3`: ranks 0 to 2 and 4 to 6 wait for 41 s",
            ],
        ),
        (
            BY_KEY,
            5,
            [
                "rank 5: here",
                "machine   node-b",
                "known     it wrote a key that only this rank writes",
            ],
        ),
        (snapshot(clients=ranks([5])), 5, ["rank 5: here"]),
        (snapshot(gone=(BROKE,)), 5, ["rank 5: gone 3.0 s ago: it broke the protocol"]),
        (
            snapshot(clients=(client(1), *ranks([0], world_size=6))),
            5,
            ["rank 5: not seen: it is expected, and may be one of the clients whose rank is not known"],
        ),
        (snapshot(), 5, ["rank 5: the store knows nothing of it"]),
    ],
)
def test_what_is_known_of_a_rank(told: Snapshot, number: int, lines: list[str]) -> None:
    found = one_rank(told, judge(told), number)
    assert (found if len(lines) > 1 else found[:1]) == lines


# What it comes to


def report(told: Snapshot, **asked: Any) -> RollReport:
    return RollReport(StatusRequest([Endpoint("localhost", 1)], **asked), told, judge(told))


def test_when_somebody_is_missing() -> None:
    good = {
        "nobody": snapshot(),
        "all": snapshot(clients=ranks([0, 1], world_size=2)),
        "one may be here": snapshot(clients=(*ranks([0], world_size=2), client(9))),
    }
    bad = {
        "one is late": snapshot(clients=ranks([0], world_size=2)),
        "one of two may be here": snapshot(clients=(*ranks([0], world_size=3), client(9))),
        "one has gone": snapshot(gone=(Gone(1, rank(5), 3.0, ""),)),
    }
    assert [name for name, told in (good | bad).items() if report(told).is_good] == list(good)


def test_time_alone_is_no_news() -> None:
    later = replace(
        STALLED,
        seconds=99.0,
        quiet_seconds=99.0,
        clients=tuple(
            replace(each, seconds=99.0, waits=(replace(HELD, seconds=99.0),)) for each in STALLED.clients
        ),
    )
    assert report(STALLED).essence == report(later).essence
    assert report(STALLED).essence != report(replace(STALLED, clients=STALLED.clients[1:])).essence
    assert hash(report(STALLED).essence)


def test_the_report_as_json() -> None:
    content = report(STALLED).content()
    assert content["roll"]["missing"] == [3, 7]
    assert content["roll"]["unseen"] == []
    assert content["roll"]["joined"] == 6
    assert content["roll"]["expected"] == 8
    assert content["roll"]["headline"].startswith("6 of 8 ranks joined; missing: 3 and 7 on node-b")
    assert content["roll"]["ranks"][3]["state"] == "late"
    assert content["roll"]["awaited"][0]["owed_by"] == 3
    assert content["snapshot"]["clients"][0]["who"]["rank"] == 0


# What the ranks do

TRAINING = (Frame("/home/me/train.py", 41, "train"), Frame("/home/me/train.py", 60, "<module>"))
ALL_REDUCE = Frame("/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce")
LOADING = (Frame("/home/me/data.py", 88, "load\x1b[2J"), *TRAINING)
MACHINE = MachineActivity(
    "node-a",
    (
        *(RankActivity(number, 100 + number, (ALL_REDUCE, *TRAINING), 252.0) for number in (0, 1)),
        RankActivity(
            2,
            102,
            LOADING,
            252.0,
            step=7,
            steps_per_second=0.5,
            step_seconds=253.0,
            facts=ProcessFacts("sleeps", "read() of /mnt/shard-17.tar", 2048),
            threads=(TRAINING, (Frame("/usr/lib/python3.11/threading.py", 3, "wait"),)),
            children=(Child(7, LOADING, ProcessFacts("is stopped")),),
        ),
    ),
)
LAUNCHER = replace(
    client(99, Identity("node-a", 5, role=Role.AGENT, source=Source.HELLO)),
    told=pack(MACHINE),
    told_seconds=2.0,
)
TOLD = replace(STALLED, clients=(*STALLED.clients, LAUNCHER))


def test_what_the_ranks_do_is_below_the_summary() -> None:
    told = report(TOLD, stacks=True)
    assert told.lines() == summary_of(TOLD), "who is missing comes before what the others do"
    assert told.below == [
        "",
        "2 of 3 ranks wait in all_reduce (train.py:41), for 4 min 12 s; rank 2 on node-a is elsewhere:",
        "  load\\x1b[2J (data.py:88) <- train (train.py:41), step 7, for 4 min 12 s: "
        "read() of /mnt/shard-17.tar",
        "  another thread of rank 2: train (train.py:41)",
        "  its process 7: load\\x1b[2J (data.py:88) <- train (train.py:41): is stopped",
        "",
        "rank 2 on node-a is in load\\x1b[2J (data.py:88, step 7), for 4 min 12 s",
        "  sleeps, read() of /mnt/shard-17.tar, 2.00 KiB of memory",
        "  load\\x1b[2J  /home/me/data.py:88",
        "  train        /home/me/train.py:41",
        "  <module>     /home/me/train.py:60",
        "",
        "its process 7: is stopped",
        "  load\\x1b[2J  /home/me/data.py:88",
        "  train        /home/me/train.py:41",
        "  <module>     /home/me/train.py:60",
        "",
        "ranks 0 and 1 on node-a wait in all_reduce (train.py:41), for 4 min 12 s; here rank 0",
        f"  all_reduce  {ALL_REDUCE.file}:9",
        "  train       /home/me/train.py:41",
        "  <module>    /home/me/train.py:60",
    ]
    assert report(TOLD).below == []
    [_, line] = report(STALLED, stacks=True).below
    assert line == "what the ranks do is not known: no launcher tells"
    assert report(TOLD, stacks=True).is_good == report(STALLED).is_good


def test_that_the_job_makes_no_progress_comes_first_with_the_odd_rank() -> None:
    launcher = replace(LAUNCHER, told=pack(replace(MACHINE, ranks=MACHINE.ranks[:3])))
    whole = snapshot(clients=(*ranks([0, 1, 2], world_size=3), launcher))
    told = report(whole)
    assert told.lines()[0] == (
        "no progress for 4 min 12 s: rank 2 on node-a is elsewhere: load\\x1b[2J (data.py:88) <- "
        "train (train.py:41); all 3 ranks joined"
    )
    assert told.content()["roll"]["headline"] == told.lines()[0]
    assert report(whole, waits=True).lines() == ["nobody waits"]


def test_what_one_rank_does() -> None:
    told = report(TOLD, rank=2)
    assert told.lines()[len(one_rank(TOLD, judge(TOLD), 2)) :] == [
        "does      load\\x1b[2J (data.py:88) <- train (train.py:41)",
        "          it has not moved for 4 min 12 s",
        "          step 7, 4 min 13 s ago; 0.50/s",
        "system    sleeps",
        "          read() of /mnt/shard-17.tar",
        "          2.00 KiB of memory",
        "stack     load\\x1b[2J  /home/me/data.py:88",
        "          train        /home/me/train.py:41",
        "          <module>     /home/me/train.py:60",
        "",
        "thread 2 of its process:",
        "  train     /home/me/train.py:41",
        "  <module>  /home/me/train.py:60",
        "",
        "thread 3 of its process:",
        "  wait  /usr/lib/python3.11/threading.py:3",
        "",
        "its process 7: is stopped",
        "  load\\x1b[2J  /home/me/data.py:88",
        "  train        /home/me/train.py:41",
        "  <module>     /home/me/train.py:60",
    ]
    assert report(STALLED, rank=2).lines() == one_rank(STALLED, judge(STALLED), 2)


def test_what_ranks_do_as_json() -> None:
    work = report(TOLD, stacks=True).content()["work"]
    assert [(each["ranks"], each["call"], each["is_main"]) for each in work["groups"]] == [
        ([2], "", False),
        ([0, 1], "all_reduce", True),
    ]
    assert work["summary"] == report(TOLD, stacks=True).below[1:5]
    activity = report(TOLD, rank=2).content()["activity"]
    assert activity["stack"][0] == {"file": "/home/me/data.py", "line": 88, "function": "load\x1b[2J"}
    assert report(STALLED, rank=2).content()["activity"] is None
    assert not {"work", "activity"} & set(report(TOLD).content())


def test_only_where_ranks_are_is_news() -> None:
    def essence(of: MachineActivity, **asked: Any) -> Hashable:
        clients = (*STALLED.clients, replace(LAUNCHER, told=pack(of)))
        return report(replace(STALLED, clients=clients), **asked).essence

    later = replace(MACHINE, ranks=tuple(replace(each, still_seconds=260.0) for each in MACHINE.ranks))
    moved = replace(MACHINE, ranks=(replace(MACHINE.ranks[0], stack=TRAINING), *MACHINE.ranks[1:]))
    assert essence(MACHINE, stacks=True) == essence(later, stacks=True) != essence(moved, stacks=True)
    assert essence(MACHINE, rank=2) == essence(moved, rank=2)
    assert essence(MACHINE, rank=0) != essence(moved, rank=0)


# A store of torch's own


FOREIGN = ForeignStore("127.0.0.1:1", 5, ("a", "b\x1b"), 3, {0: "node-a", 1: "node-a", 2: "", 4: "node-b"})


def test_what_torchs_own_store_tells() -> None:
    assert list(describe(FOREIGN)) == [
        "127.0.0.1:1 is a server of torch's own, which does not tell who its clients are",
        "",
        "keys      5",
        "workers   3 counted in; of how many is not known",
        "ranks     0 and 1 on node-a came; who is still here is not known",
        "          2 came; who is still here is not known",
        "          4 on node-b came; who is still here is not known",
        "not told  who is connected, who waits for what, who is missing: torch's protocol does not have it",
        "hint      serve the store with `rallypoint serve`, or start the job with `rallypoint run`",
    ]


def test_of_torchs_own_store_little_is_told_in_few_lines() -> None:
    empty = describe(ForeignStore("127.0.0.1:1", 0, (), None, {}))
    assert [line.split()[0] for line in empty if line] == ["127.0.0.1:1", "keys", "not", "hint"]
    lines = list(describe(replace(FOREIGN, writers={number: f"node-{number}" for number in range(100)})))
    assert len(lines) < 24
    assert "          and those of 92 machines more" in lines
    assert list(describe_keys(FOREIGN, "")) == ["a", "b\\x1b"]
    assert list(describe_keys(FOREIGN, "a")) == ["a"]


def test_the_machine_in_an_address_of_gloo() -> None:
    assert host_of(struct.pack("<Q", 6) + b"node-a" + b"rest") == "node-a"
    for size, rest in ((6, b"node-"), (0, b""), (256, b"x" * 300)):
        assert host_of(struct.pack("<Q", size) + rest) == ""
    assert host_of(b"short") == host_of(b"") == ""


def test_sources_and_states_all_have_words() -> None:
    for source in Source:
        for state in RankState:
            roll = replace(
                judge(snapshot()),
                ranks=(Standing(0, state, source=source),),
                machines=(MachineRanks("", (0,)),),
            )
            assert one_rank(snapshot(), roll, 0)
            assert summary(snapshot(), roll)
