"""The store's server without its I/O: takes bytes from all connections, returns bytes for all connections.

Both loops and the tests drive this same object, as `server_core` describes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from rallypoint.compiling import mypyc_attr
from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.core.clients import EXTENSION_METHODS, SESSION_METHODS, Client, Owners
from rallypoint.store.core.context import PIECE_BYTES, SLICE, About, Context, DriverTask, Slices, sliced
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.sessions import Session
from rallypoint.store.core.snapshots import Contents, Fields, Pending
from rallypoint.store.core.tickets import Member, StoreCarrier, Ticket, wake
from rallypoint.store.core.turn import Durations, Turn
from rallypoint.store.engine import Engine
from rallypoint.store.engine.keyspace import Budget, State, Value
from rallypoint.store.rollcall.identity import is_hello
from rallypoint.store.rollcall.question import KEYS_NAMED, Question
from rallypoint.store.wire.encoding import (
    EMPTY_BLOB,
    SHORT,
    SHORT_LENGTHS,
    blob,
    pack_i64,
    pack_u64,
    unpack_i64,
)
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import NOT_READY, READY, STOP_WAITING, WAIT_CANCELED, Op
from rallypoint.store.wire.parser import RequestParser, RequestTable
from rallypoint.store.wire.sessions import ANNOUNCED, NAMES_ANNOUNCED

_ANNOUNCED: Final = [ANNOUNCED]
_NAMES_ANNOUNCED: Final = [NAMES_ANNOUNCED]
_WAITS_TOLD: Final = 2_048
"""Of one relay; more would hold up others."""
_MOST_WRITERS = 1 << 20


@mypyc_attr(allow_interpreted_subclasses=True)
class Connection(Client):
    """One client: the handler of its requests. Made by `Core.open` alone."""

    __slots__ = (
        *("_core", "_engine", "_get", "_journal", "_snapshot", "_snapshot_is_due", "_turn", "_woken"),
        *("_writers",),
    )

    def __init__(self, core: Core, peer: str) -> None:
        super().__init__(core.clients, core.sessions, peer)
        self._core = core
        self._turn = core.turn
        self._journal = core.journal
        self._woken = core.outbox.woken
        self._engine = core.engine
        self._get = core.engine.get
        self._writers = core.writers
        self._snapshot: bytes | None = None
        self._snapshot_is_due = False
        self.read_with(RequestParser(self, core.request_table))

    @property
    def is_owed(self) -> bool:
        return self._snapshot_is_due

    def take_notice(self) -> bytes:
        if self._snapshot is not None:
            snapshot, self._snapshot = self._snapshot, None
            self._snapshot_is_due = False
            return snapshot
        return STOP_WAITING if self.session is None else self.session.flush()

    def wake(self) -> None:
        self._woken.append(self)

    # What the parser calls, for each request: the handler's methods return the reply.

    def ping(self, nonce: bytes) -> bytes:
        return nonce

    def get(self, key: bytes) -> bytes:
        find = self._get  # `self._get(key)` would look for a method first, and cost more
        value = find(key)
        if value is None:
            return EMPTY_BLOB
        length = len(value)  # from here on as in `blob`, but without the call: this is the hot path
        if length >= SHORT:
            return self._get_long(key, value)
        return SHORT_LENGTHS[length] + value

    def _get_long(self, key: bytes, value: Value) -> bytes:
        length = len(value)
        self._core.check_reply(length)
        if length <= PIECE_BYTES:
            return pack_u64(length) + value
        self._core.note_sending(self, [key], [value], length)
        self.begin(_in_blobs([value], [length]))
        assert self._parser is not None, "it has sent this request"
        self._parser.leave_unfinished()
        return self.go_on() or b""

    def multi_get(self, keys: list[bytes]) -> bytes | None:
        return self.begin(self._multi_get(keys))

    def _multi_get(self, keys: list[bytes]) -> Slices:
        values = [value or b"" for value in map(self._get, keys)]
        lengths = list(map(len, values))
        self._core.check_reply(8 * len(values) + sum(lengths))
        if sum(lengths) > PIECE_BYTES:
            self._core.note_sending(self, keys, values, sum(lengths))
        return (yield from _in_blobs(values, lengths))

    def set(self, key: bytes, value: bytes) -> bytes:
        woken = self._engine.set(key, value)
        self._writers[key] = self.id
        return wake(woken, self, self._journal) if woken else b""

    def multi_set(self, keys_and_values: list[bytes]) -> bytes | None:
        return self.begin(self._multi_set(keys_and_values))

    def _multi_set(self, keys_and_values: list[bytes]) -> Slices:
        new: dict[bytes, bytes] = {}
        for some in sliced(keys_and_values):
            if new:
                yield None
            new.update(zip(some[::2], some[1::2], strict=True))
        woken = self._engine.set_all(new)
        self._writers.update(dict.fromkeys(new, self.id))
        return wake(woken, self, self._journal) if woken else b""

    def append(self, key: bytes, value: bytes) -> bytes:
        woken = self._engine.append(key, value)
        self._writers[key] = self.id
        return wake(woken, self, self._journal) if woken else b""

    def add(self, key: bytes, amount: int) -> bytes:
        total, woken = self._engine.add(key, amount)
        if amount:
            self._writers[key] = self.id
        if woken:
            return wake(woken, self, self._journal) + pack_i64(total)
        return pack_i64(total)

    def add_times(self, key: bytes, amount: int, times: int) -> int | None:
        """Carry out `times` equal ADDs at once, for the last sum; None if they must be done one by one."""
        total = self._engine.add_times(key, amount, times)
        if total is not None and amount:
            self._writers[key] = self.id
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        notices, value = self.swap(key, expected, desired)
        return notices + blob(value)

    def swap(self, key: bytes, expected: bytes, desired: bytes) -> tuple[bytes, bytes | bytearray]:
        """As COMPARE_SET; returns this client's own notices, if it wakes, and the value uncopied."""
        is_written = (self._get(key) or b"") == expected
        value, woken = self._engine.compare_set(key, expected, desired)
        if is_written:
            self._writers[key] = self.id
        return (wake(woken, self, self._journal) if woken else b""), value

    def delete_key(self, key: bytes) -> bytes:
        owners = self._core.owners
        if key == owners.key:
            return pack_i64(self in self._core.clients and owners.add(self.id))
        if is_hello(key):
            self.greet(key)
            return pack_i64(0)
        self._writers.pop(key, None)
        return pack_i64(self._engine.delete(key))

    def num_keys(self) -> bytes:
        return pack_i64(self._engine.num_keys())

    def list_keys(self) -> bytes | None:
        return self.begin(self._list_keys())

    def _list_keys(self) -> Slices:
        keys = list(self._engine.keys())
        self._core.check_reply(8 * len(keys) + sum(map(len, keys)))
        return (yield from _in_blobs(keys, list(map(len, keys)), pack_i64(len(keys))))

    def queue_push(self, key: bytes, value: bytes) -> bytes:
        woken = self._engine.push(key, value)
        self._core.pushers[key] = self.id
        return wake(woken, self, self._journal) if woken else b""

    def queue_pop(self, key: bytes) -> bytes:
        length, value = self._engine.pop(self, key)
        if length <= 1:
            self._core.pushers.pop(key, None)
        return pack_i64(length) if value is None else pack_i64(length) + blob(value)

    def queue_len(self, key: bytes) -> bytes:
        return pack_i64(self._engine.queue_length(key))

    def check(self, keys: list[bytes]) -> bytes:
        if keys == _ANNOUNCED or (keys == _NAMES_ANNOUNCED and self._core.has_names):
            return READY
        return READY if self._engine.has_all(keys) else NOT_READY

    def wait(self, keys: list[bytes]) -> bytes | None:
        if len(keys) > SLICE:
            return self.begin(self._wait(keys))
        if self._engine.wait(self, keys, self._turn.now):
            return STOP_WAITING
        if self._journal is not None:
            self._journal.waits(self, keys)
        self._context.check_budget()
        return b""

    def _wait(self, keys: list[bytes]) -> Slices:
        is_over = yield from self._engine.wait_in_slices(self, sliced(keys), self._turn.now)
        if is_over:
            return STOP_WAITING
        if self._journal is not None:
            self._journal.waits(self, keys)
        self._context.check_budget()
        return b""

    def barrier(self, key: bytes, world_size: int) -> bytes:
        released = self._engine.barrier(self, key, world_size, now=self._turn.now)
        if self._journal is not None:
            self._journal.waits(self, [key])
        if not released:
            self._context.check_budget()
            return b""
        if self._journal is not None:
            self._journal.gathered(key, world_size, released, self)
        return wake(released, self, self._journal)

    def cancel_wait(self) -> bytes:
        # A withdrawal may call another connection instead of this one, but never this one itself.
        woken = self._engine.withdraw(self)
        if woken:
            wake(woken, self, self._journal)
        if self._journal is not None:
            self._journal.gave_up(self)
        if self._engine.is_untidy:
            self._core.outbox.others.append(DriverTask.REST)
        return WAIT_CANCELED

    def snapshot(self, question: bytes) -> bytes:
        """Start a snapshot. It takes a while, so other requests may be answered first."""
        if self._snapshot_is_due:
            raise ProtocolError("a second SNAPSHOT before the first is answered")
        self._core.snapshots.start(Question.from_json(question), self._take_snapshot)
        self._snapshot_is_due = True
        return b""

    def _take_snapshot(self, snapshot: bytes) -> None:
        if self in self._core.clients:
            self._snapshot = self._core.frame(snapshot)
            self._woken.append(self)


CLIENT_METHODS: Final[dict[Op, Callable[[Connection, list[bytes], bytes], bytes | None]]] = {
    Op.SET: lambda client, blobs, _: client.set(blobs[0], blobs[1]),
    Op.COMPARE_SET: lambda client, blobs, _: client.compare_set(*blobs),
    Op.GET: lambda client, blobs, _: client.get(blobs[0]),
    Op.ADD: lambda client, blobs, tail: client.add(blobs[0], unpack_i64(tail)[0]),
    Op.CHECK: lambda client, blobs, _: client.check(blobs),
    Op.WAIT: lambda client, blobs, _: client.wait(blobs),
    Op.GETNUMKEYS: lambda client, _, __: client.num_keys(),
    Op.DELETE_KEY: lambda client, blobs, _: client.delete_key(blobs[0]),
    Op.APPEND: lambda client, blobs, _: client.append(blobs[0], blobs[1]),
    Op.MULTI_GET: lambda client, blobs, _: client.multi_get(blobs),
    Op.MULTI_SET: lambda client, blobs, _: client.multi_set(blobs),
    Op.CANCEL_WAIT: lambda client, _, __: client.cancel_wait(),
    Op.PING: lambda client, _, tail: client.ping(tail),
    Op.QUEUE_PUSH: lambda client, blobs, _: client.queue_push(blobs[0], blobs[1]),
    Op.QUEUE_POP: lambda client, blobs, _: client.queue_pop(blobs[0]),
    Op.QUEUE_LEN: lambda client, blobs, _: client.queue_len(blobs[0]),
    Op.LIST_KEYS: lambda client, _, __: client.list_keys(),
    Op.BARRIER: lambda client, blobs, tail: client.barrier(blobs[0], unpack_i64(tail)[0]),
}
"""torch's operations, and the methods that carry them out."""


def _in_blobs(values: Sequence[Value], lengths: list[int], head: bytes = b"") -> Slices:
    """A reply of `head` and these values; a long one in pieces, each copied when it is sent.

    `lengths` are the lengths at the time of the request: a value that is appended to later only grows.
    """
    if sum(lengths) > PIECE_BYTES:
        yield None  # `begin` returns no pieces
    parts: list[Value] = [head]
    size = 0
    for number, (value, length) in enumerate(zip(values, lengths, strict=True), 1):
        parts.append(pack_u64(length))
        start = 0
        while length - start > PIECE_BYTES:
            parts.append(value[start : start + PIECE_BYTES])
            yield b"".join(parts)
            parts, size, start = [], 0, start + PIECE_BYTES
        parts.append(value[start:length])
        size += length - start
        if size > PIECE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
        elif not number % SLICE:
            yield None
    return b"".join(parts)


def _name_of(member: Member) -> State:
    """The name of a member of the engine in a checkpoint."""
    return [member.session.token, member.tag] if isinstance(member, Ticket) else [b"", member.id]


class Core(ServerCore[Connection]):
    """The server of one store: its connections, sessions and engine. Not safe for threads."""

    __slots__ = (
        "_carrier",
        "_contents",
        "_framed",
        "_replaced",
        "_sending",
        "_sending_bytes",
        "engine",
        "has_names",
        "owners",
        "pushers",
        "writers",
    )

    def __init__(
        self,
        limits: Limits | None = None,
        turn: Turn | None = None,
        about: About | None = None,
        *,
        wants_events: bool = False,
        owner_key: bytes | None = None,
        has_names: bool = False,
        beside: ServerCore[Connection] | None = None,
    ) -> None:
        """`owner_key`: the server ends with the last client that has deleted this key; see `Owners`.

        `has_names`: clients may ENTER other stores here, by their names. `beside`: the core without a name at
        the same server, where this is one of those stores; they share one budget.
        """
        limits = limits or Limits()
        budget = beside.budget if beside is not None else Budget(limits)
        context = Context(limits, turn, about, budget, wants_events=wants_events)
        self.engine: Engine[Member] = Engine(context.limits, budget)
        self.has_names = has_names
        self.writers: dict[bytes, int] = {}
        """By key, the number of the client or relay that wrote it last, as far as that is kept."""
        self.pushers: dict[bytes, int] = {}
        """The same for queues."""
        self._framed = b"", blob(b"")
        self._sending: dict[Connection, tuple[list[bytes], list[Value]]] = {}
        self._sending_bytes = 0  # how much has begun since `_count_replaced`
        self._replaced: dict[Connection, int] = {}
        self._carrier = StoreCarrier(self.engine, context, CLIENT_METHODS, self._act_for, self.pushers)
        table: RequestTable[Connection] = RequestTable(
            context.limits, {**CLIENT_METHODS, **SESSION_METHODS, **EXTENSION_METHODS}, is_prompt=True
        )
        super().__init__(context, self._carrier, table)
        self.clients.have_named = beside is not None
        self.owners = Owners(owner_key, context.outbox.others)
        self._contents = Contents(
            self.engine, self.writers, self.pushers, self.clients, self.sessions, self.turn
        )

    def _make(self, peer: str) -> Connection:
        return Connection(self, peer)

    def _act_for(self, session: Session) -> Connection:
        """A connection that carries out the requests of a session, as their sender. It is never opened."""
        requester = Connection(self, session.peer)
        requester.id = session.id
        return requester

    def _leave(self, client: Connection) -> None:
        super()._leave(client)
        woken = self.engine.withdraw(client)
        if woken:
            wake(woken, client, self.journal)
        if self.engine.is_untidy:
            self.outbox.others.append(DriverTask.REST)

    def close(self, client: Connection) -> None:
        super().close(client)
        self.owners.remove(client.id)

    def note_sending(self, client: Connection, keys: list[bytes], values: list[Value], count: int) -> None:
        """Note that a client is sent these values in pieces: they stay in memory even if replaced."""
        self._sending_bytes += count
        if self._sending_bytes > self.budget.limit // 8:
            self._count_replaced()
        self._sending[client] = keys, values

    def _count_replaced(self) -> None:
        """Charge clients for the values that they are being sent and that are no longer stored.

        Clients that are sent the same value share its charge.
        """
        get, before = self.engine.get, sum(self._replaced.values())
        self._sending = {each: sent for each, sent in self._sending.items() if each.is_unfinished}
        gone = {
            each: [value for key, value in zip(*sent, strict=True) if get(key) is not value]
            for each, sent in self._sending.items()
        }
        readers = Counter([id(value) for values in gone.values() for value in values])
        self._replaced = {
            each: sum([len(value) // readers[id(value)] for value in values]) for each, values in gone.items()
        }
        self._sending_bytes = 0
        self.clients.context.count_held(sum(self._replaced.values()) - before)

    def check_reply(self, count: int) -> None:
        """Raise LimitError for a reply that is longer than may be sent."""
        limit = self.limits.unsent_bytes
        if count > limit:
            raise LimitError(f"asked for {count:,} bytes at once; the limit unsent_bytes is {limit:,}")

    # Checkpoints

    def state(self) -> State:
        """The store and its clients, as plain data, without counters and without who wrote which key.

        Call it only when no request is under way.
        """
        engine, notes = self.engine, map(self._carrier.notes_of, self.sessions)
        sessions = self.sessions.state(engine.get)
        return [self.clients.state(), engine.space.state(), sessions, list(notes), engine.state(_name_of)]

    def take_state(self, state: State) -> None:
        """Restore a `state`, with its clients. The core must be new."""
        clients, values, sessions, notes, waits = state
        self.clients.take_state(clients, self._make)
        self.engine.space.take_state(values)
        self.sessions.take_state(sessions, self.engine.get, self.clients.with_id)
        for session, some in zip(self.sessions, notes, strict=True):
            self._carrier.take_notes(session, some)
        by_token = {session.token: session for session in self.sessions}

        def member_of(name: State) -> Member:
            token, number = name
            return by_token[token].notes[number] if token else self.clients.with_id(number)

        self.engine.take_state(waits, member_of)

    # Figures and snapshots

    def end_second(self, turns: Durations | None = None) -> None:
        super().end_second(turns)
        self.forget_writers()
        if self._sending:
            self._count_replaced()

    def forget_writers(self) -> None:
        """About once a second: forget who wrote which key, if that is very much."""
        for each in (self.writers, self.pushers):
            if len(each) > _MOST_WRITERS:
                each.clear()

    def held_by(self, client: Connection) -> int:
        return super().held_by(client) + self.engine.waits_held_by(client) + self._replaced.get(client, 0)

    def held_behind(self, session: Session) -> int:
        return super().held_behind(session) + sum(map(self.engine.waits_held_by, session.notes.values()))

    def go_on(self) -> bool:
        return super().go_on() | self.engine.sweep()

    def has_key(self, name: str) -> bool:
        try:
            return not self.engine.missing([b"/" + name.encode(errors="surrogateescape")])
        except UnicodeEncodeError:  # no key is named like that
            return False

    @property
    def plan(self) -> bytes | bytearray | None:
        return self._contents.plan

    @property
    def stall(self) -> bytes | bytearray | None:
        return self._contents.stall

    @property
    def waiting(self) -> int:
        return self.engine.waiting

    @property
    def oldest_wait(self) -> float | None:
        return self.engine.oldest_wait

    def waits_of(self, client: Connection) -> Sequence[Pending]:
        return self.engine.waiters.pending_of(client, KEYS_NAMED)

    def waits_behind(self, session: Session) -> Sequence[Pending]:
        waits_of, tickets = self.engine.waiters.pending_of, islice(session.notes.values(), _WAITS_TOLD)
        return [each for ticket in tickets for each in waits_of(ticket, KEYS_NAMED)]

    def frame(self, snapshot: bytes) -> bytes:
        """A snapshot as a reply, made once for all clients that share it."""
        if self._framed[0] is not snapshot:
            self._framed = snapshot, blob(snapshot)
        return self._framed[1]

    def describe(self, question: Question) -> Fields:
        return self._contents.describe(question)

    def check_invariants(self) -> None:
        super().check_invariants()
        self.engine.check_invariants()
