"""One connection to a store server: whole requests out, whole replies in, each within a deadline.

The threads of a store take their connections from a pool: each call has one to itself while it lasts, so a
wait in one thread does not hold up another. A fork starts with an empty pool: two processes on one connection
would read each other's answers.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Union

from rallypoint.errors import (
    AccessError,
    ConnectError,
    ConnectionLostError,
    LimitError,
    ProtocolError,
    RallypointError,
    StoreTimeoutError,
    UsageError,
)
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Identity, Role, hello_key, identity_of
from rallypoint.store.server.guard.secret import Secret, Token
from rallypoint.store.wire.encoding import VALIDATE, pack_i64, request, unpack_i64, unpack_u64
from rallypoint.store.wire.opcodes import CLIENT_OPS, LOCKED, Op

if TYPE_CHECKING:
    from rallypoint.store.server.guard.tls import Channel

_NOT_THERE: Final = pack_i64(0)
"""The answer to a hello, which is the deletion of a key that nobody has."""
_READ_BYTES = 1 << 16
_MOST_BYTES = 1 << 20  # the other side names a length: it is no reason to reserve that much memory

RELAY_VARIABLE: Final = "RALLYPOINT_RELAY"
"""For the ranks of a launcher: the relay of this machine, as HOST:PORT; and the store that it is for."""
STORE_VARIABLE: Final = "RALLYPOINT_RELAY_OF"

Late = StoreTimeoutError | ConnectError

Stream = Union[socket.socket, "GuardedSocket"]
"""It may give more bytes than asked for."""


class Connection:
    """A connected socket. Not safe for threads.

    After an error in the middle of an exchange, the meaning of the next byte is not known. So `in_step` is
    False from the first byte of a request until the last byte of the reply has been read, and a connection
    that is out of step must be closed.
    """

    def __init__(self, sock: Stream, server: str) -> None:
        self._sock = sock
        self._server = server
        self._buffer = bytearray()
        self._sent = b""
        """The request that has no complete reply yet."""
        self.in_step = True

    def shake_hands(self, who: Identity, deadline: Deadline) -> None:
        """VALIDATE, a PING that shows that a store is at the other end, and a hello."""
        nonce = os.urandom(4)
        self._greet(VALIDATE + request(Op.PING, tail=nonce) + _hello(who), nonce, deadline)
        self.read_i64(deadline)  # the answer to the hello, which means nothing
        self.finish()

    def begin_as_tool(self, who: Identity, store: str, deadline: Deadline) -> None:
        """As `shake_hands`, to request snapshots, and without a PING: the leader of a replicated store
        answers that only while it surely leads, but makes snapshots also while its engine is away.

        `store` is the name of the store, if there are several.
        """
        enter = request(Op.ENTER, store.encode()) if store else b""
        self._greet(VALIDATE + enter + _hello(who), _NOT_THERE[:4], deadline)
        self.read(4, deadline)
        self.finish()

    def _greet(self, greeting: bytes, expected: bytes, deadline: Deadline) -> None:
        """Send a greeting, and see that the answer begins as a store's does, with these four bytes."""
        try:
            self.send(greeting, deadline)
            answer = self.read(len(expected), deadline)
        except StoreTimeoutError:
            raise StoreTimeoutError(
                f"connected, but it gave no answer as a store does within {deadline.seconds:g} s"
            ) from None
        if answer == LOCKED:
            raise AccessError(
                f"the store at {self._server} takes nobody from another machine without the job's secret",
                hint="give it to this process, in RALLYPOINT_SECRET_FILE or RALLYPOINT_SECRET; only "
                "`rallypoint status` and `rallypoint web` can do with a token, in RALLYPOINT_TOKEN",
            )
        if answer != expected:
            raise ProtocolError(
                f"{self._server} answers, but not as a store does ({answer!r})",
                hint="another service listens on that port",
            )

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send all of a request."""
        self.in_step = False
        self._sent = data
        try:
            self._sock.settimeout(deadline.remaining or 1e-6)
            self._sock.sendall(data)
        except TimeoutError:
            raise self._late(deadline) from None
        except OSError as error:
            raise self._lost(error.strerror) from error

    def read(self, count: int, deadline: Deadline) -> bytes:
        """Exactly `count` bytes of a reply."""
        buffer = self._buffer
        while len(buffer) < count:
            buffer += self._receive(count - len(buffer), deadline)
        data = bytes(buffer[:count])
        del buffer[:count]
        return data

    def read_i64(self, deadline: Deadline) -> int:
        number: int = unpack_i64(self.read(8, deadline))[0]
        return number

    def read_blob(self, deadline: Deadline) -> bytes:
        return self.read(unpack_u64(self.read(8, deadline))[0], deadline)

    def finish(self) -> None:
        """All that was expected has been read."""
        self.in_step = not self._buffer
        self._sent = b""

    def close(self) -> None:
        self._sock.close()

    @property
    def is_stale(self) -> bool:
        """Whether the server has ended this connection while it was idle (or sent stray bytes)."""
        self._sock.setblocking(False)
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def _receive(self, wanted: int, deadline: Deadline) -> bytes:
        try:
            self._sock.settimeout(deadline.remaining or 1e-6)
            data = self._sock.recv(min(max(wanted, _READ_BYTES), _MOST_BYTES))
        except TimeoutError:
            raise self._late(deadline) from None
        except OSError as error:
            raise self._lost(error.strerror) from error
        if not data:
            raise self._lost("the server closed it")
        return data

    def _late(self, deadline: Deadline) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"the store at {_with_head(self._server)} gave no answer within {deadline.seconds:g} s",
            hint="the server is overloaded, stopped, or cut off; the operation may or may not have been done",
        )

    def _lost(self, reason: str | None) -> ConnectionLostError:
        lost = f"the connection to the store at {_with_head(self._server)} was lost"
        broken = _broken_limit(self._sent)
        if broken:
            return ConnectionLostError(
                f"{lost} behind a request that is over a limit: {broken}",
                hint="send less at once; or raise the limit where the server is started, with `rallypoint "
                "serve --limit` or the variable RALLYPOINT_LIMITS",
            )
        return ConnectionLostError(
            f"{lost}: {reason or 'unknown error'}",
            hint="if the process that holds the store ended first, its log has the cause; a server that "
            "closes a connection because of a bad request says so in its own log",
        )


def _hello(who: Identity) -> bytes:
    return request(Op.DELETE_KEY, b"/" + hello_key(who).encode())


def _with_head(server: str) -> str:
    """The address of a server; for a relay of the launcher's, with that of the store behind it."""
    head = os.environ.get(STORE_VARIABLE)
    is_relay = head and os.environ.get(RELAY_VARIABLE) == server
    return f"{server}, a relay of the store at {head}," if is_relay else server


def _broken_limit(sent: bytes) -> str:
    """The limit that a request breaks, in the words of the server's log; empty if it breaks none.

    The server may have other limits than the variable and the defaults say: its log has the last word.
    """
    # Late: only an error needs the server's half of the protocol.
    from rallypoint.store.server.process.startup import limits_of_environment
    from rallypoint.store.wire.limits import Limits
    from rallypoint.store.wire.requests import RequestSpec, deliver_nothing

    try:
        limits = limits_of_environment()
    except UsageError:
        limits = Limits()
    specs = {int(op): RequestSpec(op, limits, deliver_nothing) for op in CLIENT_OPS}
    start, stop = 0, len(sent)
    try:
        while start < stop and sent[start] in specs:  # else it is a handshake, or a question
            _, start = specs[sent[start]].read(sent, start, stop)
    except LimitError as error:
        return error.message
    return ""


def who_am_i(role: Role = Role.UNKNOWN, rank: int = -1, world_size: int = -1) -> Identity:
    """The identity that the launcher's variables name, unless a rank is given.

    `role` is for launchers and tools, which have no rank, whatever the variables say.
    """
    who = identity_of(os.environ, socket.gethostname(), os.getpid())
    if role not in (Role.UNKNOWN, Role.RANK):
        return replace(who, role=role, rank=-1, local_rank=-1, world_size=-1)
    if rank < 0:
        return who
    local_rank = who.local_rank if who.rank == rank else -1
    return replace(who, role=Role.RANK, rank=rank, local_rank=local_rank, world_size=world_size)


class GuardedSocket:
    """Stands for a socket: what is sent and read goes through a channel."""

    def __init__(self, sock: socket.socket, channel: Channel, deadline: Deadline) -> None:
        self._sock = sock
        self._channel = channel
        self._deadline = deadline
        self.setblocking = sock.setblocking
        self.close = sock.close

    def settimeout(self, seconds: float) -> None:
        """For the next call as a whole, however many pieces come meanwhile."""
        self._deadline = Deadline(seconds)

    def sendall(self, data: bytes) -> None:
        self._send(self._channel.seal(data))

    def recv(self, count: int, flags: int = 0) -> bytes:
        """What has come, be it more than `count` bytes; with flags, what the socket itself has."""
        if flags:
            return self._sock.recv(count, flags)
        while data := self._receive():
            said = self._channel.receive(data)
            if said or self._channel.has_ended:
                return said
        return b""

    def open(self) -> None:
        """Shake hands and prove the secret."""
        self._send(self._channel.begin())
        while not self._channel.is_open:
            data = self._receive()
            if not data:
                raise ConnectionLostError(
                    "it was closed before the job's secret was proved: is it a store with a secret?"
                )
            try:
                self._channel.receive(data)  # nothing is behind the preface before a request
            except AccessError:
                try:
                    self._send(self._channel.take())
                except OSError:  # the reason counts, whether the other end hears of it or not
                    pass
                raise
            self._send(self._channel.take())

    def _send(self, data: bytes) -> None:
        if data:
            self._sock.settimeout(self._deadline.remaining or 1e-6)
            self._sock.sendall(data)

    def _receive(self) -> bytes:
        self._sock.settimeout(self._deadline.remaining or 1e-6)
        return self._sock.recv(_READ_BYTES)


def guard(
    sock: socket.socket, host: str, server: str, proof: Secret | Token, deadline: Deadline
) -> GuardedSocket:
    """Speak TLS with the server, and prove the secret to each other.

    AccessError, which names `server`, if either has not the same secret.
    """
    from rallypoint.store.server.guard.tls import client_channel  # late: few jobs have a secret

    guarded = GuardedSocket(sock, client_channel(host, proof), deadline)
    try:
        guarded.open()
    except AccessError as error:
        why = f"the store at {server} is not trusted: {error.message}"
        raise AccessError(why, hint=error.hint) from error
    return guarded


class ConnectionPool:
    """Lends connections, which `connect` makes, and takes back those that are in step."""

    def __init__(self, connect: Callable[[Deadline], Connection]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._owner = os.getpid()
        self._closed = False
        self.explain: Callable[[Late, Deadline], Late] = lambda late, _: late
        """The error of a call whose deadline has passed, with more about the cause."""

    @contextmanager
    def lend(self, deadline: Deadline) -> Iterator[Connection]:
        """A connection for the time of one call."""
        try:
            connection = self._take() or self._connect(deadline)
        except ConnectError as late:
            raise self.explain(late, deadline) from None
        try:
            yield connection
        except StoreTimeoutError as late:
            raise self.explain(late, deadline) from None
        finally:
            self._give_back(connection)

    def close(self) -> None:
        """Close the idle connections now, and the others when they come back."""
        if self._owner != os.getpid():
            self._forget_the_parents()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> Connection | None:
        if self._owner != os.getpid():
            self._forget_the_parents()
        while True:
            with self._lock:
                if self._closed:
                    raise RallypointError("this store is closed", hint="make a new one, or close it later")
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not connection.is_stale:
                return connection
            connection.close()

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if connection.in_step and not self._closed and self._owner == os.getpid():
                self._idle.append(connection)
                return
        connection.close()

    def _forget_the_parents(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()  # a thread of the parent may have held it
        for connection in self._idle:
            connection.close()  # only our copy of the descriptor
        self._idle = []
