"""Combines the requests of a relay's clients on their way to the store.

`relay.py` has the theory. The owner of a Combiner sends what `take_batch` returns, and passes on what comes
back with `take`; the outbox says when there is something to send, and when clients are read no further.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final

from rallypoint.errors import ProtocolError
from rallypoint.store.core.context import Context, DriverTask, Rest
from rallypoint.store.relay.core.slots import (
    AddSlot,
    Arrival,
    ArriveSlot,
    Call,
    LongValues,
    OnAnswer,
    OnLeft,
    PlainSlot,
    RequestOrder,
    SharedSlot,
    Slot,
    UnprovenSlot,
    Waiter,
    WaitSlot,
    ignore,
)
from rallypoint.store.wire.encoding import pack_u64, unpack_i64
from rallypoint.store.wire.opcodes import SHARE_OPS, Op
from rallypoint.store.wire.sessions import Status, pack_pair, parse_count, parse_end_of_wait

_SHORT: Final = 256  # the longest value of a SET that is compared with others
_REQUEST_COST: Final = 256  # what a request takes besides its bytes, roughly
_JOIN_COST: Final = 128  # and one that joins it
_BATCH_COST: Final = 1 << 17  # of the requests of one batch: some milliseconds of work

_REPLY_BYTES: Final = 128
"""What a reply takes that is not there yet, roughly."""
_CROWD: Final = 1 << 15
"""Clients that ask for much add to the next batch only while its cost is below this; the others always do."""


class Combiner:
    """All that a relay has been asked and has not answered."""

    __slots__ = (
        *("_batches", "_is_crowded", "_is_due", "_is_pressed", "_joinable", "_last_sent", "_leaving"),
        *("_limit", "_numbers", "_open", "_others", "_proven", "_sent", "_tags", "_unsent", "_unsent_bytes"),
        *("_waits", "held_bytes", "known", "parked", "replies_due"),
    )

    def __init__(self, context: Context) -> None:
        self._limit = context.limits.relayed_bytes
        self._others = context.outbox.others
        self._numbers = 0
        self._tags = 0
        self._batches = 0
        self._proven = 0  # a request of this batch has been answered: all before it has been carried out
        self._open = 0  # immediate requests under way, but for those whose answers come in pieces
        self._last_sent = 0  # the number of the last slot that was sent
        self._unsent: dict[Slot, None] = {}
        self._unsent_bytes = 0  # the cost of these
        self._sent: dict[int, Slot] = {}
        self._joinable: dict[tuple[object, ...], Slot] = {}  # of those that are not sent
        self._waits: dict[tuple[bytes, ...], WaitSlot] = {}  # that may be joined, sent or not
        self._leaving: deque[Rest] = deque()  # of clients that waited for very much
        self._is_due = False
        self._is_pressed = False
        self._is_crowded = False
        self.parked: dict[Waiter, tuple[tuple[bytes, ...], Op]] = {}
        self.known = LongValues()
        self.held_bytes = 0
        """What is not answered, but for waits: in bytes, roughly."""
        self.replies_due = 0
        """Replies that clients wait for, in their order."""

    # Asking

    def ask(
        self, order: RequestOrder, op: Op, blobs: Sequence[bytes], tail: bytes, on_answer: OnAnswer
    ) -> None:
        """A request that is answered at once."""
        if op is Op.ADD:
            self._add(order, blobs[0], unpack_i64(tail)[0], on_answer)
        elif op in SHARE_OPS and (op is not Op.SET or len(blobs[1]) <= _SHORT):
            self._share(order, op, blobs, on_answer)
        else:
            self._put(order, PlainSlot(op, blobs, tail, on_answer), blobs)

    def _share(self, order: RequestOrder, op: Op, blobs: Sequence[bytes], on_answer: OnAnswer) -> None:
        name = (op, *blobs)
        slot = self._find(order, name)
        if slot is None:
            slot = self._joinable[name] = SharedSlot(self.known, op, blobs)
            self._put(order, slot, blobs)
        assert isinstance(slot, SharedSlot)
        slot.askers.append(on_answer)
        self._hold(slot, _JOIN_COST)

    def _add(self, order: RequestOrder, key: bytes, amount: int, on_answer: OnAnswer) -> None:
        name = (Op.ADD, key)
        slot = self._find(order, name)
        if not isinstance(slot, AddSlot) or not slot.has_room(amount):
            slot = self._joinable[name] = AddSlot(key, self._add_alone)
            self._put(order, slot, [key])
        slot.add(order, amount, on_answer)
        self._hold(slot, _JOIN_COST)

    def _add_alone(self, order: RequestOrder, key: bytes, amount: int, on_answer: OnAnswer) -> None:
        """An ADD that nobody may join."""
        slot = AddSlot(key, self._add_alone)
        slot.add(order, amount, on_answer)
        self._put(order, slot, [key])

    def wait(self, waiter: Waiter, keys: Sequence[bytes], op: Op = Op.WAIT) -> None:
        """A WAIT or a WAIT_IN_TURN; the waiter's `end` is called when it is over, unless it is cancelled."""
        self._join_wait(waiter, tuple(keys), op)

    def cancel(self, waiter: Waiter) -> None:
        """End a wait before it is over."""
        self.parked.pop(waiter, None)
        slot, waiter.slot = waiter.slot, None
        if slot is None:
            return
        del slot.waiters[waiter]
        if slot.waiters:
            return
        if self._waits.get(slot.keys) is slot:
            del self._waits[slot.keys]
        if not slot.batch:
            self._drop_unsent(slot)
            return
        slot.is_leaving = True
        self._leave(slot.tag, 1, partial(self._drop_sent, slot))

    def ask_again(self, waiter: Waiter) -> None:
        """The client that waits can pop again."""
        parked = self.parked.pop(waiter, None)
        if parked is not None:
            self._join_wait(waiter, *parked)

    def arrive(self, arrival: Arrival, order: RequestOrder, key: bytes, size: int) -> None:
        """An arrival at a barrier; its `release` is called until all for whom it stands may go."""
        name = (Op.ARRIVE, key, size)
        slot = self._find(order, name)
        if not isinstance(slot, ArriveSlot) or not slot.has_room(arrival.count):
            slot = self._joinable[name] = ArriveSlot(key, size)
            self._put(order, slot, [key])
        arrival.slot = slot
        slot.arrivals[arrival] = None

    def leave(self, arrival: Arrival, count: int, on_left: OnLeft) -> None:
        """Take back a part of an arrival."""
        slot = arrival.slot
        count = min(count, arrival.count - arrival.leaving)
        if slot.batch:
            arrival.leaving += count
            self._leave(slot.tag, count, partial(self._left, arrival, count, on_left))
            return
        arrival.count -= count
        if not arrival.count:
            del slot.arrivals[arrival]
        if not slot.arrivals:
            self._drop_unsent(slot)
            name = (Op.ARRIVE, slot.key, slot.size)
            if self._joinable.get(name) is slot:
                del self._joinable[name]
        on_left(count)

    def _left(self, arrival: Arrival, asked: int, on_left: OnLeft, status: Status, content: bytes) -> None:
        """Arrivals that were sent have been taken back, unless they had been released before."""
        slot = arrival.slot
        meant = slot.left(arrival, asked, parse_count(content) if status is Status.DONE else 0)
        if not slot.count:
            self._drop_sent(slot)
        on_left(meant)

    def pop_called(self, order: RequestOrder, call: Call, key: bytes, on_answer: OnAnswer) -> None:
        """A pop by the client that was called to it."""
        self._put(order, PlainSlot(Op.POP_CALLED, [key], pack_u64(call.tag), on_answer), [key])

    def send_report(self, report: bytes) -> None:
        """Tell the other side what this relay knows."""
        self._put(None, UnprovenSlot(Op.TOLD, [report], b"", ignore), [report])

    def dismiss(self, call: Call) -> None:
        """The client that was called will not pop."""
        self._leave(call.tag, 1, ignore)

    def withdraw(self, rest: Rest) -> None:
        """Take back all that a client has asked, with other clients' requests in between."""
        self._leaving.append(rest)
        self._go_on_leaving()

    def _go_on_leaving(self) -> None:
        while self._leaving and self.unsent_cost <= _CROWD:
            if next(self._leaving[0], True):
                self._leaving.popleft()

    # Sending

    @property
    def unsent_cost(self) -> int:
        """How much work the next batches are, waits included: in bytes, roughly."""
        return self._unsent_bytes + _REQUEST_COST * len(self._unsent)

    def mark_due(self) -> None:
        """There may be something to send: tell the driver, once until it is sent."""
        if not self._is_due:
            self._is_due = True
            self._others.append(DriverTask.FLUSH)

    def mark_sent(self) -> None:
        """What could be sent has been."""
        self._is_due = False
        self._go_on_leaving()
        self._check_pressure()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def has_batch(self) -> bool:
        """Whether there is something to send, and nothing under way that it has to wait for."""
        return bool(self._unsent) and not self._open

    def take_batch(self, number: int, most_bytes: int, longest: int) -> list[bytes]:
        """Requests for the batch of that number: `most_bytes` together at most, or a single longer one.

        And no more than some milliseconds of work, here and at the other end.

        One that is longer than `longest` is refused here: no batch has room for it.
        """
        requests: list[bytes] = []
        size = cost = 0
        self.begin_batch(number)
        for slot in list(self._unsent):
            data = slot.encode()
            if len(data) > longest:
                self._refuse(slot, len(data), longest)
                continue
            size += 8 + len(data)
            cost += slot.cost + _REQUEST_COST
            if requests and (size > most_bytes or cost > _BATCH_COST):
                break
            requests.append(data)
            del self._unsent[slot]
            self._unsent_bytes -= slot.cost
            slot.batch = self._batches
            slot.tag = self._tags
            self._tags += 1
            self._sent[slot.tag] = slot
            self._last_sent = slot.number
            self._open += slot.is_immediate
        self._joinable.clear()
        return requests

    def _refuse(self, slot: Slot, size: int, longest: int) -> None:
        """Tell the clients that asked that the store takes no request of that size."""
        del self._unsent[slot]
        self._unsent_bytes -= slot.cost
        self.held_bytes -= slot.cost
        message = f"a request of {size:,} bytes; the store takes {longest:,} from a relay at once"
        slot.take(Status.REFUSED, message.encode())

    def begin_batch(self, number: int) -> None:
        """A batch is sent, be it an empty one: a wait that begins from now on has begun after it."""
        self._batches = number

    def take(self, tag: int, status: Status, content: bytes) -> None:
        """An item has come."""
        slot = self._sent.get(tag)
        if slot is None:
            raise ProtocolError(f"an answer to request {tag}, which is not under way")
        if slot.is_immediate and slot.pieces is None:
            self._open -= 1
            if slot.is_proof and status is not Status.REFUSED:
                self._proven = max(self._proven, slot.batch)
        if status is Status.PIECE:
            slot.take_piece(content)
            return
        if slot.is_immediate:
            self.held_bytes -= slot.cost
        if slot.pieces is not None:
            content = b"".join([*slot.pieces, content])
        if slot.take(status, content):
            self._sent.pop(tag, None)

    # Inside

    def _put(self, order: RequestOrder | None, slot: Slot, blobs: Sequence[bytes]) -> None:
        self._numbers += 1
        slot.number = self._numbers
        if order is not None:
            order.last = slot.number
        self._unsent[slot] = None
        self.mark_due()
        if slot.is_immediate:
            self._hold(slot, _REQUEST_COST + sum(map(len, blobs)))
        else:
            self._check_pressure()

    def _hold(self, slot: Slot, cost: int) -> None:
        """A request that is not sent takes more."""
        slot.cost += cost
        self.held_bytes += cost
        self._unsent_bytes += cost
        self._check_pressure()

    def _check_pressure(self) -> None:
        """Have the driver read nothing more from clients while too much is held.

        And nothing from those who ask for much, while there is enough for the next batch.
        """
        is_crowded = self.unsent_cost > _CROWD
        if is_crowded != self._is_crowded:
            self._is_crowded = is_crowded
            self._others.append(DriverTask.CROWDED if is_crowded else DriverTask.ROOM)
        held = self.held_bytes + self.replies_due * _REPLY_BYTES
        if held > self._limit and not self._is_pressed:
            self._is_pressed = True
            self._others.append(DriverTask.HOLD)
        elif held <= self._limit // 2 and self._is_pressed:
            self._is_pressed = False
            self._others.append(DriverTask.READ_ON)

    def _drop_unsent(self, slot: Slot) -> None:
        """Nobody needs a wait or an arrival any more that was not sent."""
        del self._unsent[slot]
        self._check_pressure()

    def _drop_sent(self, slot: Slot, *_: object) -> None:
        """Nothing more comes for a slot that was sent."""
        self._sent.pop(slot.tag, None)

    def _find(self, order: RequestOrder, name: tuple[object, ...]) -> Slot | None:
        """What a request of that name may join: behind all earlier requests of its order."""
        slot = self._joinable.get(name)
        if slot is None or slot.number < order.last:
            return None
        order.last = slot.number
        return slot

    def _join_wait(self, waiter: Waiter, keys: tuple[bytes, ...], op: Op) -> None:
        slot = self._waits.get(keys) if op is Op.WAIT else None
        if slot is not None and slot.batch and (len(keys) > 1 or waiter.order.last > self._last_sent):
            # Some of several keys may have come before this one began, and have gone since. And earlier
            # requests of its order may still have to wait for a batch behind the next.
            slot = None
        if slot is None or (not slot.batch and slot.number < waiter.order.last):
            slot = WaitSlot(keys, op, self._end_wait)
            self._put(waiter.order, slot, ())
            if op is Op.WAIT:
                self._waits[keys] = slot
        elif not slot.batch:
            waiter.order.last = slot.number
        waiter.slot = slot
        waiter.since = self._batches + 1
        slot.waiters[waiter] = None

    def _end_wait(self, slot: WaitSlot, waiters: Sequence[Waiter], status: Status, content: bytes) -> None:
        """A wait is over upstream: which of the clients that share it are woken?"""
        if self._waits.get(slot.keys) is slot:
            del self._waits[slot.keys]
        if status is Status.REFUSED:
            for waiter in waiters:
                waiter.end(content, None)
            return
        proven = max(slot.batch, self._proven, parse_end_of_wait(content))
        sure = [waiter for waiter in waiters if waiter.since <= proven]
        again = [(waiter, Op.WAIT) for waiter in waiters if waiter.since > proven]
        if status is Status.CALLED:
            called = next((waiter for waiter in sure if waiter.is_present), None)
            again = [(waiter, Op.WAIT_IN_TURN) for waiter in waiters if waiter is not called]
            sure = [called] if called is not None else []
            if called is None:
                self._leave(slot.tag, 1, ignore)
        call = Call(slot.tag, slot.keys) if status is Status.CALLED else None
        for waiter in sure:
            waiter.end(None, call)
        self._wait_again(again, slot.keys)

    def _wait_again(self, waiters: Sequence[tuple[Waiter, Op]], keys: tuple[bytes, ...]) -> None:
        in_turn: WaitSlot | None = None
        for waiter, op in waiters:
            if op is Op.WAIT_IN_TURN and not waiter.is_present:
                self.parked[waiter] = (keys, op)
            elif op is Op.WAIT or in_turn is None:
                self._join_wait(waiter, keys, op)
                in_turn = waiter.slot if op is Op.WAIT_IN_TURN else in_turn
            else:
                waiter.order.last = in_turn.number
                waiter.slot = in_turn
                waiter.since = self._batches + 1
                in_turn.waiters[waiter] = None

    def _leave(self, tag: int, count: int, on_answer: OnAnswer) -> None:
        self._put(None, UnprovenSlot(Op.LEAVE, (), pack_pair(tag, count), on_answer), ())

    def check_invariants(self) -> None:
        for slot in self._unsent:
            assert not slot.batch
            assert not isinstance(slot, WaitSlot) or slot.waiters
            assert not isinstance(slot, ArriveSlot) or slot.count
        numbers = [slot.number for slot in self._unsent]
        assert numbers == sorted(numbers)
        assert all(slot in self._unsent for slot in self._joinable.values())
        sent = self._sent.values()
        assert self._open == sum(slot.is_immediate and slot.pieces is None for slot in sent)
        for tag, slot in self._sent.items():
            assert slot.tag == tag
            assert 0 < slot.batch <= self._batches
            if isinstance(slot, WaitSlot):
                assert bool(slot.waiters) != slot.is_leaving
            if isinstance(slot, ArriveSlot):
                assert slot.count
                assert all(arrival.count >= 0 for arrival in slot.arrivals)
        slots = [*self._unsent, *self._sent.values()]
        for keys, wait in self._waits.items():
            assert wait in slots
            assert wait.keys == keys
            assert not wait.is_leaving
        for slot in slots:
            if isinstance(slot, WaitSlot):
                assert all(waiter.slot is slot for waiter in slot.waiters)
        assert self.held_bytes == sum(slot.cost for slot in slots)
        assert self._unsent_bytes == sum(slot.cost for slot in self._unsent)
        self.known.check_invariants()
