"""A relay's clients: each speaks torch's protocol, and gets its replies in order, as from the store itself.

A reply that is not there yet has its place in a queue, so that those behind it wait. A wait or a barrier
has one only until all before it is answered: from then on it ends when it ends, as on the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.relay.core.slots import Arrival, Call, Waiter
from rallypoint.rollcall.identity import is_hello
from rallypoint.rollcall.snapshot import Question
from rallypoint.server.core.front import Client
from rallypoint.server.core.looks import Pending
from rallypoint.wire.encoding import blob, pack_i64, unpack_i64
from rallypoint.wire.opcodes import READY, STOP_WAITING, WAIT_CANCELED, Op
from rallypoint.wire.parser import RequestParser
from rallypoint.wire.sessions import ANNOUNCED, Status

if TYPE_CHECKING:
    from rallypoint.relay.core.relay import RelayCore

_ANNOUNCED: Final = [ANNOUNCED]


class _Place:
    """The place of a reply among those of its client."""

    __slots__ = ("_rank", "is_queued", "may_wait", "refusal", "reply")

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.reply: bytes | None = None
        self.may_wait = False  # whether replies behind it need not wait for it
        self.is_queued = False
        self.refusal: bytes | None = None

    @property
    def is_over(self) -> bool:
        """Whether it may go from the head of the queue."""
        return self.refusal is None and (self.reply is not None or self.may_wait)

    def answer(self, status: Status, content: bytes) -> None:
        if status is Status.REFUSED:
            self._rank.refuse(self, content)
        else:
            self._rank.fill(self, content)


class Rank(Client):
    """One client. Made by `RelayCore.open` alone."""

    __slots__ = (
        *("_arrivals", "_calls", "_core", "_is_ending", "_is_looking", "_keys", "_out", "_out_bytes"),
        *("_places", "_waits", "is_present", "last"),
    )

    def __init__(self, core: RelayCore, peer: str) -> None:
        super().__init__(core.sessions, peer)
        self.read_with(RequestParser(self, core.forms))
        self.last = 0  # it is a line of its own
        self.is_present = True
        self._core = core
        self._places: deque[_Place] = deque()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._waits: dict[Waiter, tuple[_Place, list[bytes], float]] = {}  # for what, and since when
        self._keys = 0  # that it waits for
        self._is_ending = False
        self._is_looking = False
        self._arrivals: dict[tuple[bytes, int], tuple[Arrival, _Place, float]] = {}
        self._calls: dict[bytes, Call] = {}

    @property
    def is_owed(self) -> bool:
        return bool(self._places)

    def take_notice(self) -> bytes:
        notice = b"".join(self._out)
        self._out.clear()
        return notice if self.session is None else notice + self.session.flush()

    def validate(self) -> None:
        self._core.complete_handshake(self)

    # Requests; what is known at once is returned

    def get(self, key: bytes) -> bytes:
        return self.carry(Op.GET, [key], b"")

    def carry(self, op: Op, blobs: list[bytes], tail: bytes) -> bytes:
        own = _OWN.get(op)
        if own is not None:
            return own(self, blobs, tail)
        if op is Op.CHECK and blobs == _ANNOUNCED:
            return self._reply(READY)
        self._core.ask(self, op, blobs, tail, self._next_place().answer)
        return b""

    def _reply(self, reply: bytes) -> bytes:
        """A reply that is known, but may have to wait for those before it."""
        if self._places:
            self._next_place().reply = reply
        elif self._out:
            self._send(reply)
        else:
            return reply
        return b""

    def _ping(self, _: list[bytes], nonce: bytes) -> bytes:
        if not self._waits and not self._arrivals:
            return self._reply(nonce)
        # The end of a wait before it comes first, if that is over at once: only the store knows.
        place = self._next_place()
        self._core.ask(self, Op.CHECK, [], b"", lambda status, _: place.answer(status, nonce))
        return b""

    def _check_keys(self, more: int) -> None:
        limit = self._core.limits.keys_per_request
        count = self._keys + len(self._arrivals) + more
        if count > limit:
            raise LimitError(f"waits for {count:,} keys at a time; the limit keys_per_request is {limit:,}")

    def _wait(self, keys: list[bytes], _: bytes) -> bytes:
        self._check_keys(len(keys))
        place = self._waiting_place()

        def end(refusal: bytes | None, call: Call | None) -> None:
            del self._waits[waiter]
            self._keys -= len(keys)
            if call is not None:
                self._be_called(call)
            if refusal is None:
                self.fill(place, STOP_WAITING)
            else:
                self.refuse(place, refusal)

        waiter = self._core.combiner.wait(self, self, keys, end)
        self._waits[waiter] = (place, keys, self._core.clock())
        self._keys += len(keys)
        self._core.has_work()
        return b""

    def _barrier(self, blobs: list[bytes], tail: bytes) -> bytes:
        key, size = blobs[0], unpack_i64(tail)[0]
        name = (key, size)
        if name in self._arrivals:
            raise ProtocolError(f"BARRIER at key {key!r} by a client that already waits there")
        self._check_keys(1)
        place = self._waiting_place()

        def release(status: Status, content: bytes) -> None:
            if name in self._arrivals and self._arrivals[name][0] is arrival:
                del self._arrivals[name]
            place.answer(status, content if status is Status.REFUSED else STOP_WAITING)

        arrival = self._core.combiner.arrive(self, key, size, 1, release)
        self._arrivals[name] = (arrival, place, self._core.clock())
        self._core.has_work()
        return b""

    def _pop(self, blobs: list[bytes], tail: bytes) -> bytes:
        call = self._calls.pop(blobs[0], None)
        place = self._next_place()
        if call is None:
            self._core.ask(self, Op.QUEUE_POP, blobs, tail, place.answer)
        else:
            for key in call.keys:
                self._calls.pop(key, None)
            self._core.combiner.pop_called(self, call, blobs[0], place.answer)
            self._core.has_work()
        return b""

    def _delete(self, blobs: list[bytes], tail: bytes) -> bytes:
        """A deletion; or a hello, which is for this relay."""
        if is_hello(blobs[0]):
            self._core.greet(self, blobs[0])
            return self._reply(pack_i64(0))
        self._core.ask(self, Op.DELETE_KEY, blobs, tail, self._next_place().answer)
        return b""

    def look(self, question: bytes) -> bytes:
        """What this relay knows; not what the store does."""
        if self._is_looking:
            raise ProtocolError("a second LOOK before the first is answered")
        asked = Question.from_json(question)
        place = self._next_place()
        self._is_looking = True

        def deliver(snapshot: bytes) -> None:
            self._is_looking = False
            self.fill(place, blob(snapshot))

        self._core.looks.start(asked, deliver)
        return b""

    def _cancel(self, _: list[bytes], __: bytes) -> bytes:
        """End all waits. The reply comes when it is known who has been released from a barrier before."""
        leaving = len(self._arrivals)
        if not leaving:
            self._give_up(lambda: None)
            return self._reply(WAIT_CANCELED)
        place = self._next_place()

        def left() -> None:
            nonlocal leaving
            leaving -= 1
            if not leaving:
                self.fill(place, WAIT_CANCELED)

        self._give_up(left)
        return b""

    def leave(self) -> None:
        """It will ask for nothing more, but still takes the replies to what it has asked."""
        self._is_ending = True
        self._give_up(lambda: None)

    def _give_up(self, on_left: Callable[[], None]) -> None:
        """End all that it waits for; `on_left` is called for each barrier that it has left."""
        combiner = self._core.combiner
        for waiter, (place, _, _) in self._waits.items():
            combiner.cancel(waiter)
            self._withdraw(place)
        self._waits.clear()
        self._keys = 0
        for call in {id(call): call for call in self._calls.values()}.values():
            combiner.dismiss(call)
        self._calls.clear()
        arrivals, self._arrivals = self._arrivals, {}
        for arrival, place, _ in arrivals.values():
            self._leave_barrier(arrival, place, on_left)
        self._core.has_work()

    def _leave_barrier(self, arrival: Arrival, place: _Place, on_left: Callable[[], None]) -> None:
        def left(_: int) -> None:
            self._withdraw(place)
            on_left()

        self._core.combiner.leave(arrival, 1, left)

    def _withdraw(self, place: _Place) -> None:
        """Nothing will come in this place, unless it has."""
        if place.reply is None:
            place.reply = b""
            self._settle()

    def _be_called(self, call: Call) -> None:
        for key in call.keys:
            before = self._calls.get(key)
            if before is not None and before is not call:
                self._core.combiner.dismiss(before)
            self._calls[key] = call

    @property
    def is_waiting(self) -> bool:
        return bool(self._waits or self._arrivals)

    def pending(self, most: int) -> list[Pending]:
        """What it waits for; of keys that are there by now, only the store knows."""
        return [(keys[:most], len(keys), since) for _, keys, since in self._waits.values()]

    def barriers(self) -> list[tuple[tuple[bytes, int], float]]:
        """The keys and sizes of the barriers at which it waits, and since when."""
        return [(name, since) for name, (_, _, since) in self._arrivals.items()]

    # Replies

    def _waiting_place(self) -> _Place:
        """The place of what ends a wait: none, if all before it is answered."""
        if self._places:
            place = self._next_place()
            place.may_wait = True
            return place
        return _Place(self)

    def _next_place(self) -> _Place:
        place = _Place(self)
        place.is_queued = True
        self._places.append(place)
        self._core.places += 1
        self._core.check_pressure()
        return place

    def fill(self, place: _Place, reply: bytes) -> None:
        """A reply is there. If it has no place any more among the others, it goes at once."""
        place.reply = reply
        if place.is_queued:
            self._settle()
        else:
            self._send(reply)

    def _settle(self) -> None:
        """Send all replies at the head of the queue."""
        places = self._places
        while places and places[0].is_over:
            place = places.popleft()
            place.is_queued = False
            self._core.places -= 1
            if place.reply:
                self._send(place.reply)
        if places and places[0].refusal is not None:
            self._be_closed(ProtocolError(places[0].refusal.decode(errors="replace")))
        if self._is_ending and not places:
            self._core.woken.append(self)  # with nothing to be sent: it is owed nothing more

    def _send(self, reply: bytes) -> None:
        if not self._out:
            self._core.woken.append(self)
            self._out_bytes = 0
        self._out.append(reply)
        self._out_bytes += len(reply)
        limit = self._core.limits.unsent_bytes
        if self._out_bytes > limit:
            self._out.clear()
            self._be_closed(
                LimitError(f"asked for more than {limit:,} bytes at once, the limit unsent_bytes")
            )

    def refuse(self, place: _Place, reason: bytes) -> None:
        """The client is to be closed, but not before the replies to what it had asked before."""
        place.refusal = reason
        if place.is_queued:
            self._settle()
        else:
            self._be_closed(ProtocolError(reason.decode(errors="replace")))

    def _be_closed(self, error: ProtocolError) -> None:
        self.forget_places()
        self._core.doom(self, error)

    def forget_places(self) -> None:
        """What it has asked has no answer any more."""
        self._core.places -= len(self._places)
        self._places.clear()

    @property
    def places(self) -> int:
        return len(self._places)

    def check_invariants(self) -> None:
        assert not self._places or not self._places[0].is_over
        assert self._keys >= 0
        assert all(place.is_queued for place in self._places)
        for waiter in self._waits:
            assert waiter.slot is not None or waiter in self._core.combiner.parked


_OWN: Final = {
    Op.PING: Rank._ping,
    Op.WAIT: Rank._wait,
    Op.BARRIER: Rank._barrier,
    Op.QUEUE_POP: Rank._pop,
    Op.CANCEL_WAIT: Rank._cancel,
    Op.DELETE_KEY: Rank._delete,
}
