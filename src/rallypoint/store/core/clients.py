"""The connections of a server or a relay: who is here, who is late, who has gone, and who owns the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

from rallypoint.codec import from_text, to_text
from rallypoint.compiling import mypyc_attr
from rallypoint.errors import AccessError, ProtocolError
from rallypoint.store.core.context import Context, DriverTask, Enter, GoOn, Other, Slices
from rallypoint.store.core.sessions import Session, Sessions
from rallypoint.store.engine.keyspace import State
from rallypoint.store.rollcall.identity import NOBODY, Identity, Role, is_hello, parse_hello
from rallypoint.store.rollcall.question import Question
from rallypoint.store.wire.encoding import EMPTY_BLOB, VALIDATE, pack_i64
from rallypoint.store.wire.opcodes import OPERATIONS, READY, Op
from rallypoint.store.wire.parser import RequestParser, RequestTable
from rallypoint.store.wire.requests import carried
from rallypoint.store.wire.sessions import ANNOUNCED

_GONE_KEPT: Final = 16_384
_TRIES: Final = 2
"""A process on another machine is never found, and a new one may have had no time yet to be seen."""
_NO_HANDSHAKE: Final = "no VALIDATE"
_NOBODY: Final = to_text(NOBODY, sparse=True)


class ClientReport(NamedTuple):
    """What a client last reported of its activity, for snapshots."""

    text: bytes
    """ASCII; empty if it has reported nothing."""
    at: float


_NO_REPORT: Final = ClientReport(b"", 0.0)
"""Most clients report nothing, and share this."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Client(ABC):
    """One connection: its requests, the one under way, and what the server holds for it."""

    __slots__ = (
        *("_clients", "_context", "_parser", "_sessions", "_slices", "_snapshot_only", "_unread"),
        *("_unserved", "id", "peer", "receive", "received", "sent", "session", "since", "told", "tries"),
        *("who", "why"),
    )

    receive: Callable[[bytes], bytes]
    """Takes the bytes that the client sent, and returns the bytes to send it, in one write.

    Raises ProtocolError if the connection must be closed. Either way, empty the outbox next.
    """

    def __init__(self, clients: Clients[Any], sessions: Sessions, peer: str) -> None:
        self._clients = clients
        self._context = clients.context
        self._sessions = sessions
        self._parser: RequestParser[Any] | None = None
        self._snapshot_only: RequestParser[Any] | None = None
        self._slices: Slices | None = None
        self.peer = peer
        """Its name in messages."""
        self.id = 0
        """Counts connections, from 1."""
        self.since = 0.0
        self.session: Session | None = None
        self._unread = 0  # bytes of replies that the client has not taken
        self._unserved = 0  # bytes of requests that are not complete, or not carried out
        self.received = 0
        """Bytes received from it, and sent to it below, as the driver counted them last."""
        self.sent = 0
        self.who = NOBODY
        self.told = _NO_REPORT
        self.tries = 0
        """How often the system was asked which process it is."""
        self.why = ""
        """Why it is closed, if it does not close by itself."""

    @property
    def is_nameless(self) -> bool:
        """Whether the system is to be asked which process it is."""
        return self.who is NOBODY and self.tries < _TRIES

    def read_with(self, parser: RequestParser[Any]) -> None:
        self._parser = parser
        self.receive = parser.feed

    @property
    def is_unfinished(self) -> bool:
        """Whether a request is under way: call `go_on`."""
        return self._slices is not None

    def begin(self, slices: Slices) -> bytes | None:
        """Carry out the first slice of a request; returns what `go_on` does."""
        self._slices = slices
        return self.go_on()

    def go_on(self) -> bytes | None:
        """Carry out the next slice: the reply after the last one; before that, a piece of it or None."""
        slices, self._slices = self._slices, None
        assert slices is not None, "there is a request under way"
        try:
            piece = next(slices)
        except StopIteration as end:
            reply: bytes = end.value
            return reply
        self._slices = slices
        return piece

    def restrict_to_snapshots(self) -> None:
        """Allow it to ask who is here, and nothing else, from now on."""
        table: RequestTable[SnapshotOnlyHandler] = RequestTable(self._context.limits, _SNAPSHOT_ONLY_METHODS)
        self._parser, self._snapshot_only = None, RequestParser(SnapshotOnlyHandler(self), table)
        self.receive = self._snapshot_only.feed

    @property
    def is_snapshot_only(self) -> bool:
        """Whether it may ask who is here, and nothing else."""
        return self._snapshot_only is not None

    def enter(self, name: bytes) -> bytes | None:
        """The client says which of several stores it means."""
        if not name and not self._clients.have_named:
            return b""  # the store without a name, which this is
        if self.who.role is not Role.TOOL:
            self._clients.arrivals -= 1  # it arrives there
        self._context.outbox.others.append(Enter(self, name))
        return None  # the requests after it are for the other store

    def snapshot(self, _: bytes, /) -> bytes | None:
        """The client asks what is known here; the answer is a notice."""
        raise ProtocolError("there is nothing here to make a snapshot of")

    def read_no_more(self) -> None:
        """Drop the parser, which refers back to the client: else only the garbage collector frees both."""
        self._parser = self._snapshot_only = self._slices = None
        self.receive = _receive_nothing
        self._unread = self._unserved = 0
        self.told = _NO_REPORT

    @property
    def rest(self) -> bytes:
        """The bytes that it has sent and that are not carried out."""
        reader = self._parser or self._snapshot_only
        return reader.rest if reader is not None else b""

    @property
    def has_rest(self) -> bool:
        """Whether requests were postponed: call `receive` again, even with no bytes."""
        return self._parser is not None and self._parser.has_rest

    @property
    def is_within_request(self) -> bool:
        """Whether only a part of a request has arrived."""
        return self._parser is not None and not self._parser.is_between_requests

    @property
    def operations(self) -> int:
        """How many requests it has sent."""
        return self._parser.operations if self._parser is not None else 0

    @property
    def is_owed(self) -> bool:
        """Whether a reply is still to come that does not depend on other clients."""
        return False

    @abstractmethod
    def take_notice(self) -> bytes:
        """The bytes to send it now, because it is in the outbox's `woken`. There may be none."""

    @property
    def notice_bytes(self) -> int:
        """How many bytes `take_notice` has left: call it again when the client has read the first ones."""
        return 0

    def validate(self) -> None:
        """The parser calls this after the handshake."""
        self._clients.complete_handshake(self)

    def greet(self, hello: bytes) -> None:
        """The client says who it is, with a hello as the key of a DELETE_KEY."""
        who = parse_hello(hello)
        if who is not None and self in self._clients:  # a relay keeps the hellos of its clients to itself
            self._clients.name(self, who)

    def report(self, text: bytes) -> bytes:
        """The client reports its activity. The report is kept until its next one, or until it leaves."""
        self._context.count_held(len(text) - len(self.told.text))
        self.told = ClientReport(text, self._context.turn.now) if text else _NO_REPORT
        return b""

    def has_session(self) -> None:
        """It carries a session from now on."""
        self._clients.name(self, replace(self.who, role=Role.AGENT))

    def hold(self, count: int, is_cut: bool) -> None:
        """The parser calls this when it keeps that many bytes for later."""
        self._clients.expect_rest(self, is_cut)
        self._context.count_held(count - self._unserved)
        self._unserved = count

    def leave_unread(self, count: int) -> None:
        """The driver calls this when that many bytes cannot be sent yet, as the client does not read."""
        self._context.count_held(count - self._unread)
        self._unread = count

    @property
    def held(self) -> int:
        """Bytes that are held for it, without its waits and its session."""
        return self._unread + self._unserved + len(self.told.text)

    def postpone(self) -> None:
        """The parser calls this when it keeps requests for another turn."""
        self._context.outbox.others.append(GoOn(self))

    # What the parser calls for a session

    def open_session(self, token: bytes, tail: bytes) -> bytes | None:
        return self.begin(self._sessions.open(self, token, tail))

    def batch(self, payload: bytes) -> bytes | None:
        session = self._own_session()
        session.begin_batch(payload)
        if self._sessions.step(session):  # nearly always
            return session.flush()
        return self.begin(self._sessions.go_on_with(session))

    def present(self) -> bytes | None:
        return self.begin(self._own_session().be_present())

    def bye(self) -> bytes:
        self._sessions.end(self._own_session())
        return b""

    def beat(self) -> bytes | None:
        return EMPTY_BLOB

    def _own_session(self) -> Session:
        if self.session is None:
            raise ProtocolError("a request of a session, on a connection that has none")
        return self.session


Method = Callable[[Client, list[bytes], bytes], bytes | None]
"""Carries out a request: its blobs and its tail."""

SESSION_METHODS: Final[dict[Op, Method]] = {
    Op.SESSION: lambda client, blobs, tail: client.open_session(blobs[0], tail),
    Op.BATCH: lambda client, blobs, _: client.batch(blobs[0]),
    Op.PRESENT: lambda client, _, __: client.present(),
    Op.BYE: lambda client, _, __: client.bye(),
    Op.BEAT: lambda client, _, __: client.beat(),
}
"""The operations of a relay's connection."""


def _report(client: Client, blobs: list[bytes], _: bytes) -> bytes:
    if not blobs[0].isascii():  # it is put into JSON unread
        raise ProtocolError("REPORT with a text that is not ASCII")
    return client.report(blobs[0])


EXTENSION_METHODS: Final[dict[Op, Method]] = {
    Op.ENTER: lambda client, blobs, _: client.enter(blobs[0]),
    Op.SNAPSHOT: lambda client, blobs, _: client.snapshot(blobs[0]),
    Op.REPORT: _report,
}
"""Our operations that any connection may send."""


def _receive_nothing(_: bytes) -> bytes:
    raise ProtocolError("the connection has been closed")


class SnapshotOnlyHandler:
    """Serves a client whose token only lets it ask who is here. Its requests are not counted."""

    is_unfinished = False

    def __init__(self, client: Client) -> None:
        self._client = client
        self.validate = client.validate
        self.hold = client.hold
        self.postpone = client.postpone

    def get(self, _: bytes, /) -> bytes:
        raise _refusal(Op.GET)

    def go_on(self) -> bytes:
        return b""  # nothing that it may ask takes longer

    def carry(self, op: Op, blobs: list[bytes], tail: bytes) -> bytes | None:
        """Answer what it may ask; AccessError for all else."""
        if op is Op.PING:
            return tail
        if op is Op.SNAPSHOT:
            if Question.from_json(blobs[0]).value is not None:
                raise AccessError("a snapshot with a value, with a token that may only see who is here")
            return self._client.snapshot(blobs[0]) or b""
        if op is Op.ENTER:
            return self._client.enter(blobs[0])
        if op is Op.CHECK and blobs == [ANNOUNCED]:
            return READY
        if op is Op.DELETE_KEY and is_hello(blobs[0]):
            who = parse_hello(blobs[0])
            if who is not None and who.role is Role.TOOL:  # or it would count as a rank
                self._client.greet(blobs[0])
            return pack_i64(0)
        raise _refusal(op)


def _refusal(op: Op) -> AccessError:
    return AccessError(f"{op.name} with a token that may only look")


_SNAPSHOT_ONLY_METHODS: Final = carried(op for op in OPERATIONS if op is not Op.VALIDATE)

ClientT = TypeVar("ClientT", bound=Client)


class Departed(NamedTuple):
    """A client that has left and was known."""

    id: int
    who: Identity
    at: float
    why: str


class Clients(Generic[ClientT]):
    """All connections of one core."""

    __slots__ = (
        *("_by_id", "_deadlines", "arrivals", "context", "elsewhere", "gone", "have_named", "names"),
        *("opened", "operations_before", "received_before", "sent_before"),
    )

    def __init__(self, context: Context) -> None:
        self.context = context
        self._by_id: dict[int, ClientT] = {}
        # When a connection is late, and with what; the deadlines come in the order of insertion.
        self._deadlines: dict[Any, tuple[float, str]] = {}
        self.gone: deque[Departed] = deque(maxlen=_GONE_KEPT)
        self.elsewhere = 0
        """How many connections the other processes of this server have."""
        self.names: tuple[str, ...] | None = None
        """The names of the stores that clients may ENTER, if the driver provides them."""
        self.have_named = False
        """Whether clients get here by ENTER, with the name of this store."""
        self.opened = 0
        """Connections so far."""
        self.arrivals = 0
        """How many clients have shaken hands so far, without tools."""
        self.received_before = 0
        """Bytes received, and below bytes sent and requests, of connections that are gone."""
        self.sent_before = 0
        self.operations_before = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[ClientT]:
        return iter(self._by_id.values())

    def __contains__(self, client: Client) -> bool:
        return client.id in self._by_id and self._by_id[client.id] is client

    def add(self, client: ClientT) -> None:
        now = self.context.turn.now
        self.opened += 1
        client.id = self.opened
        client.since = now
        self._by_id[client.id] = client
        self._set_deadline(client, _NO_HANDSHAKE)

    def complete_handshake(self, client: ClientT) -> None:
        self._deadlines.pop(client, None)
        self.arrivals += 1
        if self.context.journal is not None:
            self.context.journal.connected(client, client.peer)

    def expect_rest(self, client: Client, is_cut: bool) -> None:
        """A client has sent a part of a request (`is_cut`), or the rest of it."""
        self._deadlines.pop(client, None)
        if is_cut:
            self._set_deadline(client, "no more of a request that is not complete")

    def name(self, client: Client, who: Identity) -> None:
        """The name of a client has become known."""
        if who.role is Role.TOOL is not client.who.role:
            self.arrivals -= 1
        client.who = who
        if self.context.journal is not None:
            self.context.journal.named(client, who)

    def end(self, client: ClientT) -> None:
        """A client has sent its last request; it stays to take its replies."""
        self._deadlines.pop(client, None)
        self._set_deadline(client, "it has ended, but did not read its last replies")

    def remove(self, client: ClientT) -> None:
        self._by_id.pop(client.id, None)
        _, late_with = self._deadlines.pop(client, (0.0, ""))
        self.received_before += client.received
        self.sent_before += client.sent
        self.operations_before += client.operations
        self.context.budget.held -= client.held
        client.read_no_more()
        if client.who.is_rank:
            self.gone.append(Departed(client.id, client.who, self.context.turn.now, client.why))
        if late_with != _NO_HANDSHAKE and self.context.journal is not None:
            self.context.journal.left(client, client.why)

    def state(self) -> State:
        """The clients, as plain data, and how many there have been."""
        rows = [[each.id, each.peer, each.since, to_text(each.who, sparse=True)] for each in self]
        return [rows, self.opened, self.arrivals]

    def take_state(self, state: State, make: Callable[[str], ClientT]) -> None:
        """Restore the clients of a `state`; all of them have shaken hands."""
        rows, opened, arrivals = state
        for number, peer, since, who in rows:
            client = self._by_id[number] = make(peer)
            client.id, client.since = number, since
            client.receive(VALIDATE)
            client.who = from_text(Identity, who.encode()) if who != _NOBODY else NOBODY
        self.opened, self.arrivals = opened, arrivals

    def with_id(self, number: int) -> ClientT:
        return self._by_id[number]

    def overdue(self) -> list[tuple[ClientT, str]]:
        """The clients to close now, and why."""
        late = []
        for client, (deadline, what) in self._deadlines.items():
            if deadline > self.context.turn.now:
                break
            seconds = self.context.limits.handshake_seconds
            late.append((client, f"{what} within {seconds:g} s, the limit handshake_seconds"))
        return late

    @property
    def operations(self) -> int:
        """How many requests there have been, a batch counting as one."""
        parsers = [each._parser for each in self._by_id.values()]  # the property takes thrice as long
        return self.operations_before + sum([each.operations for each in parsers if each is not None])

    def _set_deadline(self, client: Client, what: str) -> None:
        deadline = self.context.turn.now + self.context.limits.handshake_seconds
        self._deadlines[client] = (deadline, what)

    def check_invariants(self) -> None:
        assert all(client in self for client in self._deadlines)
        deadlines = [deadline for deadline, _ in self._deadlines.values()]
        assert deadlines == sorted(deadlines)


class Owners:
    """The clients with which a server ends, by the numbers of their connections.

    A client becomes an owner by deleting a key that only the process that started the server knows. This
    is how a client that cannot be watched otherwise (torch's, in C++) ties the server to its own life.
    """

    __slots__ = ("_here", "_others", "is_abandoned", "key")

    def __init__(self, key: bytes | None, others: list[Other]) -> None:
        """`others` is the outbox's list, which gets ABANDONED when the last owner has left."""
        self.key = key
        self.is_abandoned = False
        self._here: set[int] = set()
        self._others = others

    def add(self, client: int) -> bool:
        """Make a client an owner; False if the server has been abandoned and is about to end."""
        if self.is_abandoned:
            return False
        self._here.add(client)
        return True

    def remove(self, client: int) -> None:
        if client in self._here:
            self._here.remove(client)
            if not self._here:
                self.is_abandoned = True
                self._others.append(DriverTask.ABANDONED)
