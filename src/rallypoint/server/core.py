"""The whole server but its I/O: bytes of all connections in, bytes for all connections out.

Both backends and the tests drive this same object. Whoever pumps the bytes

- calls `open` for each new connection and `close` exactly once when it ends, for whatever reason;
- passes what it reads to the connection's `receive`, sends it what that returns, in one write, then
  calls `take_woken` and sends each connection in it one STOP_WAITING;
- closes a connection when `receive` raises ProtocolError (after sending the error's `replies`), when
  `overdue` names it, and when it does not read what it is sent (`Limits.unsent_bytes`).

Time comes in as a parameter, in seconds of any monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rallypoint.engine import Engine
from rallypoint.errors import LimitError, ProtocolError
from rallypoint.wire.encoding import EMPTY_BLOB, SHORT, SHORT_LENGTHS, blob, blobs, pack_i64, pack_u64
from rallypoint.wire.limits import Limits
from rallypoint.wire.opcodes import NOT_READY, READY, STOP_WAITING, WAIT_CANCELED
from rallypoint.wire.parser import Forms, RequestParser


class Connection:
    """One client: the handler of its requests. Made by `Core.open` alone."""

    __slots__ = ("_core", "_engine", "_get", "peer", "receive")

    receive: Callable[[bytes], bytes]
    """Takes what the client sent, and returns what it is to be sent, in one write.

    Raises ProtocolError when the connection is to be closed. Either way, `Core.take_woken` comes next.
    """

    def __init__(self, core: Core, peer: str) -> None:
        self._core = core
        self._engine = core.engine
        self._get = core.engine.get
        self.peer = peer
        self.receive = RequestParser(self, core.forms).feed

    # What the parser calls, for each request: the handler's methods return the reply.

    def validate(self) -> None:
        self._core.complete_handshake(self)

    def ping(self, nonce: bytes) -> bytes:
        return nonce

    def get(self, key: bytes) -> bytes:
        value = self._get(key)
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
        return self._core.wake(woken, self) if woken else b""

    def multi_set(self, keys_and_values: list[bytes]) -> bytes:
        woken = self._engine.multi_set(keys_and_values)
        return self._core.wake(woken, self) if woken else b""

    def append(self, key: bytes, value: bytes) -> bytes:
        woken = self._engine.append(key, value)
        return self._core.wake(woken, self) if woken else b""

    def add(self, key: bytes, amount: int) -> bytes:
        total, woken = self._engine.add(key, amount)
        if woken:
            return self._core.wake(woken, self) + pack_i64(total)
        return pack_i64(total)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        value, woken = self._engine.compare_set(key, expected, desired)
        return self._core.wake(woken, self) + blob(value)

    def delete_key(self, key: bytes) -> bytes:
        if key == self._core.owner_key:
            return pack_i64(self._core.take_owner(self))
        return pack_i64(self._engine.delete(key))

    def num_keys(self) -> bytes:
        return pack_i64(self._engine.num_keys())

    def list_keys(self) -> bytes:
        keys = list(self._engine.keys())
        self._core.check_reply(8 * len(keys) + sum(map(len, keys)))
        return pack_i64(len(keys)) + blobs(keys)

    def queue_push(self, key: bytes, value: bytes) -> bytes:
        return self._core.wake(self._engine.push(key, value), self)

    def queue_pop(self, key: bytes) -> bytes:
        length, value = self._engine.pop(self, key)
        return pack_i64(length) if value is None else pack_i64(length) + blob(value)

    def queue_len(self, key: bytes) -> bytes:
        return pack_i64(self._engine.queue_length(key))

    def check(self, keys: list[bytes]) -> bytes:
        return NOT_READY if self._engine.missing(keys) else READY

    def wait(self, keys: list[bytes]) -> bytes:
        return STOP_WAITING if self._engine.wait(self, keys) else b""

    def barrier(self, key: bytes, world_size: int) -> bytes:
        return self._core.wake(self._engine.barrier(self, key, world_size), self)

    def cancel_wait(self) -> bytes:
        # Whom a withdrawal calls in its stead is another connection: this one waits for nothing now.
        self._core.wake(self._engine.withdraw(self), self)
        return WAIT_CANCELED


def _receive_nothing(_: bytes) -> bytes:
    raise ProtocolError("the connection has been closed")


class Core:
    """Parser and engine for all connections of one server. Not safe for threads."""

    __slots__ = (
        *("_handshakes", "_on_abandoned", "_owners", "connections", "engine", "forms"),
        *("limits", "owner_key", "woken"),
    )

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.forms = Forms(self.limits)
        self.engine: Engine[Connection] = Engine(self.limits)
        self.connections: set[Connection] = set()
        self._handshakes: dict[Connection, float] = {}  # deadlines, which come in the order of insertion
        self.woken: list[Connection] = []
        """Always this same list. If it is not empty, `take_woken` is due."""
        self.owner_key: bytes | None = None
        self._owners: set[Connection] = set()
        self._on_abandoned: Callable[[], None] | None = None

    def live_with_owners(self, key: bytes, on_abandoned: Callable[[], None]) -> None:
        """Call `on_abandoned`, once, when the last owner has closed its connection.

        A connection becomes an owner by deleting `key`, a secret of whoever started the server. Thus a
        client that cannot be watched otherwise (torch's, in C++) ties the server to its own life.
        """
        self.owner_key = key
        self._on_abandoned = on_abandoned

    def take_owner(self, connection: Connection) -> bool:
        """Make a connection an owner; False if the server has been abandoned and is about to end."""
        if self._on_abandoned is None:
            return False
        self._owners.add(connection)
        return True

    def open(self, peer: str, now: float) -> Connection:
        """A new connection; `peer` is its name in messages. LimitError if it is one too many."""
        limit = self.limits.connections
        if len(self.connections) >= limit:
            raise LimitError(f"one more connection than {limit:,}, the limit connections")
        connection = Connection(self, peer)
        self.connections.add(connection)
        self._handshakes[connection] = now + self.limits.handshake_seconds
        return connection

    def take_woken(self) -> list[Connection]:
        """The connections that are to be sent a STOP_WAITING, once for each time that they stand here."""
        woken = self.woken[:]
        self.woken.clear()
        return woken

    def close(self, connection: Connection) -> None:
        """Forget a connection; `take_woken` comes next."""
        self.connections.discard(connection)
        self._handshakes.pop(connection, None)
        connection.receive = _receive_nothing  # the parser refers back to the connection
        self._disown(connection)
        self.wake(self.engine.withdraw(connection), connection)

    def _disown(self, connection: Connection) -> None:
        if connection not in self._owners:
            return
        self._owners.remove(connection)
        if not self._owners and self._on_abandoned is not None:
            abandon, self._on_abandoned = self._on_abandoned, None
            abandon()

    def end(self, connection: Connection, now: float) -> None:
        """A connection has sent its last; it stays open to take its replies. `take_woken` comes next."""
        self._handshakes.pop(connection, None)
        self._handshakes[connection] = now + self.limits.handshake_seconds
        self.wake(self.engine.withdraw(connection), connection)

    def overdue(self, now: float) -> list[Connection]:
        """The connections that have not completed their handshake, or their end, in time."""
        late = []
        for connection, deadline in self._handshakes.items():
            if deadline > now:
                break
            late.append(connection)
        return late

    def check_reply(self, count: int) -> None:
        """Refuse to put together a reply that is longer than anyone may be sent."""
        limit = self.limits.unsent_bytes
        if count > limit:
            raise LimitError(f"asked for {count:,} bytes at once; the limit unsent_bytes is {limit:,}")

    def complete_handshake(self, connection: Connection) -> None:
        self._handshakes.pop(connection, None)

    def wake(self, members: Sequence[Connection], current: Connection) -> bytes:
        """Note whom to wake; return the STOP_WAITINGs of `current` itself, to stand among its replies."""
        if not members:
            return b""
        others = [member for member in members if member is not current]
        self.woken += others
        return STOP_WAITING * (len(members) - len(others))

    def check_invariants(self) -> None:
        """Assert that all parts agree; for tests."""
        self.engine.check_invariants()
        assert self.connections.issuperset(self._handshakes)
        deadlines = list(self._handshakes.values())
        assert deadlines == sorted(deadlines)
