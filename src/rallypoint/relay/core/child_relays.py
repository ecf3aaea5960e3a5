"""Relays on a relay: what their sessions ask is asked of the combiner, as a rank's requests are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from rallypoint.errors import ProtocolError
from rallypoint.relay.core.slots import Arrival, Call, Line, Waiter
from rallypoint.server.core.sessions import Session
from rallypoint.wire.encoding import pack_i64, unpack_i64, unpack_u64
from rallypoint.wire.opcodes import READY, Op
from rallypoint.wire.sessions import ANNOUNCED, Status, end_of_wait, parse_arrive, unpack_pair

if TYPE_CHECKING:
    from rallypoint.relay.core.relay import RelayCore

_ANNOUNCED: Final = [ANNOUNCED]


class _Line:
    """The order of one session's requests."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0


class _Wait:
    """A wait of a session; when a push has ended it, the call, until that is answered."""

    __slots__ = ("call", "waiter")

    def __init__(self) -> None:
        self.waiter: Waiter | None = None
        self.call: Call | None = None


class _Arrival:
    """Arrivals of a session at one barrier. While it is away they are taken back, and are parked here."""

    __slots__ = (
        "_answer",
        "_combine",
        "_core",
        "_handle",
        "_is_away",
        "_leaves",
        "_pending",
        "count",
        "parked",
    )

    def __init__(
        self,
        core: RelayCore,
        combine: Callable[[int, Callable[[Status, bytes], None]], Arrival],
        count: int,
        answer: Callable[[Status, bytes], None],
    ) -> None:
        self._core = core
        self._combine = combine
        self._answer = answer
        self._is_away = False
        self._pending = False  # whether it is not yet known how many could be taken back
        self._leaves: list[tuple[int, Callable[[int], None]]] = []  # that wait for that
        self.count = count  # not released, and not left
        self.parked = 0
        self._handle = combine(count, self._release)

    def _release(self, status: Status, content: bytes) -> None:
        self.count -= unpack_i64(content)[0] if status is Status.DONE else self.count
        self._answer(status, content)

    def leave(self, asked: int, answer: Callable[[int], None]) -> None:
        if self._pending:
            self._leaves.append((asked, answer))
        elif self._is_away:
            left = min(asked, self.parked)
            self.parked -= left
            self.count -= left
            answer(left)
        else:

            def left_upstream(left: int) -> None:
                self.count -= left
                answer(left)

            self._core.combiner.leave(self._handle, asked, left_upstream)

    def suspend(self) -> None:
        if self._is_away:
            return
        self._is_away = True
        if self._pending or not self.count:
            return
        self._pending = True
        self._core.combiner.leave(self._handle, self._handle.count - self._handle.leaving, self._park)

    def resume(self) -> None:
        self._is_away = False
        if not self._pending:
            self._arrive_again()

    def _park(self, left: int) -> None:
        self._pending = False
        self.parked += left
        is_away, self._is_away = self._is_away, True
        leaves, self._leaves = self._leaves, []
        for asked, answer in leaves:
            self.leave(asked, answer)
        self._is_away = is_away
        if not is_away:
            self._arrive_again()

    def _arrive_again(self) -> None:
        if self.parked:
            count, self.parked = self.parked, 0
            self._handle = self._combine(count, self._release)


class RelayCarrier:
    """Asks the combiner of one relay what its sessions ask."""

    __slots__ = ("_core", "_lines")

    def __init__(self, core: RelayCore) -> None:
        self._core = core
        self._lines: dict[Session, _Line] = {}

    def carry(self, session: Session, tag: int, op: Op, blobs: list[bytes], tail: bytes) -> None:
        line = self._lines.get(session)
        if line is None:
            line = self._lines[session] = _Line()
        own = _OWN.get(op)
        try:
            if own is not None:
                own(self, session, line, tag, blobs, tail)
                self._core.has_work()
            elif op is Op.CHECK and blobs == _ANNOUNCED:
                session.answer(tag, Status.DONE, READY)
            else:
                self._core.ask(line, op, blobs, tail, partial(session.answer, tag))
        except ProtocolError as error:
            session.answer(tag, Status.REFUSED, error.message.encode())

    def suspend(self, session: Session) -> None:
        for note in list(session.notes.values()):
            if isinstance(note, _Arrival):
                note.suspend()
        self._core.has_work()

    def resume(self, session: Session) -> None:
        for note in list(session.notes.values()):
            if isinstance(note, _Arrival):
                note.resume()
            elif note.waiter is not None:
                self._core.combiner.come_back(note.waiter)
        self._core.has_work()

    def forget(self, session: Session) -> None:
        self._lines.pop(session, None)
        notes, session.notes = session.notes, {}
        for note in notes.values():
            self._end(note, lambda _: None)
        self._core.has_work()

    # The operations that are not passed on as they are

    def _get(self, session: Session, line: Line, tag: int, blobs: list[bytes], _: bytes) -> None:
        self._read(session, line, tag, blobs, recalled=False)

    def _recall(self, session: Session, line: Line, tag: int, blobs: list[bytes], _: bytes) -> None:
        self._read(session, line, tag, blobs, recalled=True)

    def _read(self, session: Session, line: Line, tag: int, blobs: list[bytes], *, recalled: bool) -> None:
        def answer(status: Status, content: bytes) -> None:
            if status is Status.DONE:
                session.answer_read(tag, blobs[0], content, content, recalled=recalled)
            else:
                session.answer(tag, status, content)

        self._core.ask(line, Op.GET, blobs, b"", answer)

    def _wait(self, session: Session, line: Line, tag: int, keys: list[bytes], _: bytes) -> None:
        self._begin_wait(session, line, tag, keys, in_turn=False)

    def _wait_in_turn(self, session: Session, line: Line, tag: int, keys: list[bytes], _: bytes) -> None:
        self._begin_wait(session, line, tag, keys, in_turn=True)

    def _begin_wait(
        self, session: Session, line: Line, tag: int, keys: list[bytes], *, in_turn: bool
    ) -> None:
        note = session.notes[tag] = _Wait()

        def end(refusal: bytes | None, call: Call | None) -> None:
            note.waiter = None
            note.call = call
            if call is None:
                session.notes.pop(tag, None)
            if refusal is not None:
                session.answer(tag, Status.REFUSED, refusal)
            else:
                # When it ended upstream is known there alone.
                session.answer(tag, Status.CALLED if call is not None else Status.DONE, end_of_wait(0))

        note.waiter = self._core.combiner.wait(line, session, keys, end, in_turn=in_turn)

    def _arrive(self, session: Session, line: Line, tag: int, blobs: list[bytes], tail: bytes) -> None:
        size, weight = parse_arrive(tail)

        def answer(status: Status, content: bytes) -> None:
            if not note.count:
                session.notes.pop(tag, None)
            session.answer(tag, status, content)

        def combine(count: int, release: Callable[[Status, bytes], None]) -> Arrival:
            return self._core.combiner.arrive(line, blobs[0], size, count, release)

        note = session.notes[tag] = _Arrival(self._core, combine, weight, answer)

    def _leave(self, session: Session, _: Line, tag: int, __: list[bytes], tail: bytes) -> None:
        of, count = unpack_pair(tail)
        note = session.notes.get(of)

        def answer(left: int) -> None:
            if not isinstance(note, _Arrival) or not note.count:
                session.notes.pop(of, None)
            session.answer(tag, Status.DONE, pack_i64(left))

        if note is None:
            answer(0)
        elif isinstance(note, _Arrival):
            note.leave(count, answer)
        else:
            self._end(note, answer)

    def _end(self, note: _Wait | _Arrival, answer: Callable[[int], None]) -> None:
        if isinstance(note, _Arrival):
            note.leave(note.count, answer)
            return
        if note.waiter is not None:
            self._core.combiner.cancel(note.waiter)
        if note.call is not None:
            self._core.combiner.dismiss(note.call)
        answer(1)

    def _told(self, session: Session, _: Line, tag: int, blobs: list[bytes], __: bytes) -> None:
        session.take_told(blobs[0], self._core.clock())
        session.answer(tag, Status.DONE, b"")

    def _pop_called(self, session: Session, line: Line, tag: int, blobs: list[bytes], tail: bytes) -> None:
        note = session.notes.pop(unpack_u64(tail)[0], None)
        answer = partial(session.answer, tag)
        if isinstance(note, _Wait) and note.call is not None:
            self._core.combiner.pop_called(line, note.call, blobs[0], answer)
        else:
            self._core.ask(line, Op.QUEUE_POP, blobs, b"", answer)


_OWN: Final = {
    Op.GET: RelayCarrier._get,
    Op.RECALL: RelayCarrier._recall,
    Op.WAIT: RelayCarrier._wait,
    Op.WAIT_IN_TURN: RelayCarrier._wait_in_turn,
    Op.ARRIVE: RelayCarrier._arrive,
    Op.LEAVE: RelayCarrier._leave,
    Op.POP_CALLED: RelayCarrier._pop_called,
    Op.TOLD: RelayCarrier._told,
}
