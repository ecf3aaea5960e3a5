"""Relays on a relay: what their sessions ask is asked of the combiner, as a rank's requests are. Pure."""

from __future__ import annotations

from typing import Final

from rallypoint.errors import ProtocolError
from rallypoint.store.core.sessions import Session
from rallypoint.store.core.slices import Rest
from rallypoint.store.core.turn import Turn
from rallypoint.store.relay.core.combining import Requests
from rallypoint.store.relay.core.slots import NOBODY, Arrival, Call, Leaver, RequestOrder, Waiter
from rallypoint.store.wire.encoding import pack_i64, unpack_i64, unpack_u64
from rallypoint.store.wire.opcodes import READY, Op
from rallypoint.store.wire.sessions import ANNOUNCED, Status, end_of_wait, parse_arrive, unpack_pair

_ANNOUNCED: Final = [ANNOUNCED]


class _Line:
    """The order of one session's requests."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0


class _Request:
    """A request of a session that is passed on."""

    __slots__ = ("_session", "_tag")

    def __init__(self, session: Session, tag: int) -> None:
        self._session = session
        self._tag = tag

    def answer(self, status: Status, content: bytes) -> None:
        self._session.answer(self._tag, status, content)


class _Read(_Request):
    """A read: the session may know the value already."""

    __slots__ = ("_is_recalled", "_key")

    def __init__(self, session: Session, tag: int, key: bytes, *, is_recalled: bool) -> None:
        super().__init__(session, tag)
        self._key = key
        self._is_recalled = is_recalled

    def answer(self, status: Status, content: bytes) -> None:
        if status is Status.DONE:
            self._session.answer_read(self._tag, self._key, content, content, recalled=self._is_recalled)
        else:
            super().answer(status, content)


class _Wait(Waiter):
    """A wait of a session; when a push has ended it, the call, until that is answered."""

    __slots__ = ("_session", "_tag", "call", "is_over")

    def __init__(self, session: Session, line: RequestOrder, tag: int) -> None:
        super().__init__(line, session)
        self._session = session
        self._tag = tag
        self.is_over = False
        self.call: Call | None = None

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
        *("_handle", "_is_away", "_is_pending", "_leaves", "_line", "_name", "_requests", "_session", "_tag"),
        *("count", "parked"),
    )

    def __init__(
        self,
        requests: Requests,
        session: Session,
        line: RequestOrder,
        tag: int,
        name: tuple[bytes, int],
        count: int,
    ) -> None:
        """`name` is the key and the size of the barrier."""
        self._requests = requests
        self._session = session
        self._line = line
        self._tag = tag
        self._name = name
        self._is_away = False
        self._is_pending = False  # whether it is not yet known how many could be taken back
        self._leaves: list[tuple[int, Leaver]] = []  # that wait for that
        self.count = count  # not released, and not left
        self.parked = 0
        self._handle = self._arrive(count)

    def _arrive(self, count: int) -> _Handle:
        handle = _Handle(self, count)
        self._requests.combiner.arrive(handle, self._line, *self._name)
        return handle

    def release(self, status: Status, content: bytes) -> None:
        self.count -= unpack_i64(content)[0] if status is Status.DONE else self.count
        if not self.count:
            self._session.notes.pop(self._tag, None)
        self._session.answer(self._tag, status, content)

    def leave(self, asked: int, leaver: Leaver) -> None:
        """Take some back; the leaver, unless it is nobody, lowers `count`."""
        if self._is_pending:
            self._leaves.append((asked, leaver))
        elif self._is_away:
            left = min(asked, self.parked)
            self.parked -= left
            leaver.left(left)
        else:
            self._requests.combiner.leave(self._handle, asked, leaver)

    def suspend(self) -> None:
        if self._is_away:
            return
        self._is_away = True
        if self._is_pending or not self.count:
            return
        self._is_pending = True
        handle = self._handle
        self._requests.combiner.leave(handle, handle.count - handle.leaving, self)

    def resume(self) -> None:
        self._is_away = False
        if not self._is_pending:
            self._arrive_again()

    def left(self, count: int) -> None:
        """Of the arrivals of a session that is away, this many could be taken back."""
        self._is_pending = False
        self.parked += count
        is_away, self._is_away = self._is_away, True
        leaves, self._leaves = self._leaves, []
        for asked, leaver in leaves:
            self.leave(asked, leaver)
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


class _Left:
    """The answer to a LEAVE of a session."""

    __slots__ = ("_note", "_of", "_session", "_tag")

    def __init__(self, session: Session, tag: int, of: int, note: _Wait | _Arrivals | None) -> None:
        self._session = session
        self._tag = tag
        self._of = of
        self._note = note

    def left(self, count: int) -> None:
        if isinstance(self._note, _Arrivals):
            self._note.count -= count
        if not isinstance(self._note, _Arrivals) or not self._note.count:
            self._session.notes.pop(self._of, None)
        self._session.answer(self._tag, Status.DONE, pack_i64(count))


class RelayCarrier:
    """Asks the combiner of one relay what its sessions ask."""

    __slots__ = ("_lines", "_requests", "_turn")

    def __init__(self, requests: Requests, turn: Turn) -> None:
        self._requests = requests
        self._turn = turn
        self._lines: dict[Session, _Line] = {}

    def carry(self, session: Session, tag: int, op: Op, blobs: list[bytes], tail: bytes) -> None:
        line = self._lines.get(session)
        if line is None:
            line = self._lines[session] = _Line()
        own = _OWN.get(op)
        try:
            if own is not None:
                own(self, session, line, tag, blobs, tail)
                self._requests.mark_due()
            elif op is Op.CHECK and blobs == _ANNOUNCED:
                session.answer(tag, Status.DONE, READY)
            else:
                self._requests.ask(line, op, blobs, tail, _Request(session, tag))
        except ProtocolError as error:
            session.answer(tag, Status.REFUSED, error.message.encode())

    def suspend(self, session: Session) -> Rest:
        for note in session.notes_in_slices():
            if note is None:
                yield
            elif isinstance(note, _Arrivals):
                note.suspend()
                self._requests.mark_due()

    def resume(self, session: Session) -> Rest:
        for note in session.notes_in_slices():
            if note is None:
                yield
            elif isinstance(note, _Arrivals):
                note.resume()
            elif not note.is_over:
                self._requests.combiner.ask_again(note)
            self._requests.mark_due()

    def forget(self, session: Session) -> Rest:
        self._lines.pop(session, None)
        for note in session.notes_in_slices():
            if note is None:
                yield
            else:
                self._end(note, NOBODY)
                self._requests.mark_due()
        session.notes.clear()

    # The operations that are not passed on as they are

    def _get(self, session: Session, line: RequestOrder, tag: int, blobs: list[bytes], _: bytes) -> None:
        self._requests.ask(line, Op.GET, blobs, b"", _Read(session, tag, blobs[0], is_recalled=False))

    def _recall(self, session: Session, line: RequestOrder, tag: int, blobs: list[bytes], _: bytes) -> None:
        self._requests.ask(line, Op.GET, blobs, b"", _Read(session, tag, blobs[0], is_recalled=True))

    def _wait(self, session: Session, line: RequestOrder, tag: int, keys: list[bytes], _: bytes) -> None:
        note = session.notes[tag] = _Wait(session, line, tag)
        self._requests.combiner.wait(note, keys)

    def _wait_in_turn(
        self, session: Session, line: RequestOrder, tag: int, keys: list[bytes], _: bytes
    ) -> None:
        note = session.notes[tag] = _Wait(session, line, tag)
        self._requests.combiner.wait(note, keys, in_turn=True)

    def _arrive(
        self, session: Session, line: RequestOrder, tag: int, blobs: list[bytes], tail: bytes
    ) -> None:
        size, weight = parse_arrive(tail)
        session.notes[tag] = _Arrivals(self._requests, session, line, tag, (blobs[0], size), weight)

    def _leave(self, session: Session, _: RequestOrder, tag: int, __: list[bytes], tail: bytes) -> None:
        of, count = unpack_pair(tail)
        note = session.notes.get(of)
        left = _Left(session, tag, of, note)
        if note is None:
            left.left(0)
        elif isinstance(note, _Arrivals):
            note.leave(count, left)
        else:
            self._end(note, left)

    def _end(self, note: _Wait | _Arrivals, leaver: Leaver) -> None:
        if isinstance(note, _Arrivals):
            note.leave(note.count, leaver)
            return
        if not note.is_over:
            self._requests.combiner.cancel(note)
        if note.call is not None:
            self._requests.combiner.dismiss(note.call)
        leaver.left(1)

    def _told(self, session: Session, _: RequestOrder, tag: int, blobs: list[bytes], __: bytes) -> None:
        session.store_report(blobs[0], self._turn.now)
        session.answer(tag, Status.DONE, b"")

    def _pop_called(
        self, session: Session, line: RequestOrder, tag: int, blobs: list[bytes], tail: bytes
    ) -> None:
        of = unpack_u64(tail)[0]
        note = session.notes.get(of)
        request = _Request(session, tag)
        if isinstance(note, _Wait) and note.call is not None:
            del session.notes[of]
            self._requests.combiner.pop_called(line, note.call, blobs[0], request)
        else:
            self._requests.ask(line, Op.QUEUE_POP, blobs, b"", request)


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
