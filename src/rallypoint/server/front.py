"""The clients' side of a server or a relay: its connections, their deadlines, and who is sent something.

Whoever pumps the bytes

- calls `open` for each new connection and `close` exactly once when it ends, for whatever reason;
- passes what it reads to the connection's `receive`, sends it what that returns, in one write, then
  calls `take_woken` and sends each connection in it its `take_notice`;
- closes a connection when `receive` raises ProtocolError (after sending the error's `replies`), when
  `overdue` names it, and when it does not read what it is sent (`Limits.unsent_bytes`);
- calls `overdue` about every second.

Time comes in as a parameter, in seconds of any monotonic clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.server.sessions import Carrier, Party, Session, Sessions
from rallypoint.wire.limits import Limits


class Client(Party, ABC):
    """One connection."""

    __slots__ = ("peer", "receive")

    receive: Callable[[bytes], bytes]
    """Takes what the client sent, and returns what it is to be sent, in one write.

    Raises ProtocolError when the connection is to be closed. Either way, `Front.take_woken` comes next.
    """

    def __init__(self, sessions: Sessions, peer: str) -> None:
        super().__init__(sessions)
        self.peer = peer

    @property
    def is_owed(self) -> bool:
        """Whether it has asked for what will be answered soon."""
        return False

    @abstractmethod
    def take_notice(self) -> bytes:
        """What it is to be sent without having asked just now, if it still is."""


ClientT = TypeVar("ClientT", bound=Client)


def _receive_nothing(_: bytes) -> bytes:
    raise ProtocolError("the connection has been closed")


class Front(ABC, Generic[ClientT]):
    """All connections of one server or relay. Not safe for threads."""

    __slots__ = ("_deadlines", "connections", "doomed", "limits", "sessions", "woken")

    def __init__(self, limits: Limits, carrier: Carrier) -> None:
        self.limits = limits
        self.connections: set[ClientT] = set()
        self.sessions = Sessions(limits, carrier, self._on_answer, self._on_displaced)
        # When a connection is late, and with what; the deadlines come in the order of insertion.
        self._deadlines: dict[ClientT, tuple[float, str]] = {}
        self.doomed: list[tuple[ClientT, ProtocolError]] = []
        """Connections that are to be closed, and why. The pump looks whenever it has sent all notices."""
        self.woken: list[ClientT] = []
        """Always this same list. If it is not empty, `take_woken` is due."""

    @property
    def has_clients(self) -> bool:
        """Whether anybody is connected, or may be back in a moment."""
        return bool(self.connections) or len(self.sessions) > 0

    @abstractmethod
    def _make(self, peer: str) -> ClientT:
        """A connection; `peer` is its name in messages."""

    def _leave(self, connection: ClientT) -> None:
        """A connection will ask for nothing more: forget what it waits for."""
        if connection.session is not None:
            self.sessions.lose(connection.session)

    def open(self, peer: str, now: float) -> ClientT:
        """A new connection; `peer` is its name in messages. LimitError if it is one too many."""
        limit = self.limits.connections
        if len(self.connections) >= limit:
            raise LimitError(f"one more connection than {limit:,}, the limit connections")
        connection = self._make(peer)
        self.connections.add(connection)
        self._set_deadline(connection, now, "no VALIDATE")
        return connection

    def complete_handshake(self, connection: ClientT) -> None:
        self._deadlines.pop(connection, None)

    def end(self, connection: ClientT, now: float) -> None:
        """A connection has sent its last; it stays open to take its replies. `take_woken` comes next."""
        self._deadlines.pop(connection, None)
        self._set_deadline(connection, now, "it has ended, but did not read its last replies")
        self._leave(connection)

    def close(self, connection: ClientT) -> None:
        """Forget a connection; `take_woken` comes next."""
        self.connections.discard(connection)
        self._deadlines.pop(connection, None)
        connection.receive = _receive_nothing  # the parser refers back to the connection
        self._leave(connection)

    def take_woken(self) -> list[ClientT]:
        """Whom to send their `take_notice`, once for each time that they stand here."""
        woken = self.woken[:]
        self.woken.clear()
        return woken

    def overdue(self, now: float) -> list[tuple[ClientT, str]]:
        """The connections that are to be closed by now, and why; `take_woken` comes next.

        Gives up the sessions whose time is over, too.
        """
        self.sessions.expire(now)
        late = []
        for connection, (deadline, what) in self._deadlines.items():
            if deadline > now:
                break
            seconds = self.limits.handshake_seconds
            late.append((connection, f"{what} within {seconds:g} s, the limit handshake_seconds"))
        return late

    def take_doomed(self) -> list[tuple[ClientT, ProtocolError]]:
        doomed = {client: error for client, error in self.doomed if client in self.connections}
        self.doomed.clear()
        return list(doomed.items())

    def doom(self, connection: ClientT, error: ProtocolError) -> None:
        """Have a connection closed."""
        self.doomed.append((connection, error))

    def _set_deadline(self, connection: ClientT, now: float, what: str) -> None:
        self._deadlines[connection] = (now + self.limits.handshake_seconds, what)

    def _on_answer(self, session: Session) -> None:
        """A session has something to send, outside of its own batch."""
        if session.connection is not None:
            self.woken.append(cast(ClientT, session.connection))

    def _on_displaced(self, party: Party) -> None:
        why = ProtocolError("its session goes on over another connection")
        self.doom(cast(ClientT, party), why)  # only our own connections open sessions

    def check_invariants(self) -> None:
        """Assert that all parts agree; for tests."""
        self.sessions.check_invariants()
        assert self.connections.issuperset(self._deadlines)
        deadlines = [deadline for deadline, _ in self._deadlines.values()]
        assert deadlines == sorted(deadlines)
