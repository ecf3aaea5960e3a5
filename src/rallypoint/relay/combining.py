"""Few requests out of many: what a relay's clients ask, put together on the way to the store.

What is asked while a batch is under way waits for the next one, and meanwhile may be joined by its like.
Nothing is ever held back for that. Why each rule is sound is in docs/concepts/relays.md; in short:

- A request joins an equal one, or an ADD another one, only while that has not been sent, and only if it
  stands behind all earlier requests of its own line; so it is carried out after it was asked, and in its
  line's order.
- A wait for one key may join one that is under way. It is over only if that one ended after this one had
  begun, which is known if a batch that was sent since had been taken when it ended; else it is asked anew.

Pure: whoever owns a Combiner sends what `take_batch` gives, and passes on what comes back with `take`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from rallypoint.errors import ProtocolError
from rallypoint.wire.encoding import pack_i64, pack_u64, unpack_i64
from rallypoint.wire.opcodes import Op
from rallypoint.wire.sessions import (
    MOST_ARRIVALS,
    REMEMBERED,
    REMEMBERED_BYTES,
    WORTH_REMEMBERING,
    Status,
    arrive_tail,
    encode,
    pack_pair,
    parse_end_of_wait,
)

Answer = Callable[[Status, bytes], None]

_SHARED: Final = frozenset({Op.GET, Op.CHECK, Op.MULTI_GET, Op.SET})
_SHORT: Final = 256  # the longest value of a SET that is compared with others

_MOST_SUM: Final = 1 << 62
_REQUEST_COST: Final = 256  # what a request takes besides its bytes, roughly
_JOIN_COST: Final = 128  # and one that joins it
_MOST_JOINED: Final = 4096  # arrivals; they are gone through one by one


class Line(Protocol):
    """Whose requests are carried out in their order: a client, or a relay further down."""

    last: int
    """The number of the slot that its latest request is in; 0 if there is none."""


class Presence(Protocol):
    """Whether somebody who waits could pop now."""

    is_present: bool


class Slot(ABC):
    """One request to the store, for one or for many."""

    __slots__ = ("batch", "cost", "number", "tag")

    is_immediate = True
    """Whether its answer comes at once, and ends it."""

    is_proof = True
    """Whether its answer shows that the store has carried it out, and all that was sent before."""

    def __init__(self) -> None:
        self.number = 0
        self.batch = 0  # in which it was sent; 0: in none yet
        self.tag = -1
        self.cost = 0

    @abstractmethod
    def encode(self) -> bytes: ...

    @abstractmethod
    def take(self, status: Status, content: bytes) -> bool:
        """Take an answer, and answer those who asked; return whether it was the last one."""


class PlainSlot(Slot):
    """A request that is for one alone."""

    __slots__ = ("_answer", "_blobs", "_op", "_tail")

    def __init__(self, op: Op, blobs: Sequence[bytes], tail: bytes, answer: Answer) -> None:
        super().__init__()
        self._op = op
        self._blobs = blobs
        self._tail = tail
        self._answer = answer

    def encode(self) -> bytes:
        return encode(self._op, self._blobs, self._tail)

    def take(self, status: Status, content: bytes) -> bool:
        self._answer(status, content)
        return True


class LeaveSlot(PlainSlot):
    """A LEAVE, which a relay on the way may answer by itself."""

    __slots__ = ()

    is_proof = False


class SharedSlot(Slot):
    """A read, or a short SET, for all who asked the same before it was sent."""

    __slots__ = ("_blobs", "_combiner", "_op", "answers")

    def __init__(self, combiner: Combiner, op: Op, blobs: Sequence[bytes]) -> None:
        super().__init__()
        self._combiner = combiner
        self._op = op
        self._blobs = blobs
        self.answers: list[Answer] = []

    def encode(self) -> bytes:
        op = self._op
        if op is Op.GET and self._combiner.known.begin_recall(self._blobs[0]):
            op = self._op = Op.RECALL
        return encode(op, self._blobs, b"")

    def take(self, status: Status, content: bytes) -> bool:
        if self._op is Op.GET or self._op is Op.RECALL:
            key = self._blobs[0]
            content = self._combiner.known.learn(key, status, content, recalled=self._op is Op.RECALL)
            if status is Status.UNCHANGED:
                status = Status.DONE
        for answer in self.answers:
            answer(status, content)
        return True


class AddSlot(Slot):
    """An ADD of the sum; its result is dealt out in the order of arrival."""

    __slots__ = ("_combiner", "_key", "_parts", "_sum")

    def __init__(self, combiner: Combiner, key: bytes) -> None:
        super().__init__()
        self._combiner = combiner
        self._key = key
        self._parts: list[tuple[Line, int, Answer]] = []
        self._sum = 0

    def has_room(self, amount: int) -> bool:
        """Whether all results, one by one, lie between the first and the last."""
        same_sign = (amount >= 0) == (self._sum >= 0) or not amount or not self._sum
        return same_sign and abs(self._sum + amount) < _MOST_SUM

    def add(self, line: Line, amount: int, answer: Answer) -> None:
        self._parts.append((line, amount, answer))
        self._sum += amount

    def encode(self) -> bytes:
        return encode(Op.ADD, [self._key], pack_i64(self._sum))

    def take(self, status: Status, content: bytes) -> bool:
        if status is not Status.DONE:
            self._refuse(status, content)
            return True
        value = unpack_i64(content)[0] - self._sum
        for _, amount, answer in self._parts:
            value += amount
            answer(status, pack_i64(value))
        return True

    def _refuse(self, status: Status, content: bytes) -> None:
        """The sum is too much, or it is no number: then each by itself, unless its line has gone on."""
        free = {line for line, _, _ in self._parts if line.last == self.number}
        for line, amount, answer in self._parts:
            if len(self._parts) > 1 and line in free:
                self._combiner.add_alone(line, self._key, amount, answer)
            else:
                answer(status, content)


class Call:
    """A push has called one of those who waited; it is to pop, or to say that it will not."""

    __slots__ = ("keys", "tag")

    def __init__(self, tag: int, keys: Sequence[bytes]) -> None:
        self.tag = tag
        self.keys = keys


EndOfWait = Callable[[bytes | None, Call | None], None]
"""How a wait ends: with the reason if it was refused, and with a call if it was woken for one pop."""


class Waiter:
    """One wait of one client."""

    __slots__ = ("end", "line", "presence", "since", "slot")

    def __init__(self, line: Line, presence: Presence, end: EndOfWait) -> None:
        self.line = line
        self.presence = presence
        self.end = end
        self.since = 0  # the first batch that could have been sent after it had begun
        self.slot: WaitSlot | None = None  # None: it is over, or is parked until its client is back


class WaitSlot(Slot):
    """A wait that any number share."""

    __slots__ = ("_combiner", "is_leaving", "keys", "op", "waiters")

    is_immediate = False

    def __init__(self, combiner: Combiner, keys: tuple[bytes, ...], op: Op) -> None:
        super().__init__()
        self._combiner = combiner
        self.keys = keys
        self.op = op
        self.waiters: dict[Waiter, None] = {}
        self.is_leaving = False

    def encode(self) -> bytes:
        return encode(self.op, self.keys, b"")

    def take(self, status: Status, content: bytes) -> bool:
        waiters, self.waiters = self.waiters, {}
        for waiter in waiters:
            waiter.slot = None
        if self.is_leaving:
            return status is not Status.CALLED  # the call goes with the leave that is under way
        self._combiner.end_wait(self, list(waiters), status, content)
        return True


class Arrival:
    """One client at one barrier, for as many as it stands for."""

    __slots__ = ("count", "early", "leaving", "release", "slot")

    def __init__(self, slot: ArriveSlot, count: int, release: Answer) -> None:
        self.slot = slot
        self.count = count  # not released, and not known to have left
        self.leaving = 0  # of these
        self.early = 0  # known to have left before the answer to its own leave
        self.release = release


class ArriveSlot(Slot):
    """The arrivals at one barrier that left in one batch."""

    __slots__ = ("arrivals", "key", "size")

    is_immediate = False

    def __init__(self, key: bytes, size: int) -> None:
        super().__init__()
        self.key = key
        self.size = size
        self.arrivals: dict[Arrival, None] = {}

    @property
    def count(self) -> int:
        return sum(arrival.count for arrival in self.arrivals)

    def has_room(self, weight: int) -> bool:
        return len(self.arrivals) < _MOST_JOINED and self.count + weight <= MOST_ARRIVALS

    def encode(self) -> bytes:
        return encode(Op.ARRIVE, [self.key], arrive_tail(self.size, self.count))

    def take(self, status: Status, content: bytes) -> bool:
        if status is not Status.DONE:
            for arrival in [*self.arrivals]:
                arrival.count = 0
                arrival.release(status, content)
            return True
        released = unpack_i64(content)[0]
        # Who is about to leave is released last: the leave then finds the others gone, and not itself.
        for arrival in [*self.arrivals]:
            released -= self._release(arrival, min(released, arrival.count - arrival.leaving))
        for arrival in [*self.arrivals]:
            released -= self._release(arrival, min(released, arrival.count))
        return not self.count

    def left(self, arrival: Arrival, asked: int, count: int) -> int:
        """A leave was answered: so many of the slot have left. Return how many of those were meant."""
        arrival.leaving -= asked
        own = min(count, arrival.count)
        arrival.count -= own
        count -= own
        early = min(arrival.early, asked - own)
        arrival.early -= early
        for other in self.arrivals:
            step = min(count, other.count, other.leaving)
            other.count -= step
            other.early += step
            count -= step
        return own + early

    @staticmethod
    def _release(arrival: Arrival, count: int) -> int:
        if count > 0:
            arrival.count -= count
            arrival.release(Status.DONE, pack_i64(count))
            return count
        return 0


class Known:
    """The long values that were read last: the store need not send them again while they are unchanged."""

    __slots__ = ("_bytes", "_recalls", "_values")

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._recalls: Counter[bytes] = Counter()  # under way; they may refer to what is known

    def begin_recall(self, key: bytes) -> bool:
        """Whether the value is known, and so need only be recalled."""
        if key not in self._values:
            return False
        self._recalls[key] += 1
        return True

    def learn(self, key: bytes, status: Status, content: bytes, *, recalled: bool) -> bytes:
        """Take the answer to a read; return the value."""
        if recalled:
            self._recalls[key] -= 1
            if not self._recalls[key]:
                del self._recalls[key]
        if status is Status.UNCHANGED:
            if key not in self._values:
                raise ProtocolError(f"the value of {key!r} is said to be unchanged, but is not known here")
            self._values.move_to_end(key)
            return self._values[key]
        if status is Status.DONE:
            self._forget(key)
            if len(content) >= WORTH_REMEMBERING:
                self._values[key] = content
                self._bytes += len(content)
                self._shrink()
        return content

    def _shrink(self) -> None:
        while len(self._values) > REMEMBERED or self._bytes > REMEMBERED_BYTES:
            oldest = next((key for key in self._values if key not in self._recalls), None)
            if oldest is None:
                return
            self._forget(oldest)

    def _forget(self, key: bytes) -> None:
        old = self._values.pop(key, None)
        if old is not None:
            self._bytes -= len(old)

    def check_invariants(self) -> None:
        assert self._bytes == sum(map(len, self._values.values()))
        assert all(count > 0 for count in self._recalls.values())


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
            "_waits",
        ),
        *("held_bytes", "known", "parked"),
    )

    def __init__(self) -> None:
        self._numbers = 0
        self._tags = 0
        self._batches = 0
        self._proven = 0  # a request of this batch has been answered: all before it has been carried out
        self._open = 0  # immediate requests under way
        self._last_sent = 0  # the number of the last slot that was sent
        self._unsent: dict[Slot, None] = {}
        self._sent: dict[int, Slot] = {}
        self._joinable: dict[tuple[object, ...], Slot] = {}  # of those that are not sent
        self._waits: dict[tuple[bytes, ...], WaitSlot] = {}  # that may be joined, sent or not
        self.parked: dict[Waiter, tuple[tuple[bytes, ...], Op]] = {}
        self.known = Known()
        self.held_bytes = 0
        """What is not answered, but for waits: in bytes, roughly."""

    # Asking

    def ask(self, line: Line, op: Op, blobs: Sequence[bytes], tail: bytes, answer: Answer) -> None:
        """A request that is answered at once."""
        if op is Op.ADD:
            self._add(line, blobs[0], unpack_i64(tail)[0], answer)
        elif op in _SHARED and (op is not Op.SET or len(blobs[1]) <= _SHORT):
            self._share(line, op, blobs, answer)
        else:
            self._put(line, PlainSlot(op, blobs, tail, answer), blobs)

    def _share(self, line: Line, op: Op, blobs: Sequence[bytes], answer: Answer) -> None:
        name = (op, *blobs)
        slot = self._find(line, name)
        if slot is None:
            slot = self._joinable[name] = SharedSlot(self, op, blobs)
            self._put(line, slot, blobs)
        assert isinstance(slot, SharedSlot)
        slot.answers.append(answer)
        self._hold(slot, _JOIN_COST)

    def _add(self, line: Line, key: bytes, amount: int, answer: Answer) -> None:
        name = (Op.ADD, key)
        slot = self._find(line, name)
        if not isinstance(slot, AddSlot) or not slot.has_room(amount):
            slot = self._joinable[name] = AddSlot(self, key)
            self._put(line, slot, [key])
        slot.add(line, amount, answer)
        self._hold(slot, _JOIN_COST)

    def _hold(self, slot: Slot, cost: int) -> None:
        slot.cost += cost
        self.held_bytes += cost

    def add_alone(self, line: Line, key: bytes, amount: int, answer: Answer) -> None:
        """An ADD that nobody may join."""
        slot = AddSlot(self, key)
        slot.add(line, amount, answer)
        self._put(line, slot, [key])

    def wait(
        self, line: Line, presence: Presence, keys: Sequence[bytes], end: EndOfWait, *, in_turn: bool = False
    ) -> Waiter:
        """A wait; `end` is called when it is over, unless it is cancelled."""
        waiter = Waiter(line, presence, end)
        self._join_wait(waiter, tuple(keys), Op.WAIT_IN_TURN if in_turn else Op.WAIT)
        return waiter

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
        self._leave(slot.tag, 1, lambda _: self._drop(slot))

    def come_back(self, waiter: Waiter) -> None:
        """Who waits can pop again."""
        parked = self.parked.pop(waiter, None)
        if parked is not None:
            self._join_wait(waiter, *parked)

    def arrive(self, line: Line, key: bytes, size: int, weight: int, release: Answer) -> Arrival:
        """An arrival at a barrier; `release` is called with how many may go, as an i64, until all have."""
        name = (Op.ARRIVE, key, size)
        slot = self._find(line, name)
        if not isinstance(slot, ArriveSlot) or not slot.has_room(weight):
            slot = self._joinable[name] = ArriveSlot(key, size)
            self._put(line, slot, [key])
        arrival = Arrival(slot, weight, release)
        slot.arrivals[arrival] = None
        return arrival

    def leave(self, arrival: Arrival, count: int, answer: Callable[[int], None]) -> None:
        """Take back so many of an arrival; the answer is how many were not released before."""
        slot = arrival.slot
        count = min(count, arrival.count - arrival.leaving)
        if slot.batch:
            arrival.leaving += count
            self._leave(slot.tag, count, lambda left: self._left(arrival, count, left, answer))
            return
        arrival.count -= count
        if not arrival.count:
            del slot.arrivals[arrival]
        if not slot.arrivals:
            del self._unsent[slot]
            name = (Op.ARRIVE, slot.key, slot.size)
            if self._joinable.get(name) is slot:
                del self._joinable[name]
        answer(count)

    def pop_called(self, line: Line, call: Call, key: bytes, answer: Answer) -> None:
        """A pop by the one who was called to it."""
        self._put(line, PlainSlot(Op.POP_CALLED, [key], pack_u64(call.tag), answer), [key])

    def dismiss(self, call: Call) -> None:
        """Who was called will not pop."""
        self._leave(call.tag, 1, lambda _: None)

    # Sending

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def has_batch(self) -> bool:
        """Whether there is something to send, and nothing under way that it has to wait for."""
        return bool(self._unsent) and not self._open

    def take_batch(self, number: int, most_bytes: int, longest: int) -> list[bytes]:
        """Requests for the batch of that number: of so many bytes together, or one that is longer.

        One that is longer than `longest` is refused here: no batch has room for it.
        """
        requests: list[bytes] = []
        size = 0
        self.begin_batch(number)
        for slot in list(self._unsent):
            data = slot.encode()
            if len(data) > longest:
                self._refuse(slot, len(data), longest)
                continue
            size += 8 + len(data)
            if requests and size > most_bytes:
                break
            requests.append(data)
            del self._unsent[slot]
            slot.batch = self._batches
            slot.tag = self._tags
            self._tags += 1
            self._sent[slot.tag] = slot
            self._last_sent = slot.number
            self._open += slot.is_immediate
        self._joinable.clear()
        return requests

    def _refuse(self, slot: Slot, size: int, longest: int) -> None:
        """Tell those who asked that the store takes no request of that size."""
        del self._unsent[slot]
        self.held_bytes -= slot.cost
        message = f"a request of {size:,} bytes; the store takes {longest:,} from a relay at once"
        slot.take(Status.REFUSED, message.encode())

    def begin_batch(self, number: int) -> None:
        """A batch is sent, be it an empty one: who begins to wait from now on has begun after it."""
        self._batches = number

    def take(self, tag: int, status: Status, content: bytes) -> None:
        """An item has come."""
        slot = self._sent.get(tag)
        if slot is None:
            raise ProtocolError(f"an answer to request {tag}, which is not under way")
        if slot.is_immediate:
            self._open -= 1
            self.held_bytes -= slot.cost
            if slot.is_proof and status is not Status.REFUSED:
                self._proven = max(self._proven, slot.batch)
        if slot.take(status, content):
            self._sent.pop(tag, None)

    # Inside

    def _put(self, line: Line | None, slot: Slot, blobs: Sequence[bytes]) -> None:
        self._numbers += 1
        slot.number = self._numbers
        if line is not None:
            line.last = slot.number
        self._unsent[slot] = None
        if slot.is_immediate:
            self._hold(slot, _REQUEST_COST + sum(map(len, blobs)))

    def _find(self, line: Line, name: tuple[object, ...]) -> Slot | None:
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
            slot = WaitSlot(self, keys, op)
            self._put(waiter.line, slot, ())
            if op is Op.WAIT:
                self._waits[keys] = slot
        elif not slot.batch:
            waiter.line.last = slot.number
        waiter.slot = slot
        waiter.since = self._batches + 1
        slot.waiters[waiter] = None

    def end_wait(self, slot: WaitSlot, waiters: Sequence[Waiter], status: Status, content: bytes) -> None:
        """A wait is over upstream: for whom of those who share it?"""
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
                self._leave(slot.tag, 1, lambda _: None)
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

    def _leave(self, tag: int, count: int, answer: Callable[[int], None]) -> None:
        def take(status: Status, content: bytes) -> None:
            answer(unpack_i64(content)[0] if status is Status.DONE else 0)

        self._put(None, LeaveSlot(Op.LEAVE, (), pack_pair(tag, count), take), ())

    def _drop(self, slot: Slot) -> None:
        self._sent.pop(slot.tag, None)

    def _left(self, arrival: Arrival, asked: int, count: int, answer: Callable[[int], None]) -> None:
        slot = arrival.slot
        meant = slot.left(arrival, asked, count)
        if not slot.count:
            self._drop(slot)
        answer(meant)

    def check_invariants(self) -> None:
        for slot in self._unsent:
            assert not slot.batch
            assert not isinstance(slot, WaitSlot) or slot.waiters
            assert not isinstance(slot, ArriveSlot) or slot.count
        numbers = [slot.number for slot in self._unsent]
        assert numbers == sorted(numbers)
        assert all(slot in self._unsent for slot in self._joinable.values())
        assert self._open == sum(slot.is_immediate for slot in self._sent.values())
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
        self.known.check_invariants()
