"""Scripts for the store's core and the relay's, all in memory, and what has to hold whatever they say.

A script is what clients do, step by step: who sends what, ends, leaves, does not read, and when time passes.
It is run twice: with what each client sends in one piece, and cut at other places. What is asserted:

- nothing is raised but the ProtocolError that closes a connection;
- both runs give every client the same bytes, and the same error;
- a batch or a frame that the tests' own reader cannot read is refused;
- all parts of the core agree after every step (`check_invariants`), and no more is held than is said;
- when all have left, nothing is held for anybody.

The limits are small, and so is what is done at once, so that scripts get there.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from itertools import pairwise, zip_longest
from random import Random
from typing import Any, Final, NamedTuple
from zlib import crc32

from ends import PRESENT, Desk, End, frame, read_frames, read_upstream, session, welcome
from rallypoint.build import in_use
from rallypoint.errors import ProtocolError, SessionLostError
from rallypoint.store.core import context, sessions, store
from rallypoint.store.core.context import CoreFault, DriverTask, GoOn
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.sessions import Session
from rallypoint.store.core.snapshots import SnapshotStep
from rallypoint.store.core.store import Core
from rallypoint.store.core.turn import Turn
from rallypoint.store.engine import engine, waiters
from rallypoint.store.relay.core import relay, relay_client, upstream, values
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.roll import stall_text
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.store.wire import parser
from rallypoint.store.wire import sessions as wire_sessions
from rallypoint.store.wire.encoding import VALIDATE
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import BATCH_OPS
from rallypoint.store.wire.parser import RequestTable
from rallypoint.store.wire.requests import Repeated, WholeRequests
from rallypoint.store.wire.sessions import batch

LIMITS: Final = Limits(
    key_bytes=100,
    value_bytes=300,
    keys_per_request=20,
    request_bytes=900,
    connections=6,
    unsent_bytes=4_000,
    stored_bytes=3_000,
    stored_entries=30,
    handshake_seconds=2.0,
    session_seconds=1.0,
    batch_bytes=800,
    held_bytes=6_000,
    relayed_bytes=1_500,
)
MOST_TURNS: Final = 5_000
"""How often a client may be gone on with after one step; far more than any needs."""


class Step(NamedTuple):
    """One line of a script."""

    verb: str
    who: int
    data: bytes = b""


Script = list[Step]


def make_small() -> None:
    """Have little done at once and little kept, in this process, and make what all cores share only once."""
    requests = WholeRequests(LIMITS, BATCH_OPS)
    remembered = {"REMEMBERED": 2, "REMEMBERED_BYTES": 500, "WORTH_REMEMBERING": 40}
    changes: dict[Any, dict[str, Any]] = {
        # So few bytes hold no more keys than a slice, as with the real numbers.
        parser: {"STEPS_AT_ONCE": 6, "BYTES_AT_ONCE": 120, "_LARGE_REPLY": 60, "REPEATED_BYTES": 44},
        sessions: {
            "STEPS_AT_ONCE": 6,
            "LONG": 100,
            "_SPARE": 200,
            "MOST_UNTAKEN": 300,
            "WholeRequests": lambda *_: requests,
        }
        | remembered,
        wire_sessions: {"PIECE_BYTES": 60},
        values: remembered,
        context: {"SLICE": 4},
        store: {"SLICE": 4, "RequestTable": _shared_table()},
        engine: {"_BARRIERS_AT_ONCE": 6},
        waiters: {"_AT_ONCE": 4},
        relay_client: {"_MOST_DUE": 6, "_NOTICE_BYTES": 150},
        relay: {"RequestTable": _shared_table()},
        upstream: {"_BATCH_BYTES": 300, "_UNACKNOWLEDGED_BYTES": 100, "_TICKS": 2, "MOST_UNTAKEN": 300},
    }
    for owner, names in changes.items():
        for name, value in names.items():
            assert hasattr(owner, name)
            setattr(owner, name, value)


def _shared_table() -> Callable[..., RequestTable[Any]]:
    """Makes tables that share all but their repeated data: making each one takes longer than a script."""
    if in_use() == "compiled":
        return RequestTable  # a compiled class cannot be filled by hand
    made: list[RequestTable[Any]] = []

    def make(limits: Limits, deliveries: Any, *, is_prompt: bool = False) -> RequestTable[Any]:
        if not made:
            made.append(RequestTable(limits, deliveries, is_prompt=is_prompt))
        table: RequestTable[Any] = object.__new__(RequestTable)
        for name in ("limits", "request_cap", "get_cap", "by_opcode", "hot"):
            setattr(table, name, getattr(made[0], name))
        table.repeated = Repeated(table.by_opcode)
        return table

    return make


class Stage:
    """A front and its clients, as a script moves them."""

    def __init__(self, core: ServerCore[Any], cuts: Random | None) -> None:
        self._core = core
        self.desk = Desk(core)
        self._cuts = cuts
        self._ends: dict[int, End] = {}
        self.outputs: list[tuple[object, ...]] = []
        self.has_paused = False

    def run(self, script: Script, *, with_look: bool) -> list[tuple[object, ...]]:
        for step in script:
            getattr(self, step.verb)(step.who, step.data)
            self.settle()
        outputs = self.outputs[:]
        # Some requests are not even looked at then; or not in the order in which they came.
        self.has_paused = self.desk.has_paused or self.desk.have_paused_together
        self._core.check_invariants()
        self._check_held()
        if with_look:
            self._look()
        self.leave_all()
        return outputs

    def settle(self) -> None:
        """What the core wants is done, and all that came out of it is written down."""
        core = self._core
        self.move()
        while core.held > core.limits.held_bytes:  # one client is closed at a time
            core.lighten()
            assert core.outbox.others, f"{core.held} bytes are held, and nobody is closed for it"
            self.move()
        for other in self.desk.take():
            assert not isinstance(other, CoreFault), other
            if other is DriverTask.SNAPSHOTS:
                self._make_snapshots()
            elif other is DriverTask.PROCESSES:
                core.processes_found()
        if core.outbox.woken or core.outbox.others:
            self.move()
        for who, end in list(self._ends.items()):
            if got := end.take():
                self.outputs.append((who, got))
            if end.connection not in self.desk.ends:
                self.outputs.append((who, end.error and end.error.message))
                del self._ends[who]

    def move(self) -> None:
        self.desk.empty_outbox()

    def _check_held(self) -> None:
        """What the parsers keep is no more than they say, and not much less."""
        most = 2 * LIMITS.request_bytes + 2 * parser.BLOB_BYTES * LIMITS.keys_per_request
        for client in self._core.clients:
            read = client._parser
            assert read is not None
            kept = len(read._kept) + sum(map(len, read._blobs if read._spec is not None else ()))
            if read._atom == parser._HANDSHAKE:
                kept = 0  # less than a VALIDATE
            said = client._unserved
            assert kept <= said <= most, f"{said} for {kept} bytes"

    def _make_snapshots(self) -> None:
        for _ in range(MOST_TURNS):
            if (step := self._core.snapshots.step()) is SnapshotStep.DONE:
                return
            if step is SnapshotStep.IDLE:  # it waits for relays, or for time to pass
                self.desk.wanted.append(DriverTask.SNAPSHOTS)
                return
        raise AssertionError("a snapshot takes too long")

    def _look(self) -> None:
        """What the core tells of itself can be read, and be put into words."""
        answers: list[bytes] = []
        self._core.snapshots.start(Question(keys=9, value="k1"), answers.append)
        for _ in range(3):
            self.settle()
            self.time(4, b"")
        self.settle()
        (answer,) = answers
        stall_text(judge(Snapshot.from_json(answer)), 1.0)

    def leave_all(self) -> None:
        """All leave: nothing may be left of them."""
        core = self._core
        self.close_all()
        for each in list(core.sessions):
            core.sessions.end(each)
        self.settle()
        assert core.held == 0, f"{core.held} bytes are held for nobody"
        assert not core.waiting, f"{core.waiting} wait that have left"

    # What clients do

    def send(self, who: int, data: bytes) -> None:
        end = self._ends.get(who)
        if end is None or end.is_ending:
            end = self._open(who)
            if end is not None:
                end.receive(VALIDATE)
        if end is not None:
            self._feed(end, data)

    def raw(self, who: int, data: bytes) -> None:
        """Sends on a new connection, without a handshake."""
        end = self._open(who)
        if end is not None:
            self._feed(end, data)

    def batch(self, who: int, data: bytes) -> None:
        """Sends the requests in `data`, which stand there as blobs, as the next batch of a session."""
        end = self._ends.get(who)
        known = end.connection.session if end is not None else None
        if known is None:
            self.send(who, session(bytes([who % 3]) * 16, keep=500 * (who % 4)) + PRESENT)
            end = self._ends.get(who)
            known = end.connection.session if end is not None else None
        if known is not None:
            whole = _next_batch(known, data)
            assert end is not None
            is_next = not end.connection.held  # or it may be a part of what `send` has begun
            self.send(who, whole)
            is_refused = who not in self._ends or self._ends[who].is_ending
            is_read = is_next and not self.desk.is_paused(end.connection)
            is_good = is_refused or not is_read or _can_be_read(read_upstream, whole)
            assert is_good, "a batch is taken that is none"

    def drop(self, who: int, data: bytes) -> None:
        """Sends a batch, and is gone before all of it is carried out. Not cut: more would be then."""
        cuts, self._cuts = self._cuts, None
        self.batch(who, b"")
        end = self._ends.get(who)
        if end is not None and end.connection.session is not None:
            end.receive(_next_batch(end.connection.session, data))
        self.close(who, b"")
        self._cuts = cuts

    def _open(self, who: int) -> End | None:
        self.close(who, b"")
        try:
            connection = self._core.open(f"client {who}")
        except ProtocolError as error:
            self.outputs.append((who, error.message))
            return None
        end = self._ends[who] = End(self.desk, connection)
        self.desk.ends[connection] = end
        return end

    def pieces(self, data: bytes) -> list[bytes]:
        """All in one piece, or cut."""
        cuts, size = self._cuts, len(data)
        if cuts is None or not size:
            return [data]
        is_bytewise = size < 100 and cuts.random() < 0.05
        places = range(size) if is_bytewise else {0, *cuts.choices(range(size), k=cuts.choice((1, 1, 2, 4)))}
        return [data[start:stop] for start, stop in pairwise([*sorted(places), size])]

    def _feed(self, end: End, data: bytes) -> None:
        """What the core wants, apart from going on with this client, has to wait until all is fed."""
        others, on = self._core.outbox.others, GoOn(end.connection)
        turns = 0
        for piece in self.pieces(data):
            end.receive(piece)
            while on in others and not self.desk.is_paused(end.connection):
                if self.desk.wants_another(end.connection):
                    return  # what stands behind that is for another store
                others.remove(on)
                end.go_on()
                turns += 1
                assert turns < MOST_TURNS + len(data), "a client is gone on with for ever"

    def end(self, who: int, _: bytes) -> None:
        end = self._ends.get(who)
        if end is not None:
            end.receive(None)

    def close_all(self) -> None:
        for end in list(self.desk.ends.values()):
            end.be_closed(None)

    def close(self, who: int, _: bytes) -> None:
        end = self._ends.pop(who, None)
        if end is not None and end.connection in self.desk.ends:
            end.be_closed(None)

    def unread(self, who: int, data: bytes) -> None:
        end = self._ends.get(who)
        if end is not None:
            end.connection.leave_unread(40 * len(data))

    def time(self, who: int, _: bytes) -> None:
        self._core.turn.now += who / 2
        for client, why in self._core.overdue():
            if client in self.desk.ends:
                client.why = why
                self.desk.ends[client].be_closed(ProtocolError(why))
        self._core.end_second()


def _can_be_read(read: Callable[[bytes], object], data: bytes) -> bool:
    """Whether a reader that was written by the docs, and not by the code, can read it."""
    try:
        read(data)
    except (AssertionError, OverflowError, struct.error):
        return False
    return True


def _next_batch(known: Session, data: bytes) -> bytes:
    head = batch(known.taken + 1, known.kept.number, [])
    size = len(head) - 9 + len(data)
    return head[:1] + size.to_bytes(8, "little") + head[9:] + data


class OnStore(Stage):
    """A relay and its clients, on a store."""

    def __init__(self, cuts: Random | None) -> None:
        turn = Turn(100.0)
        relay = self._relay = RelayCore(bytes(16), LIMITS, turn)
        super().__init__(relay, cuts)
        self._store = Desk(Core(LIMITS, turn))
        self._tokens = 0
        self._connect()
        self.move()

    def _connect(self) -> None:
        self._link = End(self._store, self._store.front.open("relay"))
        self._store.ends[self._link.connection] = self._link
        self._up = VALIDATE + self._relay.connect()

    def move(self) -> None:
        for _ in range(MOST_TURNS):
            self.desk.empty_outbox()
            self._up += self._relay.flush()
            self._push(len(self._up))
            if self._link.connection not in self._store.ends:
                self._lost()
            got = self._link.take()
            if not got and not self._up and not self._relay.outbox.others:
                return
            self._pull(got)
        raise AssertionError("a relay and its store do not come to rest")

    def _push(self, count: int) -> None:
        """Let that many bytes come to the store."""
        data, self._up = self._up[:count], self._up[count:]
        if data and self._link.connection in self._store.ends:
            self._link.receive(data)
        self._store.empty_outbox()
        for other in self._store.take():
            assert not isinstance(other, CoreFault), other
            while other is DriverTask.SNAPSHOTS and self._store.front.snapshots.step() is SnapshotStep.MORE:
                pass
        error = self._link.error
        assert error is None or "held_bytes" in error.message, f"the store refused the relay: {error}"

    def _pull(self, data: bytes) -> None:
        try:
            self._up += self._relay.receive_upstream(data)
        except SessionLostError:
            self._tokens += 1
            self.close_all()
            self.desk.empty_outbox()
            self._relay.lose_upstream()
            self._relay.reset(self._tokens.to_bytes(16, "big"))
            self._lost()

    def _lost(self) -> None:
        self._relay.lose_upstream()
        if self._link.connection in self._store.ends:
            self._link.be_closed(None)
        self._connect()

    def lose(self, who: int, _: bytes) -> None:
        """The connection breaks, with some of what was under way."""
        self._up += self._relay.flush()
        self._push(20 * who)
        self._pull(self._link.take()[: 10 * who])
        self._lost()

    def time(self, who: int, data: bytes) -> None:
        super().time(who, data)
        for client, _ in self._store.front.overdue():
            self._store.ends[client].be_closed(None)
        self._store.front.end_second()
        self._store.empty_outbox()
        self._up += self._relay.upstream.tick()

    def leave_all(self) -> None:
        super().leave_all()
        combiner = self._relay.combiner
        assert not combiner.held_bytes
        assert not combiner.parked
        assert not combiner.has_unsent


class UnderUpstream(Stage):
    """A relay and its clients, and an upstream that the script plays."""

    def __init__(self, cuts: Random | None) -> None:
        relay = self._relay = RelayCore(bytes(16), LIMITS, Turn(100.0))
        super().__init__(relay, cuts)
        self._connect(0)

    def _connect(self, answer: int) -> None:
        self._relay.connect()
        self._take([welcome(answer, self._relay.upstream._kept.number, LIMITS.batch_bytes)])

    def _take(self, pieces: list[bytes]) -> None:
        relay = self._relay
        try:
            self.outputs.append(("up", b"".join(map(relay.receive_upstream, pieces))))
            return
        except SessionLostError as error:
            self.outputs.append(("lost", error.message))
            self.close_all()
            self.desk.empty_outbox()
            relay.lose_upstream()
            relay.reset(bytes(16))
            answer = 0
        except ProtocolError as error:
            self.outputs.append(("closed", error.message))
            relay.lose_upstream()
            answer = 1
        self._connect(answer)

    def move(self) -> None:
        self.desk.empty_outbox()
        self.outputs.append(("up", self._relay.flush()))
        self.desk.empty_outbox()

    def lose(self, who: int, _: bytes) -> None:
        self._relay.lose_upstream()
        self._connect(1)

    def up(self, _: int, data: bytes) -> None:
        """Bytes as they are. Each frame that is complete may lead to a batch: so this is never cut."""
        self._take([data])

    def items(self, _: int, data: bytes) -> None:
        """The next frame, with these items."""
        here = self._relay.upstream
        head = frame(here._taken + 1, here._kept.number)[8:]
        whole = len(head + data).to_bytes(8, "little") + head + data
        is_next = not here._reader._kept  # or it is a part of what `up` has begun
        self._take(self.pieces(whole))
        is_refused = here is not self._relay.upstream
        assert is_refused or not is_next or _can_be_read(read_frames, whole), "a frame is taken that is none"


STAGES: Final[dict[str, Callable[[Random | None], Stage]]] = {
    "store": lambda cuts: Stage(Core(LIMITS, Turn(100.0), wants_events=True, owner_key=b"/k9"), cuts),
    "relay": OnStore,
    "upstream": UnderUpstream,
}


# What a look has counted, and the lengths in front of a snapshot: with the numbers in it, they change.
_READ_BY_A_LOOK: Final = re.compile(rb'"operations":(\d+|\[[^]]*\])|^.*(?=\{"kind")', re.DOTALL)
# A batch with the report of a relay, or with nothing: with more counted, a report may be too long for one.
_REPORT_OR_NOTHING: Final = re.compile(rb'!.{24}(.{8}\).{8}\{"kind":"relay".*)?', re.DOTALL)


def _comparable(outputs: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """What must not depend on the cuts.

    A pause may come between two requests: so who gets something first does, and how many requests have been
    read by a look. Nor are GETs counted that come in one read with a violation.
    """
    found: list[tuple[object, ...]] = []
    for who, said in outputs:
        if not isinstance(said, bytes):
            found.append((who, said))
        elif said and not (who == "up" and _REPORT_OR_NOTHING.fullmatch(said)):
            found.append((who, _READ_BY_A_LOOK.sub(b"", said)))
    return sorted(found, key=lambda output: str(output[0]))


def play(stage: str, script: Script) -> None:
    """Run a script; what it raises is a finding."""
    seed = crc32(b"".join([step.data for step in script]))
    stages = STAGES[stage](None), STAGES[stage](Random(seed))
    whole = _comparable(stages[0].run(script, with_look=seed % 16 == 0))
    cut = _comparable(stages[1].run(script, with_look=False))
    if whole != cut and not any(each.has_paused for each in stages):
        if any("the limit held_bytes" in str(said) for _, said in whole + cut):
            return  # how much is held at a moment depends on the cuts
        one, other = next(pair for pair in zip_longest(whole, cut) if pair[0] != pair[1])
        raise AssertionError(f"in one piece {one!r}, cut {other!r}")
