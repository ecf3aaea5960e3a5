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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar, cast

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.rollcall.identity import NOBODY, Identity, Role, parse_hello
from rallypoint.rollcall.snapshot import Question, Snapshot
from rallypoint.server.core.looks import About, Fields, Looks, Pending
from rallypoint.server.core.sessions import Carrier, Party, Session, Sessions
from rallypoint.server.core.traffic import Traffic
from rallypoint.wire.limits import Limits
from rallypoint.wire.opcodes import Op
from rallypoint.wire.parser import RequestParser

GONE_KEPT: Final = 16_384

_NO_HANDSHAKE: Final = "no VALIDATE"

# Who asks these has come a step further, or lets others do so. Reads and waits may be said again and again;
# and by ADD and COMPARE_SET, launchers give signs of life.
_PROGRESS: Final = (
    *(Op.SET, Op.APPEND, Op.MULTI_SET, Op.QUEUE_PUSH, Op.QUEUE_POP, Op.POP_CALLED, Op.BARRIER, Op.ARRIVE),
)


_SHORT_BREAK: Final = 5.0
"""Who waits in pieces, as torch's barrier does to log in between, has waited all the time."""


class Client(Party, ABC):
    """One connection."""

    __slots__ = ("_parser", "count_bytes", "receive", "tries", "who", "why")

    receive: Callable[[bytes], bytes]
    """Takes what the client sent, and returns what it is to be sent, in one write.

    Raises ProtocolError when the connection is to be closed. Either way, `Front.take_woken` comes next.
    """

    def __init__(self, sessions: Sessions, peer: str) -> None:
        super().__init__(sessions, peer)
        self._parser: RequestParser[Any] | None = None
        self.count_bytes: Callable[[], tuple[int, int]] = _count_nothing
        """How many bytes it has sent and been sent, as far as whoever pumps them knows."""
        self.who = NOBODY
        self.tries = 0
        """How often the system was asked who it is."""
        self.why = ""
        """Why it is closed, if it does not close by itself."""

    def read_with(self, parser: RequestParser[Any]) -> None:
        self._parser = parser
        self.receive = parser.feed

    def read_no_more(self) -> None:
        """The parser refers back to the connection: without this, only a collection would free them."""
        self._parser = None
        self.receive = _receive_nothing

    @property
    def operations(self) -> int:
        """How many requests it has sent."""
        return self._parser.operations if self._parser is not None else 0

    def opcode_in(self, data: bytes) -> int:
        """Of which kind the request is that the next bytes go on with, or begin."""
        return self._parser.opcode_in(data) if self._parser is not None else -1

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


def _stand_still() -> float:
    return 0.0


def _count_nothing() -> tuple[int, int]:
    return 0, 0


class Observer(ABC):
    """Hears what happens to clients."""

    @abstractmethod
    def started(self) -> None:
        """The server is up."""

    @abstractmethod
    def stopped(self) -> None:
        """It serves no more; nothing is heard after that."""

    @abstractmethod
    def look(self) -> None:
        """About once a second."""

    @abstractmethod
    def connected(self, client: Client) -> None:
        """It has shaken hands."""

    @abstractmethod
    def named(self, client: Client) -> None:
        """It is known who it is."""

    @abstractmethod
    def left(self, client: Client) -> None:
        """It has gone."""

    @abstractmethod
    def erred(self, peer: str, reason: str) -> None:
        """It was refused, or is closed because of what it did."""

    @abstractmethod
    def waits(self, client: Client, keys: Sequence[bytes]) -> None:
        """It begins to wait, for keys or at a barrier."""

    @abstractmethod
    def woken(self, clients: Sequence[object], by: Client | None) -> None:
        """They need not wait any more, because of what another has done. Relays' tickets are among them."""

    @abstractmethod
    def gave_up(self, client: Client) -> None:
        """It waits no more, though what it waited for has not come."""

    @abstractmethod
    def gathered(self, key: bytes, size: int, clients: Sequence[object], last: Client) -> None:
        """A barrier is complete; `last` was the last to arrive."""

    @abstractmethod
    def stalled(self, seconds: float, text: str) -> None:
        """Nobody has made progress for so long; the text says who waits for what. From another thread."""


class Front(ABC, Generic[ClientT]):
    """All connections of one server or relay. Not safe for threads."""

    kind = "server"
    """What it is called in snapshots."""

    __slots__ = (
        *("_arrivals", "_deadlines", "_seen", "_waited_at", "_waiting_since", "about", "began", "clock"),
        *("connections", "doomed", "find_processes", "gone", "limits", "looks", "observer", "opened"),
        *("operations_before", "progressed", "received_before", "sent_before", "sessions", "traffic"),
        *("wall", "woken"),
    )

    def __init__(self, limits: Limits, carrier: Carrier) -> None:
        self.limits = limits
        self.clock: Callable[[], float] = _stand_still
        """Tells the time, as in `open`; whoever pumps sets it, and `wall`, the time of day."""
        self.wall: Callable[[], float] = _stand_still
        self.about = About()
        self.began = 0.0
        self.opened = 0
        """Connections so far."""
        self.received_before = 0
        """Bytes and requests of connections that are gone."""
        self.sent_before = 0
        self.operations_before = 0
        self.progressed = 0.0
        """When somebody was last seen to make progress, to a second."""
        self._arrivals = 0  # of clients that are no tools
        self._seen = 0  # what told of progress when it was last looked for
        self._waiting_since: float | None = None
        self._waited_at = 0.0
        self.gone: deque[tuple[int, Identity, float, str]] = deque(maxlen=GONE_KEPT)
        self.traffic = Traffic()
        self.observer: Observer | None = None
        self.looks = Looks(self)
        self.find_processes: Callable[[], Callable[[], bool]] = lambda: lambda: False
        """Asks the system who is behind connections; what it returns says whether that is still to come."""
        self.connections: set[ClientT] = set()
        self.sessions = Sessions(limits, carrier, self._on_answer, self._on_displaced, self._on_opened)
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
        self.opened += 1
        connection.id = self.opened
        connection.since = now
        self.connections.add(connection)
        self._set_deadline(connection, now, _NO_HANDSHAKE)
        return connection

    def complete_handshake(self, connection: ClientT) -> None:
        self._deadlines.pop(connection, None)
        self._arrivals += 1
        if self.observer is not None:
            self.observer.connected(connection)

    def greet(self, connection: Client, hello: bytes) -> None:
        """A client says who it is, with a key that is a hello."""
        who = parse_hello(hello)
        if who is not None and connection in self.connections:  # relays keep the hellos of their clients
            self.name(connection, who)

    def name(self, connection: Client, who: Identity) -> None:
        """It is known who a client is."""
        if who.role is Role.TOOL is not connection.who.role:
            self._arrivals -= 1
        connection.who = who
        if self.observer is not None:
            self.observer.named(connection)

    def end(self, connection: ClientT, now: float) -> None:
        """A connection has sent its last; it stays open to take its replies. `take_woken` comes next."""
        self._deadlines.pop(connection, None)
        self._set_deadline(connection, now, "it has ended, but did not read its last replies")
        self._leave(connection)

    def close(self, connection: ClientT) -> None:
        """Forget a connection; `take_woken` comes next."""
        self.connections.discard(connection)
        _, late_with = self._deadlines.pop(connection, (0.0, ""))
        counted = connection.count_bytes()
        connection.count_bytes = lambda: counted
        self.received_before += counted[0]
        self.sent_before += counted[1]
        self.operations_before += connection.operations
        connection.read_no_more()
        if connection.who.is_rank:
            self.gone.append((connection.id, connection.who, self.clock(), connection.why))
        if self.observer is not None and late_with != _NO_HANDSHAKE:
            self.observer.left(connection)
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

    def _on_opened(self, party: Party) -> None:
        """A connection turns out to be a relay's."""
        connection = cast(ClientT, party)
        self.name(connection, replace(connection.who, role=Role.AGENT))

    def _on_displaced(self, party: Party) -> None:
        why = ProtocolError("its session goes on over another connection")
        self.doom(cast(ClientT, party), why)  # only our own connections open sessions

    # What it knows

    @property
    def operations(self) -> int:
        """How many requests there have been, a batch counting as one."""
        parsers = [each._parser for each in self.connections]  # the property takes thrice as long
        return self.operations_before + sum([each.operations for each in parsers if each is not None])

    def counts(self) -> dict[Op, int]:
        """How many requests of each kind there have been, those within batches included."""
        return self.sessions.counts()

    @property
    def waiting(self) -> int:
        """How many connections wait for something."""
        return 0

    @property
    def oldest_wait(self) -> float | None:
        """Since when somebody waits, as far as this front is who should say so."""
        return None

    def waits_of(self, _: ClientT, /) -> Sequence[Pending]:
        """What a connection waits for."""
        return ()

    def waits_behind(self, _: Session, /) -> Sequence[Pending]:
        """What a relay waits for."""
        return ()

    def describe(self, _: Question, /) -> Fields:
        """What a `Snapshot` tells of servers that it does not tell of relays, or the other way round."""
        return ()

    def end_second(self) -> None:
        """About once a second: see what has happened since, and whether that is progress."""
        now, counts = self.clock(), self.counts()
        self.traffic.end_second(now, self.wall(), counts, clients=len(self.connections), waiting=self.waiting)
        seen = self._arrivals + sum(counts.get(op, 0) for op in _PROGRESS)
        if seen != self._seen:
            self._seen, self.progressed = seen, now
        if self.waiting:
            self._waited_at = now
            if self._waiting_since is None:
                self._waiting_since = self.oldest_wait
        elif now - self._waited_at > _SHORT_BREAK:
            self._waiting_since = None
        if self.observer is not None:
            self.observer.look()

    @property
    def stalled_seconds(self) -> float:
        """How long nobody has made progress while somebody waited, to a second; 0: somebody has."""
        if self._waiting_since is None:
            return 0.0
        return self.clock() - max(self.progressed, self._waiting_since)

    def sum_up(self) -> Snapshot:
        """The figures, but for what is the sum over all connections."""
        now, traffic, about = self.clock(), self.traffic, self.about
        return Snapshot(
            kind=self.kind,
            version=about.version,
            host=about.host,
            pid=about.pid,
            backend=about.backend,
            time=self.wall(),
            seconds=now - self.began,
            quiet_seconds=now - self.progressed,
            stalled_seconds=self.stalled_seconds,
            accepted=self.opened,
            operations=tuple(traffic.operations(now, self.counts())),
            history=tuple(traffic.history),
            errors=tuple(traffic.errors),
            error_count=traffic.error_count,
        )

    def check_invariants(self) -> None:
        """Assert that all parts agree; for tests."""
        self.sessions.check_invariants()
        assert self.connections.issuperset(self._deadlines)
        deadlines = [deadline for deadline, _ in self._deadlines.values()]
        assert deadlines == sorted(deadlines)
