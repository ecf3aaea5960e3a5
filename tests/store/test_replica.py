"""The pure part of a store that outlives its machine: one log gives one store, to everybody who reads it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ends import BEAT, SIGN_OF_LIFE, note, session
from rallypoint.errors import ProtocolError
from rallypoint.store.core.context import About, Close, DriverTask, GoOn
from rallypoint.store.core.snapshots import SnapshotStep
from rallypoint.store.core.store import Core
from rallypoint.store.replica.core import replica as replica_module
from rallypoint.store.replica.core.leader import Caller, LeaderCore
from rallypoint.store.replica.core.records import (
    Entry,
    FormatError,
    Kind,
    link,
    pack,
    pack_record,
    seal,
    unpack,
)
from rallypoint.store.replica.core.replica import Replica, pack_state, rules_of
from rallypoint.store.replica.log import LostRecordsError
from rallypoint.store.rollcall.identity import Identity, Role, hello_key
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Replication, Snapshot
from rallypoint.store.wire import parser
from rallypoint.store.wire.encoding import VALIDATE, counted_request, pack_i64, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import READY, Op
from rallypoint.store.wire.sessions import ASK
from test_replay import DATA, LIMITS

MOST = 120
"""Bytes of a record: so few that many come in parts."""


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


class Leader:
    """Drives a leader, and the engine with it: what is appended is committed when the test says so."""

    def __init__(self, log: list[bytes], replica: Replica | None = None, limits: Limits = LIMITS) -> None:
        self.log = log
        self.clock = Clock()
        self.core = LeaderCore(replica or Replica(limits), self.clock, limits)
        self.callers: list[Caller] = []
        self.sent: dict[int, bytes] = {}
        self.closed: dict[int, str] = {}
        self.ending: dict[Caller, str] = {}
        self.core.begin(len(log) + 1)

    def open(self, data: bytes = b"") -> Caller:
        caller = self.core.open(f"peer {len(self.callers)}")
        self.callers.append(caller)
        self.sent[caller.id] = b""
        self.receive(caller, VALIDATE + data)
        return caller

    def receive(self, caller: Caller, data: bytes) -> None:
        if caller.id in self.closed or caller in self.ending:
            return
        try:
            self.sent[caller.id] += caller.receive(data)
            while caller.has_rest:
                self.sent[caller.id] += caller.receive(b"")
        except ProtocolError as error:
            self.sent[caller.id] += error.replies
            self._refuse(caller, error.message)
        self._empty_outbox()

    def close(self, caller: Caller) -> None:
        if caller.id not in self.closed:
            self._drop(caller, "closed")
        self._empty_outbox()

    def tick(self, seconds: float = 1.0, *, leads: bool = False) -> None:
        """Time passes. `leads`: and the engine has confirmed that it leads."""
        self.clock.now += seconds
        self.core.turn.now = self.clock.now
        if leads:
            self.core.confirm(self.clock.now)
        for caller, why in self.core.overdue():
            self._drop(caller, why)
        self._empty_outbox()

    def commit(self) -> list[bytes]:
        """Append the next record, and have it acknowledged."""
        parts = self.core.next_record(MOST)
        self.log += parts
        if parts:
            self.core.committed()
            self._empty_outbox()
        return list(parts)

    def commit_all(self) -> None:
        while self.commit():
            pass

    def ask(self, caller: Caller, *requests: bytes) -> bytes:
        """What a caller is sent because of some requests, when all is committed."""
        before = len(self.sent[caller.id])
        self.receive(caller, b"".join(requests))
        self.commit_all()
        return self.sent[caller.id][before:]

    def look(self, name: str = "") -> Snapshot:
        told: list[bytes] = []
        self.core.start_snapshot(name, Question(), told.append)
        while self.core.snapshots.step() is not SnapshotStep.DONE:
            pass
        return Snapshot.from_json(told[0])

    def _refuse(self, caller: Caller, why: str) -> None:
        """As a pump does: it takes no more requests, but gets its replies."""
        if caller.is_owed:
            self.ending[caller] = why
            self.core.end(caller)
        else:
            self._drop(caller, why)

    def _drop(self, caller: Caller, why: str) -> None:
        self.closed[caller.id] = why
        self.core.close(caller)

    def _empty_outbox(self) -> None:
        outbox = self.core.outbox
        while outbox.woken or outbox.others:
            for caller in outbox.take_woken():
                if caller.id not in self.closed:
                    self.sent[caller.id] += caller.take_notice()
                    if caller in self.ending and not caller.is_owed:
                        self._drop(caller, self.ending[caller])
            for other in outbox.take_others():
                if isinstance(other, Close) and other.client.id not in self.closed:
                    self._refuse(other.client, other.error.message)
                assert isinstance(other, Close | GoOn | DriverTask), other


actions = st.lists(
    st.one_of(
        st.tuples(st.just("open"), DATA),
        st.tuples(st.just("receive"), st.integers(0, 5), DATA),
        st.tuples(st.just("receive"), st.integers(0, 5), DATA.map(lambda data: data[:30])),
        st.tuples(st.just("close"), st.integers(0, 5)),
        st.tuples(st.sampled_from(["commit", "commit", "tick", "restart", "checkpoint"])),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=200)
@given(actions=actions)
def test_a_standby_equals_the_leader_at_every_record(actions: list[Any]) -> None:
    """Also one that begins with a checkpoint; and the leader itself, if it has taken over from another."""
    log: list[bytes] = []
    leader = Leader(log)
    standby, late = Replica(LIMITS), Replica(LIMITS)
    for name, *rest in actions:
        if name == "open":
            leader.open(*rest)
        elif name in ("receive", "close") and leader.callers:
            caller = leader.callers[rest[0] % len(leader.callers)]
            getattr(leader, name)(caller, *rest[1:])
        elif name == "tick":
            leader.tick()
        elif name == "restart":  # what is not committed is lost
            leader = Leader(log, standby, LIMITS)
            standby = Replica.of(standby.state(), LIMITS)
        elif name == "checkpoint":
            late = Replica.of(late.state(), LIMITS)
        kept = leader.core.replica.plain_state(), leader.core.replica.state()
        leader.commit()
        assert pack_state(kept[0]) == kept[1], "it is packed while the leader goes on"
        for part in log[standby.sequence :]:
            standby.apply(part)
        for part in log[late.sequence :]:
            late.apply(part)
        state = leader.core.replica.state()
        assert standby.state() == state
        assert late.state() == state
        assert not standby.faults
        leader.core.check_invariants()
        standby.check_invariants()
        late.check_invariants()


@settings(deadline=None, max_examples=100)
@given(pieces=st.lists(DATA, max_size=8), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_a_lone_client_is_answered_as_by_a_plain_store(pieces: list[bytes], cuts: list[int]) -> None:
    """Whether its reads go through the log or not, and wherever its requests are cut."""
    plain = Core(LIMITS)
    client, expected, wrong = plain.open(""), b"", ""
    client.receive(VALIDATE)
    leader = Leader([])
    caller = leader.open()
    for number, data in enumerate(pieces):
        if number % 2:
            leader.core.confirm(leader.clock.now)
        cut = cuts[number % len(cuts)] if cuts else 0
        leader.receive(caller, data[:cut])
        leader.ask(caller, data[cut:])
        if wrong:
            continue
        try:
            expected += client.receive(data)
            while client.has_rest:
                expected += client.receive(b"")
        except ProtocolError as error:
            expected, wrong = expected + error.replies, error.message
        while plain.outbox.woken or plain.outbox.others:
            expected += b"".join(each.take_notice() for each in plain.outbox.take_woken())
            plain.outbox.take_others()
    assert leader.sent[caller.id] == expected
    assert (caller.id in leader.closed or caller in leader.ending) is bool(wrong)


@pytest.mark.parametrize(
    ("what", "is_read"),
    [
        (request(Op.GET, b"/k"), True),
        (counted_request(Op.WAIT, [b"/k"]), True),
        (counted_request(Op.WAIT, [b"/k", b"/missing"]), False),
        (request(Op.SET, b"/k", b"v"), False),
        (request(Op.GET, b"/k") + request(Op.DELETE_KEY, b"/k"), False),
    ],
)
def test_who_only_reads_needs_no_record(what: bytes, is_read: bool) -> None:
    leader = Leader([])
    caller = leader.open(request(Op.SET, b"/k", b"v"))
    leader.core.confirm(leader.clock.now)
    leader.commit_all()
    leader.receive(caller, what)
    assert bool(leader.commit()) is not is_read


def test_a_read_that_is_refused_closes_its_client_alone() -> None:
    leader = Leader([], limits=Limits(unsent_bytes=5_000))
    one, other = leader.open(), leader.open()
    leader.ask(one, request(Op.SET, b"/k", bytes(6_000)))
    leader.core.confirm(leader.clock.now)
    leader.receive(one, request(Op.GET, b"/k"))
    leader.receive(other, request(Op.GETNUMKEYS))
    assert (list(leader.closed), leader.sent[other.id]) == ([one.id], pack_i64(1))


def test_what_a_short_record_asks_for_is_bounded() -> None:
    """Who asks for more than it may be sent at once is closed; nobody else holds any of it."""
    leader = Leader([], limits=Limits(unsent_bytes=30_000))
    caller = leader.open()
    leader.ask(caller, request(Op.SET, b"/k", bytes(9_000)))
    leader.ask(caller, request(Op.ADD, b"/n", tail=pack_i64(1)), *[request(Op.GET, b"/k")] * 20)
    assert len(leader.sent[caller.id]) < 30_000
    assert "unsent_bytes" in leader.closed[caller.id]
    assert leader.core.held == 0


def test_a_read_that_fails_leaves_nothing_to_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader([])
    one, other = leader.open(), leader.open()
    leader.ask(one, request(Op.SET, b"/k", b"of one"))
    leader.core.confirm(leader.clock.now)
    monkeypatch.setattr(Core, "check_reply", lambda *_: (_ for _ in ()).throw(MemoryError))
    monkeypatch.setattr(parser, "BYTES_AT_ONCE", 20)
    with pytest.raises(MemoryError):
        leader.receive(one, request(Op.GET, b"/k") * 9)
    monkeypatch.undo()
    assert leader.ask(other, request(Op.GETNUMKEYS)) == pack_i64(1)


def test_waits_for_many_keys_that_are_given_up_are_tidied_up() -> None:
    leader = Leader([], limits=Limits())
    caller = leader.open()
    leader.ask(caller, counted_request(Op.WAIT, [b"/%d" % number for number in range(3_000)]))
    kept = leader.core.replica.plain_state(), leader.core.replica.state()
    leader.ask(caller, request(Op.CANCEL_WAIT))
    assert pack_state(kept[0]) == kept[1], "it is packed while the leader goes on"
    assert Replica.of(leader.core.replica.state()).state() == leader.core.replica.state()


def test_who_looks_is_answered_without_a_record_and_without_a_lease() -> None:
    hello = request(Op.DELETE_KEY, b"/" + hello_key(Identity(role=Role.TOOL)).encode())
    leader = Leader([])
    leader.commit_all()
    looker = leader.open(hello + ASK + request(Op.SNAPSHOT, Question().to_json()))
    while leader.core.snapshots.step() is not SnapshotStep.DONE:
        pass
    leader.receive(looker, b"")
    assert leader.sent[looker.id].startswith(pack_i64(0) + READY)
    assert b'"kind":"server"' in leader.sent[looker.id]
    assert not leader.commit()
    rank = leader.open(request(Op.PING, tail=b"1234") + hello)
    assert not leader.sent[rank.id], "who may ask for more is answered when this leader surely leads"


def test_what_a_client_tells_is_no_record_and_what_a_launcher_says_of_a_stall_is() -> None:
    leader = Leader([])
    leader.commit_all()
    caller = leader.open(request(Op.REPORT, b"text"))
    leader.receive(caller, request(Op.REPORT, b"another"))
    assert not leader.commit()
    assert (caller.held, caller.is_known) == (0, False)
    leader.ask(caller, request(Op.REPORT, b"text") + request(Op.SET, b"/rallypoint/stall", b"rank 3"))
    assert b"text" not in b"".join(leader.log)
    snapshot = leader.look()
    assert (snapshot.stall, [each.told for each in snapshot.clients]) == ("rank 3", [""])


def test_a_look_tells_the_process_the_bytes_and_whether_there_is_such_a_store() -> None:
    leader = Leader([])
    leader.core.about = About("1.2", "node-a", 77, "legacy")
    leader.core.describe_replication = lambda: Replication("etcd at a:1", 1, "")
    rank, gone = leader.open(), leader.open()
    for caller, count in ((rank, 100), (gone, 20)):
        leader.ask(caller, request(Op.SET, b"/k", b"v"))
        caller.received, caller.sent = count, 3 * count
    leader.close(gone)
    leader.commit_all()
    here, nowhere = leader.look(), leader.look("nope")
    assert (here.version, here.host, here.pid, here.backend) == ("1.2", "node-a", 77, "legacy")
    assert (here.received, here.sent) == (120, 360)
    assert [(each.received, each.sent) for each in here.clients] == [(100, 300)]
    assert not judge(here).trouble
    assert judge(nowhere).trouble == "there is no store named nope here"


def test_no_session_is_given_up_because_the_engine_was_away() -> None:
    """Time stands still for the log meanwhile: its relay could not have come back."""
    leader = Leader([])
    leader.core.confirm(leader.clock.now)
    relay = leader.open()
    leader.ask(relay, session(keep=5_000), b"\x22")
    leader.close(relay)
    leader.commit_all()
    sessions, before = leader.core.replica.stores[""].sessions, leader.core.time
    for _ in range(20):
        leader.tick()
    assert not leader.commit()
    leader.tick(leads=True)
    leader.commit()
    assert (len(sessions), leader.core.time) == (1, before + 1.0)
    for _ in range(5):
        leader.tick(leads=True)
        leader.commit()
    assert not len(sessions)


def test_a_beat_is_answered_with_what_is_wrong_unless_this_process_surely_leads() -> None:
    leader = Leader([])
    leader.commit()
    relay = leader.open(BEAT)
    assert leader.sent.pop(relay.id) == note()
    leader.core.describe_replication = lambda: Replication(
        "etcd at a:1", 1, "", away_seconds=70.0, error="down"
    )
    leader.sent[relay.id] = b""
    leader.receive(relay, BEAT)
    trouble = "the engine of the store, etcd at a:1, has not answered for 1 min 10 s: down"
    assert trouble.encode() in leader.sent[relay.id]
    leader.core.confirm(leader.clock.now)
    leader.receive(relay, BEAT)
    assert leader.sent[relay.id].endswith(SIGN_OF_LIFE)


def test_the_limits_are_those_of_the_leader() -> None:
    """Also with a checkpoint, in whose log they do not stand any more; and with less than what is stored."""
    log: list[bytes] = []
    wide = Leader(log)
    wide.ask(wide.open(), request(Op.SET, b"/long key", bytes(400)))
    replica = Replica(Limits(key_bytes=7))
    for part in log:
        replica.apply(part)
    assert replica.state() == wide.core.replica.state()
    assert Replica.of(replica.state(), Limits(key_bytes=7)).state() == replica.state()
    narrow = Leader(log, replica, Limits(key_bytes=3, stored_bytes=10))
    caller = narrow.open()
    assert narrow.ask(caller, request(Op.GET, b"/a")) == request(Op.GET, b"")[1:]
    assert narrow.ask(caller, request(Op.GETNUMKEYS)) == pack_i64(1)
    narrow.ask(caller, request(Op.SET, b"/a", b"no room"))
    assert "stored_bytes" in narrow.closed[caller.id]


def test_a_replica_refuses_other_formats() -> None:
    with pytest.raises(FormatError, match=r"format \[9\]"):
        Replica().apply(b"\x09" + bytes(20))
    with pytest.raises(FormatError, match="format 9"):
        Replica.of(seal(pack([9, 0, 0.0, []])))
    with pytest.raises(FormatError, match="cannot be read"):
        Replica.of(b"nothing")


def _replica_of(log: list[bytes]) -> Replica:
    replica = Replica(LIMITS)
    for part in log:
        replica.apply(part)
    return replica


def test_a_replica_takes_nothing_from_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests may make something else there; an operation that only one knows is an example."""
    log: list[bytes] = []
    leader = Leader(log)
    leader.ask(leader.open(), request(Op.SET, b"/k", b"v"))
    state = leader.core.replica.state()
    monkeypatch.setattr(replica_module, "__version__", "9.9")
    with pytest.raises(FormatError, match=r"written by Rallypoint 0\.\S+, and this is 9\.9"):
        _replica_of(log)
    with pytest.raises(FormatError, match=r"this is 9\.9"):
        Replica.of(state)
    monkeypatch.undo()
    replica = Replica(LIMITS)
    unknown = [Entry(Kind.OPEN, 1, b"\0peer"), Entry(Kind.REQUESTS, 1, b"\xee")]
    with pytest.raises(FormatError, match="no operation 238"):
        replica.apply(link([pack_record(1.0, unknown)], 0)[0])


records = st.one_of(
    st.binary(max_size=60),
    st.builds(
        lambda time, entries, cut, more: pack_record(time, entries)[: cut or None] + more,
        st.floats() | st.just(1.0),
        st.lists(
            st.builds(
                Entry,
                st.sampled_from(Kind) | st.integers(0, 255),
                st.integers(0, 3),
                DATA | st.sampled_from([b"\0p", b"{}", b'{"version": 3}', b"[]", rules_of(LIMITS)]),
            ),
            max_size=5,
        ),
        st.integers(-30, 0) | st.just(0),
        st.binary(max_size=9) | st.just(b""),
    ),
)


@settings(deadline=None, max_examples=300)
@given(some=st.lists(st.tuples(records, st.integers(0, 4)), max_size=6))
def test_whatever_stands_in_the_log_is_taken_or_refused_by_name(some: list[tuple[bytes, int]]) -> None:
    """And what is taken makes a state that can be kept, and is the same in every replica."""
    leader = Leader([])
    leader.ask(leader.open(), session(), request(Op.SET, b"/k", b"v"))
    one = leader.core.replica
    other = Replica.of(one.state(), LIMITS)
    for record, mark in some:
        data = link([record[:1] + bytes([mark]) + record[2:] if mark else record], one.last)[0]
        try:
            one.apply(data)
        except FormatError:
            return
        other.apply(data)
        assert not one.faults
        if one.can_be_kept:
            assert one.state() == other.state()
            other = Replica.of(other.state(), LIMITS)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_checkpoint_that_is_damaged_is_refused(data: st.DataObject) -> None:
    leader = Leader([])
    leader.ask(leader.open(), session(), request(Op.SET, b"/k", b"v"))
    state = bytearray(leader.core.replica.state())
    position = data.draw(st.integers(0, len(state) - 1))
    state[position] ^= data.draw(st.integers(1, 255))
    for wrong in (state, state[:position], data.draw(st.binary(max_size=40))):
        with pytest.raises(FormatError):
            Replica.of(bytes(wrong))


def test_a_record_that_ends_within_a_request_is_refused() -> None:
    """The rest of it would be in no checkpoint."""
    entries = [Entry(Kind.OPEN, 1, b"\0p"), Entry(Kind.REQUESTS, 1, request(Op.GET, b"/key")[:-1])]
    with pytest.raises(FormatError, match="within a request"):
        Replica().apply(link([pack_record(1.0, entries)], 0)[0])


@pytest.mark.parametrize("limit", [b'"8192"', b"0", b"NaN", b"true", b"null"])
def test_rules_that_are_no_limits_are_refused(limit: bytes) -> None:
    rules = rules_of(Limits()).replace(b":8192", b":" + limit)
    assert rules != rules_of(Limits())
    with pytest.raises(FormatError, match="record 1 of the log: the rules of a leader"):
        Replica().apply(link([pack_record(1.0, [Entry(Kind.TERM, 1, rules)])], 0)[0])


def test_what_an_engine_has_lost_is_noticed_when_the_log_goes_on() -> None:
    """Also if it has grown again by as much meanwhile, so that the numbers look right."""
    log: list[bytes] = []
    leader = Leader(log)
    caller = leader.open()
    leader.ask(caller, request(Op.SET, b"/k", b"v"))
    standby, late = Replica(LIMITS), Replica(LIMITS)
    for part in log:
        standby.apply(part)
    del log[-2:]
    for part in log:
        late.apply(part)
    other = Leader(log, late)
    while len(log) <= standby.sequence:
        other.ask(other.open(), request(Op.SET, b"/k", b"w"))
    with pytest.raises(LostRecordsError, match="another one than before"):
        standby.check_last(log[standby.sequence - 1])
    with pytest.raises(LostRecordsError, match="from another record"):
        standby.apply(log[standby.sequence])
    late.check_last(log[late.sequence - 1])


def test_a_store_with_a_name_is_dropped_when_nobody_has_used_it_for_a_while() -> None:
    leader = Leader([])
    caller, other = leader.open(request(Op.ENTER, b"round 1")), leader.open()
    leader.ask(caller, request(Op.SET, b"/k", b"v"))
    leader.core.confirm(leader.clock.now)
    assert leader.ask(caller, request(Op.GETNUMKEYS)) == pack_i64(1)
    assert leader.ask(other, request(Op.GETNUMKEYS)) == pack_i64(0)
    assert list(leader.core.replica.stores) == ["round 1"]
    leader.close(caller)
    reading = leader.open(request(Op.ENTER, b"round 1"))
    for _ in range(62):
        leader.tick()
        leader.commit()
    assert list(leader.core.replica.stores) == ["round 1"], "somebody is there who only reads"
    leader.close(reading)
    for _ in range(62):
        leader.tick()
        leader.commit()
    assert not leader.core.replica.stores
    leader.close(caller := leader.open(request(Op.ENTER, b"round 1") + request(Op.SET, b"/k", b"v")))
    leader.commit()
    for _ in range(3):
        leader.tick()
        leader.commit()
    assert list(leader.core.replica.stores) == ["round 1"], "it is used again"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=20,
)


@given(value=plain)
def test_plain_data_comes_back(value: Any) -> None:
    assert unpack(pack(value)) == value


@given(value=plain, cut=st.integers(0, 40), data=st.binary(max_size=60))
def test_other_bytes_are_refused(value: Any, cut: int, data: bytes) -> None:
    packed = pack(value)
    for wrong in (packed[:cut], data):
        if wrong != packed:
            try:
                unpack(wrong)
            except (ValueError, UnicodeDecodeError):
                continue
