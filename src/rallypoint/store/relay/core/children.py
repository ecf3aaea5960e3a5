"""Relays on a relay: what their sessions ask is asked of the combiner, as a rank's requests are. Pure."""

from __future__ import annotations

from functools import partial
from typing import Final

from rallypoint.errors import ProtocolError
from rallypoint.store.core.context import Rest
from rallypoint.store.core.sessions import Session
from rallypoint.store.core.turn import Turn
from rallypoint.store.relay.core.combining import Combiner
from rallypoint.store.relay.core.slots import Arrival, Call, OnLeft, RequestOrder, Waiter, ignore
from rallypoint.store.wire.encoding import pack_i64, unpack_i64, unpack_u64
from rallypoint.store.wire.opcodes import READY, Op
from rallypoint.store.wire.sessions import ANNOUNCED, Status, end_of_wait, parse_arrive, unpack_pair

_ANNOUNCED: Final = [ANNOUNCED]


class _Wait(Waiter):
    """A wait of a session; when a push has ended it, the call, until that is answered."""

    __slots__ = ("_session", "_tag", "call", "is_over")

    def __init__(self, session: Session, order: RequestOrder, tag: int) -> None:
        super().__init__(order)
        self._session = session
        self._tag = tag
        self.is_over = False
        self.call: Call | None = None

    @property
    def is_present(self) -> bool:
        return self._session.is_present

    def end(self, refusal: bytes | None, call: Call | None) -> None:
        session = self._session
        self.is_over = True
        self.call = call
        if call is None:
            session.notes.pop(self._tag, None)
        if refusal is not None:
            session.answer(self._tag, Status.REFUSED, refusal)
        else:
            # When it ended upstream is known there alone.
            session.answer(self._tag, Status.CALLED if call is not None else Status.DONE, end_of_wait(0))


class _Arrivals:
    """Arrivals of a session at one barrier. While it is away they are taken back, and are parked here."""

    __slots__ = (
        *("_combiner", "_handle", "_is_away", "_is_pending", "_leaves", "_name", "_order", "_session"),
        *("_tag", "count", "parked"),
    )

    def __init__(
        self,
        combiner: Combiner,
        session: Session,
        order: RequestOrder,
        tag: int,
        name: tuple[bytes, int],
        count: int,
    ) -> None:
        """`name` is the key and the size of the barrier."""
        self._combiner = combiner
        self._session = session
        self._order = order
        self._tag = tag
        self._name = name
        self._is_away = False
        self._is_pending = False  # whether it is not yet known how many could be taken back
        self._leaves: list[tuple[int, OnLeft]] = []  # that wait for that
        self.count = count  # not released, and not left
        self.parked = 0
        self._handle = self._arrive(count)

    def _arrive(self, count: int) -> _Handle:
        handle = _Handle(self, count)
        self._combiner.arrive(handle, self._order, *self._name)
        return handle

    def release(self, status: Status, content: bytes) -> None:
        self.count -= unpack_i64(content)[0] if status is Status.DONE else self.count
        if not self.count:
            self._session.notes.pop(self._tag, None)
        self._session.answer(self._tag, status, content)

    def leave(self, asked: int, on_left: OnLeft) -> None:
        """Take some back; `on_left` is to lower `count`."""
        if self._is_pending:
            self._leaves.append((asked, on_left))
        elif self._is_away:
            left = min(asked, self.parked)
            self.parked -= left
            on_left(left)
        else:
            self._combiner.leave(self._handle, asked, on_left)

    def suspend(self) -> None:
        if self._is_away:
            return
        self._is_away = True
        if self._is_pending or not self.count:
            return
        self._is_pending = True
        handle = self._handle
        self._combiner.leave(handle, handle.count - handle.leaving, self._taken_back)

    def resume(self) -> None:
        self._is_away = False
        if not self._is_pending:
            self._arrive_again()

    def _taken_back(self, count: int) -> None:
        """Of the arrivals of a session that is away, this many could be taken back."""
        self._is_pending = False
        self.parked += count
        is_away, self._is_away = self._is_away, True
        leaves, self._leaves = self._leaves, []
        for asked, on_left in leaves:
            self.leave(asked, on_left)
        self._is_away = is_away
        if not is_away:
            self._arrive_again()

    def _arrive_again(self) -> None:
        if self.parked:
            count, self.parked = self.parked, 0
            self._handle = self._arrive(count)


class _Handle(Arrival):
    """Arrivals of a session as the combiner knows them."""

    __slots__ = ("_arrivals",)

    def __init__(self, arrivals: _Arrivals, count: int) -> None:
        super().__init__(count)
        self._arrivals = arrivals

    def release(self, status: Status, content: bytes) -> None:
        self._arrivals.release(status, content)


class RelayCarrier:
    """Asks the combiner of one relay what its sessions ask."""

    __slots__ = ("_orders", "_turn", "combiner")

    def __init__(self, combiner: Combiner, turn: Turn) -> None:
        self.combiner = combiner
        self._turn = turn
        self._orders: dict[Session, RequestOrder] = {}

    def carry(self, session: Session, tag: int, op: Op, blobs: list[bytes], tail: bytes) -> None:
        order = self._orders.get(session)
        if order is None:
            order = self._orders[session] = RequestOrder()
        own = _OWN.get(op)
        try:
            if own is not None:
                own(self, session, order, tag, op, blobs, tail)
            elif op is Op.CHECK and blobs == _ANNOUNCED:
                session.answer(tag, Status.DONE, READY)
            else:
                self.combiner.ask(order, op, blobs, tail, partial(session.answer, tag))
        except ProtocolError as error:
            session.answer(tag, Status.REFUSED, error.message.encode())

    def suspend(self, session: Session) -> Rest:
        for note in session.notes_in_slices():
            if note is None:
                yield
            elif isinstance(note, _Arrivals):
                note.suspend()

    def resume(self, session: Session) -> Rest:
        for note in session.notes_in_slices():
            if note is None:
                yield
            elif isinstance(note, _Arrivals):
                note.resume()
            elif not note.is_over:
                self.combiner.ask_again(note)

    def forget(self, session: Session) -> Rest:
        self._orders.pop(session, None)
        for note in session.notes_in_slices():
            if note is None:
                yield
            else:
                self._end(note, ignore)
        session.notes.clear()

    # The operations that are not passed on as they are

    def _read(
        self, session: Session, order: RequestOrder, tag: int, op: Op, blobs: list[bytes], _tail: bytes
    ) -> None:
        def answer(status: Status, content: bytes) -> None:
            if status is Status.DONE:
                session.answer_read(tag, blobs[0], content, content, recalled=op is Op.RECALL)
            else:
                session.answer(tag, status, content)

        self.combiner.ask(order, Op.GET, blobs, b"", answer)

    def _wait(
        self, session: Session, order: RequestOrder, tag: int, op: Op, keys: list[bytes], _tail: bytes
    ) -> None:
        note = session.notes[tag] = _Wait(session, order, tag)
        self.combiner.wait(note, keys, op)

    def _arrive(
        self, session: Session, order: RequestOrder, tag: int, _op: Op, blobs: list[bytes], tail: bytes
    ) -> None:
        size, weight = parse_arrive(tail)
        session.notes[tag] = _Arrivals(self.combiner, session, order, tag, (blobs[0], size), weight)

    def _leave(
        self, session: Session, _order: RequestOrder, tag: int, _op: Op, _blobs: list[bytes], tail: bytes
    ) -> None:
        of, count = unpack_pair(tail)
        note = session.notes.get(of)

        def left(gone: int) -> None:
            if isinstance(note, _Arrivals):
                note.count -= gone
            if not isinstance(note, _Arrivals) or not note.count:
                session.notes.pop(of, None)
            session.answer(tag, Status.DONE, pack_i64(gone))

        if note is None:
            left(0)
        elif isinstance(note, _Arrivals):
            note.leave(count, left)
        else:
            self._end(note, left)

    def _end(self, note: _Wait | _Arrivals, on_left: OnLeft) -> None:
        if isinstance(note, _Arrivals):
            note.leave(note.count, on_left)
            return
        if not note.is_over:
            self.combiner.cancel(note)
        if note.call is not None:
            self.combiner.dismiss(note.call)
        on_left(1)

    def _told(
        self, session: Session, _order: RequestOrder, tag: int, _op: Op, blobs: list[bytes], _tail: bytes
    ) -> None:
        session.store_report(blobs[0], self._turn.now)
        session.answer(tag, Status.DONE, b"")

    def _pop_called(
        self, session: Session, order: RequestOrder, tag: int, _op: Op, blobs: list[bytes], tail: bytes
    ) -> None:
        of = unpack_u64(tail)[0]
        note = session.notes.get(of)
        answer = partial(session.answer, tag)
        if isinstance(note, _Wait) and note.call is not None:
            del session.notes[of]
            self.combiner.pop_called(order, note.call, blobs[0], answer)
        else:
            self.combiner.ask(order, Op.QUEUE_POP, blobs, b"", answer)


_OWN: Final = {
    Op.GET: RelayCarrier._read,
    Op.RECALL: RelayCarrier._read,
    Op.WAIT: RelayCarrier._wait,
    Op.WAIT_IN_TURN: RelayCarrier._wait,
    Op.ARRIVE: RelayCarrier._arrive,
    Op.LEAVE: RelayCarrier._leave,
    Op.POP_CALLED: RelayCarrier._pop_called,
    Op.TOLD: RelayCarrier._told,
}
