"""Relays on a relay: what their sessions ask goes to the combiner, as a client's requests do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from rallypoint.errors import ProtocolError
from rallypoint.store.core.context import Rest
from rallypoint.store.core.sessions import Session
from rallypoint.store.core.turn import Turn
from rallypoint.store.relay.core.combining import Combiner
from rallypoint.store.relay.core.upstream_requests import (
    Arrival,
    OnLeft,
    PopCall,
    RequestOrder,
    Waiter,
    ignore,
)
from rallypoint.store.wire.encoding import pack_i64, unpack_i64, unpack_u64
from rallypoint.store.wire.opcodes import READY, Op
from rallypoint.store.wire.sessions import (
    ANNOUNCED,
    MOST_ARRIVALS,
    Status,
    end_of_wait,
    parse_arrive,
    unpack_pair,
)

_ANNOUNCED: Final = [ANNOUNCED]


class Downstream:
    """One session of a relay below, and what it asks of the combiner."""

    __slots__ = ("_turn", "combiner", "order", "session")

    def __init__(self, session: Session, combiner: Combiner, turn: Turn) -> None:
        self.session = session
        self.combiner = combiner
        self.order = RequestOrder()
        self._turn = turn

    # The operations that are not passed on as they are

    def _read(self, tag: int, op: Op, blobs: list[bytes], _: bytes) -> None:
        session = self.session

        def answer(status: Status, content: bytes) -> None:
            if status is Status.DONE:
                session.answer_read(tag, blobs[0], content, content, recalled=op is Op.RECALL)
            else:
                session.answer(tag, status, content)

        self.combiner.ask(self.order, Op.GET, blobs, b"", answer)

    def _wait(self, tag: int, op: Op, keys: list[bytes], _: bytes) -> None:
        note = self.session.notes[tag] = _Wait(self, tag)
        self.combiner.wait(note, keys, op)

    def _arrive(self, tag: int, _: Op, blobs: list[bytes], tail: bytes) -> None:
        size, count = parse_arrive(tail)
        self.session.notes[tag] = _Arrivals(self, tag, (blobs[0], size), count)

    def _leave(self, tag: int, _: Op, __: list[bytes], tail: bytes) -> None:
        of, count = unpack_pair(tail)
        note = self.session.notes.get(of)

        def left(gone: int) -> None:
            self.session.answer(tag, Status.DONE, pack_i64(gone))

        if note is None:
            left(0)
        else:
            note.leave(count, left)

    def _told(self, tag: int, _: Op, blobs: list[bytes], __: bytes) -> None:
        self.session.store_report(blobs[0], self._turn.now)
        self.session.answer(tag, Status.DONE, b"")

    def _pop_called(self, tag: int, _: Op, blobs: list[bytes], tail: bytes) -> None:
        notes, of = self.session.notes, unpack_u64(tail)[0]
        note = notes.get(of)
        answer = partial(self.session.answer, tag)
        if isinstance(note, _Wait) and note.call is not None:
            del notes[of]
            self.combiner.pop_called(self.order, note.call, blobs[0], answer)
        else:
            self.combiner.ask(self.order, Op.QUEUE_POP, blobs, b"", answer)


_OWN: Final = {
    Op.GET: Downstream._read,
    Op.RECALL: Downstream._read,
    Op.WAIT: Downstream._wait,
    Op.WAIT_IN_TURN: Downstream._wait,
    Op.ARRIVE: Downstream._arrive,
    Op.LEAVE: Downstream._leave,
    Op.POP_CALLED: Downstream._pop_called,
    Op.RELAY_REPORT: Downstream._told,
}


class _Wait(Waiter):
    """A wait of a session; when a push has ended it, the call, until that is answered."""

    __slots__ = ("_downstream", "_is_over", "_tag", "call")

    def __init__(self, downstream: Downstream, tag: int) -> None:
        super().__init__(downstream.order)
        self._downstream = downstream
        self._tag = tag
        self._is_over = False
        self.call: PopCall | None = None

    @property
    def is_present(self) -> bool:
        return self._downstream.session.is_present

    def end(self, refusal: bytes | None, call: PopCall | None) -> None:
        session = self._downstream.session
        self._is_over = True
        self.call = call
        if call is None:
            session.notes.pop(self._tag, None)
        if refusal is not None:
            session.answer(self._tag, Status.REFUSED, refusal)
        else:
            # When it ended upstream is known there alone.
            session.answer(self._tag, Status.CALLED if call is not None else Status.DONE, end_of_wait(0))

    def leave(self, _: int, on_left: OnLeft) -> None:
        self._downstream.session.notes.pop(self._tag, None)
        if not self._is_over:
            self._downstream.combiner.cancel(self)
        if self.call is not None:
            self._downstream.combiner.dismiss(self.call)
        on_left(1)

    def suspend(self) -> None:
        """It stays: `is_present` says that it is not to be called."""

    def resume(self) -> None:
        if not self._is_over:
            self._downstream.combiner.ask_again(self)


class _Arrivals:
    """Arrivals of a session at one barrier. While it is away they are taken back, and kept here."""

    __slots__ = ("_arrival", "_count", "_downstream", "_is_away", "_is_pending", "_leaves", "_name", "_tag")

    _arrival: Arrival

    def __init__(self, downstream: Downstream, tag: int, name: tuple[bytes, int], count: int) -> None:
        """`name` is the key and the size of the barrier."""
        self._downstream = downstream
        self._tag = tag
        self._name = name
        self._is_away = False
        self._is_pending = False  # whether they are being taken back
        self._leaves: list[tuple[int, OnLeft]] = []  # that wait for the end of that
        self._count = count  # not released, and not left
        self._arrive()

    def _arrive(self) -> None:
        if self._count:
            self._arrival = _Arrival(self, self._count)
            self._downstream.combiner.arrive(self._arrival, self._downstream.order, *self._name)

    def release(self, status: Status, content: bytes) -> None:
        self._lower(unpack_i64(content)[0] if status is Status.DONE else self._count)
        self._downstream.session.answer(self._tag, status, content)

    def _lower(self, count: int) -> None:
        self._count -= count
        if not self._count:
            self._downstream.session.notes.pop(self._tag, None)

    def leave(self, asked: int, on_left: OnLeft) -> None:
        if self._is_pending:
            self._leaves.append((asked, on_left))
        elif self._is_away:
            self._left(on_left, min(asked, self._count))
        else:
            self._downstream.combiner.leave(self._arrival, asked, partial(self._left, on_left))

    def _left(self, on_left: OnLeft, count: int) -> None:
        self._lower(count)
        on_left(count)

    def suspend(self) -> None:
        if self._is_away:
            return
        self._is_away = True
        if self._is_pending or not self._count:
            return
        self._is_pending = True
        arrival = self._arrival
        self._downstream.combiner.leave(arrival, arrival.count - arrival.leaving, self._taken_back)

    def resume(self) -> None:
        was_away, self._is_away = self._is_away, False
        if was_away and not self._is_pending:
            self._arrive()

    def _taken_back(self, _: int) -> None:
        """All that had not been released are taken back."""
        self._is_pending = False
        leaves, self._leaves = self._leaves, []
        for asked, on_left in leaves:
            self._left(on_left, min(asked, self._count))
        if not self._is_away:
            self._arrive()


class _Arrival(Arrival):
    """Arrivals of a session as the combiner knows them."""

    __slots__ = ("_arrivals",)

    def __init__(self, arrivals: _Arrivals, count: int) -> None:
        super().__init__(count)
        self._arrivals = arrivals

    def release(self, status: Status, content: bytes) -> None:
        self._arrivals.release(status, content)


class RelayCarrier:
    """Asks the combiner of one relay what the sessions of relays below ask."""

    __slots__ = ("_sessions", "_turn", "combiner")

    def __init__(self, combiner: Combiner, turn: Turn) -> None:
        self.combiner = combiner
        self._turn = turn
        self._sessions: dict[Session, Downstream] = {}

    def carry(self, session: Session, tag: int, op: Op, blobs: list[bytes], tail: bytes) -> None:
        downstream = self._sessions.get(session)
        if downstream is None:
            downstream = self._sessions[session] = Downstream(session, self.combiner, self._turn)
        own = _OWN.get(op)
        try:
            if own is not None:
                own(downstream, tag, op, blobs, tail)
            elif op is Op.CHECK and blobs == _ANNOUNCED:
                session.answer(tag, Status.DONE, READY)
            else:
                self.combiner.ask(downstream.order, op, blobs, tail, partial(session.answer, tag))
        except ProtocolError as error:
            session.answer(tag, Status.REFUSED, error.message.encode())

    def suspend(self, session: Session) -> Rest:
        return _for_each(session, lambda note: note.suspend())

    def resume(self, session: Session) -> Rest:
        return _for_each(session, lambda note: note.resume())

    def forget(self, session: Session) -> Rest:
        self._sessions.pop(session, None)
        yield from _for_each(session, lambda note: note.leave(MOST_ARRIVALS, ignore))
        session.notes.clear()


def _for_each(session: Session, do: Callable[[_Wait | _Arrivals], None]) -> Rest:
    """Go through all that a session waits for, a slice at a time."""
    for note in session.notes_in_slices():
        if note is None:
            yield
        else:
            do(note)
