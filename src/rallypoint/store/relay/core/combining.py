"""Combines the requests of a relay's clients on their way to the store. `relay` has the theory.

The owner of a Combiner sends what `take_batch` returns, and passes the answers to `take`. The outbox says
when there is something to send, and when clients are not to be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final

from rallypoint.errors import ProtocolError
from rallypoint.store.core.context import Context, DriverTask, Rest
from rallypoint.store.relay.core.upstream_requests import (
    Arrival,
    CombinedAdd,
    CombinedArrival,
    OnAnswer,
    OnLeft,
    PopCall,
    RequestOrder,
    SharedGet,
    SharedRequest,
    SharedWait,
    SingleRequest,
    UnprovenRequest,
    UpstreamRequest,
    Waiter,
    ignore,
)
from rallypoint.store.relay.core.values import KnownValues
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
        *("_waits", "held_bytes", "parked", "replies_due", "values"),
    )

    def __init__(self, context: Context) -> None:
        self._limit = context.limits.relayed_bytes
        self._others = context.outbox.others
        self._numbers = 0
        self._tags = 0
        self._batches = 0
        self._proven = 0  # a request of this batch has been answered: all before it has been carried out
        self._open = 0  # immediate requests under way, but for those whose answers come in pieces
        self._last_sent = 0  # the number of the last request that was sent
        self._unsent: dict[UpstreamRequest, None] = {}
        self._unsent_bytes = 0  # the cost of these
        self._sent: dict[int, UpstreamRequest] = {}
        self._joinable: dict[tuple[object, ...], UpstreamRequest] = {}  # of those that are not sent
        self._waits: dict[tuple[bytes, ...], SharedWait] = {}  # that may be joined, sent or not
        self._leaving: deque[Rest] = deque()  # of clients that waited for very much
        self._is_due = False
        self._is_pressed = False
        self._is_crowded = False
        self.parked: dict[Waiter, tuple[bytes, ...]] = {}
        """Those of sessions that are away and would wait in turn: for which keys."""
        self.values = KnownValues()
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
            self._put(order, SingleRequest(op, blobs, tail, on_answer), blobs)

    def _share(self, order: RequestOrder, op: Op, blobs: Sequence[bytes], on_answer: OnAnswer) -> None:
        name = (op, *blobs)
        request = self._find(order, name)
        if request is None:
            request = SharedGet(self.values, blobs) if op is Op.GET else SharedRequest(op, blobs)
            self._joinable[name] = request
            self._put(order, request, blobs)
        assert isinstance(request, SharedRequest)
        request.askers.append(on_answer)
        self._hold(request, _JOIN_COST)

    def _add(self, order: RequestOrder, key: bytes, amount: int, on_answer: OnAnswer) -> None:
        name = (Op.ADD, key)
        request = self._find(order, name)
        if not isinstance(request, CombinedAdd) or not request.has_room(amount):
            request = self._joinable[name] = CombinedAdd(key, self._add_alone)
            self._put(order, request, [key])
        request.add(order, amount, on_answer)
        self._hold(request, _JOIN_COST)

    def _add_alone(self, order: RequestOrder, key: bytes, amount: int, on_answer: OnAnswer) -> None:
        """An ADD that nobody may join."""
        request = CombinedAdd(key, self._add_alone)
        request.add(order, amount, on_answer)
        self._put(order, request, [key])

    def wait(self, waiter: Waiter, keys: Sequence[bytes], op: Op = Op.WAIT) -> None:
        """A WAIT or a WAIT_IN_TURN; the waiter's `end` is called when it is over, unless it is cancelled."""
        name = tuple(keys)
        last = waiter.order.last
        request = self._waits.get(name) if op is Op.WAIT else None
        if request is not None and request.batch:
            # Of several keys, one may have come before this wait began, and be gone. And an earlier request
            # of the waiter's order may be left for a batch after the next one.
            may_join = len(name) == 1 and last <= self._last_sent
        else:
            may_join = request is not None and request.number >= last
        if request is None or not may_join:
            request = SharedWait(name, op, self._end_wait)
            self._put(waiter.order, request, ())
            if op is Op.WAIT:
                self._waits[name] = request
        self._let_share(request, waiter)

    def _let_share(self, request: SharedWait, waiter: Waiter) -> None:
        if not request.batch:
            waiter.order.last = request.number
        waiter.request = request
        waiter.since = self._batches + 1
        request.waiters[waiter] = None

    def cancel(self, waiter: Waiter) -> None:
        """End a wait before it is over."""
        self.parked.pop(waiter, None)
        request, waiter.request = waiter.request, None
        if request is None:
            return
        del request.waiters[waiter]
        if request.waiters:
            return
        if self._waits.get(request.keys) is request:
            del self._waits[request.keys]
        if not request.batch:
            self._drop_unsent(request)
            return
        request.is_leaving = True
        self._leave(request.tag, 1, partial(self._drop_sent, request))

    def ask_again(self, waiter: Waiter) -> None:
        """The client that waits can pop again."""
        keys = self.parked.pop(waiter, None)
        if keys is not None:
            self.wait(waiter, keys, Op.WAIT_IN_TURN)

    def arrive(self, arrival: Arrival, order: RequestOrder, key: bytes, size: int) -> None:
        """An arrival at a barrier; its `release` is called until all for whom it stands may go."""
        name = (Op.ARRIVE, key, size)
        request = self._find(order, name)
        if not isinstance(request, CombinedArrival) or not request.has_room(arrival.count):
            request = self._joinable[name] = CombinedArrival(key, size)
            self._put(order, request, [key])
        arrival.request = request
        request.arrivals[arrival] = None

    def leave(self, arrival: Arrival, count: int, on_left: OnLeft) -> None:
        """Take back a part of an arrival."""
        request = arrival.request
        count = min(count, arrival.count - arrival.leaving)
        if request.batch:
            arrival.leaving += count
            self._leave(request.tag, count, partial(self._left, arrival, count, on_left))
            return
        arrival.count -= count
        if not arrival.count:
            del request.arrivals[arrival]
        if not request.arrivals:
            self._drop_unsent(request)
            name = (Op.ARRIVE, request.key, request.size)
            if self._joinable.get(name) is request:
                del self._joinable[name]
        on_left(count)

    def _left(self, arrival: Arrival, asked: int, on_left: OnLeft, status: Status, content: bytes) -> None:
        """Arrivals that were sent have been taken back, unless they had been released before."""
        request = arrival.request
        meant = request.left(arrival, asked, parse_count(content) if status is Status.DONE else 0)
        if not request.count:
            self._drop_sent(request)
        on_left(meant)

    def pop_called(self, order: RequestOrder, call: PopCall, key: bytes, on_answer: OnAnswer) -> None:
        """A pop by the client that was called to it."""
        self._put(order, SingleRequest(Op.POP_CALLED, [key], pack_u64(call.tag), on_answer), [key])

    def send_report(self, report: bytes) -> None:
        """Tell the other side what this relay knows."""
        self._put(None, UnprovenRequest(Op.RELAY_REPORT, [report], b"", ignore), [report])

    def dismiss(self, call: PopCall) -> None:
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
        for request in list(self._unsent):
            data = request.encode()
            if len(data) > longest:
                self._refuse(request, len(data), longest)
                continue
            size += 8 + len(data)
            cost += request.cost + _REQUEST_COST
            if requests and (size > most_bytes or cost > _BATCH_COST):
                break
            requests.append(data)
            del self._unsent[request]
            self._unsent_bytes -= request.cost
            request.batch = self._batches
            request.tag = self._tags
            self._tags += 1
            self._sent[request.tag] = request
            self._last_sent = request.number
            self._open += request.is_immediate
        self._joinable.clear()
        return requests

    def _refuse(self, request: UpstreamRequest, size: int, longest: int) -> None:
        """Tell the clients that asked that the store takes no request of that size."""
        del self._unsent[request]
        self._unsent_bytes -= request.cost
        self.held_bytes -= request.cost
        message = f"a request of {size:,} bytes; the store takes {longest:,} from a relay at once"
        request.receive(Status.REFUSED, message.encode())

    def begin_batch(self, number: int) -> None:
        """A batch is sent, be it an empty one: a wait that begins from now on has begun after it."""
        self._batches = number

    def receive(self, tag: int, status: Status, content: bytes) -> None:
        """An answer has arrived."""
        request = self._sent.get(tag)
        if request is None:
            raise ProtocolError(f"an answer to request {tag}, which is not under way")
        if request.is_immediate and request.pieces is None:
            self._open -= 1
            if request.is_proof and status is not Status.REFUSED:
                self._proven = max(self._proven, request.batch)
        if status is Status.PIECE:
            request.receive_piece(content)
            return
        if request.is_immediate:
            self.held_bytes -= request.cost
        if request.pieces is not None:
            content = b"".join([*request.pieces, content])
        if request.receive(status, content):
            self._sent.pop(tag, None)

    # Inside

    def _put(self, order: RequestOrder | None, request: UpstreamRequest, blobs: Sequence[bytes]) -> None:
        self._numbers += 1
        request.number = self._numbers
        if order is not None:
            order.last = request.number
        self._unsent[request] = None
        self.mark_due()
        if request.is_immediate:
            self._hold(request, _REQUEST_COST + sum(map(len, blobs)))
        else:
            self._check_pressure()

    def _hold(self, request: UpstreamRequest, cost: int) -> None:
        """A request that is not sent takes more."""
        request.cost += cost
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

    def _drop_unsent(self, request: UpstreamRequest) -> None:
        """Nobody needs a wait or an arrival any more that was not sent."""
        del self._unsent[request]
        self._check_pressure()

    def _drop_sent(self, request: UpstreamRequest, *_: object) -> None:
        """Nothing more comes for a request that was sent."""
        self._sent.pop(request.tag, None)

    def _find(self, order: RequestOrder, name: tuple[object, ...]) -> UpstreamRequest | None:
        """What a request of that name may join: behind all earlier requests of its order."""
        request = self._joinable.get(name)
        if request is None or request.number < order.last:
            return None
        order.last = request.number
        return request

    def _end_wait(self, request: SharedWait, waiters: list[Waiter], status: Status, content: bytes) -> None:
        """A wait is over upstream: end those that had begun before that, and ask for the others anew."""
        if self._waits.get(request.keys) is request:
            del self._waits[request.keys]
        if status is Status.REFUSED:
            for waiter in waiters:
                waiter.end(content, None)
            return
        proven = max(request.batch, self._proven, parse_end_of_wait(content))
        if status is Status.CALLED:
            self._call_one(request, waiters, proven)
            return
        for waiter in waiters:
            if waiter.since <= proven:
                waiter.end(None, None)
        for waiter in waiters:
            if waiter.since > proven:
                self.wait(waiter, request.keys)

    def _call_one(self, request: SharedWait, waiters: list[Waiter], proven: int) -> None:
        """A push has ended a wait: call one client, and have the others wait again, in turn."""
        called = next((each for each in waiters if each.since <= proven and each.is_present), None)
        if called is None:
            self._leave(request.tag, 1, ignore)
        else:
            called.end(None, PopCall(request.tag, request.keys))
        in_turn: SharedWait | None = None
        for waiter in waiters:
            if waiter is called:
                continue
            if not waiter.is_present:
                self.parked[waiter] = request.keys
            elif in_turn is None:
                self.wait(waiter, request.keys, Op.WAIT_IN_TURN)
                in_turn = waiter.request
            else:
                self._let_share(in_turn, waiter)

    def _leave(self, tag: int, count: int, on_answer: OnAnswer) -> None:
        self._put(None, UnprovenRequest(Op.LEAVE, (), pack_pair(tag, count), on_answer), ())

    def check_invariants(self) -> None:
        for request in self._unsent:
            assert not request.batch
            assert not isinstance(request, SharedWait) or request.waiters
            assert not isinstance(request, CombinedArrival) or request.count
        numbers = [request.number for request in self._unsent]
        assert numbers == sorted(numbers)
        assert all(request in self._unsent for request in self._joinable.values())
        sent = self._sent.values()
        assert self._open == sum(request.is_immediate and request.pieces is None for request in sent)
        for tag, request in self._sent.items():
            assert request.tag == tag
            assert 0 < request.batch <= self._batches
            if isinstance(request, SharedWait):
                assert bool(request.waiters) != request.is_leaving
            if isinstance(request, CombinedArrival):
                assert request.count
                assert all(arrival.count >= 0 for arrival in request.arrivals)
        requests = [*self._unsent, *self._sent.values()]
        for keys, wait in self._waits.items():
            assert wait in requests
            assert wait.keys == keys
            assert not wait.is_leaving
        for request in requests:
            if isinstance(request, SharedWait):
                assert all(waiter.request is request for waiter in request.waiters)
        assert self.held_bytes == sum(request.cost for request in requests)
        assert self._unsent_bytes == sum(request.cost for request in self._unsent)
        self.values.check_invariants()
