"""The server's half of sessions: each request of a relay is carried out once, whatever its connection does.

A session belongs to a connection while that lasts, and is kept for a while without one. What is sent in it
is kept until the relay says that it has come. Pure: bytes in, bytes out, and time as a parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rallypoint.compiling import mypyc_attr
from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.core.long_answers import LongAnswers
from rallypoint.store.core.outbox import Outbox
from rallypoint.store.core.slices import Rest, Slices, nothing, one_after_the_other, sliced
from rallypoint.store.engine.budget import Budget
from rallypoint.store.engine.keyspace import State, Value
from rallypoint.store.wire.form import WholeRequests
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.parser import STEP_BYTES, STEPS_AT_ONCE
from rallypoint.store.wire.sessions import (
    LONG,
    MOST_UNTAKEN,
    REMEMBERED,
    REMEMBERED_BYTES,
    UNASKED,
    WORTH_REMEMBERING,
    Kept,
    Status,
    frame,
    item,
    parse_head,
    parse_requests,
)

_SPARE = 4096


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


@mypyc_attr(allow_interpreted_subclasses=True)
class Bearer:
    """A connection: the request that it has under way, and what a session knows of it."""

    __slots__ = ("_slices", "id", "peer", "session", "since")

    def __init__(self, peer: str) -> None:
        self._slices: Slices | None = None
        self.peer = peer
        """Its name in messages."""
        self.id = 0
        """Counts connections, from 1."""
        self.since = 0.0
        self.session: Session | None = None

    def has_session(self) -> None:
        """It carries a session from now on."""

    @property
    def is_unfinished(self) -> bool:
        """Whether a request is under way: `go_on` is to be called."""
        return self._slices is not None

    def begin(self, slices: Slices) -> bytes | None:
        """The first slice of a request; returns what `go_on` does."""
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
        self.connection: Bearer | None = None
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
        self._suspending: Rest = nothing()
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

    def answer(self, tag: int, status: Status, content: bytes, value: Value = b"") -> None:
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
        self, tag: int, key: bytes, same: object, content: bytes, value: Value = b"", *, recalled: bool
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
            for tag in tags:
                if tag in self.notes:
                    yield self.notes[tag]

    def attach(self, connection: Bearer, taken: int) -> None:
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
            self._suspending = one_after_the_other(self._suspending, self._carrier.suspend(self))
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
