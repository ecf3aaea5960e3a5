"""The leader: clients' requests become records, committed records become replies. `replica` has the theory.

The clients' side is a `ServerCore` of `Caller`s, which a pump serves as it serves a store's. The driver

- calls `begin`, and then, whenever the outbox says FLUSH, `next_record`; it has the engine append the parts,
  and calls `committed`;
- says when the engine has confirmed that this process leads (`confirm`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.core.clients import EXTENSION_METHODS, SESSION_METHODS, Client
from rallypoint.store.core.context import About, Close, Context, DriverTask
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.sessions import NoCarrier, Session
from rallypoint.store.core.snapshots import SnapshotCallback, Snapshots, SnapshotStep
from rallypoint.store.core.store import Connection, Core
from rallypoint.store.core.turn import Durations, Turn
from rallypoint.store.replica.core.records import LINK_BYTES, Entry, Kind, in_parts, link, pack_record
from rallypoint.store.replica.core.replica import Output, Replica, rules_of
from rallypoint.store.rollcall.identity import Role, is_hello, parse_hello
from rallypoint.store.rollcall.judgement import trouble_with_engine
from rallypoint.store.rollcall.question import Question
from rallypoint.store.wire.encoding import EMPTY_BLOB, VALIDATE, blob, encode, pack_i64
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import LOGGED_OPS, READ_OPS, READY, Op
from rallypoint.store.wire.parser import RequestParser, RequestTable
from rallypoint.store.wire.requests import Deliver, Nature, Scanner, carried
from rallypoint.store.wire.sessions import ANNOUNCED, Note, pack_note

if TYPE_CHECKING:
    from rallypoint.store.rollcall.snapshot import Replication, Snapshot

LEASE_SECONDS: Final = 1.0
"""For how long a process that was confirmed as the leader answers reads by itself. Nobody else leads in that
time: others wait for longer before they do."""

RENEW_SECONDS: Final = 0.3
"""How often a leader says that it is alive."""
SILENCE_SECONDS: Final = LEASE_SECONDS + RENEW_SECONDS
"""After so long without a sign, the lease of a leader is over: it was renewed before the last sign was seen.
Clocks of two machines need not agree, but a second has to last equally long on both, within a quarter."""

_SCANNED_BYTES: Final = 4_096
"""Longer data is parsed, so that one client's flood is cut into slices."""
_ENTRY_BYTES: Final = 64
"""What an entry takes besides its data, about."""
_ASK_SECONDS: Final = 0.5
_IDLE_SECONDS: Final = 60.0
"""For how long a named store is kept that nobody uses."""


class Caller(Client):
    """One client of the leader."""

    __slots__ = (
        *("_is_tool", "_snapshot_is_due", "_leader", "_most_bytes", "_outgoing", "_outgoing_bytes"),
        *("_woken", "has_left", "is_known", "name", "pending"),
    )

    def __init__(self, leader: LeaderCore, peer: str) -> None:
        super().__init__(leader.clients, leader.sessions, peer)
        self._leader = leader
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._most_bytes = self._context.limits.unsent_bytes
        self._woken = leader.outbox.woken
        self._snapshot_is_due = False
        self._is_tool = True  # so far
        self.name = ""
        """Which store it means."""
        self.is_known = False
        """Whether the log knows of it."""
        self.has_left = False
        """Whether the log knows that it has gone, or will."""
        self.pending = 0
        """How many of its entries are not committed."""
        self.read_with(RequestParser(self, leader.request_table))
        self.receive = self._receive

    def _receive(self, data: bytes) -> bytes:
        parser = self._parser
        assert parser is not None
        if not self._is_tool and parser.is_between_requests and 0 < len(data) <= _SCANNED_BYTES:
            nature, awaited = self._leader.scanner.classify(data)
            if nature is Nature.READS and self._may_read(awaited):
                return self._read(data)
            if nature is not Nature.OTHER:
                self._leader.log_requests(self, data)
                return b""
        return parser.feed(data)

    def _may_read(self, awaited: Sequence[bytes]) -> bool:
        """Whether requests that only read can be answered now, without a record."""
        return not self.pending and self._leader.may_read(self.name, awaited)

    def _read(self, data: bytes) -> bytes:
        reply = self._leader.read(self.name, data)
        return self.take_notice() + reply if self._outgoing else reply

    # What the parser calls

    def get(self, key: bytes) -> bytes:
        return self.carry(Op.GET, [key], b"")

    def carry(self, op: Op, blobs: list[bytes], tail: bytes) -> bytes:
        if self._is_tool and (answer := self._answer_tool(op, blobs)):
            return answer
        self._is_tool = False
        data = encode(op, blobs, tail)
        if (op in READ_OPS or op is Op.WAIT) and self._may_read(blobs if op is Op.WAIT else ()):
            return self._read(data)
        self._leader.log_requests(self, data)
        return b""

    def _answer_tool(self, op: Op, blobs: list[bytes]) -> bytes:
        """Answer a tool that wants a snapshot: its hello, then its question. Nothing, if it asks for more.

        No record is needed, so it is answered also while the engine is away.
        """
        if op is Op.DELETE_KEY and is_hello(blobs[0]):
            who = parse_hello(blobs[0])
            if who is not None and who.role is Role.TOOL:
                self.greet(blobs[0])
                return pack_i64(0)
        elif op is Op.CHECK and blobs == [ANNOUNCED] and self.who.role is Role.TOOL:
            return READY
        return b""

    def enter(self, name: bytes) -> bytes:
        if self.is_known:
            raise ProtocolError("it says which store it means behind its first request")
        if b"\0" in name:
            raise ProtocolError("the name of a store has no zero byte")
        self.name = name.decode(errors="surrogateescape")
        return b""

    def beat(self) -> bytes:
        """Who may lead no more says so: the relay looks for another one then."""
        if self._leader.may_read(self.name, ()):
            return EMPTY_BLOB
        return pack_note(self._leader.trouble())

    def snapshot(self, question: bytes) -> bytes:
        if self._snapshot_is_due:
            raise ProtocolError("a second SNAPSHOT before the first is answered")
        self._leader.start_snapshot(self.name, Question.from_json(question), self._take_snapshot)
        self._snapshot_is_due = True
        return b""

    def report(self, _: bytes) -> bytes:
        """Forgotten: launchers tell their relays, and the log is no place for it."""
        return b""

    def _take_snapshot(self, snapshot: bytes) -> None:
        self._snapshot_is_due = False
        if self in self._leader.clients:
            self.queue(blob(snapshot))

    # Outgoing

    @property
    def is_owed(self) -> bool:
        return self._snapshot_is_due or self.pending > 0

    def queue(self, data: bytes) -> None:
        """Send this with the next notice. If too much is queued, the connection is closed instead."""
        self._outgoing_bytes += len(data)
        if self._outgoing_bytes > self._most_bytes:
            why = f"it asked for more than {self._most_bytes:,} bytes at once, the limit unsent_bytes"
            self._leader.outbox.others.append(Close(self, LimitError(why), at_once=True))
            return
        if not self._outgoing:
            self._woken.append(self)
        self._outgoing.append(data)

    def take_notice(self) -> bytes:
        outgoing, self._outgoing = self._outgoing, []
        self._outgoing_bytes = 0
        return outgoing[0] if len(outgoing) == 1 else b"".join(outgoing)


class LeaderCore(ServerCore[Caller]):
    """One leader, for one term. Not safe for threads."""

    __slots__ = (
        *("_all_snapshots", "_asked", "_clock", "_confirmed", "_counts_until", "_ended", "_entries", "_idle"),
        *("_in_flight", "_is_full", "_known", "_nothing", "_parts", "_readers", "_sending_bytes"),
        *("_time_ahead", "_waiting_bytes", "replica", "scanner", "describe_replication"),
    )

    def __init__(
        self,
        replica: Replica,
        clock: Callable[[], float],
        limits: Limits | None = None,
        turn: Turn | None = None,
        about: About | None = None,
    ) -> None:
        """`clock`: the monotonic clock of `turn`, but not only once in a turn: see `may_read`."""
        context = Context(limits, turn, about)
        own: dict[Op, Deliver[Caller]] = {**EXTENSION_METHODS, Op.BEAT: SESSION_METHODS[Op.BEAT]}
        table: RequestTable[Caller] = RequestTable(context.limits, {**carried(LOGGED_OPS), **own})
        super().__init__(context, NoCarrier(), table)
        self.replica = replica
        self.scanner = Scanner(self.limits, LOGGED_OPS)
        self.snapshots = self._all_snapshots = LeaderSnapshots(self)
        self.describe_replication: Callable[[], Replication | None] = lambda: None
        """For snapshots; the driver knows it."""
        self._clock = clock
        # Time goes on where the leader before has left it, and stands still while nobody confirms that this
        # process leads: relays could not take their sessions up, so none is given up for that.
        self._time_ahead = replica.turn.now - clock()
        self._counts_until = clock()
        self._confirmed = float("-inf")
        self._known: dict[int, Caller] = {}  # those that the log knows of
        self._ended: set[Caller] = set()  # those that wait for their last replies
        self._entries: deque[Entry] = deque()  # of the next records
        self._waiting_bytes = 0
        self._is_full = False
        self._in_flight: list[Entry] = []  # of the record that is on its way
        self._parts: Sequence[bytes] = ()
        self._sending_bytes = 0  # because of the last record
        self._readers: dict[str, _Reader] = {}
        self._nothing = Core(self.limits, replica.turn, has_names=True)
        self._idle: dict[str, float] = {}
        self._asked: dict[str, float] = {}

    def _make(self, peer: str) -> Caller:
        return Caller(self, peer)

    # Records

    def begin(self, term: int) -> None:
        """Lead. The first record says so; it closes all connections that the leader before had."""
        self._log(Entry(Kind.TERM, term, rules_of(self.limits)))

    def log_requests(self, caller: Caller, data: bytes) -> None:
        """Have some whole requests carried out, in their turn."""
        if not caller.is_known:
            caller.is_known = True
            self._idle.pop(caller.name, None)
            self._known[caller.id] = caller
            place = f"{caller.name}\0{caller.peer}".encode(errors="surrogateescape")
            self._log(Entry(Kind.OPEN, caller.id, place))
        caller.pending += 1
        self._log(Entry(Kind.REQUESTS, caller.id, data))

    def _log(self, entry: Entry) -> None:
        if not self._entries and not self._in_flight:
            self.outbox.others.append(DriverTask.FLUSH)
        self._entries.append(entry)
        self._waiting_bytes += _size(entry)
        if self._waiting_bytes > self.limits.relayed_bytes and not self._is_full:
            self._is_full = True
            self.outbox.others.append(DriverTask.HOLD)

    def next_record(self, most: int) -> Sequence[bytes]:
        """The next record, in parts of at most so many bytes. None, if there is nothing to say, or the last
        record is still on its way."""
        if self._in_flight or not self._entries:
            return ()
        self._in_flight = self._take_entries(most)
        if self._is_full and self._waiting_bytes <= self.limits.relayed_bytes // 2:
            self._is_full = False
            self.outbox.others.append(DriverTask.READ_ON)
        self._parts = link(
            in_parts(pack_record(self.time, self._in_flight), most - LINK_BYTES), self.replica.last
        )
        return self._parts

    def _take_entries(self, most: int) -> list[Entry]:
        """Entries of so many bytes at most; but at least one."""
        if self._waiting_bytes <= most:
            taken = list(self._entries)
            self._entries.clear()
            self._waiting_bytes = 0
            return taken
        taken, size = [], 0
        while self._entries and (not taken or size + _size(self._entries[0]) <= most):
            taken.append(self._entries.popleft())
            size += _size(taken[-1])
        self._waiting_bytes -= size
        return taken

    def committed(self) -> None:
        """The engine has acknowledged the record: now, and not before, it is carried out."""
        entries, self._in_flight = self._in_flight, []
        if self._entries:
            self.outbox.others.append(DriverTask.FLUSH)
        known = self._known
        for kind, client, _ in entries:
            if kind is Kind.REQUESTS and client in known:
                known[client].pending -= 1
        self._sending_bytes = 0
        for part in self._parts:
            self.replica.apply(part, self._send)
        self.check_held()
        for caller in [each for each in self._ended if not each.pending]:
            self._ended.remove(caller)
            self.outbox.woken.append(caller)  # nothing more will come for it, and it may be closed

    def _send(self, output: Output) -> None:
        number, data, error = output
        caller = self._known.get(number)
        if caller is None:
            return
        if data:
            self._sending_bytes += len(data)
            if self._sending_bytes > self.limits.held_bytes:  # a short record may ask for a lot
                why = "its record asked for more than the limit held_bytes"
                self.outbox.others.append(Close(caller, LimitError(why), at_once=True))
            else:
                caller.queue(data)
        if error is not None:
            caller.has_left = True  # the replica has closed it already
            self.outbox.others.append(Close(caller, error))

    @property
    def time(self) -> float:
        """The time, as the log has it."""
        return min(self._clock(), self._counts_until) + self._time_ahead

    # Clients

    def _leave(self, caller: Caller) -> None:
        if caller.is_known and not caller.has_left:
            caller.has_left = True
            self._log(Entry(Kind.CLOSE, caller.id))

    def end(self, client: Caller) -> None:
        super().end(client)
        self._ended.add(client)

    def close(self, client: Caller) -> None:
        super().close(client)
        found = self.replica.client(client.id)
        if found is not None:  # for the sums of its store
            found[1].received, found[1].sent = client.received, client.sent
        self._known.pop(client.id, None)
        self._ended.discard(client)

    def overdue(self) -> list[tuple[Caller, str]]:
        if self.replica.awaits_sessions and self.may_read("", ()):
            self._log(Entry(Kind.EXPIRE))
        self._drop_idle()
        return super().overdue()

    def _drop_idle(self) -> None:
        """Drop the stores with a name that nobody has used for a while, such as those of earlier rounds."""
        now = self.turn.now
        used = {caller.name for caller in self.clients}
        for name, core in self.replica.stores.items():
            if not name or core.has_clients or name in used:
                self._idle.pop(name, None)
            elif now - self._idle.setdefault(name, now) >= _IDLE_SECONDS:
                for kept in (self._idle, self._readers, self._asked):
                    kept.pop(name, None)
                self._log(Entry(Kind.DROP, 0, name.encode(errors="surrogateescape")))

    @property
    def held(self) -> int:
        return super().held + sum(core.held for core in self.replica.stores.values())

    def _holders(self) -> Iterator[tuple[int, Any]]:
        yield from ((self._weight_of(each), each) for each in self.clients)
        for name, core in self.replica.stores.items():
            yield from ((core.held_behind(each), (name, each)) for each in core.sessions)

    def _end_holder(self, holder: Any, error: LimitError) -> None:
        if isinstance(holder, Caller):
            super()._end_holder(holder, error)
            return
        name, session = holder
        self.note_error(session.peer, error.message)
        self._log(Entry(Kind.END_SESSION, 0, name.encode(errors="surrogateescape") + b"\0" + session.token))

    def _weight_of(self, caller: Caller) -> int:
        found = self.replica.client(caller.id)
        return caller.held + (found[0].held_by(found[1]) if found is not None else 0)

    # Reads

    def confirm(self, since: float) -> None:
        """The engine has confirmed that this process leads, when it was asked at this moment, or later."""
        self._confirmed = since
        self._time_ahead -= max(self._clock() - self._counts_until, 0.0)
        self._counts_until = max(since + LEASE_SECONDS, self._clock())

    def may_read(self, name: str, awaited: Sequence[bytes]) -> bool:
        """Whether what the replica holds is the truth, and all of these keys are there.

        The time is that of right now, and not of the turn: a process that was stopped in the midst of a turn
        may have lost its lead since, and read a request that came later.
        """
        if self._clock() >= self._confirmed + LEASE_SECONDS:
            return False
        if not awaited:
            return True
        store = self.replica.stores.get(name)
        return store is not None and not store.engine.missing(awaited)

    def read(self, name: str, data: bytes) -> bytes:
        """The replies to requests that only read."""
        core = self.replica.stores.get(name, self._nothing)
        reader = self._readers.pop(name, None)
        if reader is None or not reader.reads(core):
            reader = _Reader(core)
        try:
            replies = [reader.receive(data)]
            size = len(replies[0])
            while reader.has_rest:
                replies.append(reader.receive(b""))
                size += len(replies[-1])
                core.check_reply(size)
        finally:
            core.outbox.others.clear()  # it has said that there is a rest
        if core is not self._nothing:  # one that failed is not asked again: it may hold another's rest
            self._readers[name] = reader
        return replies[0] if len(replies) == 1 else b"".join(replies)

    # What it knows

    @property
    def waiting(self) -> int:
        return sum(core.waiting for core in self.replica.stores.values())

    @property
    def oldest_wait(self) -> float | None:
        waits = [core.oldest_wait for core in self.replica.stores.values()]
        return min((each - self._time_ahead for each in waits if each is not None), default=None)

    def counts(self) -> dict[Op, int]:
        counts: dict[Op, int] = {}
        for core in self.replica.stores.values():
            for op, count in core.counts().items():
                counts[op] = counts.get(op, 0) + count
        return counts

    def end_second(self, turns: Durations | None = None) -> None:
        super().end_second(turns)
        for core in self.replica.stores.values():
            clients, waiting = len(core.clients), core.waiting
            core.traffic.end_second(
                core.turn, turns or Durations(), core.counts(), clients=clients, waiting=waiting
            )
            core.progress.end_second(
                self.time, core.clients.arrivals, core.counts(), core.oldest_wait, waiting
            )
            core.forget_writers()

    def ask_in(self, name: str) -> bool:
        """Have the relays of a store tell of themselves, soon; once is enough for all of them.

        False if that cannot be written down now.
        """
        if not self.may_read(name, ()):
            return False
        if self._asked.get(name, float("-inf")) + _ASK_SECONDS <= self._clock():
            self._asked[name] = self._clock()
            self._log(Entry(Kind.TELL, 0, name.encode(errors="surrogateescape")))
        return True

    def trouble(self) -> Note:
        """What keeps it from going on: its engine is away, as far as it knows."""
        kept = self.describe_replication()
        return Note(*trouble_with_engine(kept)) if kept is not None and kept.away_seconds >= 0 else Note()

    def caller_of(self, client: Client) -> Caller | None:
        number = self.replica.number_of(client)
        return self._known.get(number) if number is not None else None

    def start_snapshot(self, name: str, question: Question, deliver: SnapshotCallback) -> None:
        """Make a snapshot of a store."""
        self._all_snapshots.start(question, deliver, name)

    def check_invariants(self) -> None:
        super().check_invariants()
        self.replica.check_invariants()
        assert self._waiting_bytes == sum(map(_size, self._entries))


def _size(entry: Entry) -> int:
    return len(entry.data) + _ENTRY_BYTES


class _Reader(Connection):
    """Answers what only reads, for all clients of a store. The store does not know of it."""

    __slots__ = ()

    def __init__(self, core: Core) -> None:
        super().__init__(core, "")
        self.receive(VALIDATE)

    def reads(self, core: Core) -> bool:
        return self._core is core

    def validate(self) -> None:
        """It does not count as a client."""

    def hold(self, *_: object) -> None:
        """Nothing is held for it: it is read to the end at once."""


class LeaderSnapshots(Snapshots):
    """The snapshots of one leader's stores: of what its replica holds."""

    __slots__ = ("_by_name", "_leader")

    def __init__(self, leader: LeaderCore) -> None:
        self._leader = leader
        self._by_name: dict[str, Snapshots] = {}

    def start(self, question: Question, deliver: SnapshotCallback, name: str = "") -> None:
        """As `Snapshots.start`, of the store of this name."""
        snapshots = self._by_name.get(name)
        if snapshots is None:
            snapshots = self._by_name[name] = Snapshots(_Subject(self._leader, name))
        snapshots.start(question, deliver)

    def step(self) -> SnapshotStep | Client:
        """As `Snapshots.step`, of the first store of which a snapshot is wanted."""
        for name, snapshots in list(self._by_name.items()):
            step = snapshots.step()
            if step is SnapshotStep.DONE:
                del self._by_name[name]
            else:
                return self._leader.caller_of(step) or SnapshotStep.MORE if isinstance(step, Client) else step
        return SnapshotStep.DONE


class _Subject:
    """One store of the leader, as the subject of snapshots."""

    is_finding = False

    def __init__(self, leader: LeaderCore, name: str) -> None:
        self._leader = leader
        self._name = name
        self._core = leader.replica.stores.get(name) or Core(leader.limits, leader.replica.turn)
        self.outbox = leader.outbox
        self.clients = self._core.clients
        self.sessions = self._core.sessions
        self.describe = self._core.describe
        self.waits_of = self._core.waits_of
        self.waits_behind = self._core.waits_behind

    @property
    def turn(self) -> Turn:
        leader = self._leader
        return Turn(leader.time, leader.turn.wall - leader.time)

    def find_processes(self) -> None:
        """Processes are not looked for: most clients come from other machines."""

    def request_report(self, _: Session) -> bool:
        return self._leader.ask_in(self._name)

    def sum_up(self) -> Snapshot:
        leader, core = self._leader, self._core
        leader.replica.turn.wall_ahead = leader.turn.wall - leader.time
        for client in core.clients:
            caller = leader.caller_of(client)
            if caller is not None:
                client.received, client.sent = caller.received, caller.sent
        kept = leader.describe_replication()
        if kept is not None and self._name and self._name not in leader.replica.stores:
            kept = replace(kept, unknown_store=self._name)
        return replace(core.sum_up(), replication=kept, **asdict(leader.about))
