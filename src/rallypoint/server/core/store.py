"""The whole server but its I/O: bytes of all connections in, bytes for all connections out.

Both backends and the tests drive this same object; `Front` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rallypoint.engine import Engine
from rallypoint.errors import LimitError, ProtocolError
from rallypoint.rollcall.identity import is_hello
from rallypoint.rollcall.snapshot import KEYS_NAMED, Question
from rallypoint.server.core.contents import describe_store
from rallypoint.server.core.front import Client, Front
from rallypoint.server.core.looks import Fields, Pending
from rallypoint.server.core.sessions import Session
from rallypoint.server.core.tickets import StoreCarrier, Ticket
from rallypoint.wire.encoding import EMPTY_BLOB, SHORT, SHORT_LENGTHS, blob, blobs, pack_i64, pack_u64
from rallypoint.wire.limits import Limits
from rallypoint.wire.opcodes import NOT_READY, READY, STOP_WAITING, WAIT_CANCELED, Op
from rallypoint.wire.parser import LOOKS, SERVED, SESSIONS, Forms, RequestParser
from rallypoint.wire.sessions import ANNOUNCED

_ANNOUNCED: Final = [ANNOUNCED]

_WRITES_NOTED: Final = 256
"""Keys of one MULTI_SET: of more, it is not known later who has written them."""
_WRITERS_KEPT: Final = 1 << 20


class Connection(Client):
    """One client: the handler of its requests. Made by `Core.open` alone."""

    __slots__ = ("_core", "_engine", "_get", "_is_looking", "_snapshot", "_writers")

    def __init__(self, core: Core, peer: str) -> None:
        super().__init__(core.sessions, peer)
        self._core = core
        self._engine = core.engine
        self._get = core.engine.get
        self._writers = core.writers
        self._snapshot: bytes | None = None
        self._is_looking = False
        self.read_with(RequestParser(self, core.forms))

    @property
    def is_owed(self) -> bool:
        return self._is_looking

    def take_notice(self) -> bytes:
        if self._snapshot is not None:
            snapshot, self._snapshot = self._snapshot, None
            self._is_looking = False
            return snapshot
        return STOP_WAITING if self.session is None else self.session.flush()

    # What the parser calls, for each request: the handler's methods return the reply.

    def validate(self) -> None:
        self._core.complete_handshake(self)

    def ping(self, nonce: bytes) -> bytes:
        return nonce

    def get(self, key: bytes) -> bytes:
        find = self._get  # `self._get(key)` would look for a method first, and cost more
        value = find(key)
        if value is None:
            return EMPTY_BLOB
        length = len(value)  # from here on as in `blob`, but without the call: this is the hot path
        return (SHORT_LENGTHS[length] if length < SHORT else pack_u64(length)) + value

    def multi_get(self, keys: list[bytes]) -> bytes:
        get = self._get
        values = [get(key) or b"" for key in keys]
        self._core.check_reply(8 * len(values) + sum(map(len, values)))
        return blobs(values)

    def set(self, key: bytes, value: bytes) -> bytes:
        woken = self._engine.set(key, value)
        self._writers[key] = self.id
        return self._core.wake(woken, self) if woken else b""

    def multi_set(self, keys_and_values: list[bytes]) -> bytes:
        woken = self._engine.multi_set(keys_and_values)
        self._core.note_writes(keys_and_values[::2], self.id)
        return self._core.wake(woken, self) if woken else b""

    def append(self, key: bytes, value: bytes) -> bytes:
        woken = self._engine.append(key, value)
        self._writers[key] = self.id
        return self._core.wake(woken, self) if woken else b""

    def add(self, key: bytes, amount: int) -> bytes:
        total, woken = self._engine.add(key, amount)
        if amount:
            self._writers[key] = self.id
        if woken:
            return self._core.wake(woken, self) + pack_i64(total)
        return pack_i64(total)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        is_written = (self._get(key) or b"") == expected
        value, woken = self._engine.compare_set(key, expected, desired)
        if is_written:
            self._writers[key] = self.id
        return self._core.wake(woken, self) + blob(value)

    def delete_key(self, key: bytes) -> bytes:
        if key == self._core.owner_key:
            return pack_i64(self._core.take_owner(self))
        if is_hello(key):
            self._core.greet(self, key)
            return pack_i64(0)
        self._writers.pop(key, None)
        return pack_i64(self._engine.delete(key))

    def num_keys(self) -> bytes:
        return pack_i64(self._engine.num_keys())

    def list_keys(self) -> bytes:
        keys = list(self._engine.keys())
        self._core.check_reply(8 * len(keys) + sum(map(len, keys)))
        return pack_i64(len(keys)) + blobs(keys)

    def queue_push(self, key: bytes, value: bytes) -> bytes:
        woken = self._engine.push(key, value)
        self._core.pushers[key] = self.id
        return self._core.wake(woken, self)

    def queue_pop(self, key: bytes) -> bytes:
        length, value = self._engine.pop(self, key)
        return pack_i64(length) if value is None else pack_i64(length) + blob(value)

    def queue_len(self, key: bytes) -> bytes:
        return pack_i64(self._engine.queue_length(key))

    def check(self, keys: list[bytes]) -> bytes:
        if keys == _ANNOUNCED:
            return READY
        return NOT_READY if self._engine.missing(keys) else READY

    def wait(self, keys: list[bytes]) -> bytes:
        core = self._core
        if self._engine.wait(self, keys, core.clock):
            return STOP_WAITING
        if core.observer is not None:
            core.observer.waits(self, keys)
        return b""

    def barrier(self, key: bytes, world_size: int) -> bytes:
        core = self._core
        released = self._engine.barrier(self, key, world_size, now=core.clock())
        if core.observer is not None:
            core.observe_barrier(self, key, world_size, released)
        return core.wake(released, self)

    def cancel_wait(self) -> bytes:
        # Whom a withdrawal calls in its stead is another connection: this one waits for nothing now.
        self._core.wake(self._engine.withdraw(self), self)
        if self._core.observer is not None:
            self._core.observer.gave_up(self)
        return WAIT_CANCELED

    def look(self, question: bytes) -> bytes:
        """A snapshot takes a while; other requests may be answered before it."""

        def deliver(snapshot: bytes) -> None:
            if self in self._core.connections:
                self._snapshot = self._core.frame(snapshot)
                self._core.woken.append(self)

        if self._is_looking:
            raise ProtocolError("a second LOOK before the first is answered")
        self._core.looks.start(Question.from_json(question), deliver)
        self._is_looking = True
        return b""


class Core(Front[Connection]):
    """Parser and engine for all connections of one server. Not safe for threads."""

    __slots__ = (
        "_carrier",
        "_framed",
        "_on_abandoned",
        "_owners",
        "engine",
        "forms",
        "owner_key",
        "pushers",
        "writers",
    )

    def __init__(self, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.engine: Engine[Connection | Ticket] = Engine(limits)
        self.writers: dict[bytes, int] = {}
        """Who has written a key last, by the ids of connections and sessions; as far as that is kept."""
        self._framed = b"", blob(b"")
        self.pushers: dict[bytes, int] = {}
        """The same of queues, which are apart from values."""
        self._carrier = StoreCarrier(self)
        super().__init__(limits, self._carrier)
        self.forms: Forms[Connection] = Forms(limits, {**SERVED, **SESSIONS, **LOOKS})
        self._carrier.proxy = Connection(self, "a relay")
        self.owner_key: bytes | None = None
        self._owners: set[Connection] = set()
        self._on_abandoned: Callable[[], None] | None = None

    def _make(self, peer: str) -> Connection:
        return Connection(self, peer)

    def _leave(self, connection: Connection) -> None:
        super()._leave(connection)
        self.wake(self.engine.withdraw(connection), connection)

    def close(self, connection: Connection) -> None:
        super().close(connection)
        self._disown(connection)

    def live_with_owners(self, key: bytes, on_abandoned: Callable[[], None]) -> None:
        """Call `on_abandoned`, once, when the last owner has closed its connection.

        A connection becomes an owner by deleting `key`, a secret of whoever started the server. Thus a
        client that cannot be watched otherwise (torch's, in C++) ties the server to its own life.
        """
        self.owner_key = key
        self._on_abandoned = on_abandoned

    def take_owner(self, connection: Connection) -> bool:
        """Make a connection an owner; False if the server has been abandoned and is about to end."""
        if self._on_abandoned is None or connection not in self.connections:
            return False
        self._owners.add(connection)
        return True

    def _disown(self, connection: Connection) -> None:
        if connection not in self._owners:
            return
        self._owners.remove(connection)
        if not self._owners and self._on_abandoned is not None:
            abandon, self._on_abandoned = self._on_abandoned, None
            abandon()

    def check_reply(self, count: int) -> None:
        """Refuse to put together a reply that is longer than anyone may be sent."""
        limit = self.limits.unsent_bytes
        if count > limit:
            raise LimitError(f"asked for {count:,} bytes at once; the limit unsent_bytes is {limit:,}")

    def wake(self, members: Sequence[Connection | Ticket], current: Connection | None = None) -> bytes:
        """Note whom to wake; return the STOP_WAITINGs of `current` itself, to stand among its replies."""
        if not members:
            return b""
        if self.observer is not None:
            self.observer.woken(members, current)
        others = [member for member in members if member is not current]
        own = STOP_WAITING * (len(members) - len(others))
        if len(self.sessions):
            self._carrier.tell([member for member in others if isinstance(member, Ticket)])
            others = [member for member in others if not isinstance(member, Ticket)]
        self.woken += others  # type: ignore[arg-type]  # there are no tickets without a session
        return own

    # What it knows

    def note_writes(self, keys: Sequence[bytes], writer: int) -> None:
        """Several keys have been written at once; to note very many would take as long as to write them."""
        writers = self.writers
        if len(keys) <= _WRITES_NOTED:
            for key in keys:
                writers[key] = writer
        elif writers:
            for key in writers.keys() & set(keys):
                del writers[key]

    def observe_barrier(
        self, connection: Connection, key: bytes, size: int, released: Sequence[Connection | Ticket]
    ) -> None:
        assert self.observer is not None
        self.observer.waits(connection, [key])
        if released:
            self.observer.gathered(key, size, released, connection)

    def end_second(self) -> None:
        super().end_second()
        for writers in (self.writers, self.pushers):
            if len(writers) > _WRITERS_KEPT:
                writers.clear()

    def counts(self) -> dict[Op, int]:
        counts = self.forms.counts(self.operations)
        for op, count in super().counts().items():
            counts[op] = counts.get(op, 0) + count
        return counts

    @property
    def waiting(self) -> int:
        return self.engine.waiting

    @property
    def oldest_wait(self) -> float | None:
        return min(map(self._waits_since, self.engine.longest_waiting), default=None)

    def _waits_since(self, member: Connection | Ticket) -> float:
        if isinstance(member, Ticket):
            return member.since
        waits = [since for _, _, since in self.engine.waits_of(member, 1)]
        return min([*waits, *self.engine.barriers_of(member).values()])

    def waits_of(self, connection: Connection) -> Sequence[Pending]:
        return self.engine.waits_of(connection, KEYS_NAMED)

    def waits_behind(self, session: Session) -> Sequence[Pending]:
        pending: list[Pending] = []
        for ticket in session.notes.values():
            pending += [
                (keys, count, ticket.since) for keys, count, _ in self.engine.waits_of(ticket, KEYS_NAMED)
            ]
        return pending

    def frame(self, snapshot: bytes) -> bytes:
        """A snapshot as a reply: made once for all who share it."""
        if self._framed[0] is not snapshot:
            self._framed = snapshot, blob(snapshot)
        return self._framed[1]

    def describe(self, question: Question) -> Fields:
        return describe_store(self, question)

    def check_invariants(self) -> None:
        super().check_invariants()
        self.engine.check_invariants()
