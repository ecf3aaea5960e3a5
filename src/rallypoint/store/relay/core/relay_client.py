"""A relay's clients: each speaks torch's protocol, and gets its replies in order, as from the store.

A reply that is not there yet has its place in a queue, so that those behind it wait. The end of a wait or of
a barrier has one only until all before it is answered: from then on it comes when it comes, as on the server.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import islice
from typing import Final

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.core.clients import Client
from rallypoint.store.core.context import SLICE, Close, Pause, Rest
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.snapshots import Pending
from rallypoint.store.engine.waiters import size_of
from rallypoint.store.relay.core.combining import Combiner
from rallypoint.store.relay.core.upstream_requests import Arrival, PopCall, RequestOrder, Waiter
from rallypoint.store.rollcall.identity import is_hello
from rallypoint.store.rollcall.question import Question
from rallypoint.store.wire.encoding import EMPTY_BLOB, blob, pack_i64, unpack_i64
from rallypoint.store.wire.opcodes import NOT_READY, READY, STOP_WAITING, WAIT_CANCELED, Op
from rallypoint.store.wire.parser import RequestParser, RequestTable
from rallypoint.store.wire.sessions import ANNOUNCED, NAMES_ANNOUNCED, Status

_ANNOUNCED: Final = [ANNOUNCED]
_NAMES_ANNOUNCED: Final = [NAMES_ANNOUNCED]

_MOST_DUE = 16
"""A client that waits for so many replies is not read until half of them are there."""
_MOST_UNREAD: Final = 4 << 20
"""Nor is one that has so much to read."""
_WAIT_BYTES: Final = 500
"""What a wait or a place at a barrier takes in memory, with its reply and its request, besides its keys."""
_NOTICE_BYTES = 1 << 16
"""What is sent at a time. Replies that many clients share take room only when they are sent."""


class _Reply:
    """One reply to a client, there or not."""

    __slots__ = ("_rank", "content", "is_queued", "may_wait", "refusal")

    def __init__(self, rank: RelayClient) -> None:
        self._rank = rank
        self.content: bytes | None = None
        self.may_wait = False  # whether replies behind it need not wait for it
        self.is_queued = False
        self.refusal: bytes | None = None

    @property
    def is_over(self) -> bool:
        """Whether it may go from the head of the queue."""
        return self.refusal is None and (self.content is not None or self.may_wait)

    def answer(self, status: Status, content: bytes) -> None:
        if status is Status.REFUSED:
            self._rank.refuse(self, content)
        else:
            self._rank.fill(self, content)


class _Wait(Waiter):
    """One WAIT of a client."""

    __slots__ = ("_rank", "began", "keys", "reply")

    def __init__(self, rank: RelayClient, reply: _Reply, keys: list[bytes], began: float) -> None:
        super().__init__(rank.order)
        self._rank = rank
        self.reply = reply
        self.keys = keys
        self.began = began

    def end(self, refusal: bytes | None, call: PopCall | None) -> None:
        self._rank.end_wait(self, refusal, call)


class _AtBarrier(Arrival):
    """A client that waits at a barrier."""

    __slots__ = ("_rank", "began", "name", "reply")

    def __init__(self, rank: RelayClient, reply: _Reply, name: tuple[bytes, int], began: float) -> None:
        super().__init__()
        self._rank = rank
        self.reply = reply
        self.name = name
        self.began = began

    def release(self, status: Status, content: bytes) -> None:
        self._rank.leave_barrier(self)
        self.reply.answer(status, content if status is Status.REFUSED else STOP_WAITING)


class RelayClient(Client):
    """One client. Made by `RelayCore.open` alone."""

    __slots__ = (
        *("_arrivals", "_calls", "_combiner", "_has_session", "_is_ending", "_is_paused", "_keys", "_out"),
        *("_out_bytes", "_relay", "_replies", "_snapshot_reply", "_waits", "_waits_held", "order"),
    )

    def __init__(
        self, relay: ServerCore[RelayClient], combiner: Combiner, table: RequestTable[RelayClient], peer: str
    ) -> None:
        super().__init__(relay.clients, relay.sessions, peer)
        self.read_with(RequestParser(self, table))
        self.order = RequestOrder()
        self._relay = relay
        self._combiner = combiner
        self._replies: deque[_Reply] = deque()
        self._out: deque[bytes | memoryview] = deque()
        self._is_paused = False
        self._out_bytes = 0
        self._waits: dict[_Wait, None] = {}
        self._keys = 0  # that it waits for
        self._waits_held = 0  # bytes that its waits take
        self._is_ending = False
        self._has_session = False
        self._snapshot_reply: _Reply | None = None
        self._arrivals: dict[tuple[bytes, int], _AtBarrier] = {}
        self._calls: dict[bytes, PopCall] = {}

    @property
    def is_owed(self) -> bool:
        return bool(self._replies or self._out)

    @property
    def held(self) -> int:
        return super().held + self._waits_held

    def _hold_waits(self, count: int) -> None:
        count = max(count, -self._waits_held)  # nothing is counted any more for a client that has gone
        self._waits_held += count
        self._context.count_held(count)

    def take_notice(self) -> bytes:
        notices: list[bytes | memoryview] = []
        room = _NOTICE_BYTES
        while self._out and room:
            content = self._out.popleft()
            if len(content) > room:
                self._out.appendleft(memoryview(content)[room:])
                content = memoryview(content)[:room]
            notices.append(content)
            room -= len(content)
        self._out_bytes -= _NOTICE_BYTES - room
        if self._is_paused:
            self._check_room()
        notice = b"".join(notices)
        return notice if self.session is None else notice + self.session.flush()

    @property
    def notice_bytes(self) -> int:
        return self._out_bytes

    # Requests; what is known at once is returned

    def get(self, key: bytes) -> bytes | None:
        return self.carry(Op.GET, [key], b"")

    def carry(self, op: Op, blobs: list[bytes], tail: bytes) -> bytes | None:
        self._check_role(op)
        own = _OWN.get(op)
        if own is not None:
            reply = own(self, blobs, tail)
        elif op is Op.CHECK and blobs == _ANNOUNCED:
            reply = self._reply_now(READY)
        elif op is Op.CHECK and blobs == _NAMES_ANNOUNCED:
            reply = self._reply_now(NOT_READY)  # its own store may have them, but it passes no name on
        else:
            reply = b""
            self._combiner.ask(self.order, op, blobs, tail, self._next_reply().answer)
        return self._unless_paused(reply)

    def _unless_paused(self, reply: bytes) -> bytes | None:
        """A reply; or None where nothing more may be read behind its request."""
        return None if self._is_paused and not reply else reply

    def open_session(self, token: bytes, tail: bytes) -> bytes | None:
        self.check_free()
        return super().open_session(token, tail)

    def check_free(self) -> None:
        """ProtocolError if it is owed something: where a reply comes among frames would be left to chance."""
        if self.is_owed or self.is_waiting:
            raise ProtocolError("SESSION on a connection that waits for other replies")

    def has_session(self) -> None:
        super().has_session()
        self._has_session = True

    def _check_role(self, op: Op) -> None:
        """A relay asks in its batches: a frame and another reply would come in any order."""
        if self._has_session:
            raise ProtocolError(f"{op.name} on a connection that has a session")

    def go_on(self) -> bytes | None:
        """Go on with a batch; or with the next request, unless there is still a pause."""
        if self._slices is not None:
            return super().go_on()
        return None if self._is_paused else b""

    def _reply_now(self, content: bytes) -> bytes:
        """A reply that is known, but may have to wait for those before it."""
        if self._replies:
            self._next_reply().content = content
        elif self._out:
            self._send(content)
        else:
            return content
        return b""

    def _ping(self, _: list[bytes], nonce: bytes) -> bytes:
        if not self._waits and not self._arrivals:
            return self._reply_now(nonce)
        # The end of a wait before it comes first, if that is over at once: only the store knows.
        reply = self._next_reply()
        self._combiner.ask(self.order, Op.CHECK, [], b"", lambda status, _: reply.answer(status, nonce))
        return b""

    def _check_keys(self, more: int) -> None:
        limit = self._relay.limits.keys_per_request
        count = self._keys + len(self._arrivals) + more
        if count > limit:
            raise LimitError(f"waits for {count:,} keys at a time; the limit keys_per_request is {limit:,}")

    def _wait(self, keys: list[bytes], _: bytes) -> bytes:
        self._check_keys(len(keys))
        wait = _Wait(self, self._waiting_reply(), keys, self._relay.turn.now)
        self._combiner.wait(wait, keys)
        self._waits[wait] = None
        self._keys += len(keys)
        self._hold_waits(_WAIT_BYTES + size_of(keys))
        return b""

    def end_wait(self, wait: _Wait, refusal: bytes | None, call: PopCall | None) -> None:
        """A wait is over, or was refused."""
        del self._waits[wait]
        self._keys -= len(wait.keys)
        self._hold_waits(-_WAIT_BYTES - size_of(wait.keys))
        if call is not None:
            self._be_called(call)
        if refusal is None:
            self.fill(wait.reply, STOP_WAITING)
        else:
            self.refuse(wait.reply, refusal)

    def _barrier(self, blobs: list[bytes], tail: bytes) -> bytes:
        key, size = blobs[0], unpack_i64(tail)[0]
        if (key, size) in self._arrivals:
            raise ProtocolError(f"BARRIER at key {key!r} by a client that already waits there")
        self._check_keys(1)
        arrival = _AtBarrier(self, self._waiting_reply(), (key, size), self._relay.turn.now)
        self._combiner.arrive(arrival, self.order, key, size)
        self._arrivals[key, size] = arrival
        self._hold_waits(_WAIT_BYTES + size_of([key]))
        return b""

    def leave_barrier(self, arrival: _AtBarrier) -> None:
        """A client is at a barrier no more."""
        if self._arrivals.get(arrival.name) is arrival:
            del self._arrivals[arrival.name]
            self._hold_waits(-_WAIT_BYTES - size_of([arrival.name[0]]))

    def _pop(self, blobs: list[bytes], tail: bytes) -> bytes:
        call = self._calls.pop(blobs[0], None)
        reply = self._next_reply()
        if call is None:
            self._combiner.ask(self.order, Op.QUEUE_POP, blobs, tail, reply.answer)
        else:
            for key in call.keys:
                self._calls.pop(key, None)
            self._combiner.pop_called(self.order, call, blobs[0], reply.answer)
        return b""

    def _delete(self, blobs: list[bytes], tail: bytes) -> bytes:
        """A deletion; or a hello, which is for this relay."""
        if is_hello(blobs[0]):
            self.greet(blobs[0])
            return self._reply_now(pack_i64(0))
        self._combiner.ask(self.order, Op.DELETE_KEY, blobs, tail, self._next_reply().answer)
        return b""

    def beat(self) -> bytes | None:
        return self._unless_paused(self._reply_now(EMPTY_BLOB))

    def snapshot(self, question: bytes) -> bytes | None:
        """What this relay knows; not what the store does."""
        asked = Question.from_json(question)  # or it breaks a rule, and is owed nothing
        self._begin_snapshot()
        self._relay.snapshots.start(asked, self._take_snapshot)
        return None if self._is_paused else b""

    def _begin_snapshot(self) -> None:
        self._check_role(Op.SNAPSHOT)
        if self._snapshot_reply is not None:
            raise ProtocolError("a second SNAPSHOT before the first is answered")
        self._snapshot_reply = self._next_reply()

    def _take_snapshot(self, snapshot: bytes) -> None:
        reply, self._snapshot_reply = self._snapshot_reply, None
        if reply is not None:
            self.fill(reply, blob(snapshot))

    def _cancel(self, _: list[bytes], __: bytes) -> bytes:
        """End all waits. The reply comes when it is known which clients a barrier has released before."""
        if not self._arrivals:
            self._give_up(None)
            return self._reply_now(WAIT_CANCELED)
        self._give_up(self._next_reply())
        return b""

    def read_no_more(self) -> None:
        super().read_no_more()
        self._waits_held = 0

    def leave(self) -> Rest:
        """It will ask for nothing more, but still takes the replies to what it has asked."""
        self._is_ending = True  # at once: its last reply may come before the first slice
        return self._leave_in_slices()

    def _leave_in_slices(self) -> Rest:
        while len(self._waits) > SLICE:
            self._end_waits(list(islice(self._waits, SLICE)))
            yield
        self._give_up(None)

    def _end_waits(self, waits: list[_Wait]) -> None:
        for wait in waits:
            self._combiner.cancel(wait)
            self.withdraw(wait.reply)
            del self._waits[wait]

    def _give_up(self, reply: _Reply | None) -> None:
        """End all that it waits for; the reply is due when it has left all barriers."""
        self._end_waits(list(self._waits))
        self._keys = 0
        self._hold_waits(-self._waits_held)
        for call in {id(call): call for call in self._calls.values()}.values():
            self._combiner.dismiss(call)
        self._calls.clear()
        arrivals, self._arrivals = self._arrivals, {}
        there = set(arrivals.values())
        for arrival in arrivals.values():
            self._combiner.leave(arrival, 1, partial(self._left, arrival, there, reply))

    def _left(self, arrival: _AtBarrier, there: set[_AtBarrier], reply: _Reply | None, _: int) -> None:
        """It has left one of the barriers, or was released there before."""
        self.withdraw(arrival.reply)
        there.discard(arrival)
        if not there and reply is not None:
            self.fill(reply, WAIT_CANCELED)

    def withdraw(self, reply: _Reply) -> None:
        """Nothing will come as this reply, unless it has."""
        if reply.content is None:
            reply.content = b""
            self._settle()

    def _be_called(self, call: PopCall) -> None:
        for key in call.keys:
            before = self._calls.get(key)
            if before is not None and before is not call:
                self._combiner.dismiss(before)
            self._calls[key] = call

    @property
    def is_waiting(self) -> bool:
        return bool(self._waits or self._arrivals)

    def pending(self, most: int) -> list[Pending]:
        """What it waits for; of keys that are there by now, only the store knows."""
        return [(wait.keys[:most], len(wait.keys), wait.began) for wait in self._waits]

    def barriers(self) -> list[tuple[tuple[bytes, int], float]]:
        """The keys and sizes of the barriers at which it waits, and since when."""
        return [(name, arrival.began) for name, arrival in self._arrivals.items()]

    # Replies

    def _waiting_reply(self) -> _Reply:
        """The reply that ends a wait: it has no place in the queue if all before it is answered."""
        if self._replies:
            reply = self._next_reply()
            reply.may_wait = True
            return reply
        return _Reply(self)

    def _next_reply(self) -> _Reply:
        reply = _Reply(self)
        reply.is_queued = True
        self._replies.append(reply)
        if len(self._replies) >= _MOST_DUE:
            self._check_room()
        self._combiner.replies_due += 1
        return reply

    def _check_room(self) -> None:
        """Read nothing more from the client while it waits for many replies, or has much to read."""
        due, unread = len(self._replies), self._out_bytes
        if not self._is_paused and (due >= _MOST_DUE or unread > _MOST_UNREAD):
            self._is_paused = True
            self._relay.outbox.others.append(Pause(self))
        elif self._is_paused and due <= _MOST_DUE // 2 and unread <= _MOST_UNREAD // 2:
            self._is_paused = False
            self._relay.outbox.others.append(Pause(self, is_over=True))

    def fill(self, reply: _Reply, content: bytes) -> None:
        """A reply is there. If it has no place any more among the others, it goes at once."""
        reply.content = content
        if reply.is_queued:
            self._settle()
        else:
            self._send(content)

    def _settle(self) -> None:
        """Send all replies at the head of the queue."""
        replies = self._replies
        while replies and replies[0].is_over:
            reply = replies.popleft()
            reply.is_queued = False
            self._combiner.replies_due -= 1
            if reply.content:
                self._send(reply.content)
        if self._is_paused or self._out_bytes > _MOST_UNREAD:
            self._check_room()
        if replies and replies[0].refusal is not None:
            self._be_closed(ProtocolError(replies[0].refusal.decode(errors="replace")))
        if self._is_ending and not replies:
            self._relay.outbox.woken.append(self)  # with nothing to be sent: it is owed nothing more

    def _send(self, content: bytes) -> None:
        if not self._out:
            self._relay.outbox.woken.append(self)
        self._out.append(content)
        self._out_bytes += len(content)
        limit = self._relay.limits.unsent_bytes
        if self._out_bytes > limit:
            self._out.clear()
            self._out_bytes = 0
            self._be_closed(
                LimitError(f"asked for more than {limit:,} bytes at once, the limit unsent_bytes")
            )

    def refuse(self, reply: _Reply, reason: bytes) -> None:
        """The client is to be closed, but not before the replies to what it had asked before."""
        reply.refusal = reason
        if reply.is_queued:
            self._settle()
        else:
            self._be_closed(ProtocolError(reason.decode(errors="replace")))

    def _be_closed(self, error: ProtocolError) -> None:
        self.forget_replies()
        self._relay.outbox.others.append(Close(self, error))

    def forget_replies(self) -> None:
        """What it has asked has no answer any more."""
        self._combiner.replies_due -= len(self._replies)
        self._replies.clear()

    @property
    def replies_due(self) -> int:
        return len(self._replies)

    def check_invariants(self) -> None:
        assert not self._replies or not self._replies[0].is_over
        assert self._keys >= 0
        assert all(reply.is_queued for reply in self._replies)
        for wait in self._waits:
            assert wait.request is not None or wait in self._combiner.parked
        held = sum(_WAIT_BYTES + size_of(wait.keys) for wait in self._waits)
        held += sum(_WAIT_BYTES + size_of([key]) for key, _ in self._arrivals)
        assert self._is_ending or self._waits_held == held


_OWN: Final = {
    Op.PING: RelayClient._ping,
    Op.WAIT: RelayClient._wait,
    Op.BARRIER: RelayClient._barrier,
    Op.QUEUE_POP: RelayClient._pop,
    Op.CANCEL_WAIT: RelayClient._cancel,
    Op.DELETE_KEY: RelayClient._delete,
}
