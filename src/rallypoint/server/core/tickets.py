"""What relays ask of the store: their requests, carried out on the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from rallypoint.errors import ProtocolError
from rallypoint.server.core.sessions import Session
from rallypoint.wire.encoding import blob, pack_i64, unpack_u64
from rallypoint.wire.opcodes import Op
from rallypoint.wire.parser import SERVED
from rallypoint.wire.sessions import Status, end_of_wait, parse_arrive, unpack_pair

if TYPE_CHECKING:
    from rallypoint.server.core.store import Connection, Core


class Ticket:
    """One wait of a session, or its arrivals at a barrier: the member that the engine knows."""

    __slots__ = ("count", "session", "since", "tag")

    def __init__(self, session: Session, tag: int, since: float, count: int = 0) -> None:
        self.session = session
        self.tag = tag
        self.since = since
        self.count = count  # of arrivals that are not released; 0: it is a wait


class StoreCarrier:
    """Carries out the requests of all sessions of one server."""

    __slots__ = ("_core", "_engine", "proxy")

    proxy: Connection
    """In whose name it does what does not depend on who asks."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._engine = core.engine

    def carry(self, session: Session, tag: int, op: Op, blobs: list[bytes], tail: bytes) -> None:
        own = _OWN.get(op)
        try:
            if own is not None:
                own(self, session, tag, blobs, tail)
            else:
                self.proxy.id = session.id  # what it writes is the relay's
                session.answer(tag, Status.DONE, SERVED[op](self.proxy, blobs, tail))
        except ProtocolError as error:
            session.answer(tag, Status.REFUSED, error.message.encode())

    def suspend(self, session: Session) -> None:
        for ticket in session.notes.values():
            self._engine.suspend(ticket)

    def resume(self, session: Session) -> None:
        for ticket in list(session.notes.values()):
            self._core.wake(self._engine.resume(ticket))

    def forget(self, session: Session) -> None:
        tickets, session.notes = session.notes, {}
        for ticket in tickets.values():
            self._core.wake(self._engine.withdraw(ticket))

    def tell(self, tickets: Iterable[Ticket]) -> None:
        """What these waited for is there."""
        for ticket in tickets:
            if ticket.count:
                left = self._engine.count_at_barrier(ticket)
                ticket.session.answer(ticket.tag, Status.DONE, pack_i64(ticket.count - left))
                ticket.count = left
                if not left:
                    self._drop(ticket)
            else:
                self._end_wait(ticket)

    def _end_wait(self, ticket: Ticket) -> None:
        if self._engine.is_called(ticket):
            # The ticket stays until its relay has popped, or says that nobody will.
            ticket.session.answer(ticket.tag, Status.CALLED, end_of_wait(ticket.session.taken))
        else:
            self._drop(ticket)
            ticket.session.answer(ticket.tag, Status.DONE, end_of_wait(ticket.session.taken))

    def _drop(self, ticket: Ticket) -> None:
        del ticket.session.notes[ticket.tag]
        if not ticket.session.is_present:
            self._engine.withdraw(ticket)  # it counts as away, which only a member of the engine can be

    # The operations that are not as a client's

    def _get(self, session: Session, tag: int, blobs: list[bytes], _: bytes) -> None:
        self._read(session, tag, blobs[0], recalled=False)

    def _recall(self, session: Session, tag: int, blobs: list[bytes], _: bytes) -> None:
        self._read(session, tag, blobs[0], recalled=True)

    def _read(self, session: Session, tag: int, key: bytes, *, recalled: bool) -> None:
        value = self._engine.get(key)
        content = blob(value if value is not None else b"")
        # A bytearray changes in place: that it is the same says nothing.
        same = value if type(value) is bytes else object()
        session.answer_read(tag, key, same, content, recalled=recalled)

    def _wait(self, session: Session, tag: int, blobs: list[bytes], _: bytes) -> None:
        ticket = Ticket(session, tag, self._core.clock())
        if self._engine.wait(ticket, blobs):
            session.answer(tag, Status.DONE, end_of_wait(session.taken))
        else:
            session.notes[tag] = ticket

    def _wait_in_turn(self, session: Session, tag: int, blobs: list[bytes], _: bytes) -> None:
        ticket = Ticket(session, tag, self._core.clock())
        done = self._engine.wait_in_turn(ticket, blobs)
        session.notes[tag] = ticket
        if done:
            self._end_wait(ticket)

    def _arrive(self, session: Session, tag: int, blobs: list[bytes], tail: bytes) -> None:
        size, weight = parse_arrive(tail)
        ticket = Ticket(session, tag, self._core.clock(), weight)
        if not session.is_present:
            self._engine.suspend(ticket)  # those who have left meanwhile are taken back first
        released = self._engine.barrier(ticket, blobs[0], size, weight)
        session.notes[tag] = ticket
        self.proxy.id = session.id
        if released and self._core.observer is not None:
            self._core.observer.gathered(blobs[0], size, released, self.proxy)
        self._core.wake(released, self.proxy)

    def _leave(self, session: Session, tag: int, _: list[bytes], tail: bytes) -> None:
        """End a wait, or some arrivals, or the call of one who was woken and will not pop."""
        of, count = unpack_pair(tail)
        ticket = session.notes.get(of)
        left = 0
        if ticket is not None and ticket.count:
            left = self._engine.leave_barrier(ticket, count)
            ticket.count -= left
            if not ticket.count:
                self._drop(ticket)
        elif ticket is not None:
            left = 1
            del session.notes[of]
            self._core.wake(self._engine.withdraw(ticket))
        session.answer(tag, Status.DONE, pack_i64(left))

    def _pop_called(self, session: Session, tag: int, blobs: list[bytes], tail: bytes) -> None:
        ticket = session.notes.get(unpack_u64(tail)[0])
        length, value = self._engine.pop(ticket or Ticket(session, tag, 0.0), blobs[0])
        if ticket is not None:
            # Whatever else it was called to, its relay counts the call as answered.
            del session.notes[ticket.tag]
            self._core.wake(self._engine.withdraw(ticket))
        content = pack_i64(length) if value is None else pack_i64(length) + blob(value)
        session.answer(tag, Status.DONE, content)

    def _told(self, session: Session, tag: int, blobs: list[bytes], _: bytes) -> None:
        session.take_told(blobs[0], self._core.clock())
        session.answer(tag, Status.DONE, b"")


_OWN: Final = {
    Op.GET: StoreCarrier._get,
    Op.RECALL: StoreCarrier._recall,
    Op.WAIT: StoreCarrier._wait,
    Op.WAIT_IN_TURN: StoreCarrier._wait_in_turn,
    Op.ARRIVE: StoreCarrier._arrive,
    Op.LEAVE: StoreCarrier._leave,
    Op.POP_CALLED: StoreCarrier._pop_called,
    Op.TOLD: StoreCarrier._told,
}
