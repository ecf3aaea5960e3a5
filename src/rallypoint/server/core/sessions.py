"""The server's half of sessions: each request of a relay is carried out once, whatever its connection does.

A session belongs to a connection while that lasts, and is kept for a while without one. What is sent in it
is kept until the relay says that it has come. Pure: bytes in, bytes out, and time as a parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, Protocol

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.server.core.context import Context
from rallypoint.server.core.outbox import Close, Outbox
from rallypoint.wire.form import WholeRequests
from rallypoint.wire.opcodes import Op
from rallypoint.wire.sessions import (
    REMEMBERED,
    REMEMBERED_BYTES,
    TOKEN_BYTES,
    UNASKED,
    WORTH_REMEMBERING,
    Answer,
    Kept,
    Status,
    Welcome,
    frame,
    item,
    pack_welcome,
    parse_head,
    parse_requests,
    parse_session,
)

IN_BATCHES: Final = (
    *(Op.SET, Op.COMPARE_SET, Op.GET, Op.ADD, Op.CHECK, Op.WAIT, Op.GETNUMKEYS, Op.DELETE_KEY, Op.APPEND),
    *(Op.MULTI_GET, Op.MULTI_SET, Op.QUEUE_PUSH, Op.QUEUE_POP, Op.QUEUE_LEN, Op.LIST_KEYS),
    *(Op.ARRIVE, Op.LEAVE, Op.WAIT_IN_TURN, Op.RECALL, Op.POP_CALLED, Op.TOLD),
)
"""The operations that a batch may hold."""

_LARGE: Final = 4096
_SPARE: Final = 4096


class Carrier(Protocol):
    """Who carries the requests of sessions out: the store, or a relay that passes them on.

    `carry` answers with `Session.answer`, once (ARRIVE: once for each release), now or later.
    """

    def carry(self, session: Session, tag: int, op: Op, blobs: list[bytes], tail: bytes) -> None: ...

    def suspend(self, session: Session) -> None:
        """The session has lost its connection: its ranks do not count, but may come back."""

    def resume(self, session: Session) -> None:
        """It is back."""

    def forget(self, session: Session) -> None:
        """It has ended: nobody waits for its answers."""


class Session:
    """One relay's session. Made by `Sessions` alone."""

    __slots__ = (
        *("_batching", "_carrier", "_items", "_items_bytes", "_most_bytes", "_outbox", "_remembered"),
        *("_remembered_bytes", "_requests", "_tags", "connection", "expires", "is_broken", "is_present"),
        *("id", "keeps_ms", "kept", "notes", "peer", "since", "taken", "token", "told", "told_at"),
    )

    def __init__(
        self,
        token: bytes,
        carrier: Carrier,
        requests: WholeRequests,
        outbox: Outbox[Any],
    ) -> None:
        self.token = token
        self.connection: Party | None = None
        self.is_present = False
        """Whether it has a connection, over which it has said that nothing is missing."""
        self.keeps_ms = 0
        self.expires: float | None = None
        self.taken = 0
        self.id = 0
        """Of the connection that opened it; so is `since`."""
        self.since = 0.0
        self.peer = ""
        """Of the connection that it was last on."""
        self.told: bytes | None = None
        """What the relay last told of itself, as it came."""
        self.told_at = float("-inf")
        self.notes: dict[int, Any] = {}
        """What the carrier keeps about this session, by the tag of a request."""
        self._carrier = carrier
        self._requests = requests
        self._outbox = outbox
        self._tags = 0  # how many requests there have been
        self._items: list[bytes] = []
        self._items_bytes = 0
        # What is not taken is sent in one go when the session is taken up, and must fit into what may wait.
        self._most_bytes = max(requests.limits.unsent_bytes - _SPARE, 0)
        self.kept = Kept()
        self._batching = False
        self.is_broken = False
        """Whether it was left in the middle of a batch: it cannot go on."""
        self._remembered: OrderedDict[bytes, tuple[object, int]] = OrderedDict()  # with their lengths
        self._remembered_bytes = 0

    # Requests

    def batch(self, payload: bytes) -> bytes:
        """Carry out a batch; return what is to be sent now."""
        number, taken = parse_head(payload)
        if number != self.taken + 1:
            raise ProtocolError(f"batch {number} of a session comes after batch {self.taken}")
        self.kept.let_go(taken)
        limit = self._requests.limits.unsent_bytes
        if self.kept.bytes > limit:
            raise LimitError(f"a session has not taken {limit:,} bytes of answers, the limit unsent_bytes")
        self.taken = number
        read, carry = self._requests.read, self._carrier.carry
        self._batching = True
        try:
            for start, stop in parse_requests(payload):
                tag = self._tags
                self._tags = tag + 1
                try:
                    op, blobs, tail = read(payload, start, stop)
                except ProtocolError as error:
                    # That one breaks a limit, or is no request: the others of the batch are not to blame.
                    self.answer(tag, Status.REFUSED, error.message.encode())
                else:
                    carry(self, tag, op, blobs, tail)
        except BaseException:
            self.is_broken = True
            raise
        finally:
            self._batching = False
        return self.flush()

    # Answers

    def answer(self, tag: int, status: Status, content: bytes) -> None:
        """Put an answer into the next frame; a large one that there is no room for becomes a refusal."""
        if len(content) > _LARGE and not self._has_room_for(content):
            limit = self._requests.limits.unsent_bytes
            message = f"more answers than {limit:,} bytes wait to be taken, the limit unsent_bytes"
            status, content = Status.REFUSED, message.encode()
        data = item(tag, status, content)
        self._items.append(data)
        self._items_bytes += len(data)
        if not self._batching and self.connection is not None:
            self._outbox.woken.append(self.connection)

    def ask_to_tell(self) -> None:
        """Have the relay tell of itself, with a TOLD, soon."""
        self.answer(UNASKED, Status.TELL, b"")

    def take_told(self, told: bytes, now: float) -> None:
        """The relay has told of itself."""
        self.told, self.told_at = told, now

    def _has_room_for(self, content: bytes) -> bool:
        return self.kept.bytes + self._items_bytes + len(content) <= self._most_bytes

    def answer_read(self, tag: int, key: bytes, value: object, content: bytes, *, recalled: bool) -> None:
        """Answer a GET with `content`; or, if it is a RECALL, not even that if `value` was sent last."""
        remembered = self._remembered
        if recalled and key in remembered and remembered[key][0] is value:
            remembered.move_to_end(key)
            self.answer(tag, Status.UNCHANGED, b"")
            return
        self._forget_read(key)
        if len(content) >= WORTH_REMEMBERING and self._has_room_for(content):
            remembered[key] = value, len(content)
            self._remembered_bytes += len(content)
            while len(remembered) > REMEMBERED or self._remembered_bytes > REMEMBERED_BYTES:
                self._forget_read(next(iter(remembered)))
        self.answer(tag, Status.DONE, content)

    def _forget_read(self, key: bytes) -> None:
        before = self._remembered.pop(key, None)
        if before is not None:
            self._remembered_bytes -= before[1]

    def flush(self) -> bytes:
        """A frame with the answers so far, if there is a connection to send it on."""
        if not self._items or self.connection is None:
            return b""
        data = frame(self.kept.number + 1, self.taken, self._items)
        self._items = []
        self._items_bytes = 0
        self.kept.add(data)
        return data

    # Coming and going

    def attach(self, connection: Party, taken: int) -> None:
        self.kept.let_go(taken)
        self.connection = connection
        self.peer = connection.peer
        connection.session = self
        self.expires = None

    def detach(self) -> None:
        if self.connection is not None:
            self.connection.session = None
            self.connection = None
            self.is_present = False
            self._carrier.suspend(self)

    def be_present(self) -> bytes:
        if not self.is_present:
            self.is_present = True
            self._batching = True
            try:
                self._carrier.resume(self)
            finally:
                self._batching = False
        return self.flush()

    def check_invariants(self) -> None:
        self.kept.check_invariants()
        assert self._items_bytes == sum(map(len, self._items))
        assert not self.is_broken
        assert len(self._remembered) <= REMEMBERED
        assert self._remembered_bytes == sum(length for _, length in self._remembered.values())
        assert self.connection is None or self.connection.session is self
        assert self.connection is not None or not self.is_present
        assert all(0 <= tag < self._tags for tag in self.notes)


class Sessions:
    """All sessions of a server or a relay, by their token."""

    __slots__ = ("_by_token", "_carrier", "_outbox", "_requests")

    def __init__(self, context: Context, carrier: Carrier) -> None:
        self._by_token: dict[bytes, Session] = {}
        self._carrier = carrier
        self._outbox = context.outbox
        self._requests = WholeRequests(context.limits, IN_BATCHES)

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_token.values())

    def open(self, connection: Party, token: bytes, tail: bytes) -> bytes:
        """Open a session on a connection, or take it up; return the answer, and what was not taken."""
        if connection.session is not None:
            raise ProtocolError("a second SESSION on one connection")
        if len(token) != TOKEN_BYTES:
            raise ProtocolError(f"SESSION with a token of {len(token)} bytes")
        keep_ms, taken, known = parse_session(tail)
        limits = self._requests.limits
        session = self._by_token.get(token)
        answer = Answer.NEW if session is None else Answer.TAKEN_UP
        if session is None:
            if known:
                return pack_welcome(Welcome(Answer.UNKNOWN, 0, 0, 0))
            if taken:
                raise ProtocolError(f"a new session has taken frame {taken}")
            if len(self._by_token) >= limits.connections:
                raise LimitError(f"one more session than {limits.connections:,}, the limit connections")
            session = self._by_token[token] = Session(token, self._carrier, self._requests, self._outbox)
            session.id, session.since = connection.id, connection.since
        elif not session.kept.reaches_back_to(taken):
            raise ProtocolError(f"a session has taken frame {taken}, but goes on elsewhere")
        elif session.connection is not None:
            displaced = ProtocolError("its session goes on over another connection")
            self._outbox.others.append(Close(session.connection, displaced))
            session.detach()
        session.attach(connection, taken)
        session.keeps_ms = min(keep_ms, int(limits.session_seconds * 1000))
        most = limits.request_bytes
        welcome = pack_welcome(Welcome(answer, session.keeps_ms, session.taken, most))
        return b"".join([welcome, *session.kept.all()])

    def counts(self) -> dict[Op, int]:
        """How many requests of each kind there have been in batches."""
        return self._requests.counts()

    def lose(self, session: Session) -> None:
        """The connection of a session is gone."""
        session.detach()
        if not session.keeps_ms:
            self.end(session)

    def end(self, session: Session) -> None:
        """Give a session up."""
        session.detach()
        if self._by_token.pop(session.token, None) is not None:
            self._carrier.forget(session)

    def expire(self, now: float) -> None:
        """Give up the sessions that have been without a connection for as long as they are kept."""
        for session in list(self._by_token.values()):
            if session.connection is not None:
                continue
            if session.expires is None:
                session.expires = now + session.keeps_ms / 1000
            elif session.expires <= now:
                self.end(session)

    def check_invariants(self) -> None:
        for token, session in self._by_token.items():
            assert session.token == token
            session.check_invariants()


class Party:
    """A connection that may carry a session: what the parser calls for that."""

    __slots__ = ("_sessions", "id", "peer", "session", "since")

    def __init__(self, sessions: Sessions, peer: str = "") -> None:
        self._sessions = sessions
        self.peer = peer
        """Its name in messages."""
        self.id = 0
        """Counts connections, from 1."""
        self.since = 0.0
        self.session: Session | None = None

    def open_session(self, token: bytes, tail: bytes) -> bytes:
        return self._sessions.open(self, token, tail)

    def batch(self, payload: bytes) -> bytes:
        session = self._own_session()
        try:
            return session.batch(payload)
        finally:
            if session.is_broken:
                self._sessions.end(session)

    def present(self) -> bytes:
        return self._own_session().be_present()

    def bye(self) -> bytes:
        self._sessions.end(self._own_session())
        return b""

    def _own_session(self) -> Session:
        if self.session is None:
            raise ProtocolError("a request of a session, on a connection that has none")
        return self.session
