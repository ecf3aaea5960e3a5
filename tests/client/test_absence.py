"""Time-outs that name names: what they say, who asks for it, and that nobody waits longer for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processes import relaying, serving
from rallypoint.client import inquiry, snapshots
from rallypoint.client.inquiry import ASKERS, Inquiry, is_asker
from rallypoint.client.snapshots import HEAD, NOT_KNOWN, absent_at_barrier, absent_for_keys, absent_workers
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import StoreTimeoutError
from rallypoint.store.connect.connecting import connect
from rallypoint.store.connect.connection import RELAY_VARIABLE, STORE_VARIABLE, Connection, ConnectionPool
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import NOBODY, Identity, Role
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.question import PLAN
from rallypoint.store.rollcall.roll import Roll
from rallypoint.store.rollcall.snapshot import Barrier
from rallypoint.store.wire.encoding import pack_i64, request
from rallypoint.store.wire.opcodes import Op
from rolls import GLOO, client, part, plan, rank, ranks, relay, snapshot, wait
from threads import serving_in_a_thread

pytestmark = pytest.mark.windows

SECONDS = 30.0
TWO_MACHINES = plan(("node-a", 2), ("node-b", 2))


# What a roll says


def test_of_a_rank_that_is_here_it_is_said_what_it_owes() -> None:
    key = GLOO.format(3)
    here = (*ranks([1, 2, 3], "node-a"), client(9, rank(0, "node-a"), wait(key)))
    told = absent_for_keys(judge(snapshot(clients=here, plan=TWO_MACHINES)), [key])
    assert told.text == "all 4 ranks joined; rank 3 on node-a should write it: it is here"
    assert told.ranks == ()
    # Of one that is missing, it is not said twice.
    here = (*ranks([1, 2], "node-a"), client(9, rank(0, "node-a"), wait(key)))
    told = absent_for_keys(judge(snapshot(clients=here, plan=TWO_MACHINES)), [key])
    assert told.text == "3 of 4 ranks joined; missing: 3 on node-b"


def test_where_nobody_knows_who_is_expected_nothing_is_said() -> None:
    roll = judge(snapshot(clients=(client(1), client(2))))
    assert (
        absent_for_keys(roll, ["key"])
        == absent_workers(roll, 2)
        == absent_for_keys(None, ["key"])
        == NOT_KNOWN
    )


def at_barrier(*arrived: int, joined: int = 3, strangers: int = 0, size: int = 4) -> Roll:
    """A barrier at which ranks and strangers have arrived."""
    unknown = [client(90 + number) for number in range(strangers)]
    members = tuple(
        (number, 5.0) for number in (*(each + 1 for each in arrived), *(each.id for each in unknown))
    )
    return judge(
        snapshot(
            clients=(*ranks(range(joined), "node-a"), *unknown),
            barriers=(Barrier("meet", size, len(members), members),),
            plan=TWO_MACHINES,
        )
    )


def test_who_has_not_come_to_a_barrier_is_named() -> None:
    told = absent_at_barrier(at_barrier(0, 1, 2), "meet", 4)
    assert (told.text, told.ranks) == ("3 of 4 have arrived; missing there: 3 on node-b", (3,))
    told = absent_at_barrier(at_barrier(0, 1, 2, joined=4), "meet", 4)
    assert told.text == "3 of 4 have arrived; missing there: 3 on node-a; all 4 ranks joined"
    assert told.ranks == (3,)
    told = absent_at_barrier(at_barrier(0, 1), "meet", 4)
    missing = "missing there: 2 on node-a; 3 on node-b; 3 of 4 ranks joined; missing: 3 on node-b"
    assert told.text == f"2 of 4 have arrived; {missing}"
    assert told.ranks == (2, 3)


def test_where_strangers_have_come_to_a_barrier_nobody_is_named_who_may_be_there() -> None:
    told = absent_at_barrier(at_barrier(0, 1, strangers=1, joined=2), "meet", 4)
    assert told.text.startswith("3 of 4 have arrived; 2 of 4 ranks joined, and 1 client whose rank is not")
    assert "missing" not in told.text
    assert told.ranks == ()


def test_a_relay_that_is_silent_is_named_where_no_rank_is_known_to_be_missing() -> None:
    """It was killed or cut off in the midst of a job: its ranks have joined, and are heard of no more."""
    behind = part("node-b", clients=ranks([2, 3], "node-b"))
    here = snapshot(
        clients=ranks([0, 1], "node-a"),
        relays=(relay(7, behind, present=False, part_seconds=14.0),),
        barriers=(Barrier("meet", 4, 2, ((1, 5.0), (2, 5.0))),),
        plan=TWO_MACHINES,
    )
    silence = "the relay at 10.0.1.7:4000 on node-b has lost its connection, and told of its clients 14 s ago"
    told = absent_at_barrier(judge(here), "meet", 4)
    assert told.text.startswith(f"2 of 4 have arrived; all 4 ranks joined; {silence}")
    assert silence in absent_for_keys(judge(here), ["key"]).text


@pytest.mark.parametrize(("key", "size"), [("other", 4), ("meet", 3)])
def test_of_a_barrier_that_is_not_there_it_is_said_who_has_joined(key: str, size: int) -> None:
    told = absent_at_barrier(at_barrier(0, 1), key, size)
    assert told.text == "3 of 4 ranks joined; missing: 3 on node-b"
    assert absent_at_barrier(None, key, size) == NOT_KNOWN


def test_workers_are_only_named_if_they_are_the_ranks_of_the_job() -> None:
    roll = judge(snapshot(clients=ranks(range(3), "node-a"), plan=TWO_MACHINES))
    assert absent_workers(roll, 4).text == "missing: 3 on node-b"
    assert absent_workers(roll, 4).ranks == (3,)
    assert absent_workers(roll, 5) == NOT_KNOWN


def test_an_error_keeps_what_it_said() -> None:
    error = StoreTimeoutError("waited", hint="look", keys=("key",))
    named = absent_workers(judge(snapshot(clients=ranks([0]), plan=plan(("a", 2)))), 2).named_in(error)
    assert (named.message, named.hint, named.keys) == ("waited; missing: 1 on a", "look", ("key",))
    assert named.missing == (1,)
    assert NOT_KNOWN.named_in(error) is error
    assert error.missing == ()


# Who asks, and when


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 2000) | st.sampled_from([15, 16, 17, 31, 32, 33, 16_384]))
def test_a_few_ranks_of_any_job_ask(size: int) -> None:
    asking = [number for number in range(size) if is_asker(Identity(rank=number, world_size=size))]
    assert asking[0] == 0
    assert min(size, ASKERS // 2) <= len(asking) <= ASKERS


@pytest.mark.parametrize(
    ("who", "asks"),
    [
        (NOBODY, True),
        (Identity(rank=7), True),
        (Identity(rank=ASKERS), False),
        (Identity(world_size=ASKERS), True),
        (Identity(rank=7, world_size=8), True),
        (Identity(rank=7, world_size=16_384), False),
        (Identity(role=Role.AGENT), False),
        (Identity(role=Role.TOOL), False),
    ],
)
def test_who_asks(who: Identity, asks: bool) -> None:
    assert is_asker(who) is asks


@pytest.mark.parametrize(
    ("seconds", "size", "ahead"), [(300, 8, 2), (8, -1, 2), (4, 8, 1), (0.1, 8, 0.025), (300, 16_384, 6)]
)
def test_it_is_asked_before_the_time_is_over(seconds: float, size: int, ahead: float) -> None:
    pool = ConnectionPool(lambda _: pytest.fail("it connects"))
    inquiry = Inquiry(pool, ("a server", 1), Identity(world_size=size))
    assert inquiry.moment(Deadline(seconds)).seconds == pytest.approx(seconds - ahead, abs=0.1)


# Real stores


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has almost the whole of a short wait to answer, so that a busy machine is no failure."""
    monkeypatch.setattr(inquiry, "_AHEAD_SHARE", 0.9)


@pytest.fixture
def port() -> Iterator[int]:
    """That of a server."""
    with serving_in_a_thread(0) as port:
        yield port


@pytest.fixture
def store(port: int, monkeypatch: pytest.MonkeyPatch, unhurried: None) -> Iterator[TCPStore]:
    """That of rank 0, of a job of two ranks on node-a and two on node-b."""
    with _rank_0(port, monkeypatch) as own:
        own.set(PLAN, TWO_MACHINES)
        yield own


def _rank_0(port: int, monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    return TCPStore("127.0.0.1", port, timeout=1)


Join = Callable[[int, int], Connection]


@pytest.fixture
def join() -> Iterator[Join]:
    """Lets a rank of node-b join."""
    with ExitStack() as stack:

        def join(port: int, number: int) -> Connection:
            who = Identity("node-b", 100 + number, number, number % 2, 4, Role.RANK)
            connection = connect("127.0.0.1", port, Deadline(SECONDS), who)
            return stack.enter_context(closing(connection))

        yield join


def _late(call: Callable[[], object]) -> StoreTimeoutError:
    with pytest.raises(StoreTimeoutError) as caught:
        call()
    return caught.value


def _all_late(*calls: Callable[[], object]) -> list[StoreTimeoutError]:
    """Several at the same time, as each takes its time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(_late, calls))


MISSING = "2 of 4 ranks joined; missing: 1 on node-a; 3 on node-b"


def test_waits_name_who_is_missing(
    store: TCPStore, port: int, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(port, 2)
    with _rank_0(port, monkeypatch) as other:
        first, second = _all_late(lambda: store.get("key"), lambda: other.queue_pop("queue"))
    place = f"the store 127.0.0.1:{port}"
    assert first.message == f"waited 1 s at {place}; 1 of 1 keys are missing: key; {MISSING}"
    assert first.keys == ("key",)
    assert second.message == f"waited 1 s: the queue 'queue' is empty; {MISSING}"
    assert first.missing == second.missing == (1, 3)
    assert store.add("count", 1) == 1


def test_a_barrier_names_who_has_not_come(store: TCPStore, port: int, join: Join) -> None:
    join(port, 2)
    join(port, 3).send(request(Op.BARRIER, b"/meet", tail=pack_i64(4)), Deadline(SECONDS))
    late = _late(lambda: store.barrier("meet", 4))
    there = "2 of 4 have arrived; missing there: 1 on node-a; 2 on node-b"
    assert late.message == (
        f"not all 4 members came to the barrier 'meet' at the store 127.0.0.1:{port} within 1 s; {there}; "
        "3 of 4 ranks joined; missing: 1 on node-a"
    )
    assert late.missing == (1, 2)


def test_a_master_names_the_workers_who_have_not_come(store: TCPStore, port: int, join: Join) -> None:
    join(port, 2)
    with TCPStore("127.0.0.1", port, 4, timeout=1, role=Role.TOOL) as watcher:
        late = _late(lambda: watcher.await_workers(4))
    came = f"1 of 4 workers have come to the store 127.0.0.1:{port} within 1 s"
    assert late.message == f"{came}; missing: 1 on node-a; 3 on node-b"
    assert late.missing == (1, 3)


def test_a_master_names_nobody_if_one_came_since_it_asked(
    store: TCPStore, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_and_count(inquiry: Inquiry, deadline: Deadline) -> Roll | None:
        roll = ask(inquiry, deadline)
        store._add(b"init/", 1)
        return roll

    ask = Inquiry.ask
    monkeypatch.setattr(Inquiry, "ask", ask_and_count)
    late = _late(lambda: store.await_workers(4))
    assert late.message == f"1 of 4 workers have come to the store 127.0.0.1:{port} within 1 s"


def test_launchers_tools_and_polls_do_not_ask(
    store: TCPStore, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(snapshots, "fetch_snapshot", lambda *_: asked.append(True))
    roles = (Role.AGENT, Role.TOOL)
    with ExitStack() as stack:
        agent, tool = (
            stack.enter_context(TCPStore("127.0.0.1", port, timeout=1, role=role)) for role in roles
        )
        _all_late(lambda: agent.wait(["key"]), lambda: tool.wait(["key"]), lambda: store.wait(["key"], 0.5))
    assert not asked
    _late(lambda: store.wait(["key"]))
    assert asked, "the test sees who asks"


def test_who_asks_again_and_again_is_not_always_answered(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inquiry, "_PAUSE_PER_RANK", SECONDS)
    assert _late(lambda: store.wait(["key"])).missing == (1, 2, 3)
    assert _late(lambda: store.wait(["key"])).missing == ()


def test_behind_a_relay_the_store_itself_is_asked(
    port: int, join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unhurried: None
) -> None:
    join(port, 2)
    with (tmp_path / "log").open("w+") as log, relaying(f"127.0.0.1:{port}", log) as relay:
        with _rank_0(relay.port, monkeypatch) as store:
            store.set(PLAN, TWO_MACHINES)
            assert _late(lambda: store.get("key")).missing == (), "a relay does not know who is expected"
            with monkeypatch.context() as launched:
                launched.setenv(RELAY_VARIABLE, relay.address)
                launched.setenv(STORE_VARIABLE, f"127.0.0.1:{port}")
                with _rank_0(port, monkeypatch) as knowing:
                    assert _late(lambda: knowing.get("key")).missing == (1, 3)
            store.set(HEAD, f'["127.0.0.1", {port}]')
        with _rank_0(relay.port, monkeypatch) as store:
            late = _late(lambda: store.get("key"))
            assert late.message.endswith(MISSING)
            assert late.missing == (1, 3)


def test_whoever_writes_nonsense_into_the_store_spoils_no_error(
    monkeypatch: pytest.MonkeyPatch, unhurried: None
) -> None:
    with ExitStack() as stack:
        ports = [stack.enter_context(serving_in_a_thread(1)) for _ in range(2)]
        stores = [stack.enter_context(_rank_0(port, monkeypatch)) for port in ports]
        for store, head in zip(stores, ["{}", '["nowhere.invalid", 1]'], strict=True):
            store.set(PLAN, "no plan")
            store.set(HEAD, head)
        for port, late in zip(
            ports, _all_late(*(partial(store.get, "key") for store in stores)), strict=True
        ):
            assert late.message == f"waited 1 s at the store 127.0.0.1:{port}; 1 of 1 keys are missing: key"
        assert [store.add("count", 1) for store in stores] == [1, 1]


def test_a_server_that_does_not_answer_makes_the_error_no_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unhurried: None
) -> None:
    """No later than for one who does not ask at all, at the same time."""

    def seconds_of(call: Callable[[], object]) -> tuple[StoreTimeoutError, float]:
        began = time.monotonic()
        return _late(call), time.monotonic() - began

    with (tmp_path / "log").open("w+") as log, serving("libuv", log) as server, ExitStack() as stack:
        store = stack.enter_context(_rank_0(server.port, monkeypatch))
        tool = stack.enter_context(TCPStore("127.0.0.1", server.port, timeout=1, role=Role.TOOL))
        psutil.Process(server.process.pid).suspend()
        with ThreadPoolExecutor(2) as pool:
            asks, does_not = pool.map(seconds_of, [lambda: store.get("key"), lambda: tool.get("key")])
    for late, _ in (asks, does_not):
        assert "gave no answer within 1 s" in late.message
    assert asks[1] < does_not[1] + 1


def test_what_comes_while_it_asks_is_not_missed(
    store: TCPStore, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*_: object) -> None:
        with TCPStore("127.0.0.1", port, timeout=SECONDS) as other:
            other.set("key", "value")

    monkeypatch.setattr(snapshots, "fetch_snapshot", look)
    assert store.get("key") == b"value"
