"""The requests that a relay sends or has sent to its upstream, each for one client or for many.

A request knows how it reads on the wire, and what an answer means for the clients that share it. The combiner
decides who may share one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

from rallypoint.compiling import mypyc_attr
from rallypoint.errors import ProtocolError
from rallypoint.store.relay.core.values import KnownValues
from rallypoint.store.wire.encoding import I64_MAX, I64_MIN, encode, pack_i64
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.sessions import MOST_ARRIVALS, Status, arrive_tail, parse_count, parse_sum

_MOST_SUM: Final = 1 << 62
_MOST_JOINED: Final = 4096  # arrivals; they are gone through one by one


OnAnswer = Callable[[Status, bytes], None]
"""Takes the answer to a request that is answered at once."""

OnLeft = Callable[[int], None]
"""Takes how many of the arrivals that were taken back had not been released before."""


def ignore(*_: object) -> None:
    """For an answer that nobody needs."""


class RequestOrder:
    """Requests that are carried out one after the other: those of a client, or of a relay further down."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0  # the number of the request that its latest request is in


class UpstreamRequest(ABC):
    """One request to the store, for one or for many."""

    __slots__ = ("batch", "cost", "number", "pieces", "tag")

    is_immediate = True
    """Whether its answer comes at once, and ends it."""

    is_proof = True
    """Whether its answer shows that the store has carried it out, and all that was sent before."""

    def __init__(self) -> None:
        self.number = 0
        self.batch = 0  # in which it was sent; 0: in none yet
        self.tag = -1
        self.cost = 0
        self.pieces: list[bytes] | None = None  # of its answer, if that comes in pieces

    @abstractmethod
    def encode(self) -> bytes: ...

    @abstractmethod
    def receive(self, status: Status, content: bytes) -> bool:
        """Pass an answer on to the clients that asked; return whether it was the last one."""

    def receive_piece(self, content: bytes) -> None:
        """Pass on a piece of the answer: not the last one."""
        if self.pieces is None:
            self.pieces = []
        self.pieces.append(content)


class SingleRequest(UpstreamRequest):
    """A request that is for one alone."""

    __slots__ = ("_blobs", "_on_answer", "_op", "_tail")

    def __init__(self, op: Op, blobs: Sequence[bytes], tail: bytes, on_answer: OnAnswer) -> None:
        super().__init__()
        self._op = op
        self._blobs = blobs
        self._tail = tail
        self._on_answer = on_answer

    def encode(self) -> bytes:
        return encode(self._op, self._blobs, self._tail)

    def receive(self, status: Status, content: bytes) -> bool:
        self._on_answer(status, content)
        return True


class UnprovenRequest(SingleRequest):
    """A request that a relay on the way may answer itself: LEAVE, RELAY_REPORT."""

    __slots__ = ()

    is_proof = False


class SharedRequest(UpstreamRequest):
    """A read, or a short SET, for all clients that asked the same before it was sent."""

    __slots__ = ("_blobs", "_op", "askers")

    def __init__(self, op: Op, blobs: Sequence[bytes]) -> None:
        super().__init__()
        self._op = op
        self._blobs = blobs
        self.askers: list[OnAnswer] = []

    def encode(self) -> bytes:
        return encode(self._op, self._blobs, b"")

    def receive(self, status: Status, content: bytes) -> bool:
        for answer in self.askers:
            answer(status, content)
        return True


class SharedGet(SharedRequest):
    """A GET, or a RECALL of a value that is known."""

    __slots__ = ("_values",)

    def __init__(self, values: KnownValues, blobs: Sequence[bytes]) -> None:
        super().__init__(Op.GET, blobs)
        self._values = values

    def encode(self) -> bytes:
        if self._values.begin_recall(self._blobs[0]):
            self._op = Op.RECALL
        return super().encode()

    def receive(self, status: Status, content: bytes) -> bool:
        recalled, expected = self._op is Op.RECALL, self.pieces is not None
        content = self._values.learn(self._blobs[0], status, content, recalled=recalled, expected=expected)
        return super().receive(Status.DONE if status is Status.UNCHANGED else status, content)

    def receive_piece(self, content: bytes) -> None:
        if self.pieces is None:
            self._values.expect(self._blobs[0])
        super().receive_piece(content)


AskAlone = Callable[[RequestOrder, bytes, int, OnAnswer], None]


class CombinedAdd(UpstreamRequest):
    """An ADD of the sum; its result is dealt out in the order of arrival."""

    __slots__ = ("_ask_alone", "_key", "_parts", "_sum")

    def __init__(self, key: bytes, ask_alone: AskAlone) -> None:
        super().__init__()
        self._ask_alone = ask_alone
        self._key = key
        self._parts: list[tuple[RequestOrder, int, OnAnswer]] = []
        self._sum = 0

    def has_room(self, amount: int) -> bool:
        """Whether all results, one by one, lie between the first and the last."""
        same_sign = (amount >= 0) == (self._sum >= 0) or not amount or not self._sum
        return same_sign and abs(self._sum + amount) < _MOST_SUM

    def add(self, order: RequestOrder, amount: int, on_answer: OnAnswer) -> None:
        self._parts.append((order, amount, on_answer))
        self._sum += amount

    def encode(self) -> bytes:
        return encode(Op.ADD, [self._key], pack_i64(self._sum))

    def receive(self, status: Status, content: bytes) -> bool:
        if status is not Status.DONE:
            self._refuse(status, content)
            return True
        value = parse_sum(content) - self._sum
        if not I64_MIN <= value <= I64_MAX:
            raise ProtocolError(f"an ADD of {self._sum} is said to give {value + self._sum}")
        for _, amount, answer in self._parts:
            value += amount
            answer(status, pack_i64(value))
        return True

    def _refuse(self, status: Status, content: bytes) -> None:
        """The sum is too large, or the key holds no number: ask one by one, in orders that allow it."""
        free = {order for order, _, _ in self._parts if order.last == self.number}
        for order, amount, answer in self._parts:
            if len(self._parts) > 1 and order in free:
                self._ask_alone(order, self._key, amount, answer)
            else:
                answer(status, content)


class PopCall:
    """A push has called one of the waiting clients; it is to pop, or to say that it will not."""

    __slots__ = ("keys", "tag")

    def __init__(self, tag: int, keys: Sequence[bytes]) -> None:
        self.tag = tag
        self.keys = keys


@mypyc_attr(allow_interpreted_subclasses=True)
class Waiter(ABC):
    """One wait of one client, or of a relay further down."""

    __slots__ = ("order", "request", "since")

    def __init__(self, order: RequestOrder) -> None:
        self.order = order
        self.since = 0  # the first batch that could have been sent after it had begun
        self.request: SharedWait | None = None  # None: it is over, or is parked until its client is back

    @property
    def is_present(self) -> bool:
        """Whether it could pop now."""
        return True

    @abstractmethod
    def end(self, refusal: bytes | None, call: PopCall | None) -> None:
        """The wait is over: with the reason if it was refused, with a call if it was woken for one pop."""


OnWaitOver = Callable[["SharedWait", list[Waiter], Status, bytes], None]
"""What decides for whom a shared wait is over."""


class SharedWait(UpstreamRequest):
    """A wait that any number share."""

    __slots__ = ("_end", "is_leaving", "keys", "op", "waiters")

    is_immediate = False

    def __init__(self, keys: tuple[bytes, ...], op: Op, end: OnWaitOver) -> None:
        super().__init__()
        self._end = end
        self.keys = keys
        self.op = op
        self.waiters: dict[Waiter, None] = {}
        self.is_leaving = False

    def encode(self) -> bytes:
        return encode(self.op, self.keys, b"")

    def receive(self, status: Status, content: bytes) -> bool:
        waiters, self.waiters = self.waiters, {}
        for waiter in waiters:
            waiter.request = None
        if self.is_leaving:
            return status is not Status.CALLED  # the call goes with the leave that is under way
        self._end(self, list(waiters), status, content)
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class Arrival(ABC):
    """One client at one barrier, or a relay further down for its ranks. Given to `Combiner.arrive` once."""

    __slots__ = ("count", "early", "leaving", "request")

    request: CombinedArrival

    def __init__(self, count: int = 1) -> None:
        self.count = count  # not released, and not known to have left
        self.leaving = 0  # of these
        self.early = 0  # known to have left before the answer to its own leave

    @abstractmethod
    def release(self, status: Status, content: bytes) -> None:
        """Some may go: how many, as an i64. Or all were refused, with the reason."""


class CombinedArrival(UpstreamRequest):
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

    def receive(self, status: Status, content: bytes) -> bool:
        if status is not Status.DONE:
            for arrival in [*self.arrivals]:
                arrival.count = 0
                arrival.release(status, content)
            return True
        released = parse_count(content)
        # Who is about to leave is released last: the leave then finds the others gone, and not itself.
        for arrival in [*self.arrivals]:
            released -= self._release(arrival, min(released, arrival.count - arrival.leaving))
        for arrival in [*self.arrivals]:
            released -= self._release(arrival, min(released, arrival.count))
        return not self.count

    def left(self, arrival: Arrival, asked: int, count: int) -> int:
        """A leave was answered: `count` of the request have left. Return how many of those were meant."""
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
