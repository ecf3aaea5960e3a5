"""Carries out relays' requests on the engine, in which a `Ticket` stands for each of their waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from rallypoint.errors import ProtocolError
from rallypoint.store.core.context import SLICE, Context, Rest, sliced
from rallypoint.store.core.sessions import Session
from rallypoint.store.engine import Engine
from rallypoint.store.engine.keyspace import State
from rallypoint.store.wire.encoding import blob, pack_i64, pack_u64, unpack_u64
from rallypoint.store.wire.opcodes import STOP_WAITING, Op
from rallypoint.store.wire.sessions import Status, end_of_wait, parse_arrive, unpack_pair

if TYPE_CHECKING:
    from rallypoint.store.core.event_journal import EventJournal


class Member(Protocol):
    """What waits in the engine: a client's connection, or the ticket of a relay."""

    since: float
    """When the client connected, or when the ticket began to wait; by the monotonic clock."""

    @property
    def id(self) -> int:
        """The number of the connection of the client or the relay."""

    def wake(self) -> None:
        """Its wait is over: notify the client or the relay."""


def wake(members: Sequence[Member], by: Member, journal: EventJournal | None) -> bytes:
    """Wake members because of a request of `by`.

    If `by` is itself among them, returns its STOP_WAITINGs, which go among its replies.
    """
    if journal is not None:
        journal.woken(members, by)
    own = 0
    for member in members:
        if member is by:
            own += 1
        else:
            member.wake()
    return STOP_WAITING * own


class Requester(Member, Protocol):
    """A connection that carries out a relay's requests, as their sender."""

    @property
    def is_unfinished(self) -> bool: ...
    def go_on(self) -> bytes | None: ...
    def read_no_more(self) -> None: ...

    def swap(self, key: bytes, expected: bytes, desired: bytes, /) -> tuple[bytes, bytes | bytearray]: ...


class Ticket:
    """One wait of a session, or its arrivals at a barrier, as a member of the engine."""

    __slots__ = ("_carrier", "count", "session", "since", "tag")

    def __init__(
        self, carrier: StoreCarrier, session: Session, tag: int, since: float, count: int = 0
    ) -> None:
        self._carrier = carrier
        self.session = session
        self.tag = tag
        self.since = since
        self.count = count  # of arrivals that are not released; 0: it is a wait

    @property
    def id(self) -> int:
        return self.session.id

    def wake(self) -> None:
        self._carrier.wake(self)


class StoreCarrier:
    """Carries out the requests of all sessions of one server."""

    __slots__ = ("_engine", "_journal", "_make_requester", "_methods", "_pushers", "_requesters", "_turn")

    def __init__(
        self,
        engine: Engine[Member],
        context: Context,
        methods: Mapping[Op, Callable[[Any, list[bytes], bytes], bytes | None]],
        make_requester: Callable[[Session], Requester],
        pushers: dict[bytes, int],
    ) -> None:
        """`methods`: those of a requester, by the operation."""
        self._methods = methods
        self._pushers = pushers
        self._engine = engine
        self._turn = context.turn
        self._journal = context.journal
        self._make_requester = make_requester
        self._requesters: dict[Session, Requester] = {}

    def carry(self, session: Session, tag: int, op: Op, blobs: list[bytes], tail: bytes) -> Rest | None:
        own = _METHODS.get(op)
        try:
            if own is not None:
                return own(self, session, tag, blobs, tail)
            reply = self._methods[op](self._requester(session), blobs, tail)
            if reply is None:
                return self._finish(session, tag)
            session.answer(tag, Status.DONE, reply)
        except ProtocolError as error:
            session.answer(tag, Status.REFUSED, error.message.encode())
        return None

    def _finish(self, session: Session, tag: int) -> Rest:
        """Finish a request that takes long."""
        requester, pieces = self._requester(session), list[bytes]()
        try:
            while requester.is_unfinished:
                yield
                pieces.append(requester.go_on() or b"")
        except ProtocolError as error:
            session.answer(tag, Status.REFUSED, error.message.encode())
        else:
            session.answer(tag, Status.DONE, b"".join(pieces))

    def _requester(self, session: Session) -> Requester:
        requester = self._requesters.get(session)
        if requester is None:
            requester = self._requesters[session] = self._make_requester(session)
        return requester

    def suspend(self, session: Session) -> Rest:
        return self._for_all(session, self._engine.suspend)

    def resume(self, session: Session) -> Rest:
        return self._for_all(session, self._engine.resume)

    def _for_all(self, session: Session, change: Callable[[Ticket], Sequence[Member]]) -> Rest:
        """Change what each ticket of a session waits for, and wake whom that wakes."""
        for ticket in session.notes_in_slices():
            if ticket is None:
                yield
            else:
                self._wake(change(ticket), session)

    def forget(self, session: Session) -> Rest:
        yield from self._for_all(session, self._engine.withdraw)
        session.notes.clear()
        requester = self._requesters.pop(session, None)
        if requester is not None:
            requester.read_no_more()  # it may be in the middle of a long reply

    def wake(self, ticket: Ticket) -> None:
        """The key that a ticket waited for is there, or some of its arrivals are released."""
        if ticket.count:
            left = self._engine.barriers.count_at(ticket)
            ticket.session.answer(ticket.tag, Status.DONE, pack_i64(ticket.count - left))
            ticket.count = left
            if not left:
                self._drop(ticket)
        else:
            self._end_wait(ticket)

    def _wake(self, members: Sequence[Member], session: Session) -> None:
        if members:
            wake(members, self._requester(session), self._journal)

    def _end_wait(self, ticket: Ticket) -> None:
        if self._engine.pops.includes(ticket):
            # The ticket stays until its relay has popped, or says that nobody will.
            ticket.session.answer(ticket.tag, Status.CALLED, end_of_wait(ticket.session.taken))
        else:
            self._drop(ticket)
            ticket.session.answer(ticket.tag, Status.DONE, end_of_wait(ticket.session.taken))

    def _drop(self, ticket: Ticket) -> None:
        del ticket.session.notes[ticket.tag]
        if not ticket.session.is_present:
            self._engine.withdraw(ticket)  # or the engine would keep it in its set of members that are away

    def notes_of(self, session: Session) -> State:
        """The tickets of a session, as plain data."""
        return [(each.tag, each.since, each.count) for each in session.notes.values()]

    def take_notes(self, session: Session, notes: State) -> None:
        """Restore the tickets of `notes_of`."""
        for tag, since, count in notes:
            session.notes[tag] = Ticket(self, session, tag, since, count)

    # The operations that differ from a client's

    def _read(self, session: Session, tag: int, key: bytes, *, recalled: bool) -> None:
        value = self._engine.get(key)
        if value is None:
            value = b""
        # A bytearray changes in place: that it is the same says nothing.
        same = value if type(value) is bytes else object()
        session.answer_read(tag, key, same, pack_u64(len(value)), value, recalled=recalled)

    def _compare_set(self, session: Session, tag: int, blobs: list[bytes], _: bytes) -> None:
        _, value = self._requester(session).swap(*blobs)
        session.answer(tag, Status.DONE, pack_u64(len(value)), value)

    def _wait(self, session: Session, tag: int, blobs: list[bytes], _: bytes) -> Rest | None:
        ticket = Ticket(self, session, tag, self._turn.now)
        if len(blobs) > SLICE:
            return self._wait_in_slices(ticket, blobs)
        if self._engine.wait(ticket, blobs, self._turn.now):
            session.answer(tag, Status.DONE, end_of_wait(session.taken))
        else:
            session.notes[tag] = ticket
        return None

    def _wait_in_slices(self, ticket: Ticket, keys: list[bytes]) -> Rest:
        session, tag = ticket.session, ticket.tag
        session.notes[tag] = ticket
        try:
            is_over = yield from self._engine.wait_in_slices(ticket, sliced(keys), self._turn.now)
        except ProtocolError as error:
            del session.notes[tag]
            self._engine.withdraw(ticket)
            session.answer(tag, Status.REFUSED, error.message.encode())
        else:
            if is_over:
                self._end_wait(ticket)

    def _wait_in_turn(self, session: Session, tag: int, blobs: list[bytes], _: bytes) -> None:
        ticket = Ticket(self, session, tag, self._turn.now)
        done = self._engine.wait_in_turn(ticket, blobs, self._turn.now)
        session.notes[tag] = ticket
        if done:
            self._end_wait(ticket)

    def _arrive(self, session: Session, tag: int, blobs: list[bytes], tail: bytes) -> None:
        size, weight = parse_arrive(tail)
        now = self._turn.now
        ticket = Ticket(self, session, tag, now, weight)
        if not session.is_present:
            self._engine.suspend(ticket)  # ranks that have left meanwhile are taken back first
        released = self._engine.barrier(ticket, blobs[0], size, weight, now)
        session.notes[tag] = ticket
        if released:
            if self._journal is not None:
                self._journal.gathered(blobs[0], size, released, self._requester(session))
            self._wake(released, session)

    def _leave(self, session: Session, tag: int, _: list[bytes], tail: bytes) -> None:
        """End a wait, some arrivals at a barrier, or a call to a queue whose rank will not pop."""
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
            self._wake(self._engine.withdraw(ticket), session)
        session.answer(tag, Status.DONE, pack_i64(left))

    def _pop_called(self, session: Session, tag: int, blobs: list[bytes], tail: bytes) -> None:
        ticket = session.notes.get(unpack_u64(tail)[0])
        length, value = self._engine.pop(ticket or Ticket(self, session, tag, 0.0), blobs[0])
        if length <= 1:
            self._pushers.pop(blobs[0], None)
        if ticket is not None:
            # The relay counts this as the answer to the call, to whatever queues it was.
            del session.notes[ticket.tag]
            self._wake(self._engine.withdraw(ticket), session)
        content = pack_i64(length) if value is None else pack_i64(length) + blob(value)
        session.answer(tag, Status.DONE, content)

    def _told(self, session: Session, tag: int, blobs: list[bytes], _: bytes) -> None:
        session.store_report(blobs[0], self._turn.now)
        session.answer(tag, Status.DONE, b"")


_METHODS: Final[dict[Op, Callable[[StoreCarrier, Session, int, list[bytes], bytes], Rest | None]]] = {
    Op.GET: lambda carrier, session, tag, blobs, _: carrier._read(session, tag, blobs[0], recalled=False),
    Op.COMPARE_SET: StoreCarrier._compare_set,
    Op.RECALL: lambda carrier, session, tag, blobs, _: carrier._read(session, tag, blobs[0], recalled=True),
    Op.WAIT: StoreCarrier._wait,
    Op.WAIT_IN_TURN: StoreCarrier._wait_in_turn,
    Op.ARRIVE: StoreCarrier._arrive,
    Op.LEAVE: StoreCarrier._leave,
    Op.POP_CALLED: StoreCarrier._pop_called,
    Op.RELAY_REPORT: StoreCarrier._told,
}
