"""`TCPStore`: torch's store over TCP, without torch.

It speaks torch's wire protocol, so the server may be Rallypoint's or torch's own, and so may its fellow
clients. As in torch, every key goes over the wire with a `/` in front, except `init/`, which counts
the workers of a job whose size is known.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rallypoint.client.base import (
    DEFAULT_TIMEOUT,
    NOTHING,
    Store,
    Timeout,
    Value,
    as_keys,
    keys_missing,
    seen,
    to_bytes,
    to_i64,
)
from rallypoint.client.inquiry import Inquiry
from rallypoint.errors import (
    ConnectionLostError,
    ProtocolError,
    QueueEmptyError,
    RallypointError,
    StoreTimeoutError,
    UsageError,
)
from rallypoint.store.connect.connecting import connect, connect_to_relay, relay_for
from rallypoint.store.connect.connection import Connection, ConnectionPool, who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import format_address
from rallypoint.store.rollcall.identity import Identity, Role
from rallypoint.store.server.loops.backend import Choice, choose
from rallypoint.store.wire.encoding import counted_request, encode, pack_i64, request
from rallypoint.store.wire.opcodes import ACTIVITY_BYTES, READY, STOP_WAITING, WAIT_CANCELED, Op

# Imported late: the server by a master, `look` where a wait has failed. Together they take longer to
# import than all the rest of a client.
if TYPE_CHECKING:
    from rallypoint.store.rollcall.roll import Roll
    from rallypoint.store.server.process.hosting import HostedServer

_WORKERS = b"init/"
_NONCE = b"done"
_POLL_SECONDS = 0.01
_FIRST_REPORT = 10.0
_OWN_SECONDS = 10.0
_GRACE_SECONDS = 2.0  # for answers behind the deadline of a wait: of its end, of what is missing, of a value
_KEYS_NAMED = 4096


_REPLIES: Final[dict[Op, Callable[[Connection, Deadline], Any]]] = {
    Op.ADD: Connection.read_i64,
    Op.CHECK: lambda connection, deadline: connection.read(1, deadline) == READY,
    Op.COMPARE_SET: Connection.read_blob,
    Op.DELETE_KEY: lambda connection, deadline: connection.read_i64(deadline) == 1,
    Op.GETNUMKEYS: Connection.read_i64,
    Op.LIST_KEYS: lambda connection, deadline: [
        connection.read_blob(deadline) for _ in range(connection.read_i64(deadline))
    ],
    Op.QUEUE_LEN: Connection.read_i64,
}
"""How the reply to a request is read. The other requests have none, and are acknowledged by a PING."""


class TCPStore(Store):
    """A client of a store server, which the master starts, in a process of its own.

    Parameters as torch's. `use_libuv=None` leaves the backend to the variable USE_LIBUV, then to what is
    installed. The store tells the server the rank of this process: `rank`, or the variable RANK; `role` is
    for launchers and tools, which have no rank. A client of the job's store connects to the relay of its
    machine, if there is one. Close the store, or use it with `with`; the master's server ends with it.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool | None = None,
        *,
        role: Role = Role.UNKNOWN,
        rank: int = -1,
    ) -> None:
        super().__init__(timeout)
        if world_size is not None and world_size < 1 and world_size != -1:
            raise UsageError(f"TCPStore world size cannot be {world_size}: it must be positive, or None")
        if not isinstance(port, int):
            raise UsageError(f"the port is {port!r}, which is no number", hint="write int(...)")
        if not 0 <= port <= 65_535 or (port == 0 and not is_master):
            raise UsageError(f"no store can be reached at port {port}", hint="ports go from 1 to 65535")
        choice = choose(use_libuv)
        server = None
        if is_master:
            from rallypoint.store.server.process.hosting import host_server, share_server

            start = share_server if multi_tenant else host_server
            server = start(host_name, port, backend=choice, listen_fd=master_listen_fd)
        who = partial(who_am_i, role, rank, world_size or -1)
        self._attach(host_name, port, server, choice, who)
        try:
            if port not in (0, self.port):
                raise UsageError(
                    f"master_listen_fd is bound to port {self.port}, not to {port}",
                    hint="pass port 0 and read the store's `port`",
                )
            self._enter(world_size if wait_for_workers else None, is_master)
        except BaseException:
            self.close()
            raise

    def _attach(
        self, host: str, port: int, server: HostedServer | None, choice: Choice, who: Callable[[], Identity]
    ) -> None:
        self.host = host
        self._who = who
        self.port = server.port if server else port
        self._choice = choice
        self._server = server
        address = server.address if server else (host, port)
        own = who()
        relay = relay_for(host, port, own.role) if server is None else None

        def reach(deadline: Deadline) -> Connection:
            here = own if own.pid == os.getpid() else who()  # or this is a fork
            if relay is None:
                return connect(*address, deadline, here)
            return connect_to_relay(relay, address, deadline, here)

        self._pool = ConnectionPool(reach)
        head = None if relay is None else address
        self._inquiry = Inquiry(self._pool, relay or address, own, head)
        self._pool.explain = self._inquiry.explain
        self._let_go = weakref.finalize(self, _let_go, self._pool, server)

    @property
    def libuvBackend(self) -> bool:  # noqa: N802 - torch's name
        """Whether the server runs on libuv; for a store that did not start it, whether it would."""
        if self._server is None:
            return self._choice is not Choice.LEGACY
        return self._server.backend == "libuv"

    @property
    def _place(self) -> str:
        return f"the store {format_address(self.host, self.port)}"

    def __repr__(self) -> str:
        role = "master" if self._server else "client"
        return f"TCPStore({format_address(self.host, self.port)}, {role})"

    # Values

    def _name(self, key: str) -> bytes:
        return b"/" + key.encode(errors="surrogateescape")

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        return [self._name(key) for key in as_keys(keys)]

    def _call(self, op: Op, *blobs: bytes, tail: bytes = b"") -> Any:
        message, read = encode(op, blobs, tail), _REPLIES.get(op)
        if read is None:  # without the PING, the next call could overtake it on another connection
            message, read = message + request(Op.PING, tail=_NONCE), _read_nonce
        with self._exchange(message) as (connection, deadline):
            return read(connection, deadline)

    def get(self, key: str) -> bytes:
        return self._get(Op.GET, [key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._get(Op.MULTI_GET, keys) if keys else []

    def add(self, key: str, amount: int) -> int:
        try:
            return super().add(key, amount)
        except ConnectionLostError as error:
            raise ConnectionLostError(
                error.message,
                hint=f"if the value of {key!r} is no number, the server ends the connection; its log says so",
            ) from error

    def add_and_look(
        self, counter: str, amount: int, key: str, *, after: tuple[str, Value] | None = None
    ) -> tuple[int, bytes]:
        message = request(Op.ADD, self._name(counter), tail=to_i64(amount, "the amount to add"))
        message += request(Op.COMPARE_SET, self._name(key), NOTHING, NOTHING)
        if after is not None:
            message = request(Op.APPEND, self._name(after[0]), to_bytes(after[1])) + message
        with self._exchange(message) as (connection, deadline):
            return connection.read_i64(deadline), seen(connection.read_blob(deadline))

    # Waiting

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        deadline = Deadline(self._seconds(timeout))
        with self._pool.lend(deadline) as connection:
            self._wait_for(connection, keys, deadline)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        deadline = Deadline(self._seconds(timeout))
        with self._pool.lend(deadline) as connection:
            connection.send(
                request(Op.BARRIER, self._name(key), tail=to_i64(world_size, "the barrier's size")), deadline
            )
            stopped, roll = self._await_stop(connection, deadline)
        if not stopped:
            from rallypoint.client.snapshots import absent_at_barrier

            late = StoreTimeoutError(
                f"not all {world_size} members came to the barrier {key!r} at {self._place} within "
                f"{deadline.seconds:g} s",
                hint="one of them is late or gone, or names another key or size",
                keys=(key,),
            )
            raise absent_at_barrier(roll, key, world_size).named_in(late)

    # Queues

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        deadline = Deadline(self._timeout)
        with self._pool.lend(deadline) as connection:
            # A client that is woken may still find the queue empty: another one was quicker, or the key
            # also has a value, which ends every wait. Then it waits again, after a pause that grows.
            pause = 0.0
            while (value := _pop(connection, self._name(key), deadline)) is None:
                if not block:
                    raise QueueEmptyError(f"the queue {key!r} is empty")
                if deadline.passed:
                    raise _still_empty(key, deadline)
                time.sleep(min(pause, deadline.remaining))
                self._wait_for(connection, [key], deadline, _still_empty(key, deadline))
                pause = min(pause + 0.001, _POLL_SECONDS)
            return value

    # The store itself

    def report(self, text: str) -> None:
        """Report a text about this process, which snapshots of the store show; it replaces the one before.

        The text is ASCII, of at most 65,536 characters; an empty one withdraws the report. For launchers, on
        servers of Rallypoint and their relays alone: torch's own server ends the connection, also behind a
        relay, so the caller has to know which it is.

        The server keeps the text with the connection that it came by, and drops it with that. Each thread
        has a connection of its own: so use a store for this that no other thread uses, and report again if
        its connection is lost.
        """
        if not text.isascii() or len(text) > ACTIVITY_BYTES:
            raise UsageError(
                f"a text of {len(text):,} characters cannot be told",
                hint=f"it has to be ASCII, and no longer than {ACTIVITY_BYTES:,} characters",
            )
        self._call(Op.REPORT, text.encode())

    def clone(self) -> TCPStore:
        """Another client of the same server. A master's server ends when it and its clones are closed."""
        if not self._let_go.alive or (self._server is not None and not self._server.retain()):
            raise RallypointError("this store is closed", hint="clone it before it is closed")
        twin = TCPStore.__new__(TCPStore)
        Store.__init__(twin, self._timeout)
        twin._attach(self.host, self.port, self._server, self._choice, self._who)
        return twin

    def close(self) -> None:
        """Close the connections; the master, or its last clone, also ends the server."""
        self._let_go()

    # Exchanges

    @contextmanager
    def _exchange(
        self, message: bytes, deadline: Deadline | None = None
    ) -> Iterator[tuple[Connection, Deadline]]:
        """Send a request; the body reads all of its reply."""
        deadline = deadline or Deadline(self._timeout)
        with self._pool.lend(deadline) as connection:
            connection.send(message, deadline)
            yield connection, deadline
            connection.finish()

    def _add(self, wire_key: bytes, amount: int, deadline: Deadline | None = None) -> int:
        message = request(Op.ADD, wire_key, tail=pack_i64(amount))
        with self._exchange(message, deadline) as (connection, until):
            return connection.read_i64(until)

    def _get(self, op: Op, keys: Sequence[str]) -> list[bytes]:
        """Wait for the keys, then read them.

        In one write it would be quicker, but torch's legacy server ends a connection that GETs a missing key.
        """
        deadline = Deadline(self._timeout)
        message = encode(op, self._names(keys), b"")
        with self._pool.lend(deadline) as connection:
            self._wait_for(connection, keys, deadline)
            connection.send(message, deadline)
            values = [connection.read_blob(deadline) for _ in keys]
            connection.finish()
            return values

    def _wait_for(
        self,
        connection: Connection,
        keys: Sequence[str],
        deadline: Deadline,
        late: StoreTimeoutError | None = None,
    ) -> None:
        """Wait for keys; at the deadline raise `late`, or an error that names the missing ones."""
        connection.send(counted_request(Op.WAIT, self._names(keys)), deadline)
        stopped, roll = self._await_stop(connection, deadline)
        if stopped:
            return
        missing = self._missing(connection, keys[:_KEYS_NAMED])
        if missing or len(keys) > _KEYS_NAMED:  # else they came in the last moment
            from rallypoint.client.snapshots import absent_for_keys

            late = late or keys_missing(self._place, missing, len(keys), deadline.seconds)
            raise absent_for_keys(roll, missing).named_in(late)

    def _missing(self, connection: Connection, keys: Sequence[str]) -> list[str]:
        deadline = Deadline(_GRACE_SECONDS)
        connection.send(b"".join(counted_request(Op.CHECK, [self._name(key)]) for key in keys), deadline)
        answers = connection.read(len(keys), deadline)
        connection.finish()
        return [key for key, answer in zip(keys, answers, strict=True) if answer != READY[0]]

    def _await_stop(self, connection: Connection, deadline: Deadline) -> tuple[bool, Roll | None]:
        """Await the end of a wait. False if the deadline came first, then with the roll if it is known."""
        try:
            _expect(connection.read(1, self._inquiry.moment(deadline)), STOP_WAITING)
        except StoreTimeoutError:
            roll = self._inquiry.ask(deadline) if self._inquiry.is_asker else None
            return _stopped(connection, deadline), roll
        connection.finish()
        return True, None

    # Coming together

    def _enter(self, world_size: int | None, is_master: bool) -> None:
        deadline = Deadline(self._timeout)
        # A master's server is ready: a short time-out is meant for the others.
        patience = Deadline(max(self._timeout, _OWN_SECONDS)) if is_master else deadline
        with self._pool.lend(patience):
            pass  # connected, and the server has answered
        if world_size is None or world_size == -1:
            return
        self._add(_WORKERS, 1, patience)
        if is_master:
            self.await_workers(world_size, deadline)

    def count_workers(self) -> int:
        """How many workers have counted themselves in. A store with a world size counts itself in."""
        return self._add(_WORKERS, 0)

    def await_workers(self, world_size: int, deadline: Deadline | None = None) -> None:
        """Wait, as a master does, until `world_size` workers have counted themselves in."""
        import logging  # late, for the same reason

        deadline = deadline or Deadline(self._timeout)
        place = format_address(self.host, self.port)
        next_report = _FIRST_REPORT
        moment = self._inquiry.moment(deadline)
        asked: int = -1
        roll: Roll | None = None
        count = self.count_workers()
        while count < world_size:
            if deadline.passed:
                from rallypoint.client.snapshots import absent_workers

                late = StoreTimeoutError(
                    f"{count} of {world_size} workers have come to the store {place} "
                    f"within {deadline.seconds:g} s",
                    hint="the others did not start, or cannot reach this machine: see their logs",
                )
                raise absent_workers(roll if count == asked else None, world_size).named_in(late)
            if moment.passed and asked < 0:
                asked, roll = count, self._inquiry.ask(deadline)
            if deadline.elapsed > next_report:
                logging.getLogger("rallypoint.store").warning(
                    "%d of %d workers have come to %s after %.0f s",
                    count,
                    world_size,
                    place,
                    deadline.elapsed,
                )
                next_report *= 2
            time.sleep(min(_POLL_SECONDS, deadline.remaining))
            count = self._add(_WORKERS, 0, Deadline(deadline.remaining + _GRACE_SECONDS))


def _still_empty(key: str, deadline: Deadline) -> StoreTimeoutError:
    return StoreTimeoutError(
        f"waited {deadline.seconds:g} s: the queue {key!r} is empty",
        hint="the process that should push to it is late or gone: see its log",
        keys=(key,),
    )


def _let_go(pool: ConnectionPool, server: HostedServer | None) -> None:
    pool.close()
    if server is not None:
        server.release()


def _pop(connection: Connection, name: bytes, deadline: Deadline) -> bytes | None:
    connection.send(request(Op.QUEUE_POP, name), deadline)
    patience = Deadline(deadline.remaining + _GRACE_SECONDS)  # the server may have taken a value out already
    value = connection.read_blob(patience) if connection.read_i64(patience) > 0 else None
    connection.finish()
    return value


def _stopped(connection: Connection, deadline: Deadline) -> bool:
    """Await STOP_WAITING; at the deadline cancel, and return False unless it came through after all."""
    try:
        _expect(connection.read(1, deadline), STOP_WAITING)
        stopped = True
    except StoreTimeoutError as late:
        try:
            stopped = _cancel(connection)
        except StoreTimeoutError:
            raise late from None
    connection.finish()
    return stopped


def _cancel(connection: Connection) -> bool:
    """Cancel a wait; True if it had ended before."""
    deadline = Deadline(_GRACE_SECONDS)
    connection.send(request(Op.CANCEL_WAIT), deadline)
    answer = connection.read(1, deadline)
    if stopped := answer == STOP_WAITING:
        answer = connection.read(1, deadline)
    _expect(answer, WAIT_CANCELED)
    return stopped


def _read_nonce(connection: Connection, deadline: Deadline) -> None:
    _expect(connection.read(len(_NONCE), deadline), _NONCE)


def _expect(answer: bytes, expected: bytes) -> None:
    if answer != expected:
        raise ProtocolError(f"the store answered {answer!r} where {expected!r} was due")
