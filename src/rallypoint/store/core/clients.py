"""The connections of a server or a relay: who is here, who is late, who has gone. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

from rallypoint.codec import from_text, to_text
from rallypoint.compiling import mypyc_attr
from rallypoint.errors import AccessError, LimitError, ProtocolError
from rallypoint.store.core.context import Context
from rallypoint.store.core.outbox import Enter, GoOn
from rallypoint.store.core.registry import Sessions
from rallypoint.store.core.sessions import Bearer, Session
from rallypoint.store.engine.keyspace import State
from rallypoint.store.rollcall.identity import NOBODY, Identity, Role, is_hello, parse_hello
from rallypoint.store.rollcall.question import Question
from rallypoint.store.wire.encoding import EMPTY_BLOB, VALIDATE, pack_i64
from rallypoint.store.wire.handlers import Deliver
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import READY, SHAPES, Op
from rallypoint.store.wire.parser import Forms, RequestParser
from rallypoint.store.wire.sessions import ANNOUNCED

_GONE_KEPT: Final = 16_384
_TRIES: Final = 2
"""A process on another machine is never found, and a new one may have had no time yet to be seen."""
_NO_HANDSHAKE: Final = "no VALIDATE"
_NOBODY: Final = to_text(NOBODY, sparse=True)


class Told(NamedTuple):
    """What a client has said of itself, for those who look."""

    text: bytes
    """ASCII; nothing: it has said nothing."""
    at: float


_NOTHING_TOLD: Final = Told(b"", 0.0)
"""Most clients tell nothing, and share this."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Client(Bearer, ABC):
    """One connection."""

    __slots__ = (
        *("_clients", "_looker", "_parser", "_sessions", "_unread", "_unserved", "receive", "received"),
        *("sent", "told", "tries", "who", "why"),
    )

    receive: Callable[[bytes], bytes]
    """Takes the bytes that the client sent, and returns the bytes to send it, in one write.

    Raises ProtocolError when the connection is to be closed. Either way, the outbox is to be emptied next.
    """

    def __init__(self, clients: Clients[Any], sessions: Sessions, peer: str) -> None:
        super().__init__(peer)
        self._clients = clients
        self._sessions = sessions
        self._parser: RequestParser[Any] | None = None
        self._looker: Looker | None = None
        self._unread = 0  # bytes of replies that the client has not taken
        self._unserved = 0  # bytes of requests that are not complete, or not carried out
        self.received = 0
        """Bytes that came from it and went to it, as the driver has counted them last."""
        self.sent = 0
        self.who = NOBODY
        self.told = _NOTHING_TOLD
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

    def restrict_to_look(self) -> None:
        """From now on it may ask who is here, and nothing else."""
        looker = Looker(self, self._clients.limits)
        self._parser, self._looker = None, looker
        self.receive = looker.receive

    @property
    def is_look_only(self) -> bool:
        """Whether it may ask who is here, and nothing else."""
        return self._looker is not None

    def enter(self, name: bytes) -> bytes | None:
        """It says which of several stores it means; the one without a name is this one, if it has none."""
        if not name and not self._clients.have_named:
            return b""
        self._clients.enter(self, name)
        return None  # what comes behind it is not for this store

    def look(self, _: bytes, /) -> bytes | None:
        """It asks what is known here; the answer is a notice."""
        raise ProtocolError("there is nothing to look at here")

    def read_no_more(self) -> None:
        """The parser refers back to the connection: without this, only a collection would free them."""
        self._parser = self._looker = self._slices = None
        self.receive = _receive_nothing
        self._unread = self._unserved = 0
        self.told = _NOTHING_TOLD

    @property
    def rest(self) -> bytes:
        """What it has sent, and is not carried out."""
        reader = self._parser or self._looker
        return reader.rest if reader is not None else b""

    @property
    def has_rest(self) -> bool:
        """Whether requests were put off: `receive` is to be called again, be it with nothing."""
        return self._parser is not None and self._parser.has_rest

    @property
    def is_within_request(self) -> bool:
        """Whether a part of a request has come, and the rest has not."""
        return self._parser is not None and not self._parser.is_between_requests

    @property
    def operations(self) -> int:
        """How many requests it has sent."""
        return self._parser.operations if self._parser is not None else 0

    @property
    def is_owed(self) -> bool:
        """Whether it has asked something that will be answered soon."""
        return False

    @abstractmethod
    def take_notice(self) -> bytes:
        """The bytes to send it now that it stands in the outbox. There may be none."""

    @property
    def notice_bytes(self) -> int:
        """What `take_notice` has left, as it was very much: call it again when the client has read that."""
        return 0

    def validate(self) -> None:
        """The parser calls this when the client has shaken hands."""
        self._clients.complete_handshake(self)

    def greet(self, hello: bytes) -> None:
        """The client says who it is, by a key that is a hello."""
        who = parse_hello(hello)
        if who is not None and self in self._clients:  # a relay keeps the hellos of its clients to itself
            self._clients.name(self, who)

    def tell(self, text: bytes) -> bytes:
        """The client says what is to be told of it. That stands until it says something else, or leaves."""
        self._clients.count_held(len(text) - len(self.told.text))
        self.told = Told(text, self._clients.now) if text else _NOTHING_TOLD
        return b""

    def has_session(self) -> None:
        self._clients.name(self, replace(self.who, role=Role.AGENT))

    def hold(self, count: int, is_cut: bool) -> None:
        """The parser calls this when it keeps that many bytes for later."""
        self._clients.expect_rest(self, is_cut)
        self._clients.count_held(count - self._unserved)
        self._unserved = count

    def leave_unread(self, count: int) -> None:
        """The driver calls this when that many bytes wait to be sent, as the client does not read."""
        self._clients.count_held(count - self._unread)
        self._unread = count

    @property
    def held(self) -> int:
        """Bytes that are held for it, without its waits and its session."""
        return self._unread + self._unserved + len(self.told.text)

    def postpone(self) -> None:
        """The parser calls this when it keeps requests for another turn."""
        self._clients.postpone(self)

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


def _receive_nothing(_: bytes) -> bytes:
    raise ProtocolError("the connection has been closed")


class Looker:
    """Takes the requests of a client that has a token, and may only ask who is here. They are not counted."""

    is_unfinished = False

    def __init__(self, client: Client, limits: Limits) -> None:
        self._client = client
        self._parser = RequestParser(self, Forms(limits, _DELIVERIES))
        self.receive = self._parser.feed
        self.validate = client.validate
        self.hold = client.hold
        self.postpone = client.postpone

    @property
    def rest(self) -> bytes:
        return self._parser.rest

    def get(self, _: bytes, /) -> bytes:
        raise _refusal(Op.GET)

    def go_on(self) -> bytes:
        return b""  # nothing that it may ask takes longer

    def carry(self, op: Op, blobs: list[bytes], tail: bytes) -> bytes | None:
        """Answer what it may ask."""
        if op is Op.PING:
            return tail
        if op is Op.LOOK:
            if Question.from_json(blobs[0]).value is not None:
                raise AccessError("a look at a value, with a token that may only see who is here")
            return self._client.look(blobs[0]) or b""
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


def _to_carry(op: Op) -> Deliver[Looker]:
    return lambda looker, blobs, tail: looker.carry(op, blobs, tail)


_DELIVERIES: Final[dict[Op, Deliver[Looker]]] = {op: _to_carry(op) for op in SHAPES if op is not Op.VALIDATE}


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
        *("_by_id", "_context", "_deadlines", "arrivals", "elsewhere", "gone", "have_named", "names"),
        *("opened", "operations_before", "received_before", "sent_before"),
    )

    def __init__(self, context: Context) -> None:
        self._context = context
        self._by_id: dict[int, ClientT] = {}
        # When a connection is late, and with what; the deadlines come in the order of insertion.
        self._deadlines: dict[Any, tuple[float, str]] = {}
        self.gone: deque[Departed] = deque(maxlen=_GONE_KEPT)
        self.elsewhere = 0
        """How many connections other processes of the same server have."""
        self.names: tuple[str, ...] | None = None
        """Those of the stores that they may name, if the driver tells."""
        self.have_named = False
        """Whether they have named this store, one of several, to get here."""
        self.opened = 0
        """Connections so far."""
        self.arrivals = 0
        """Clients so far that have shaken hands and are no tools."""
        self.received_before = 0
        """Bytes and requests of connections that are gone."""
        self.sent_before = 0
        self.operations_before = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[ClientT]:
        return iter(self._by_id.values())

    def __contains__(self, client: Client) -> bool:
        return client.id in self._by_id and self._by_id[client.id] is client

    @property
    def limits(self) -> Limits:
        return self._context.limits

    @property
    def now(self) -> float:
        return self._context.turn.now

    def check_room(self) -> None:
        """LimitError if one more is one too many."""
        limit = self._context.limits.connections
        if len(self._by_id) + self.elsewhere >= limit:
            raise LimitError(f"one more connection than {limit:,}, the limit connections")

    def add(self, client: ClientT) -> None:
        now = self._context.turn.now
        self.opened += 1
        client.id = self.opened
        client.since = now
        self._by_id[client.id] = client
        self._set_deadline(client, _NO_HANDSHAKE)

    def complete_handshake(self, client: ClientT) -> None:
        self._deadlines.pop(client, None)
        self.arrivals += 1
        self._context.journal.connected(client, client.peer)

    def expect_rest(self, client: Client, is_cut: bool) -> None:
        """A client has sent a part of a request; or the rest of it has come."""
        self._deadlines.pop(client, None)
        if is_cut:
            self._set_deadline(client, "no more of a request that is not complete")

    def name(self, client: Client, who: Identity) -> None:
        """The name of a client has become known."""
        if who.role is Role.TOOL is not client.who.role:
            self.arrivals -= 1
        client.who = who
        self._context.journal.named(client, who)

    def count_held(self, count: int) -> None:
        """More bytes are held for a client, or less."""
        self._context.budget.held += count
        if count > 0:
            self._context.check_budget()

    def count_waits(self) -> None:
        """The engine may hold more for clients than before."""
        self._context.check_budget()

    def enter(self, client: Client, name: bytes) -> None:
        """A client means another store."""
        if client.who.role is not Role.TOOL:
            self.arrivals -= 1  # it arrives there
        self._context.outbox.others.append(Enter(client, name))

    def postpone(self, client: Client) -> None:
        """A client has asked for more than what is done at once."""
        self._context.outbox.others.append(GoOn(client))

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
        self._context.budget.held -= client.held
        client.read_no_more()
        if client.who.is_rank:
            self.gone.append(Departed(client.id, client.who, self._context.turn.now, client.why))
        if late_with != _NO_HANDSHAKE:
            self._context.journal.left(client, client.why)

    def state(self) -> State:
        """Who is here, as plain data, and how many there were."""
        rows = [[each.id, each.peer, each.since, to_text(each.who, sparse=True)] for each in self]
        return [rows, self.opened, self.arrivals]

    def take_state(self, state: State, make: Callable[[str], ClientT]) -> None:
        """Have the clients that have given this state, all of which have shaken hands."""
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
        """The clients that are to be closed by now, and why."""
        late = []
        for client, (deadline, what) in self._deadlines.items():
            if deadline > self._context.turn.now:
                break
            seconds = self._context.limits.handshake_seconds
            late.append((client, f"{what} within {seconds:g} s, the limit handshake_seconds"))
        return late

    @property
    def operations(self) -> int:
        """How many requests there have been, a batch counting as one."""
        parsers = [each._parser for each in self._by_id.values()]  # the property takes thrice as long
        return self.operations_before + sum([each.operations for each in parsers if each is not None])

    def _set_deadline(self, client: Client, what: str) -> None:
        deadline = self._context.turn.now + self._context.limits.handshake_seconds
        self._deadlines[client] = (deadline, what)

    def check_invariants(self) -> None:
        assert all(client in self for client in self._deadlines)
        deadlines = [deadline for deadline, _ in self._deadlines.values()]
        assert deadlines == sorted(deadlines)
