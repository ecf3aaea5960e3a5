"""All sessions of a server or a relay: opening them, taking them up on new connections, and ending them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.core.context import Close, Context, CoreFault, DriverTask, Rest, Slices
from rallypoint.store.core.sessions import Carrier, Session, SessionConnection
from rallypoint.store.engine.keyspace import State
from rallypoint.store.rollcall.identity import WORKER
from rallypoint.store.wire.opcodes import BATCH_OPS, Op
from rallypoint.store.wire.requests import WholeRequests
from rallypoint.store.wire.sessions import TOKEN_BYTES, Answer, Welcome, pack_welcome, parse_session

if TYPE_CHECKING:
    from rallypoint.store.rollcall.snapshot import Counters


class Sessions:
    """All sessions of a server or a relay, by their token."""

    __slots__ = (
        *("_by_token", "_carrier", "_context", "_of_workers", "_orphans", "_outbox", "_requests", "_rests"),
        "ended_workers",
    )

    def __init__(self, context: Context, carrier: Carrier) -> None:
        self._by_token: dict[bytes, Session] = {}
        # Sessions that have lost their connection in the middle of a batch, which is still carried out.
        self._orphans: deque[Session] = deque()
        self._rests: deque[Rest] = deque()  # work left for sessions that were detached or ended
        self._carrier = carrier
        self._outbox = context.outbox
        self._context = context
        self._requests = WholeRequests(context.limits, BATCH_OPS)
        self._of_workers: WholeRequests | None = None  # for the workers of this server
        self.ended_workers: Counters | None = None
        """What ended workers of this server had counted in their last reports."""

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_token.values())

    def go_on_with(self, session: Session) -> Slices:
        """Carry out the rest of a batch, after its first slice; returns the frames to send."""
        yield None
        while not self.step(session):
            yield None
        return session.flush()

    def step(self, session: Session) -> bool:
        """Carry out a slice of a batch; return whether there is none left. If it fails, the session ends."""
        try:
            is_done = session.step()
        except Exception:
            self.end(session)
            raise
        self._context.check_budget()
        return is_done

    def go_on(self, note_error: Callable[[str, str], None]) -> bool:
        """Do a slice of the work left for sessions without a connection; return whether there is more.

        If a batch breaks a rule, `note_error` is called with the peer and the reason.
        """
        if self._rests:
            rest = self._rests.popleft()
            try:
                next(rest)
                self._rests.append(rest)
            except StopIteration:
                pass
            except Exception as error:
                self._outbox.others.append(CoreFault(error))
        if self._orphans:
            session = self._orphans.popleft()
            try:
                if session.connection is None and not self.step(session):
                    self._orphans.append(session)
            except ProtocolError as error:
                note_error(session.peer, error.message)
            except Exception as error:
                self._outbox.others.append(CoreFault(error))
        return bool(self._orphans or self._rests)

    def _do(self, rest: Rest) -> None:
        """Do the first slice of some work now, and the others later."""
        try:
            next(rest)
        except StopIteration:
            return
        self._rests.append(rest)
        self._outbox.others.append(DriverTask.REST)

    def open(self, connection: SessionConnection, token: bytes, tail: bytes) -> Slices:
        """Open a session on a connection, or take it up; return the answer, and the frames to send again.

        A batch that is under way is carried out first.
        """
        if connection.session is not None:
            raise ProtocolError("a second SESSION on one connection")
        if len(token) != TOKEN_BYTES:
            raise ProtocolError(f"SESSION with a token of {len(token)} bytes")
        keep_ms, taken, known = parse_session(tail)
        limits = self._requests.limits
        session = self._by_token.get(token)
        while session is not None and not self.step(session):
            yield None
            session = self._by_token.get(token)
        answer = Answer.NEW if session is None else Answer.TAKEN_UP
        if session is not None and taken > session.kept.number:  # the log has lost what it had been sent
            return pack_welcome(Welcome(Answer.UNKNOWN, 0, 0, 0))
        if session is None:
            if known:
                return pack_welcome(Welcome(Answer.UNKNOWN, 0, 0, 0))
            if taken:
                raise ProtocolError(f"a new session has taken frame {taken}")
            if len(self._by_token) >= limits.connections:
                raise LimitError(f"one more session than {limits.connections:,}, the limit connections")
            requests = self._worker_requests() if connection.peer.startswith(WORKER) else self._requests
            session = self._by_token[token] = Session(
                token, self._carrier, requests, self._outbox, self._context.budget
            )
            session.id, session.since = connection.id, connection.since
        elif not session.kept.reaches_back_to(taken):
            raise ProtocolError(f"a session has taken frame {taken}, but goes on elsewhere")
        elif session.connection is not None:
            displaced = ProtocolError("its session goes on over another connection")
            self._outbox.others.append(Close(session.connection, displaced))
            self._do(session.detach())
        session.attach(connection, taken)
        session.keeps_ms = min(keep_ms, int(limits.session_seconds * 1000))
        most = min(limits.batch_bytes, limits.request_bytes)
        welcome = pack_welcome(Welcome(answer, session.keeps_ms, session.taken, most))
        return b"".join([welcome, *session.kept.all()])

    def _worker_requests(self) -> WholeRequests:
        """Many clients share a worker's session, so as much may wait for it as for all clients."""
        if self._of_workers is None:
            limits = self._requests.limits
            most = max(limits.unsent_bytes, limits.held_bytes)
            self._of_workers = WholeRequests(replace(limits, unsent_bytes=most), BATCH_OPS)
        return self._of_workers

    def counts(self) -> dict[Op, int]:
        """How many requests of each kind there have been in batches."""
        counts = self._requests.counts()
        for op, count in self.counts_of_workers().items():
            counts[op] += count
        return counts

    def counts_of_workers(self) -> dict[Op, int]:
        """How many of them came from workers of this server."""
        return self._of_workers.counts() if self._of_workers is not None else {}

    def lose(self, session: Session) -> None:
        """Handle the loss of a session's connection."""
        if not session.keeps_ms:
            self.end(session)
            return
        self._do(session.detach())
        if session.is_under_way:
            self._orphans.append(session)
            self._outbox.others.append(DriverTask.REST)

    def end(self, session: Session) -> None:
        """End a session."""
        suspending = session.detach()
        if self._by_token.pop(session.token, None) is not None:
            if session.peer.startswith(WORKER):  # counters must not go down
                from rallypoint.store.rollcall.clients import with_ended  # late: most servers have none

                self.ended_workers = with_ended(self.ended_workers, session.told)
            session.give_up()
            self._do(self._end(suspending, session))

    def _end(self, suspending: Rest, session: Session) -> Rest:
        """Withdraw all that a session waits for. Until then, nobody is closed for holding too much."""
        budget = self._context.budget
        budget.ending += 1
        yield from chain(suspending, self._carrier.forget(session))
        budget.ending -= 1

    def expire(self, now: float) -> None:
        """End the sessions that have been without a connection for longer than `keeps_ms`."""
        for session in list(self._by_token.values()):
            if session.connection is not None:
                continue
            if session.expires is None:
                session.expires = now + session.keeps_ms / 1000
            elif session.expires <= now:
                self.end(session)

    def state(self, value_of: Callable[[bytes], object]) -> State:
        """All sessions but their notes, as plain data. Call it only when no work is left."""
        assert not self._orphans
        assert not self._rests
        return [session.state(value_of) for session in self]

    def take_state(
        self,
        state: State,
        value_of: Callable[[bytes], object],
        connection_of: Callable[[int], SessionConnection],
    ) -> None:
        """Restore the sessions of a `state`, each on its connection. There must be none before."""
        for each in state:
            token = each[0][0]
            session = Session(token, self._carrier, self._requests, self._outbox, self._context.budget)
            self._by_token[token] = session
            connection = session.take_state(each, value_of)
            if connection is not None:
                session.connection = connection_of(connection)
                session.connection.session = session

    def check_invariants(self) -> None:
        for token, session in self._by_token.items():
            assert session.token == token
            session.check_invariants()
