"""Few requests out of many: what a relay's clients ask, put together on the way to the store.

What is asked while a batch is under way waits for the next one, and meanwhile may be joined by its like.
Nothing is ever held back for that. Why each rule is sound is in docs/concepts/relays.md; in short:

- A request joins an equal one, or an ADD another one, only while that has not been sent, and only if it
  stands behind all earlier requests of its own line; so it is carried out after it was asked, and in its
  line's order.
- A wait for one key may join one that is under way. It is over only if that one ended after this one had
  begun, which is known if a batch that was sent since had been taken when it ended; else it is asked anew.

Pure: the owner of a Combiner sends what `take_batch` gives, and passes on what comes back with `take`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from rallypoint.errors import ProtocolError
from rallypoint.store.core.context import Context
from rallypoint.store.core.outbox import DriverTask
from rallypoint.store.core.slices import Rest
from rallypoint.store.relay.core.slots import (
    NOBODY,
    AddSlot,
    Arrival,
    ArriveSlot,
    Asker,
    Call,
    Leaver,
    LongValues,
    PlainSlot,
    RequestOrder,
    SharedSlot,
    Slot,
    UnprovenSlot,
    Waiter,
    WaitSlot,
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
"""Those who ask for much add to the next batch while it is smaller, in the measure of `Combiner.unsent_cost`.
All others always do. So these wait for one such batch at most, and for a part of their own."""


class Combiner:
    """All that a relay has been asked and has not answered."""

    __slots__ = (
        *(
            "_batches",
            "_joinable",
            "_last_sent",
            "_numbers",
            "_open",
            "_proven",
            "_sent",
            "_tags",
            "_unsent",
            "_unsent_bytes",
            "_waits",
        ),
        *("held_bytes", "known", "parked"),
    )

    def __init__(self) -> None:
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
        self.parked: dict[Waiter, tuple[tuple[bytes, ...], Op]] = {}
        self.known = LongValues()
        self.held_bytes = 0
        """What is not answered, but for waits: in bytes, roughly."""

    # Asking

    def ask(self, line: RequestOrder, op: Op, blobs: Sequence[bytes], tail: bytes, asker: Asker) -> None:
        """A request that is answered at once."""
        if op is Op.ADD:
            self._add(line, blobs[0], unpack_i64(tail)[0], asker)
        elif op in SHARE_OPS and (op is not Op.SET or len(blobs[1]) <= _SHORT):
            self._share(line, op, blobs, asker)
        else:
            self._put(line, PlainSlot(op, blobs, tail, asker), blobs)

    def _share(self, line: RequestOrder, op: Op, blobs: Sequence[bytes], asker: Asker) -> None:
        name = (op, *blobs)
        slot = self._find(line, name)
        if slot is None:
            slot = self._joinable[name] = SharedSlot(self.known, op, blobs)
            self._put(line, slot, blobs)
        assert isinstance(slot, SharedSlot)
        slot.askers.append(asker)
        self._hold(slot, _JOIN_COST)

    def _add(self, line: RequestOrder, key: bytes, amount: int, asker: Asker) -> None:
        name = (Op.ADD, key)
        slot = self._find(line, name)
        if not isinstance(slot, AddSlot) or not slot.has_room(amount):
            slot = self._joinable[name] = AddSlot(key, self._add_alone)
            self._put(line, slot, [key])
        slot.add(line, amount, asker)
        self._hold(slot, _JOIN_COST)

    def _hold(self, slot: Slot, cost: int) -> None:
        """A request that is not sent takes more."""
        slot.cost += cost
        self.held_bytes += cost
        self._unsent_bytes += cost

    def _add_alone(self, line: RequestOrder, key: bytes, amount: int, asker: Asker) -> None:
        """An ADD that nobody may join."""
        slot = AddSlot(key, self._add_alone)
        slot.add(line, amount, asker)
        self._put(line, slot, [key])

    def wait(self, waiter: Waiter, keys: Sequence[bytes], *, in_turn: bool = False) -> None:
        """A wait; its `end` is called when it is over, unless it is cancelled."""
        self._join_wait(waiter, tuple(keys), Op.WAIT_IN_TURN if in_turn else Op.WAIT)

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
            del self._unsent[slot]
            return
        slot.is_leaving = True
        self._leave(slot.tag, 1, _CancelledWait(self, slot))

    def ask_again(self, waiter: Waiter) -> None:
        """The client that waits can pop again."""
        parked = self.parked.pop(waiter, None)
        if parked is not None:
            self._join_wait(waiter, *parked)

    def arrive(self, arrival: Arrival, line: RequestOrder, key: bytes, size: int) -> None:
        """An arrival at a barrier; its `release` is called until all for whom it stands may go."""
        name = (Op.ARRIVE, key, size)
        slot = self._find(line, name)
        if not isinstance(slot, ArriveSlot) or not slot.has_room(arrival.count):
            slot = self._joinable[name] = ArriveSlot(key, size)
            self._put(line, slot, [key])
        arrival.slot = slot
        slot.arrivals[arrival] = None

    def leave(self, arrival: Arrival, count: int, leaver: Leaver) -> None:
        """Take back a part of an arrival. The leaver is told how many were not released before."""
        slot = arrival.slot
        count = min(count, arrival.count - arrival.leaving)
        if slot.batch:
            arrival.leaving += count
            self._leave(slot.tag, count, _LeftBarrier(self, arrival, count, leaver))
            return
        arrival.count -= count
        if not arrival.count:
            del slot.arrivals[arrival]
        if not slot.arrivals:
            del self._unsent[slot]
            name = (Op.ARRIVE, slot.key, slot.size)
            if self._joinable.get(name) is slot:
                del self._joinable[name]
        leaver.left(count)

    def pop_called(self, line: RequestOrder, call: Call, key: bytes, asker: Asker) -> None:
        """A pop by the client that was called to it."""
        self._put(line, PlainSlot(Op.POP_CALLED, [key], pack_u64(call.tag), asker), [key])

    def send_report(self, report: bytes) -> None:
        """Tell the other side what this relay knows."""
        self._put(None, UnprovenSlot(Op.TOLD, [report], b"", NOBODY), [report])

    def dismiss(self, call: Call) -> None:
        """The client that was called will not pop."""
        self._leave(call.tag, 1, NOBODY)

    # Sending

    @property
    def unsent_cost(self) -> int:
        """How much work the next batches are, waits included: in bytes, roughly."""
        return self._unsent_bytes + _REQUEST_COST * len(self._unsent)

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

    def _put(self, line: RequestOrder | None, slot: Slot, blobs: Sequence[bytes]) -> None:
        self._numbers += 1
        slot.number = self._numbers
        if line is not None:
            line.last = slot.number
        self._unsent[slot] = None
        if slot.is_immediate:
            self._hold(slot, _REQUEST_COST + sum(map(len, blobs)))

    def _find(self, line: RequestOrder, name: tuple[object, ...]) -> Slot | None:
        """What a request of that name may join: behind all that its line has asked before."""
        slot = self._joinable.get(name)
        if slot is None or slot.number < line.last:
            return None
        line.last = slot.number
        return slot

    def _join_wait(self, waiter: Waiter, keys: tuple[bytes, ...], op: Op) -> None:
        slot = self._waits.get(keys) if op is Op.WAIT else None
        if slot is not None and slot.batch and (len(keys) > 1 or waiter.line.last > self._last_sent):
            # Some of several keys may have come before this one began, and have gone since. And what its
            # line has asked before may still have to wait for a batch behind the next.
            slot = None
        if slot is None or (not slot.batch and slot.number < waiter.line.last):
            slot = WaitSlot(keys, op, self._end_wait)
            self._put(waiter.line, slot, ())
            if op is Op.WAIT:
                self._waits[keys] = slot
        elif not slot.batch:
            waiter.line.last = slot.number
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
            called = next((waiter for waiter in sure if waiter.presence.is_present), None)
            again = [(waiter, Op.WAIT_IN_TURN) for waiter in waiters if waiter is not called]
            sure = [called] if called is not None else []
            if called is None:
                self._leave(slot.tag, 1, NOBODY)
        call = Call(slot.tag, slot.keys) if status is Status.CALLED else None
        for waiter in sure:
            waiter.end(None, call)
        self._wait_again(again, slot.keys)

    def _wait_again(self, waiters: Sequence[tuple[Waiter, Op]], keys: tuple[bytes, ...]) -> None:
        in_turn: WaitSlot | None = None
        for waiter, op in waiters:
            if op is Op.WAIT_IN_TURN and not waiter.presence.is_present:
                self.parked[waiter] = (keys, op)
            elif op is Op.WAIT or in_turn is None:
                self._join_wait(waiter, keys, op)
                in_turn = waiter.slot if op is Op.WAIT_IN_TURN else in_turn
            else:
                waiter.line.last = in_turn.number
                waiter.slot = in_turn
                waiter.since = self._batches + 1
                in_turn.waiters[waiter] = None

    def _leave(self, tag: int, count: int, asker: Asker) -> None:
        self._put(None, UnprovenSlot(Op.LEAVE, (), pack_pair(tag, count), asker), ())

    def drop(self, slot: Slot) -> None:
        """Nothing more comes for a slot that was sent."""
        self._sent.pop(slot.tag, None)

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


class _CancelledWait:
    """A wait that was sent has been taken back."""

    __slots__ = ("_combiner", "_slot")

    def __init__(self, combiner: Combiner, slot: Slot) -> None:
        self._combiner = combiner
        self._slot = slot

    def answer(self, _: Status, __: bytes) -> None:
        self._combiner.drop(self._slot)


class _LeftBarrier:
    """Arrivals that were sent have been taken back, as far as they had not been released."""

    __slots__ = ("_arrival", "_asked", "_combiner", "_leaver")

    def __init__(self, combiner: Combiner, arrival: Arrival, asked: int, leaver: Leaver) -> None:
        self._combiner = combiner
        self._arrival = arrival
        self._asked = asked
        self._leaver = leaver

    def answer(self, status: Status, content: bytes) -> None:
        slot = self._arrival.slot
        count = parse_count(content) if status is Status.DONE else 0
        meant = slot.left(self._arrival, self._asked, count)
        if not slot.count:
            self._combiner.drop(slot)
        self._leaver.left(meant)


class Requests:
    """The combiner of one relay, and how much it holds. The outbox says when there is something to send."""

    __slots__ = (
        *("_is_crowded", "_is_due", "_is_pressed", "_leaving", "_limit", "_others"),
        *("combiner", "replies_due"),
    )

    def __init__(self, context: Context) -> None:
        self.combiner = Combiner()
        self.replies_due = 0
        """Replies that clients wait for, in their order."""
        self._limit = context.limits.relayed_bytes
        self._others = context.outbox.others
        self._is_due = False
        self._is_pressed = False
        self._is_crowded = False
        self._leaving: deque[Rest] = deque()  # of clients that waited for very much

    def renew(self) -> None:
        """The session upstream is lost, and with it all that was asked."""
        self.combiner = Combiner()
        self._leaving.clear()
        self.check_pressure()

    def ask(self, line: RequestOrder, op: Op, blobs: Sequence[bytes], tail: bytes, asker: Asker) -> None:
        """Ask the store what is answered at once."""
        self.combiner.ask(line, op, blobs, tail, asker)
        self.mark_due()

    def mark_due(self) -> None:
        """There may be something to send: say so, once until it is sent."""
        if not self._is_due:
            self._is_due = True
            self._others.append(DriverTask.FLUSH)
        self.check_pressure()

    def mark_sent(self) -> None:
        """What could be sent has been."""
        self._is_due = False
        self._go_on_leaving()
        self.check_pressure()

    def leave(self, rest: Rest) -> None:
        """Take back what a client has asked, with other clients' requests in between."""
        self._leaving.append(rest)
        self._go_on_leaving()

    def _go_on_leaving(self) -> None:
        while self._leaving and self.combiner.unsent_cost <= _CROWD:
            if next(self._leaving[0], True):
                self._leaving.popleft()

    def check_pressure(self) -> None:
        """Have the driver read nothing more from clients while too much is held.

        And nothing from those who ask for much, while there is enough for the next batch.
        """
        is_crowded = self.combiner.unsent_cost > _CROWD
        if is_crowded != self._is_crowded:
            self._is_crowded = is_crowded
            self._others.append(DriverTask.CROWDED if is_crowded else DriverTask.ROOM)
        held = self.combiner.held_bytes + self.replies_due * _REPLY_BYTES
        if held > self._limit and not self._is_pressed:
            self._is_pressed = True
            self._others.append(DriverTask.HOLD)
        elif held <= self._limit // 2 and self._is_pressed:
            self._is_pressed = False
            self._others.append(DriverTask.READ_ON)
