"""The server's half of sessions: each request of a relay is carried out once, whatever its connection does.

`Session` is one of them, and keeps its frames until the relay acknowledges them. `Sessions` opens them, has
them taken up on new connections, and ends them. The life of a session, which outlives its connections:

    state      begins when                                         ends when
    ---------  --------------------------------------------------  -----------------------------------------
    attached   SESSION: it is new, or taken up                     PRESENT; or its connection is lost
    present    PRESENT: the relay has sent again what was lost     its connection is lost: its waits suspend
    detached   its connection is lost, or displaced by another     SESSION; or `keeps_ms` are over
    ended      BYE; overdue; a batch failed; it held too much      its waits are withdrawn, slice by slice

While a session is not present, its waits go on, but they do not count at barriers and get no queue items. A
batch that was under way when the connection was lost is carried out all the same.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.core.context import Close, Context, CoreFault, DriverTask, Rest, Slices, sliced
from rallypoint.store.engine.keyspace import State, Value
from rallypoint.store.rollcall.identity import WORKER
from rallypoint.store.wire.opcodes import BATCH_OPS, Op
from rallypoint.store.wire.parser import STEP_BYTES, STEPS_AT_ONCE
from rallypoint.store.wire.requests import WholeRequests
from rallypoint.store.wire.sessions import (
    LONG,
    MOST_UNTAKEN,
    REMEMBERED,
    REMEMBERED_BYTES,
    TOKEN_BYTES,
    UNASKED,
    WORTH_REMEMBERING,
    Answer,
    LongAnswers,
    ResendBuffer,
    Status,
    Welcome,
    frame,
    item,
    pack_welcome,
    parse_head,
    parse_requests,
    parse_session,
)

if TYPE_CHECKING:
    from rallypoint.store.rollcall.snapshot import Counters

_SPARE = 4096


class Carrier(Protocol):
    """Carries out the requests of sessions: the store, or a relay that passes them on.

    `carry` answers by `Session.answer`, once (ARRIVE: once for each release), now or later. If it returns a
    generator, that is the rest of a long request: run its slices before the next request.
    """

    def carry(self, session: Session, tag: int, op: Op, blobs: list[bytes], tail: bytes) -> Rest | None: ...

    # These go through all notes of a session, a slice at a time, in the order of the calls.

    def suspend(self, session: Session, /) -> Rest:
        """The session has lost its connection: its ranks do not count until it is resumed."""

    def resume(self, session: Session, /) -> Rest:
        """It has a connection again."""

    def forget(self, session: Session, /) -> Rest:
        """It has ended: withdraw all that it waits for."""


class NoCarrier:
    """Of a core whose clients open no sessions."""

    def carry(self, *_: object) -> None:
        raise AssertionError

    def suspend(self, _: Session, /) -> Rest:
        raise AssertionError

    def resume(self, _: Session, /) -> Rest:
        raise AssertionError

    def forget(self, _: Session, /) -> Rest:
        raise AssertionError


class SessionConnection(Protocol):
    """What a session knows of the connection that carries it."""

    id: int
    peer: str
    since: float
    session: Session | None

    def has_session(self) -> None:
        """It carries a session from now on."""


class Session:
    """One relay's session. Made by `Sessions` alone."""

    __slots__ = (
        *("_batching", "_budget", "_carrier", "_has_ended", "_items", "_items_bytes", "_long", "_most_bytes"),
        *("_remembered", "_remembered_bytes", "_requests", "_suspending", "_tags", "under_way", "_woken"),
        *("connection", "expires", "id", "is_present", "keeps_ms", "kept", "notes", "peer", "since", "taken"),
        *("token", "told", "told_at"),
    )

    def __init__(self, token: bytes, carrier: Carrier, requests: WholeRequests, context: Context) -> None:
        self.token = token
        self._budget = context.budget
        self.connection: SessionConnection | None = None
        self.is_present = False
        """Whether it has a connection, over which PRESENT has come."""
        self.keeps_ms = 0
        self.expires: float | None = None
        self.taken = 0
        self.id = 0
        """The number of the connection that opened it; `since` is when that one connected."""
        self.since = 0.0
        self.peer = ""
        """The name of the connection that it was last on."""
        self.told: bytes | None = None
        """The relay's last report, unread."""
        self.told_at = float("-inf")
        self.notes: dict[int, Any] = {}
        """What the carrier keeps for this session, by the tag of a request."""
        self._carrier = carrier
        self._requests = requests
        self._woken = context.outbox.woken
        self._tags = 0  # how many requests there have been
        self._items: list[bytes] = []
        self._items_bytes = 0
        self._long = LongAnswers()
        # What is not taken is sent in one go when the session is taken up, and must fit into what may wait.
        self._most_bytes = max(requests.limits.unsent_bytes - _SPARE, 0)
        self.kept = ResendBuffer()
        self._batching = False
        self._has_ended = False
        self.under_way: Rest | None = None
        """What is left of a batch."""
        self._suspending: Rest = iter(())
        self._remembered: OrderedDict[bytes, tuple[object, int]] = OrderedDict()  # with their lengths
        self._remembered_bytes = 0

    # Requests

    def begin_batch(self, payload: bytes) -> None:
        """Accept a batch; `step` carries it out."""
        assert self.under_way is None
        number, taken = parse_head(payload)
        if number != self.taken + 1:
            raise ProtocolError(f"batch {number} of a session comes after batch {self.taken}")
        self._let_go(taken)
        limit = self._requests.limits.unsent_bytes
        if self.kept.bytes > limit:
            raise LimitError(f"a session has not taken {limit:,} bytes of answers, the limit unsent_bytes")
        self.taken = number
        self.under_way = self._carry_out(payload)

    def step(self) -> bool:
        """Carry out the next slice of the batch under way; return whether there is none left.

        If it raises, the session cannot go on: a part of the batch is lost.
        """
        if self.under_way is not None:
            self._batching = True
            try:
                # Compiled, to catch a StopIteration takes longer than a request.
                if next(self.under_way, True):
                    self.under_way = None
            finally:
                self._batching = False
        return self.under_way is None

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

    def give_up(self) -> None:
        """End the session: drop the rest of its batch, and all its answers."""
        self._has_ended = True
        self.under_way = None
        self._budget.held -= self.held
        self.kept, self._items, self._items_bytes, self.told = ResendBuffer(), [], 0, None
        self._long = LongAnswers()
        self._remembered.clear()
        self._remembered_bytes = 0

    # Answers

    def answer(self, tag: int, status: Status, content: bytes, value: Value = b"") -> None:
        """Put an answer, `content` and then `value`, into the next frames.

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
        self, tag: int, status: Status, content: bytes, value: Value = b"", key: bytes | None = None
    ) -> None:
        self._long.add(tag, status, *((content, value) if value else (b"", content)), key)
        self._budget.held += len(content) + len(value)
        self._put(item(tag, Status.PIECE, b""))

    def _put(self, data: bytes) -> None:
        """Put an item into the next frame."""
        self._items.append(data)
        self._items_bytes += len(data)
        self._budget.held += len(data)
        if self.under_way is None and not self._batching and self.connection is not None:
            self._woken.append(self.connection)

    def request_report(self) -> None:
        """Have the relay send a report, as a RELAY_REPORT, soon."""
        self.answer(UNASKED, Status.REPORT, b"")

    def store_report(self, told: bytes, now: float) -> None:
        """The relay has sent a report."""
        self._budget.held += len(told) - (len(self.told) if self.told is not None else 0)
        self.told, self.told_at = told, now

    def _has_room_for(self, size: int) -> bool:
        return self.kept.bytes + self._items_bytes + self._long.bytes + size <= self._most_bytes

    def answer_read(
        self, tag: int, key: bytes, same: object, content: bytes, value: Value = b"", *, recalled: bool
    ) -> None:
        """Answer a GET or RECALL with `content` and then `value`.

        `same` identifies the value. A RECALL of the value that was sent last for this key is answered with
        UNCHANGED. Such an answer relies on the earlier answers for the key, so it must not overtake them.
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
        """The frames to send now, if there is a connection; of long answers, the next pieces."""
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
        """Make a frame of items for which `held` bytes were counted, and keep it until it is acknowledged."""
        data = frame(self.kept.number + 1, self.taken, items)
        self._budget.held += len(data) - held
        self.kept.add(data)
        return data

    # Connections

    def notes_in_slices(self) -> Iterator[Any]:
        """Its notes, without those that are gone meanwhile; and None between slices."""
        for number, tags in enumerate(sliced(list(self.notes))):
            if number:
                yield None
            for tag in tags:
                if tag in self.notes:
                    yield self.notes[tag]

    def attach(self, connection: SessionConnection, taken: int) -> None:
        self._let_go(taken)
        self.connection = connection
        self.peer = connection.peer
        connection.session = self
        self.expires = None
        connection.has_session()

    def detach(self) -> Rest:
        """Handle the loss of its connection. Returns the work to do; `be_present` does what is left of it."""
        if self.connection is not None:
            self.connection.session = None
            self.connection = None
            self.is_present = False
            self._suspending = chain(self._suspending, self._carrier.suspend(self))
        return self._suspending

    def be_present(self) -> Slices:
        """Handle PRESENT: the relay has sent all that was lost. Returns the frames to send."""
        if not self.is_present:
            yield from self._suspending
            yield from self._carrier.resume(self)
            self.is_present = True
        return self.flush()

    def state(self, value_of: Callable[[bytes], object]) -> State:
        """All of it but its notes, as plain data; `value_of` gives the value of a key in the store."""
        assert self.under_way is None
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
        """Restore a `state`; return the number of its connection, if it has one."""
        about, told, answers = state
        _, connection, self.is_present, self.keeps_ms, self.expires, self.taken, self.id = about
        self.since, self.peer, self.told, self.told_at = told
        self._tags, self._items, long, kept, remembered = answers
        self._items_bytes = sum(map(len, self._items))
        for tag, status, head, body, key in long:
            self._long.add(tag, Status(status), head, body, key)
        self.kept = ResendBuffer.of(*kept)
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


class Sessions:
    """All sessions of a server or a relay, by their token."""

    __slots__ = (
        *("_by_token", "_carrier", "_context", "_note_error", "_of_workers", "_others", "_requests"),
        *("_rests", "ended_workers"),
    )

    def __init__(self, context: Context, carrier: Carrier, note_error: Callable[[str, str], None]) -> None:
        """`note_error` takes the peer and the reason, if a batch without a connection breaks a rule."""
        self._by_token: dict[bytes, Session] = {}
        self._rests: deque[Rest] = deque()  # work left for sessions that were detached or ended
        self._carrier = carrier
        self._note_error = note_error
        self._others = context.outbox.others
        self._context = context
        self._requests = WholeRequests(context.limits, BATCH_OPS)
        self._of_workers: WholeRequests | None = None  # for the workers of this server
        self.ended_workers: Counters | None = None
        """What ended workers of this server had counted in their last reports."""

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_token.values())

    def go_on_with(self, session: Session) -> Slices:
        """Carry out the rest of a batch, after its first slice; returns the frames to send."""
        yield None
        while not self.step(session):
            yield None
        return session.flush()

    def step(self, session: Session) -> bool:
        """Carry out a slice of a batch; return whether there is none left. If it fails, the session ends."""
        try:
            is_done = session.step()
        except Exception:
            self.end(session)
            raise
        self._context.check_budget()
        return is_done

    def go_on(self) -> bool:
        """Do a slice of the work left for sessions without a connection; return whether there is more."""
        if self._rests:
            rest = self._rests.popleft()
            try:
                next(rest)
                self._rests.append(rest)
            except StopIteration:
                pass
            except Exception as error:
                self._others.append(CoreFault(error))
        return bool(self._rests)

    def _do(self, rest: Rest) -> None:
        """Do the first slice of some work now, and the others later."""
        try:
            next(rest)
        except StopIteration:
            return
        self._do_later(rest)

    def _do_later(self, rest: Rest) -> None:
        self._rests.append(rest)
        self._others.append(DriverTask.REST)

    def open(self, connection: SessionConnection, token: bytes, tail: bytes) -> Slices:
        """Open a session on a connection, or take it up; return the answer, and the frames to send again.

        A batch that is under way is carried out first.
        """
        if connection.session is not None:
            raise ProtocolError("a second SESSION on one connection")
        if len(token) != TOKEN_BYTES:
            raise ProtocolError(f"SESSION with a token of {len(token)} bytes")
        keep_ms, taken, known = parse_session(tail)
        limits = self._requests.limits
        session = self._by_token.get(token)
        while session is not None and not self.step(session):
            yield None
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
            session = self._by_token[token] = Session(token, self._carrier, requests, self._context)
            session.id, session.since = connection.id, connection.since
        elif not session.kept.reaches_back_to(taken):
            raise ProtocolError(f"a session has taken frame {taken}, but goes on elsewhere")
        elif session.connection is not None:
            displaced = ProtocolError("its session goes on over another connection")
            self._others.append(Close(session.connection, displaced))
            self._do(session.detach())
        session.attach(connection, taken)
        session.keeps_ms = min(keep_ms, int(limits.session_seconds * 1000))
        most = min(limits.batch_bytes, limits.request_bytes)
        welcome = pack_welcome(Welcome(answer, session.keeps_ms, session.taken, most))
        return b"".join([welcome, *session.kept.all()])

    def _worker_requests(self) -> WholeRequests:
        """Many clients share a worker's session, so as much may wait for it as for all clients."""
        if self._of_workers is None:
            limits = self._requests.limits
            most = max(limits.unsent_bytes, limits.held_bytes)
            self._of_workers = WholeRequests(replace(limits, unsent_bytes=most), BATCH_OPS)
        return self._of_workers

    def counts(self) -> dict[Op, int]:
        """How many requests of each kind there have been in batches."""
        counts = self._requests.counts()
        for op, count in self.counts_of_workers().items():
            counts[op] += count
        return counts

    def counts_of_workers(self) -> dict[Op, int]:
        """How many of them came from workers of this server."""
        return self._of_workers.counts() if self._of_workers is not None else {}

    def lose(self, session: Session) -> None:
        """Handle the loss of a session's connection."""
        if not session.keeps_ms:
            self.end(session)
            return
        self._do(session.detach())
        if session.under_way is not None:
            self._do_later(self._finish(session))

    def _finish(self, session: Session) -> Rest:
        """Carry out the rest of a batch that has lost its connection, unless another one does."""
        try:
            while session.connection is None and not self.step(session):
                yield
        except ProtocolError as error:
            self._note_error(session.peer, error.message)

    def end(self, session: Session) -> None:
        """End a session."""
        suspending = session.detach()
        if self._by_token.pop(session.token, None) is not None:
            if session.peer.startswith(WORKER):  # counters must not go down
                from rallypoint.store.rollcall.clients import with_ended  # late: most servers have none

                self.ended_workers = with_ended(self.ended_workers, session.told)
            session.give_up()
            self._do(self._end(suspending, session))

    def _end(self, suspending: Rest, session: Session) -> Rest:
        """Withdraw all that a session waits for. Until then, nobody is closed for holding too much."""
        budget = self._context.budget
        budget.ending += 1
        yield from chain(suspending, self._carrier.forget(session))
        budget.ending -= 1

    def expire(self, now: float) -> None:
        """End the sessions that have been without a connection for longer than `keeps_ms`."""
        for session in list(self._by_token.values()):
            if session.connection is not None:
                continue
            if session.expires is None:
                session.expires = now + session.keeps_ms / 1000
            elif session.expires <= now:
                self.end(session)

    def state(self, value_of: Callable[[bytes], object]) -> State:
        """All sessions but their notes, as plain data. Call it only when no work is left."""
        assert not self._rests
        return [session.state(value_of) for session in self]

    def take_state(
        self,
        state: State,
        value_of: Callable[[bytes], object],
        connection_of: Callable[[int], SessionConnection],
    ) -> None:
        """Restore the sessions of a `state`, each on its connection. There must be none before."""
        for each in state:
            token = each[0][0]
            session = Session(token, self._carrier, self._requests, self._context)
            self._by_token[token] = session
            connection = session.take_state(each, value_of)
            if connection is not None:
                session.connection = connection_of(connection)
                session.connection.session = session

    def check_invariants(self) -> None:
        for token, session in self._by_token.items():
            assert session.token == token
            session.check_invariants()
