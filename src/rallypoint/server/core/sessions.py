"""The server's half of sessions: each request of a relay is carried out once, whatever its connection does.

A session belongs to a connection while that lasts, and is kept for a while without one. What is sent in it
is kept until the relay says that it has come. Pure: bytes in, bytes out, and time as a parameter.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, Protocol

from rallypoint.engine.keyspace import State
from rallypoint.errors import LimitError, ProtocolError
from rallypoint.rollcall.identity import WORKER
from rallypoint.server.core.budget import Budget
from rallypoint.server.core.context import Context
from rallypoint.server.core.long_answers import LongAnswers
from rallypoint.server.core.outbox import Close, CoreFault, Outbox, Work
from rallypoint.server.core.slices import Rest, Slices, Worker, sliced
from rallypoint.wire.encoding import EMPTY_BLOB
from rallypoint.wire.form import WholeRequests
from rallypoint.wire.opcodes import Op
from rallypoint.wire.parser import STEP_BYTES, STEPS_AT_ONCE
from rallypoint.wire.sessions import (
    LONG,
    MOST_UNTAKEN,
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

_SPARE: Final = 4096


class Carrier(Protocol):
    """Who carries the requests of sessions out: the store, or a relay that passes them on.

    `carry` answers with `Session.answer`, once (ARRIVE: once for each release), now or later. What it
    returns, if anything, is the rest of a request that takes long: its slices come before the next request.
    """

    def carry(self, session: Session, tag: int, op: Op, blobs: list[bytes], tail: bytes) -> Rest | None: ...

    # These go through all notes of a session, a slice at a time, in the order in which they are called.

    def suspend(self, session: Session, /) -> Rest:
        """The session has lost its connection: its ranks do not count, but may come back."""

    def resume(self, session: Session, /) -> Rest:
        """It is back."""

    def forget(self, session: Session, /) -> Rest:
        """It has ended: nobody waits for its answers."""


class Session:
    """One relay's session. Made by `Sessions` alone."""

    __slots__ = (
        *("_batching", "_budget", "_carrier", "_has_ended", "_items", "_items_bytes", "_long", "_most_bytes"),
        *("_outbox", "_remembered", "_remembered_bytes", "_requests", "_suspending", "_tags", "_under_way"),
        *("connection", "expires", "id", "is_present", "keeps_ms", "kept", "notes", "peer", "since", "taken"),
        *("token", "told", "told_at"),
    )

    def __init__(
        self,
        token: bytes,
        carrier: Carrier,
        requests: WholeRequests,
        outbox: Outbox[Any],
        budget: Budget,
    ) -> None:
        self.token = token
        self._budget = budget
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
        self._long = LongAnswers()
        # What is not taken is sent in one go when the session is taken up, and must fit into what may wait.
        self._most_bytes = max(requests.limits.unsent_bytes - _SPARE, 0)
        self.kept = Kept()
        self._batching = False
        self._has_ended = False
        self._under_way: Rest | None = None
        self._suspending: Rest = _nothing()
        self._remembered: OrderedDict[bytes, tuple[object, int]] = OrderedDict()  # with their lengths
        self._remembered_bytes = 0

    # Requests

    def begin_batch(self, payload: bytes) -> None:
        """Take a batch. `step` carries it out."""
        assert self._under_way is None
        number, taken = parse_head(payload)
        if number != self.taken + 1:
            raise ProtocolError(f"batch {number} of a session comes after batch {self.taken}")
        self._let_go(taken)
        limit = self._requests.limits.unsent_bytes
        if self.kept.bytes > limit:
            raise LimitError(f"a session has not taken {limit:,} bytes of answers, the limit unsent_bytes")
        self.taken = number
        self._under_way = self._carry_out(payload)

    def step(self) -> bool:
        """Carry out the next slice of the batch under way; return whether there is none left.

        If it raises, the session cannot go on: a part of the batch is lost.
        """
        if self._under_way is not None:
            self._batching = True
            try:
                next(self._under_way)
            except StopIteration:
                self._under_way = None
            finally:
                self._batching = False
        return self._under_way is None

    def _carry_out(self, payload: bytes) -> Rest:
        read, carry = self._requests.read, self._carrier.carry
        steps = STEPS_AT_ONCE
        for start, stop in parse_requests(payload):
            tag = self._tags
            self._tags = tag + 1
            before = self._items_bytes
            try:
                op, blobs, tail = read(payload, start, stop)
            except ProtocolError as error:
                # That one breaks a limit, or is no request: the others of the batch are not to blame.
                self.answer(tag, Status.REFUSED, error.message.encode())
            else:
                rest = carry(self, tag, op, blobs, tail)
                if rest is not None:
                    yield from rest
                steps -= len(blobs)
            steps -= 1 + max(self._items_bytes - before, 0) // STEP_BYTES
            if steps < 0:
                yield
                steps = STEPS_AT_ONCE

    @property
    def held(self) -> int:
        """Bytes that are held for it, without its waits."""
        told = len(self.told) if self.told is not None else 0
        return self.kept.bytes + self._items_bytes + self._long.bytes + self._remembered_bytes + told

    def _let_go(self, taken: int) -> None:
        """The relay has taken all frames up to this one."""
        before = self.kept.bytes
        self.kept.let_go(taken)
        self._budget.held += self.kept.bytes - before

    @property
    def is_under_way(self) -> bool:
        """Whether a part of a batch is still to be carried out."""
        return self._under_way is not None

    def give_up(self) -> None:
        """The session has ended: the rest of its batch, and what it is answered, is for nobody."""
        self._has_ended = True
        self._under_way = None
        self._budget.held -= self.held
        self.kept, self._items, self._items_bytes, self.told = Kept(), [], 0, None
        self._long = LongAnswers()
        self._remembered.clear()
        self._remembered_bytes = 0

    # Answers

    def answer(self, tag: int, status: Status, content: bytes, value: bytes = b"") -> None:
        """Answer with `content`, and `value` behind it, soon.

        A long answer is sent in pieces, or refused if there is no room for it.
        """
        if self._has_ended:
            return
        size = len(content) + len(value)
        if size <= LONG:
            self._put(item(tag, status, content + value if value else content))
        elif self._has_room_for(size):
            self._put_long(tag, status, content, value)
        else:
            limit = self._requests.limits.unsent_bytes
            message = f"more answers than {limit:,} bytes wait to be taken, the limit unsent_bytes"
            self._put(item(tag, Status.REFUSED, message.encode()))

    def _put_long(
        self, tag: int, status: Status, content: bytes, value: bytes = b"", key: bytes | None = None
    ) -> None:
        self._long.add(tag, status, *((content, value) if value else (b"", content)), key)
        self._budget.held += len(content) + len(value)
        self._put(item(tag, Status.PIECE, b""))

    def _put(self, data: bytes) -> None:
        """Put an item into the next frame."""
        self._items.append(data)
        self._items_bytes += len(data)
        self._budget.held += len(data)
        if self._under_way is None and not self._batching and self.connection is not None:
            self._outbox.woken.append(self.connection)

    def ask_to_tell(self) -> None:
        """Have the relay tell of itself, with a TOLD, soon."""
        self.answer(UNASKED, Status.TELL, b"")

    def take_told(self, told: bytes, now: float) -> None:
        """The relay has told of itself."""
        self._budget.held += len(told) - (len(self.told) if self.told is not None else 0)
        self.told, self.told_at = told, now

    def _has_room_for(self, size: int) -> bool:
        return self.kept.bytes + self._items_bytes + self._long.bytes + size <= self._most_bytes

    def answer_read(
        self, tag: int, key: bytes, same: object, content: bytes, value: bytes = b"", *, recalled: bool
    ) -> None:
        """Answer a GET with `content`, and `value` behind it.

        If it is a RECALL, not even that, if `same` is what was sent last. The answer to a RECALL relies on
        those to the reads of this key before it, and so does not overtake them.
        """
        remembered = self._remembered
        if self._has_ended:
            return
        size = len(content) + len(value)
        status = Status.DONE
        if recalled and key in remembered and remembered[key][0] is same:
            remembered.move_to_end(key)
            status, content, value, size = Status.UNCHANGED, b"", b"", 0
        else:
            self._forget_read(key)
            if size >= WORTH_REMEMBERING and self._has_room_for(size):
                remembered[key] = same, size
                self._remembered_bytes += size
                self._budget.held += size
                while len(remembered) > REMEMBERED or self._remembered_bytes > REMEMBERED_BYTES:
                    self._forget_read(next(iter(remembered)))
        if self._has_room_for(size) if size > LONG else recalled and self._long.has(key):
            self._put_long(tag, status, content, value, key)
        else:
            self.answer(tag, status, content, value)

    def _forget_read(self, key: bytes) -> None:
        before = self._remembered.pop(key, None)
        if before is not None:
            self._remembered_bytes -= before[1]
            self._budget.held -= before[1]

    def flush(self) -> bytes:
        """The answers so far, if there is a connection to send them on; of long ones, the next pieces."""
        if self.connection is None:
            return b""
        frames = []
        if self._items:
            frames.append(self._frame(self._items, self._items_bytes))
            self._items = []
            self._items_bytes = 0
        while self._long and self.kept.bytes < MOST_UNTAKEN:
            before = self._long.bytes
            frames.append(self._frame([self._long.take_piece()], before - self._long.bytes))
        return b"".join(frames)

    def _frame(self, items: list[bytes], held: int) -> bytes:
        """A frame that is kept from now on, of items for which that much was held."""
        data = frame(self.kept.number + 1, self.taken, items)
        self._budget.held += len(data) - held
        self.kept.add(data)
        return data

    # Coming and going

    def notes_in_slices(self) -> Iterator[Any]:
        """Its notes, as far as they are not gone meanwhile; and None, where others should have their turn."""
        for number, tags in enumerate(sliced(list(self.notes))):
            if number:
                yield None
            yield from (self.notes[tag] for tag in tags if tag in self.notes)

    def attach(self, connection: Party, taken: int) -> None:
        self._let_go(taken)
        self.connection = connection
        self.peer = connection.peer
        connection.session = self
        self.expires = None
        connection.has_session()

    def detach(self) -> Rest:
        """It has lost its connection. Returns what is to be done then; `be_present` does the rest of it."""
        if self.connection is not None:
            self.connection.session = None
            self.connection = None
            self.is_present = False
            self._suspending = _one_after_the_other(self._suspending, self._carrier.suspend(self))
        return self._suspending

    def be_present(self) -> Slices:
        """Nothing is missing any more; returns what is to be sent then."""
        if not self.is_present:
            yield from self._suspending
            yield from self._carrier.resume(self)
            self.is_present = True
        return self.flush()

    def state(self, value_of: Callable[[bytes], object]) -> State:
        """All of it but its notes, as plain data; `value_of` gives the value of a key in the store."""
        assert self._under_way is None
        connection = self.connection.id if self.connection is not None else None
        about = [self.token, connection, self.is_present, self.keeps_ms, self.expires, self.taken, self.id]
        told = [self.since, self.peer, self.told, self.told_at]
        # That a value is still the one that was sent is told by its identity, which no other process has.
        remembered = [
            (key, length, value_of(key) is same) for key, (same, length) in self._remembered.items()
        ]
        answers = [self._tags, list(self._items), self._long.state(), self.kept.state(), remembered]
        return [about, told, answers]

    def take_state(self, state: State, value_of: Callable[[bytes], object]) -> int | None:
        """Become what has given this state; return the number of its connection, if it has one."""
        about, told, answers = state
        _, connection, self.is_present, self.keeps_ms, self.expires, self.taken, self.id = about
        self.since, self.peer, self.told, self.told_at = told
        self._tags, self._items, long, kept, remembered = answers
        self._items_bytes = sum(map(len, self._items))
        for tag, status, head, body, key in long:
            self._long.add(tag, Status(status), head, body, key)
        self.kept = Kept.of(*kept)
        for key, length, is_same in remembered:
            self._remembered[key] = value_of(key) if is_same else object(), length
            self._remembered_bytes += length
        self._budget.held += self.held
        return connection  # type: ignore[no-any-return]

    def check_invariants(self) -> None:
        self.kept.check_invariants()
        assert self._items_bytes == sum(map(len, self._items))
        self._long.check_invariants()
        assert len(self._remembered) <= REMEMBERED
        assert self._remembered_bytes == sum(length for _, length in self._remembered.values())
        assert self.connection is None or self.connection.session is self
        assert self.connection is not None or not self.is_present
        assert all(0 <= tag < self._tags for tag in self.notes)


def _nothing() -> Rest:
    yield from ()


def _one_after_the_other(*rests: Rest) -> Rest:
    for rest in rests:
        yield from rest


class Sessions:
    """All sessions of a server or a relay, by their token."""

    __slots__ = (
        *("_budget", "_by_token", "_carrier", "_of_workers", "_orphans", "_outbox", "_requests", "_rests"),
    )

    def __init__(self, context: Context, carrier: Carrier) -> None:
        self._by_token: dict[bytes, Session] = {}
        # Sessions that have lost their connection in the middle of a batch: that is carried out all the same.
        self._orphans: deque[Session] = deque()
        self._rests: deque[Rest] = deque()  # what is left to be done for sessions that come and go
        self._carrier = carrier
        self._outbox = context.outbox
        self._budget = context.budget
        self._requests = WholeRequests(context.limits, IN_BATCHES)
        self._of_workers: WholeRequests | None = None  # what the workers of this server ask, if it has some

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_token.values())

    def carry_out(self, session: Session) -> Slices:
        """The batch that a session has begun; returns what is to be sent then."""
        while not self._step(session):
            yield
        return session.flush()

    def _step(self, session: Session) -> bool:
        """Carry out a slice of a batch; return whether there is none left. If it fails, the session ends."""
        try:
            return session.step()
        except Exception:
            self.end(session)
            raise

    def go_on(self, note_error: Callable[[str, str], None]) -> bool:
        """Go on with what is left to be done for sessions without a connection, such as a batch.

        Returns whether there is more to do. `note_error` is called with the peer and the reason, if a batch
        breaks a rule.
        """
        if self._rests:
            rest = self._rests.popleft()
            try:
                next(rest)
                self._rests.append(rest)
            except StopIteration:
                pass
            except Exception as error:
                self._outbox.others.append(CoreFault(error))
        if self._orphans:
            session = self._orphans.popleft()
            try:
                if session.connection is None and not self._step(session):
                    self._orphans.append(session)
            except ProtocolError as error:
                note_error(session.peer, error.message)
            except Exception as error:
                self._outbox.others.append(CoreFault(error))
        return bool(self._orphans or self._rests)

    def _do(self, rest: Rest) -> None:
        """Do the first slice at once, and others later."""
        try:
            next(rest)
        except StopIteration:
            return
        self._rests.append(rest)
        self._outbox.others.append(Work.REST)

    def open(self, connection: Party, token: bytes, tail: bytes) -> Slices:
        """Open a session on a connection, or take it up; return the answer, and what was not taken.

        A batch that is under way is carried out before.
        """
        if connection.session is not None:
            raise ProtocolError("a second SESSION on one connection")
        if len(token) != TOKEN_BYTES:
            raise ProtocolError(f"SESSION with a token of {len(token)} bytes")
        keep_ms, taken, known = parse_session(tail)
        limits = self._requests.limits
        session = self._by_token.get(token)
        while session is not None and not self._step(session):
            yield
            session = self._by_token.get(token)
        answer = Answer.NEW if session is None else Answer.TAKEN_UP
        if session is not None and taken > session.kept.number:  # the log has lost what it had been sent
            return pack_welcome(Welcome(Answer.UNKNOWN, 0, 0, 0))
        if session is None:
            if known:
                return pack_welcome(Welcome(Answer.UNKNOWN, 0, 0, 0))
            if taken:
                raise ProtocolError(f"a new session has taken frame {taken}")
            if len(self._by_token) >= limits.connections:
                raise LimitError(f"one more session than {limits.connections:,}, the limit connections")
            requests = self._worker_requests() if connection.peer.startswith(WORKER) else self._requests
            session = self._by_token[token] = Session(
                token, self._carrier, requests, self._outbox, self._budget
            )
            session.id, session.since = connection.id, connection.since
        elif not session.kept.reaches_back_to(taken):
            raise ProtocolError(f"a session has taken frame {taken}, but goes on elsewhere")
        elif session.connection is not None:
            displaced = ProtocolError("its session goes on over another connection")
            self._outbox.others.append(Close(session.connection, displaced))
            self._do(session.detach())
        session.attach(connection, taken)
        session.keeps_ms = min(keep_ms, int(limits.session_seconds * 1000))
        most = min(limits.batch_bytes, limits.request_bytes)
        welcome = pack_welcome(Welcome(answer, session.keeps_ms, session.taken, most))
        return b"".join([welcome, *session.kept.all()])

    def _worker_requests(self) -> WholeRequests:
        """Many clients share a worker's session: what waits for them may be as much as for all clients."""
        if self._of_workers is None:
            limits = self._requests.limits
            most = max(limits.unsent_bytes, limits.held_bytes)
            self._of_workers = WholeRequests(replace(limits, unsent_bytes=most), IN_BATCHES)
        return self._of_workers

    def counts(self) -> dict[Op, int]:
        """How many requests of each kind there have been in batches."""
        counts = self._requests.counts()
        for op, count in self.counts_of_workers().items():
            counts[op] += count
        return counts

    def counts_of_workers(self) -> dict[Op, int]:
        """Those of the workers of this server among them."""
        return self._of_workers.counts() if self._of_workers is not None else {}

    def lose(self, session: Session) -> None:
        """The connection of a session is gone."""
        if not session.keeps_ms:
            self.end(session)
            return
        self._do(session.detach())
        if session.is_under_way:
            self._orphans.append(session)
            self._outbox.others.append(Work.REST)

    def end(self, session: Session) -> None:
        """Give a session up."""
        suspending = session.detach()
        if self._by_token.pop(session.token, None) is not None:
            session.give_up()
            self._do(_one_after_the_other(suspending, self._carrier.forget(session)))

    def expire(self, now: float) -> None:
        """Give up the sessions that have been without a connection for as long as they are kept."""
        for session in list(self._by_token.values()):
            if session.connection is not None:
                continue
            if session.expires is None:
                session.expires = now + session.keeps_ms / 1000
            elif session.expires <= now:
                self.end(session)

    def state(self, value_of: Callable[[bytes], object]) -> State:
        """All sessions but their notes, as plain data. To be asked when nothing is left to go on with."""
        assert not self._orphans
        assert not self._rests
        return [session.state(value_of) for session in self]

    def take_state(
        self,
        state: State,
        value_of: Callable[[bytes], object],
        connection_of: Callable[[int], Party],
    ) -> None:
        """Have the sessions that have given this state, each on its connection. There were none before."""
        for each in state:
            token = each[0][0]
            session = Session(token, self._carrier, self._requests, self._outbox, self._budget)
            self._by_token[token] = session
            connection = session.take_state(each, value_of)
            if connection is not None:
                session.connection = connection_of(connection)
                session.connection.session = session

    def check_invariants(self) -> None:
        for token, session in self._by_token.items():
            assert session.token == token
            session.check_invariants()


class Party(Worker):
    """A connection that may carry a session: what the parser calls for that."""

    __slots__ = ("_sessions", "id", "peer", "session", "since")

    def __init__(self, sessions: Sessions, peer: str = "") -> None:
        super().__init__()
        self._sessions = sessions
        self.peer = peer
        """Its name in messages."""
        self.id = 0
        """Counts connections, from 1."""
        self.since = 0.0
        self.session: Session | None = None

    def open_session(self, token: bytes, tail: bytes) -> bytes | None:
        return self.begin(self._sessions.open(self, token, tail))

    def has_session(self) -> None:
        """It carries a session from now on."""

    def batch(self, payload: bytes) -> bytes | None:
        session = self._own_session()
        session.begin_batch(payload)
        return self.begin(self._sessions.carry_out(session))

    def present(self) -> bytes | None:
        return self.begin(self._own_session().be_present())

    def bye(self) -> bytes:
        self._sessions.end(self._own_session())
        return b""

    def beat(self) -> bytes:
        self._own_session()
        return EMPTY_BLOB

    def _own_session(self) -> Session:
        if self.session is None:
            raise ProtocolError("a request of a session, on a connection that has none")
        return self.session
