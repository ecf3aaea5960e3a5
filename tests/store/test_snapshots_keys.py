"""What a server tells of what it stores: keys, who has written them, and what keys tell of the job."""

from __future__ import annotations

from typing import Any

import pytest

from ends import Desk, Played, pop_called, wait_in_turn
from rallypoint.store.core import store as stores
from rallypoint.store.core.store import Core
from rallypoint.store.rollcall.identity import Identity, Role
from rallypoint.store.rollcall.plan import Plan, PlannedMachine
from rallypoint.store.rollcall.question import PLAN, STALL, STALL_BYTES, Question
from rallypoint.store.rollcall.snapshot import Key, Snapshot, Value
from rallypoint.store.wire.encoding import counted_request, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from rolls import GLOO, rank
from test_core import add, get, pop, push, set_, wait
from test_snapshots import finish, hello, seen_by, told

pytestmark = pytest.mark.windows


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def desk(core: Core) -> Desk:
    return Desk(core)


def multi_set(*keys: bytes) -> bytes:
    return counted_request(Op.MULTI_SET, [part for key in keys for part in (key, b"")], blobs_each=2)


def keys_of(desk: Desk, **asked: Any) -> list[Key]:
    return list(seen_by(desk.front, Question(**{"keys": 10_000, **asked})).keys)


def writers_of(desk: Desk) -> dict[str, int]:
    return {each.key: each.writer for each in keys_of(desk)}


# What is asked for


def test_keys_are_told_only_if_they_are_asked_for(desk: Desk) -> None:
    (client,) = desk.open()
    client.send(set_(b"/a", b"1") + set_(b"/b", b"22") + push(b"/q", b"333") + push(b"/q", b"4"))
    snapshot = seen_by(desk.front)
    assert (snapshot.keys, snapshot.value) == ((), None)
    assert (snapshot.key_count, snapshot.queue_count, snapshot.keys_found) == (2, 1, 3)
    assert snapshot.stored_bytes == 6 + 3 + 4
    names = [Key("a", 1, 0, 1, "client 0"), Key("b", 2, 0, 1, "client 0"), Key("q", 4, 2, 1, "client 0")]
    assert keys_of(desk) == names
    assert keys_of(desk, keys=2) == names[:2]


def test_a_very_long_queue_is_not_added_up(desk: Desk) -> None:
    (client,) = desk.open()
    client.send(push(b"/q", b"xy") * 10_000)
    assert [(each.size, each.queued) for each in keys_of(desk)] == [(20_000, 10_000)]
    client.send(push(b"/q", b"xy"))
    assert [(each.size, each.queued) for each in keys_of(desk)] == [(-1, 10_001)]


def test_keys_are_searched_for(desk: Desk) -> None:
    (client,) = desk.open()
    client.send(set_(b"/apple") + set_(b"/pear") + push(b"/grape") + set_(b"no/app") + set_(b"\xff"))
    for search, found in {"app": ["apple", "no/app"], "ap": ["apple", "no/app", "grape"], "x": []}.items():
        snapshot = seen_by(desk.front, Question(keys=10, search=search))
        assert [each.key for each in snapshot.keys] == found
        assert snapshot.keys_found == len(found)
    assert [each.key for each in keys_of(desk, search="\udcff")] == ["\udcff"]


@pytest.mark.parametrize(
    ("name", "most", "value"),
    [
        ("k", 4096, Value("k", 5, "76616c7565")),
        ("k", 2, Value("k", 5, "7661")),
        ("k", 0, Value("k", 5, "")),
        ("bare", 4096, Value("bare", 1, "31")),
        ("\udcff", 4096, Value("\udcff", 1, "32")),
        ("grown", 4096, Value("grown", 2, "6162")),
        ("q", 4096, None),
        ("missing", 4096, None),
    ],
)
def test_one_value_is_told_as_far_as_it_is_asked_for(
    desk: Desk, name: str, most: int, value: Value | None
) -> None:
    (client,) = desk.open()
    client.send(set_(b"/k", b"value") + set_(b"bare", b"1") + set_(b"/\xff", b"2") + push(b"/q", b"3"))
    client.send(set_(b"/grown", b"a") + request(Op.APPEND, b"/grown", b"b"))
    assert seen_by(desk.front, Question(value=name, value_bytes=most)).value == value


def test_keys_may_go_while_they_are_looked_at() -> None:
    """However far the look is by then: those are told that were there still."""
    counts = [_told_before_all_go(steps) for steps in range(40)]
    assert counts == sorted(counts)
    assert set(counts) == set(range(11))


def _told_before_all_go(steps: int) -> int:
    desk = Desk(Core())
    (client,) = desk.open()
    client.send(b"".join(set_(b"/%d" % number, b"v") for number in range(10)))
    found: list[bytes] = []
    desk.front.snapshots.start(Question(keys=100), found.append)
    for _ in range(steps):
        next(desk.front.snapshots._under_way[0].steps, None)
        desk.front.processes_found()
    client.send(b"".join(request(Op.DELETE_KEY, b"/%d" % number) for number in range(10)))
    finish(desk.front)
    keys = Snapshot.from_json(found[0]).keys
    assert {each.size for each in keys} <= {1}
    return len(keys)


# Who has written a key last


ALL_BUT_ONE = ["set", "add", "append", "two", "compare"]
FIRST = set_(b"/set") + add(b"/add", 1) + request(Op.APPEND, b"/append", b"x") + multi_set(b"/one", b"/two")
FIRST += request(Op.COMPARE_SET, b"/compare", b"", b"v")
SECOND = set_(b"/set") + add(b"/add", 1) + request(Op.APPEND, b"/append", b"x") + multi_set(b"/two")
SECOND += request(Op.COMPARE_SET, b"/compare", b"v", b"w")
READS = get(b"/k") + add(b"/k", 0) + wait(b"/k") + counted_request(Op.MULTI_GET, [b"/k"])
READS += counted_request(Op.CHECK, [b"/k"]) + request(Op.DELETE_KEY, b"/other")
DELETES = request(Op.DELETE_KEY, b"/k") + add(b"/k", 0)
"""The key is there afterwards, because it was read."""


@pytest.mark.parametrize(
    ("sent", "writers"),
    [
        ([FIRST], dict.fromkeys([*ALL_BUT_ONE, "one"], 1)),
        ([FIRST, SECOND], {**dict.fromkeys(ALL_BUT_ONE, 2), "one": 1}),
        ([set_(b"/k", b"1"), READS], {"k": 1}),
        ([set_(b"/k"), DELETES], {"k": 0}),
        ([set_(b"/k"), DELETES + add(b"/k", 1)], {"k": 2}),
        ([push(b"/q"), push(b"/q"), pop(b"/q")], {"q": 2}),
    ],
    ids=["the first", "the last", "who reads", "who deletes", "who counts on", "the last to push"],
)
def test_the_last_writer_of_a_key_is_told(desk: Desk, sent: list[bytes], writers: dict[str, int]) -> None:
    """What two clients send, in turn."""
    for client, each in zip(desk.open(2) * 2, sent, strict=False):
        client.send(each)
    assert writers_of(desk) == writers


@pytest.mark.parametrize("value", [b"v", b"value", b""])
def test_a_comparison_that_fails_writes_nothing(core: Core, desk: Desk, value: bytes) -> None:
    first, second = desk.open(2)
    first.send(set_(b"/k", value))
    second.send(request(Op.COMPARE_SET, b"/k", b"other", b"desired"))
    second.send(request(Op.COMPARE_SET, b"/k", b"other", value))  # it is so already, but not because of that
    second.send(request(Op.COMPARE_SET, b"/new", b"other", b"other"))
    assert writers_of(desk) == {"k": 1}
    assert core.writers == {b"/k": 1}
    second.send(request(Op.COMPARE_SET, b"/k", value, value))
    assert writers_of(desk) == {"k": 2}


def test_a_write_that_is_refused_writes_nothing() -> None:
    desk = Desk(Core(Limits(stored_bytes=50)))
    first, *others = desk.open(4)
    first.send(set_(b"/k", b"word"))
    long = b"x" * 50
    sent = [set_(b"/k", long), add(b"/k", 1), counted_request(Op.MULTI_SET, [b"/k", long], blobs_each=2)]
    for other, each in zip(others, sent, strict=True):
        other.send(each)
        assert other.error is not None
    assert writers_of(desk) == {"k": 1}


def test_values_and_queues_of_one_name_have_writers_of_their_own(desk: Desk) -> None:
    first, second = desk.open(2)
    first.send(set_(b"/k") + push(b"/q"))
    second.send(push(b"/k") + set_(b"/q"))
    assert [(each.key, each.queued, each.writer) for each in keys_of(desk)] == [
        ("k", 0, 1),
        ("q", 0, 2),
        ("q", 1, 1),
        ("k", 1, 2),
    ]
    first.send(request(Op.DELETE_KEY, b"/k") + pop(b"/q"))
    assert [(each.key, each.queued, each.writer) for each in keys_of(desk)] == [("q", 0, 2), ("k", 1, 2)]


def test_what_a_relay_writes_is_the_relays(desk: Desk) -> None:
    first, second = Played(desk), Played(desk, bytes(16))
    (client,) = desk.open()
    client.send(set_(b"/c"))
    first.send(set_(b"/a"), multi_set(b"/m"), add(b"/n", 1), push(b"/q"), told(b"{}"))
    second.send(set_(b"/b"), request(Op.COMPARE_SET, b"/a", b"", b"v"), told(b"{}"))
    first.send(get(b"/a"), wait_in_turn(b"/q"), pop_called(b"/q", 5))
    assert writers_of(desk) == {"c": 3, "a": 2, "m": 1, "n": 1, "b": 2}
    assert {each.key: each.writer_is for each in keys_of(desk)}["a"] == "the relay client 1"


def test_writers_are_told_by_the_best_that_is_known(core: Core, desk: Desk) -> None:
    ends = desk.open(5)
    for number, end in enumerate(ends):
        end.send(set_(b"/%d" % number))
    ends[1].send(hello(rank(7)))
    ends[2].send(hello(Identity("node-b", 12, role=Role.AGENT)))
    ends[3].send(hello(rank(8)))
    ends[3].close()
    ends[4].close()
    found = {each.key: (each.writer, each.writer_is) for each in keys_of(desk)}
    assert found == {
        "0": (1, "client 0"),
        "1": (2, "rank 7"),
        "2": (3, "process 12 on node-b"),
        "3": (4, "rank 8"),
        "4": (5, ""),
    }


def test_writers_are_not_kept_without_end(core: Core, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_MOST_WRITERS", 3)
    (client,) = desk.open()
    client.send(multi_set(b"/a", b"/b", b"/c") + push(b"/q"))
    core.end_second()
    assert set(writers_of(desk).values()) == {1}
    client.send(set_(b"/d"))
    core.end_second()
    assert writers_of(desk) == {"a": 0, "b": 0, "c": 0, "d": 0, "q": 1}
    client.send(push(b"/1") + push(b"/2") + push(b"/3"))
    core.end_second()
    assert set(writers_of(desk).values()) == {0}


# What keys tell of the job


def test_ranks_are_told_by_the_keys_that_only_they_write(desk: Desk) -> None:
    first, second, third = desk.open(3)
    first.send(set_(b"/" + GLOO.format(0).encode()) + set_(b"/default_pg/0//cpu//1/0"))
    second.send(
        set_(b"/attempt_0/" + GLOO.format(3).encode()) + set_(b"/attempt_1/" + GLOO.format(3).encode())
    )
    third.send(set_(b"/" + GLOO.format(2).encode()) + set_(b"/default_pg/0//1//cpu//0/9"))
    third.close()
    assert seen_by(desk.front).group_writers == ((0, 1), (3, 2), (2, 3))


def test_what_only_looks_like_a_ranks_key_tells_nothing(desk: Desk) -> None:
    (client,) = desk.open()
    for key in (b"/default_pg/0//cpu//", b"/default_pg/0//cpu//0/x", b"/default_pg/0//cpu//0/3/more", b"/k"):
        client.send(set_(key))
    client.send(push(b"/" + GLOO.format(5).encode()))
    assert seen_by(desk.front).group_writers == ()


def test_workers_plan_stall_and_rosters_are_told(desk: Desk) -> None:
    (client,) = desk.open()
    plan = Plan(2, (PlannedMachine("node-a", 0, 4),)).to_json()
    client.send(add(b"init/", 3) + set_(b"/" + PLAN.encode(), plan.encode()))
    meeting = b"/rallypoint/meeting/job/7/"
    client.send(
        set_(meeting + b"roster", b'{"names":"names/a/3"}') + set_(meeting + b"names/a/3", b'{"who":1}')
    )
    client.send(set_(b"/rallypoint/meeting/roster", b"") + set_(meeting + b"names/a/2", b'{"who":0}'))
    client.send(set_(b"/" + STALL.encode(), b"\xff" + b"x" * STALL_BYTES))
    snapshot = seen_by(desk.front)
    assert (snapshot.workers, snapshot.plan) == (3, plan)
    assert snapshot.stall == "\ufffd" + "x" * (STALL_BYTES - 1)
    assert snapshot.rosters == (("job/7", '{"who":1}'), ("", ""))


@pytest.mark.parametrize("value", [b"", b"-1", b"x", b"1" * 30, b"\xff", b" 1"])
def test_a_number_of_workers_that_is_none_is_not_known(desk: Desk, value: bytes) -> None:
    (client,) = desk.open()
    client.send(set_(b"init/", value))
    assert seen_by(desk.front).workers == 0


def test_rosters_are_bounded(desk: Desk) -> None:
    (client,) = desk.open()
    client.send(b"".join(set_(b"/rallypoint/meeting/%d/roster" % number) for number in range(20)))
    assert len(seen_by(desk.front).rosters) == 16
