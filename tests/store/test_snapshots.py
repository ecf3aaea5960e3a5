"""What a server tells of itself and of its clients: that it is right, and that any client may ask for it.

Without sockets; the clock is moved by hand. Other modules: `test_snapshots_json`, `test_snapshots_keys` for
what is stored, `test_snapshots_relays`, and `test_snapshots_live` for real servers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ends import Desk, End, Played, arrive, blob, i64
from rallypoint.store.connect.connection import who_am_i
from rallypoint.store.core.context import CoreFault, Other
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.snapshots import SnapshotStep
from rallypoint.store.core.store import Core
from rallypoint.store.core.turn import Turn
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.rollcall.identity import (
    NOBODY,
    Identity,
    Role,
    Source,
    hello_key,
    identity_of,
    parse_hello,
)
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Barrier, Snapshot
from rallypoint.store.wire.encoding import VALIDATE, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from rolls import rank
from test_core import CANCEL_WAIT, barrier, get, set_, wait

pytestmark = pytest.mark.windows

repeatable = settings(derandomize=True, deadline=None, max_examples=100)

identities = st.builds(
    Identity,
    host=st.text(max_size=20),
    pid=st.integers(0, (1 << 32) - 1),
    rank=st.integers(-1, 1 << 20),
    local_rank=st.integers(-1, 64),
    world_size=st.integers(-1, 1 << 20),
    role=st.sampled_from(Role),
    source=st.sampled_from(Source),
)
PING = request(Op.PING, tail=b"ping")


Clock = Turn
"""Stands still unless it is moved."""


def look(question: bytes = b"{}") -> bytes:
    return b"\x30" + blob(question)


def told(report: bytes) -> bytes:
    return b"\x29" + blob(report)


def hello(who: Identity) -> bytes:
    return request(Op.DELETE_KEY, b"/" + hello_key(who).encode())


def finish(front: ServerCore[Any]) -> None:
    """Go on with all looks until they are there; time passes while they wait."""
    while (step := go_on(front)) is not SnapshotStep.DONE:
        if step is SnapshotStep.IDLE:
            front.turn.now += 0.01


def go_on(front: ServerCore[Any]) -> object:
    """One step of a look. No process is found behind any client."""
    step = front.snapshots.step()
    if front.is_finding:
        front.processes_found()
        return SnapshotStep.MORE
    return step


def seen_by(front: ServerCore[Any], question: Question | None = None) -> Snapshot:
    """A snapshot, made at once."""
    found: list[bytes] = []
    front.snapshots.start(question or Question(), found.append)
    finish(front)
    (data,) = found
    return Snapshot.from_json(data)


def faults_in(wanted: list[Other]) -> list[type[Exception]]:
    return [type(each.error) for each in wanted if isinstance(each, CoreFault)]


def taken(end: End) -> Snapshot:
    """What a client has got, which is a snapshot and nothing else."""
    data = end.take()
    assert int.from_bytes(data[:8], "little") == len(data) - 8
    return Snapshot.from_json(data[8:])


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000.0)


@pytest.fixture
def core(clock: Clock) -> Core:
    return Core(turn=clock)


@pytest.fixture
def desk(core: Core) -> Desk:
    return Desk(core)


# Questions


NO_QUESTIONS = (
    *(b"x", b"[]", b"1", b"\xff", b'{"keys":-1}', b'{"keys":true}', b'{"keys":1.0}', b'{"search":1}'),
    *(b'{"value":1}', b'{"value_bytes":"1"}', b"[" * 10_000, b'{"keys":"\\ud800"}'),
)


@pytest.mark.parametrize("make", [Core, lambda: RelayCore(bytes(16))], ids=["server", "relay"])
def test_a_question_that_is_none_ends_the_connection_of_who_asked(
    make: Callable[[], Core | RelayCore],
) -> None:
    for garbage in NO_QUESTIONS:
        first, second = Desk(make()).open(2)
        first.send(look(garbage))
        assert first.error is not None, garbage[:100]
        assert "SNAPSHOT asks what cannot be understood" in first.error.message
        assert second.ask(PING) == b"ping"


def test_a_question_is_bounded(desk: Desk) -> None:
    (client,) = desk.open()
    client.send(look(b" " * 16_385))
    assert client.error is not None
    assert client.error.message == "SNAPSHOT with a question of 16,385 bytes; 16384 are allowed"
    (client,) = desk.open()
    client.send(look(b" " * 16_382 + b"{}"))
    assert client.error is None


def test_a_look_that_fails_is_answered_all_the_same(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours is neither to end the server nor to let anybody wait for ever."""
    first, second = desk.open(2)
    monkeypatch.setattr(Core, "describe", lambda *_: 1 / 0)
    first.send(look())
    finish(desk.front)
    desk.settle()
    assert faults_in(desk.take()) == [ZeroDivisionError]
    monkeypatch.undo()
    second.send(look())
    finish(desk.front)
    desk.settle()
    assert first.take() == blob(b"")
    assert len(taken(second).clients) == 2


# Asking together


def test_who_asks_the_same_before_it_is_begun_shares_it(core: Core) -> None:
    found: dict[str, bytes] = {}

    def ask(name: str, question: Question) -> None:
        core.snapshots.start(question, lambda snapshot: found.update({name: snapshot}))

    core.open("client")
    ask("first", Question())
    ask("second", Question())
    assert core.snapshots.step() is SnapshotStep.IDLE, "the system is asked which process that is"
    ask("third", Question())
    ask("other", Question(keys=1))
    assert len(core.snapshots._under_way) == 2
    core.processes_found()
    while core.snapshots._under_way[0].is_open:
        next(core.snapshots._under_way[0].steps)
    ask("late", Question())
    assert len(core.snapshots._under_way) == 3, "what has begun may have missed what was before it"
    finish(core)
    assert found["first"] is found["second"] is found["third"]
    assert found["late"] is not found["first"]
    assert found["other"] is not found["first"]


def test_what_becomes_of_one_who_shares_a_look_is_nothing_to_the_others(core: Core) -> None:
    got: list[tuple[str, bool]] = []

    def fail(_: bytes) -> None:
        got.append(("failed", True))
        raise RuntimeError("cannot start a thread")

    core.snapshots.start(Question(), lambda snapshot: got.append(("first", bool(snapshot))))
    core.snapshots.start(Question(), fail)
    core.snapshots.start(Question(), lambda snapshot: got.append(("last", bool(snapshot))))
    finish(core)
    assert got == [("first", True), ("failed", True), ("last", True)], "each of them once"
    assert faults_in(core.outbox.take_others()) == [RuntimeError]


# Asking


def test_few_snapshots_are_made_at_a_time(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes room while it is made, and anybody may ask."""
    begun: list[Question] = []
    done: list[bytes] = []
    under_way: list[int] = []

    def describe(_: Core, question: Question) -> Iterator[None]:
        begun.append(question)
        under_way.append(len(begun) - len(done))
        yield from [None] * 50

    monkeypatch.setattr(Core, "describe", describe)
    for number in range(20):
        core.snapshots.start(Question(keys=number), done.append)
    finish(core)
    assert max(under_way) == 4
    assert len(done) == 20
    assert all(done), "none has failed"
    assert {question.keys for question in begun} == set(range(20))


def test_a_look_comes_behind_what_is_asked_while_it_is_made(desk: Desk) -> None:
    (client,) = desk.open()
    assert client.ask(get(b"k") + look() + PING) == blob(b"") + b"ping"
    finish(desk.front)
    assert client.take() == b""
    desk.settle()
    assert taken(client).clients[0].operations == 3
    assert client.ask(look()) == b""


def test_a_wait_may_end_while_a_look_is_made(desk: Desk) -> None:
    first, second = desk.open(2)
    first.send(wait(b"k") + look())
    finish(desk.front)
    second.connection.receive(set_(b"k"))  # both are there before either is sent
    desk.settle()
    data = first.take()
    snapshot = Snapshot.from_json(data[8:-1])
    assert data == blob(data[8:-1]) + b"\x00"
    assert snapshot.clients[0].waits or snapshot.clients[1].waits


@pytest.mark.parametrize("make", [Core, lambda: RelayCore(bytes(16))], ids=["server", "relay"])
def test_one_look_at_a_time(make: Callable[[], Core | RelayCore]) -> None:
    desk = Desk(make())
    client, other = desk.open(2)
    client.send(look() + look())
    assert client.error is not None
    assert client.error.message == "a second SNAPSHOT before the first is answered"
    finish(desk.front)
    desk.settle()
    for _ in range(3):
        other.send(look())
        finish(desk.front)
        desk.settle()
        assert len(taken(other).clients) == 1


@pytest.mark.parametrize("make", [Core, lambda: RelayCore(bytes(16))], ids=["server", "relay"])
def test_who_looks_may_leave(make: Callable[[], Core | RelayCore]) -> None:
    desk = Desk(make())
    first, second = desk.open(2)
    first.send(look())
    second.send(look())
    first.close()
    finish(desk.front)
    desk.settle()
    assert [each.peer for each in taken(second).clients] == ["client 1"]
    assert first.take() == b""


def test_who_has_ended_is_owed_its_look(desk: Desk) -> None:
    """As it is owed the reply to anything else: whoever pumps keeps the connection open for it."""
    (client,) = desk.open()
    assert not client.connection.is_owed
    client.send(look())
    assert client.connection.is_owed
    desk.front.end(client.connection)
    finish(desk.front)
    desk.settle()
    assert len(taken(client).clients) == 1
    assert not client.connection.is_owed


def test_who_goes_while_a_look_is_made_is_gone_in_it_and_counted_once(core: Core, clock: Clock) -> None:
    clients = [core.open(f"client {number}") for number in range(3)]
    for number, client in enumerate(clients):
        client.receive(VALIDATE + hello(rank(number)))
        client.received, client.sent = 10, 20
    found: list[bytes] = []
    core.snapshots.start(Question(), found.append)
    steps = core.snapshots._under_way[0].steps
    while any(each in core.clients for each in clients[:2]):  # goes one step on, then one of them goes
        next(steps)
        core.close(next(each for each in core.clients if each in clients[:2]))
    finish(core)
    snapshot = Snapshot.from_json(found[0])
    assert (snapshot.received, snapshot.sent) == (30, 60)
    here = {each.who.rank for each in snapshot.clients}
    assert 2 in here
    assert here | {each.who.rank for each in snapshot.gone} == {0, 1, 2}
    assert not here & {each.who.rank for each in snapshot.gone}
    assert all(each.operations == 1 and each.received == 10 for each in snapshot.clients)


# Clients, and who they are


def test_only_ranks_that_are_known_and_not_here_are_gone(desk: Desk, clock: Clock) -> None:
    stranger, tool, agent, *others = desk.open(7)
    tool.send(hello(Identity("node-a", 5, role=Role.TOOL)))
    agent.send(hello(Identity("node-a", 6, 9, role=Role.AGENT)))
    for end, number in zip(others, [0, 1, 1, 2], strict=True):
        end.send(hello(rank(number)))
    for end in (stranger, tool, agent, others[1], others[0], others[3]):
        end.connection.why = "because"
        end.close()
        clock.now += 1.0
    found = seen_by(desk.front).gone
    assert [(each.who.rank, each.id, each.seconds, each.why) for each in found] == [
        (0, 4, 2.0, "because"),
        (2, 7, 1.0, "because"),
    ], "rank 1 is here on another connection"


# Waits and barriers


def test_a_barrier_is_told_with_who_waits_there(desk: Desk, clock: Clock) -> None:
    first, second, third = desk.open(3)
    first.send(barrier(b"/b", 3))
    clock.now += 1.0
    second.send(barrier(b"/b", 3) + barrier(b"/b", 4))
    clock.now += 1.0
    assert seen_by(desk.front).barriers == (
        Barrier("b", 3, 2, ((1, 2.0), (2, 1.0))),
        Barrier("b", 4, 1, ((2, 1.0),)),
    )
    second.send(CANCEL_WAIT)
    assert seen_by(desk.front).barriers == (Barrier("b", 3, 1, ((1, 2.0),)),)
    second.send(barrier(b"/b", 3))
    third.send(barrier(b"/b", 3))
    assert seen_by(desk.front).barriers == ()


def test_a_relay_at_a_barrier_is_told_once_and_counts_for_its_ranks(desk: Desk, clock: Clock) -> None:
    (client,) = desk.open()
    relay = Played(desk)
    relay.send(arrive(b"/b", 9, 3))
    clock.now += 1.0
    relay.send(arrive(b"/b", 9, 2), told(b"{}"))
    client.send(barrier(b"/b", 9))
    clock.now += 0.25
    assert seen_by(desk.front).barriers == (Barrier("b", 9, 6, ((2, 1.25), (1, 0.25))),)


# Who a client says it is


@pytest.mark.parametrize("make", [Core, lambda: RelayCore(bytes(16))], ids=["server", "relay"])
@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"\xff\xfe", b"[]", b'{"rank":"3"}', b'{"rank":-2}', b'{"role":"king"}', b"[" * 900],
)
def test_a_hello_that_cannot_be_read_changes_nothing(
    make: Callable[[], Core | RelayCore], content: bytes
) -> None:
    desk = Desk(make())
    (client,) = desk.open()
    who = rank(3)
    assert client.ask(hello(who)) == i64(0)
    assert client.ask(request(Op.DELETE_KEY, b"/rallypoint/hello/1/" + content) + PING) == i64(0) + b"ping"
    assert client.connection.who == replace(who, source=Source.HELLO)


@repeatable
@given(who=identities)
def test_a_hello_says_who_somebody_is(who: Identity) -> None:
    assert parse_hello(b"/" + hello_key(who).encode()) == replace(who, source=Source.HELLO)


@pytest.mark.parametrize(
    ("environ", "who"),
    [
        ({}, Identity("node-a", 7)),
        (
            {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"},
            Identity("node-a", 7, 3, 1, 8, Role.RANK),
        ),
        ({"RANK": "0"}, Identity("node-a", 7, 0, role=Role.RANK)),
        ({"RANK": "", "WORLD_SIZE": "8"}, Identity("node-a", 7, world_size=8)),
        ({"RANK": "-1"}, Identity("node-a", 7)),
        ({"RANK": "1" * 10}, Identity("node-a", 7)),
        ({"RANK": "\u0663"}, Identity("node-a", 7)),
        ({"RANK": " 3"}, Identity("node-a", 7)),
    ],
)
def test_the_variables_of_a_launcher_tell_who_a_process_is(environ: dict[str, str], who: Identity) -> None:
    assert identity_of(environ, "node-a", 7) == who
    assert identity_of(environ, "h" * 1_000, 7) == replace(who, host="h" * 255)


def test_this_process_says_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    host, pid = socket.gethostname(), os.getpid()
    assert who_am_i() == who_am_i(Role.RANK) == Identity(host, pid, 3, 1, 8, Role.RANK)
    for role in (Role.TOOL, Role.AGENT):
        assert who_am_i(role) == Identity(host, pid, role=role), "no rank, whatever the variables say"
    assert who_am_i(rank=4, world_size=5) == Identity(host, pid, 4, -1, 5, Role.RANK)
    assert who_am_i(rank=3, world_size=5) == Identity(host, pid, 3, 1, 5, Role.RANK)


@pytest.mark.parametrize("make", [Core, lambda limits: RelayCore(bytes(16), limits)])
def test_a_hello_may_be_longer_than_keys(make: Callable[[Limits], Core | RelayCore]) -> None:
    desk = Desk(make(Limits(key_bytes=16)))
    (client,) = desk.open()
    assert client.ask(hello(rank(3, host="h" * 255))) == i64(0)
    assert client.connection.who.rank == 3


def test_what_is_no_hello_is_deleted(desk: Desk) -> None:
    (client,) = desk.open()
    for key in (b"k", b"/rallypoint/hello/1", b"/rallypoint/hello/2/{}", b"rallypoint/hello/1/{}"):
        client.send(set_(key))
        assert client.ask(request(Op.DELETE_KEY, key)) == i64(1)
    assert client.connection.who is NOBODY


def test_a_hello_in_a_batch_is_nobodys(desk: Desk, core: Core) -> None:
    """Relays keep the hellos of their clients to themselves; an older one does not know that."""
    relay = Played(desk)
    assert relay.send(hello(rank(3))) == [(0, 0, i64(0))]
    assert [each.who.rank for each in core.clients] == [-1]
    assert relay.end.connection.who.rank == -1
