"""What a server tells of the clients behind relays, and what a relay tells of itself. Without sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ends import ByHand, Desk, Wire, blob, end_of_wait, i64, relay_on, welcome
from rallypoint.errors import SessionLostError
from rallypoint.store.core.snapshots import SnapshotStep
from rallypoint.store.core.store import Core
from rallypoint.store.rollcall.identity import Role, Source
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Snapshot
from rolls import rank
from test_core import CANCEL_WAIT, barrier, get, set_, wait
from test_snapshots import PING, Clock, finish, go_on, hello, look, seen_by, taken

pytestmark = pytest.mark.windows

ASK_REPORT = (2**64 - 1, 4, b"")
"""What asks a relay to tell of itself."""


class Tree:
    """A server, relays on it or on each other, and the time of all of them."""

    def __init__(self) -> None:
        self.clock = Clock(100.0)
        self.head = Desk(Core(turn=self.clock))
        self.desks = [self.head]
        self.wires: list[Wire] = []

    def relay(self, upstream: Desk | None = None) -> Desk:
        desk, wire = relay_on(upstream or self.head, len(self.desks), turn=self.clock)
        self.desks.append(desk)
        self.wires.append(wire)
        self.run()
        return desk

    def wire_of(self, desk: Desk) -> Wire:
        return next(wire for wire in self.wires if wire.relay is desk)

    def run(self, without: Sequence[Desk] = ()) -> None:
        """Until nothing moves; time stands still."""
        for _ in range(len(self.desks) + 1):
            for wire in reversed(self.wires):
                if wire.relay not in without:
                    wire.run()

    def look(self, desk: Desk, *, without: Sequence[Desk] = ()) -> Snapshot:
        """A snapshot; what is `without` says nothing meanwhile."""
        found: list[bytes] = []
        desk.front.snapshots.start(Question(), found.append)
        for _ in range(1_000):
            self.go_on(without)
            if found:
                return Snapshot.from_json(found[0])
        raise AssertionError("it does not end")

    def go_on(self, without: Sequence[Desk] = ()) -> None:
        is_idle = True
        for desk in self.desks:
            if desk not in without:
                while go_on(desk.front) not in (SnapshotStep.DONE, SnapshotStep.IDLE):
                    is_idle = False
                desk.settle()
        self.run(without)
        if is_idle:
            self.clock.now += 0.01


@pytest.fixture
def tree() -> Tree:
    return Tree()


def part_of(snapshot: Snapshot, index: int = 0) -> Snapshot:
    part = snapshot.relays[index].part
    assert part is not None
    return part


# One relay, and relays on relays


def test_a_server_tells_what_its_relay_tells(tree: Tree) -> None:
    relay = tree.relay()
    (direct,) = tree.head.open()
    (behind,) = relay.open()
    behind.send(hello(rank(3)) + set_(b"/k"))
    tree.run()
    tree.clock.now += 2.5
    snapshot = tree.look(tree.head)
    assert (snapshot.kind, [each.peer for each in snapshot.clients]) == ("server", [direct.connection.peer])
    (found,) = snapshot.relays
    assert (found.id, found.peer, found.present) == (1, "relay", True)
    assert found.seconds == pytest.approx(2.5, abs=0.1)
    assert 0.0 <= found.part_seconds < 0.1
    part = part_of(snapshot)
    assert part.kind == "relay"
    assert [each.who for each in part.clients] == [replace(rank(3), source=Source.HELLO)]
    assert [each.name for each in part.operations] == ["SET", "DELETE_KEY"]


def test_a_relay_tells_its_own_part_to_who_looks_there(tree: Tree) -> None:
    upper = tree.relay()
    lower = tree.relay(upper)
    tree.head.open(3)
    client, other = upper.open(2)
    lower.open()[0].send(hello(rank(5)))
    other.send(wait(b"/k", b"/l") + barrier(b"/b", 7))
    tree.run()
    tree.clock.now += 1.0
    client.send(look())
    for _ in range(5):
        tree.go_on()
    snapshot = taken(client)
    assert (snapshot.kind, snapshot.key_count) == ("relay", 0)
    assert sorted(each.id for each in snapshot.clients) == [2, 3], "not the relay below"
    (waiting,) = [each for each in snapshot.clients if each.waits]
    ((names, count, seconds),) = [(each.keys, each.count, each.seconds) for each in waiting.waits]
    assert (names, count) == (("k", "l"), 2)
    assert seconds == pytest.approx(1.0, abs=0.1)
    (found,) = snapshot.barriers
    assert (found.key, found.size, found.arrived, found.members[0][0]) == ("b", 7, 1, waiting.id)
    assert found.members[0][1] == pytest.approx(1.0, abs=0.1)
    assert [each.who.rank for each in part_of(snapshot).clients] == [5]


def test_replies_of_a_relay_come_in_their_order_looks_included(tree: Tree) -> None:
    relay = tree.relay()
    (client,) = relay.open()
    assert client.ask(get(b"/k") + look() + PING) == b""
    tree.run()
    assert client.take() == blob(b"")
    finish(relay.front)
    relay.settle()
    data = client.take()
    assert data == blob(data[8:-4]) + b"ping"
    assert len(Snapshot.from_json(data[8:-4]).clients) == 1


# What relays wait for


def test_what_a_relay_waits_for_is_told_by_the_server_too(tree: Tree) -> None:
    relay = tree.relay()
    first, second = relay.open(2)
    first.send(wait(b"/a", b"/b"))
    tree.run()
    tree.clock.now += 1.0
    tree.head.open()[0].send(set_(b"/a"))
    second.send(wait(b"/c"))
    tree.run()
    tree.clock.now += 1.0
    (found,) = tree.look(tree.head).relays
    assert [(each.keys, each.count) for each in found.waits] == [(("b",), 1), (("c",), 1)]
    assert [each.seconds for each in found.waits] == pytest.approx([2.0, 1.0], abs=0.1)
    first.send(CANCEL_WAIT)
    tree.run()
    (found,) = tree.look(tree.head).relays
    assert [each.keys for each in found.waits] == [("c",)]


@pytest.mark.parametrize("depth", [1, 2])
def test_who_is_at_a_barrier_is_told_through_relays(tree: Tree, depth: int) -> None:
    relay = tree.relay()
    for _ in range(depth - 1):
        relay = tree.relay(relay)
    behind = relay.open(3)
    (direct,) = tree.head.open()
    for end in behind[:2]:
        end.send(barrier(b"/b", 4))
    tree.run()
    tree.clock.now += 1.0
    direct.send(barrier(b"/b", 4))
    tree.clock.now += 1.0
    snapshot = tree.look(tree.head)
    (found,) = snapshot.barriers
    assert (found.key, found.size, found.arrived) == ("b", 4, 3)
    assert [number for number, _ in found.members] == [1, direct.connection.id]
    assert [seconds for _, seconds in found.members] == pytest.approx([2.0, 1.0], abs=0.2)
    part = part_of(snapshot)
    for _ in range(depth - 1):
        assert part.barriers == ()
        part = part_of(part)
    (found,) = part.barriers
    assert (found.arrived, {number for number, _ in found.members}) == (
        2,
        {end.connection.id for end in behind[:2]},
    )
    behind[2].send(barrier(b"/b", 4))
    tree.run()
    tree.clock.now += 1.0
    snapshot = tree.look(tree.head)
    assert (snapshot.barriers, part_of(snapshot).barriers) == ((), ())


# Relays that do not answer


def test_a_relay_that_answers_no_more_has_its_old_part(tree: Tree) -> None:
    relay = tree.relay()
    relay.open()
    assert len(part_of(tree.look(tree.head)).clients) == 1
    relay.open()
    tree.clock.now += 30.0
    (found,) = tree.look(tree.head, without=[relay]).relays
    assert found.part is not None
    assert len(found.part.clients) == 1
    assert found.part_seconds == pytest.approx(31.0, abs=0.2)
    (found,) = tree.look(tree.head).relays
    assert found.part is not None
    assert len(found.part.clients) == 2
    assert found.part_seconds < 0.2


def test_a_part_that_is_fresh_is_not_asked_for_again(tree: Tree) -> None:
    relay = tree.relay()
    tree.look(tree.head)
    (wire,) = tree.wires
    frames = wire.core.upstream.frames
    tree.clock.now += 0.3
    tree.look(tree.head, without=[relay])
    tree.run()
    assert wire.core.upstream.frames == frames
    tree.clock.now += 0.3
    tree.look(tree.head)
    assert wire.core.upstream.frames > frames


def test_a_relay_that_goes_away_is_not_waited_for(tree: Tree) -> None:
    relay = tree.relay()
    found: list[bytes] = []
    tree.head.front.snapshots.start(Question(), found.append)
    go_on(tree.head.front)
    assert not found
    began = tree.clock.now
    tree.wire_of(relay).lose()
    finish(tree.head.front)
    (row,) = Snapshot.from_json(found[0]).relays
    assert (row.present, row.part) == (False, None)
    assert tree.clock.now == began


def test_a_relay_that_is_away_is_told_as_it_was(tree: Tree) -> None:
    relay = tree.relay()
    relay.open()
    tree.look(tree.head)
    wire = tree.wire_of(relay)
    wire.lose()
    tree.clock.now += 5.0
    (found,) = seen_by(tree.head.front).relays
    assert (found.id, found.present) == (1, False)
    assert found.part_seconds == pytest.approx(5.0, abs=0.1)
    assert found.part is not None
    wire.connect()
    tree.run()
    (found,) = tree.look(tree.head).relays
    assert (found.id, found.present) == (1, True)
    assert found.part_seconds < 0.1


def test_a_relay_that_was_asked_and_comes_back_tells_then(tree: Tree) -> None:
    relay = tree.relay()
    wire = tree.wire_of(relay)
    tree.head.front.snapshots.start(Question(), lambda _: None)
    go_on(tree.head.front)
    tree.head.settle()
    wire.lose()  # with the question
    finish(tree.head.front)
    wire.connect()
    for _ in range(5):
        tree.go_on()
    (session,) = tree.head.front.sessions
    assert session.told is not None


def test_a_relay_that_has_ended_is_not_told(tree: Tree) -> None:
    relay = tree.relay()
    wire = tree.wire_of(relay)
    wire.end.send(b"\x23")
    assert tree.look(tree.head, without=[relay]).relays == ()


# A relay that is asked


def test_a_relay_tells_when_it_is_asked_and_only_once_at_a_time() -> None:
    relay = ByHand()
    relay.desk.open()
    assert relay.answer(ASK_REPORT, ASK_REPORT) == []
    assert relay.answer(ASK_REPORT) == []
    finish(relay.core)
    (sent,) = relay.asked()
    assert sent[:1] == b"\x29"
    assert len(Snapshot.from_json(sent[9:]).clients) == 1
    relay.answer((0, 0, b""))
    relay.answer(ASK_REPORT)
    finish(relay.core)
    assert len(relay.asked()) == 1


def test_what_a_relay_tells_is_in_nobodys_way() -> None:
    """Nothing that clients ask waits for it, and its answer proves nothing about waits."""
    relay = ByHand()
    (client,) = relay.desk.open()
    relay.answer(ASK_REPORT)
    finish(relay.core)
    client.send(get(b"k"))
    first, second = relay.asked()
    assert (first[:1], second) == (b"\x29", get(b"k"))
    relay.answer((0, 0, b""), (1, 0, blob(b"v")))
    assert client.take() == blob(b"v")
    relay.core.check_invariants()
    assert relay.core.combiner.held_bytes == 0


def test_that_a_relay_was_heard_does_not_prove_that_anything_else_was() -> None:
    """A relay on the way takes it: what was sent before may still have to come to the store."""
    relay = ByHand()
    first, second = relay.desk.open(2)
    first.send(wait(b"k"))
    assert relay.asked() == [wait(b"k")]
    relay.answer(ASK_REPORT)
    second.send(wait(b"k"))
    finish(relay.core)
    assert len(relay.asked()) == 1
    relay.answer((1, 0, b""))
    again = relay.answer((0, 0, end_of_wait(0)))
    assert (first.take(), second.take()) == (b"\x00", b"")
    assert again == [wait(b"k")], "whether the key was there after it had begun is not known"


def test_a_relay_whose_store_refuses_what_it_tells_goes_on(tree: Tree) -> None:
    relay = ByHand(most_bytes=300)
    (client,) = relay.desk.open()
    relay.answer(ASK_REPORT)
    finish(relay.core)
    assert relay.asked() == [], "no batch has room for it"
    client.send(get(b"k"))
    assert relay.asked() == [get(b"k")]
    relay.answer((0, 0, blob(b"v")), ASK_REPORT)
    assert client.take() == blob(b"v")
    finish(relay.core)
    assert relay.asked() == []


def test_a_relay_whose_session_is_lost_while_it_tells_tells_the_next_one() -> None:
    relay = ByHand()
    relay.answer(ASK_REPORT)
    relay.core.lose_upstream()
    relay.core.connect()
    with pytest.raises(SessionLostError):
        relay.core.receive_upstream(welcome(answer=2))
    relay.core.lose_upstream()
    relay.core.reset(bytes(16))
    relay.number = 0
    relay.core.connect()
    relay.core.receive_upstream(welcome())
    relay.answer(ASK_REPORT)
    finish(relay.core)
    assert [each[:1] for each in relay.asked()] == [b"\x29"], "once, and to the one that is there"


def test_a_relay_that_has_lost_its_store_can_be_looked_at(tree: Tree) -> None:
    relay = tree.relay()
    tree.wire_of(relay).lose()
    (client,) = relay.open()
    client.send(hello(rank(1)) + look())
    finish(relay.front)
    relay.settle()
    data = client.take()
    assert data[:8] == i64(0)
    assert [each.who.rank for each in Snapshot.from_json(data[16:]).clients] == [1]


def test_a_relays_connection_is_no_rank(tree: Tree) -> None:
    relay = tree.relay()
    connection = tree.wire_of(relay).end.connection
    assert (connection.who.role, connection.who.is_rank) == (Role.AGENT, False)
    assert not replace(connection.who, rank=0).is_rank, "whatever the variables of its process say"
    tree.wire_of(relay).lose()
    assert tree.look(tree.head, without=[relay]).gone == ()
