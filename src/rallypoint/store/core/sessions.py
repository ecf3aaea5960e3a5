"""The server's half of sessions: each request of a relay is carried out once, whatever its connection does.

Frames are kept until the relay acknowledges them. `server_core` describes the life of a session.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple, Protocol

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.core.context import Outbox, Rest, Slices, sliced
from rallypoint.store.engine.keyspace import Budget, State, Value
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.parser import STEP_BYTES, STEPS_AT_ONCE
from rallypoint.store.wire.requests import WholeRequests
from rallypoint.store.wire.sessions import (
    LONG,
    MOST_UNTAKEN,
    PIECE_BYTES,
    REMEMBERED,
    REMEMBERED_BYTES,
    UNASKED,
    WORTH_REMEMBERING,
    ResendBuffer,
    Status,
    frame,
    item,
    parse_head,
    parse_requests,
)

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


class SessionConnection(Protocol):
    """What a session knows of the connection that carries it."""

    id: int
    peer: str
    since: float
    session: Session | None

    def has_session(self) -> None:
        """It carries a session from now on."""


class _Unsent(NamedTuple):
    """What is left of an answer."""

    tag: int
    status: Status
    key: bytes | None
    head: bytes
    body: Value
    start: int
    stop: int
    """Where in `body` it begins and ends: a value that is appended to meanwhile only grows."""


class LongAnswers:
    """Long answers that are not completely sent, in their order.

    They are sent in pieces, so that short ones need not wait for them.
    """

    __slots__ = ("_keys", "_unsent", "bytes")

    def __init__(self) -> None:
        self._unsent: deque[_Unsent] = deque()
        self._keys: Counter[bytes | None] = Counter()
        self.bytes = 0
        """How much is left to be sent."""

    def __bool__(self) -> bool:
        return bool(self._unsent)

    def has(self, key: bytes) -> bool:
        """Whether an answer to a read of this key is among them."""
        return key in self._keys

    def add(self, tag: int, status: Status, head: bytes, body: Value, key: bytes | None = None) -> None:
        """Add an answer of two parts, so that a value need not be copied. `key`: the answer is its value."""
        self._unsent.append(_Unsent(tag, status, key, head, body, 0, len(body)))
        self._keys[key] += 1
        self.bytes += len(head) + len(body)

    def take_piece(self) -> bytes:
        """The next item to be sent."""
        tag, status, key, head, body, start, stop = self._unsent.popleft()
        end = min(start + PIECE_BYTES, stop)
        piece = head + body[start:end]
        self.bytes -= len(piece)
        if end < stop:
            self._unsent.appendleft(_Unsent(tag, status, key, b"", body, end, stop))
            return item(tag, Status.PIECE, piece)
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]
        return item(tag, status, piece)

    def state(self) -> list[object]:
        """All of them, as plain data."""
        return [
            [each.tag, int(each.status), each.head, bytes(each.body[each.start : each.stop]), each.key]
            for each in self._unsent
        ]

    def check_invariants(self) -> None:
        assert self.bytes == sum(len(each.head) + each.stop - each.start for each in self._unsent)
        assert self._keys == Counter(each.key for each in self._unsent)


class Session:
    """One relay's session. Made by `registry.Sessions` alone."""

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
        self._outbox = outbox
        self._tags = 0  # how many requests there have been
        self._items: list[bytes] = []
        self._items_bytes = 0
        self._long = LongAnswers()
        # What is not taken is sent in one go when the session is taken up, and must fit into what may wait.
        self._most_bytes = max(requests.limits.unsent_bytes - _SPARE, 0)
        self.kept = ResendBuffer()
        self._batching = False
        self._has_ended = False
        self._under_way: Rest | None = None
        self._suspending: Rest = iter(())
        self._remembered: OrderedDict[bytes, tuple[object, int]] = OrderedDict()  # with their lengths
        self._remembered_bytes = 0

    # Requests

    def begin_batch(self, payload: bytes) -> None:
        """Accept a batch; `step` carries it out."""
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
                # Compiled, to catch a StopIteration takes longer than a request.
                if next(self._under_way, True):
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
        """Whether a part of a batch is not carried out yet."""
        return self._under_way is not None

    def give_up(self) -> None:
        """End the session: drop the rest of its batch, and all its answers."""
        self._has_ended = True
        self._under_way = None
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
        if self._under_way is None and not self._batching and self.connection is not None:
            self._outbox.woken.append(self.connection)

    def request_report(self) -> None:
        """Have the relay send a report, as a TOLD, soon."""
        self.answer(UNASKED, Status.TELL, b"")

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
