"""A relay without its I/O: takes bytes from its clients and from upstream, returns bytes for both. Pure.

The relay holds one session upstream, at a store or another relay, and asks there for all its clients:

- `ranks` are its clients, `children` the sessions of relays below. What they ask becomes a slot (`slots`):
  one request upstream, for one or for many.
- `combining` decides who shares a slot. What is asked while a batch is under way waits for the next one, and
  may be joined meanwhile; nothing is ever delayed for that. A request joins an equal one, or an ADD another
  ADD, only while that is unsent, and only behind all earlier requests of its own order: so it is carried out
  after it was asked, and in its order. A wait for one key may join one that is under way. It ends with that
  only if that ended after this one had begun, which a batch proves that was sent in between and taken before
  the end; else the wait is asked anew. docs/concepts/relays.md has the reasons.
- `upstream` is the session's state: batches and frames are numbered; batches stay in a resend buffer until
  the other side has acknowledged them, and are sent again on the next connection. So each request is
  carried out once.

The clients' side is a `ServerCore`, which a pump serves as it serves the store's. The driver of the upstream
side shakes hands, sends what `connect` returns, passes what it reads to `receive_upstream`, sends what that
and `flush` return, and reports when the connection is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rallypoint.store.core.clients import EXTENSION_METHODS, SESSION_METHODS
from rallypoint.store.core.context import About, Context, DriverTask
from rallypoint.store.core.looks import Fields, Pending, as_list, barrier_row
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.turn import Turn
from rallypoint.store.relay.core.children import RelayCarrier
from rallypoint.store.relay.core.combining import Combiner
from rallypoint.store.relay.core.ranks import Rank
from rallypoint.store.relay.core.upstream import Upstream
from rallypoint.store.rollcall.question import KEYS_NAMED, Question
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import CLIENT_OPS, Op
from rallypoint.store.wire.parser import RequestTable
from rallypoint.store.wire.requests import Deliver, carried

if TYPE_CHECKING:
    from rallypoint.store.rollcall import snapshot as told


class RelayCore(ServerCore[Rank]):
    """One relay. Not safe for threads."""

    kind = "relay"

    __slots__ = (*("_carrier", "_context", "_is_reporting", "combiner", "describe_upstream", "upstream"),)

    def __init__(
        self,
        token: bytes,
        limits: Limits | None = None,
        turn: Turn | None = None,
        about: About | None = None,
    ) -> None:
        """`token`: a secret that is never used again. It names the session upstream."""
        context = Context(limits, turn, about)
        self._context = context
        self.combiner = Combiner(context)
        self._carrier = RelayCarrier(self.combiner, context.turn)
        own: dict[Op, Deliver[Rank]] = {**SESSION_METHODS, **EXTENSION_METHODS}
        table: RequestTable[Rank] = RequestTable(context.limits, {**carried(CLIENT_OPS), **own})
        super().__init__(context, self._carrier, table)
        self.describe_upstream: Callable[[], told.Upstream | None] = lambda: None
        """For snapshots; the driver knows it."""
        self._open_session(token)

    def _open_session(self, token: bytes) -> None:
        self.upstream = Upstream(self.combiner, token, self.limits, self._start_report)
        self._is_reporting = False

    # Clients

    def _make(self, peer: str) -> Rank:
        return Rank(self, self.combiner, self.request_table, peer)

    def _leave(self, client: Rank) -> None:
        super()._leave(client)
        self.combiner.withdraw(client.leave())

    def close(self, client: Rank) -> None:
        super().close(client)
        client.forget_replies()

    # What it knows

    @property
    def waiting(self) -> int:
        return sum(rank.is_waiting for rank in self.clients)

    def waits_of(self, rank: Rank) -> Sequence[Pending]:
        return rank.pending(KEYS_NAMED)

    def sum_up(self) -> told.Snapshot:
        return replace(super().sum_up(), upstream=self.describe_upstream())

    def describe(self, _: Question) -> Fields:
        """The barriers at which its clients wait; others may be there through other relays."""
        members: dict[tuple[bytes, int], list[tuple[int, float]]] = {}
        now = self.turn.now
        for rank in list(self.clients):
            for name, since in rank.barriers():
                members.setdefault(name, []).append((rank.id, now - since))
            yield None
        rows = [barrier_row(*name, len(found), found) for name, found in members.items()]
        yield "barriers", as_list(rows)

    def _start_report(self) -> None:
        """The other side wants to know what this relay knows; once is enough."""
        if not self._is_reporting:
            self._is_reporting = True
            self.looks.start(Question(), partial(self._send_report, self.upstream))

    def _send_report(self, upstream: Upstream, snapshot: bytes) -> None:
        """Send a snapshot to the session that asked for it, unless that is lost."""
        if upstream is self.upstream:
            self._is_reporting = False
            self.combiner.send_report(snapshot)

    # Upstream

    def connect(self) -> bytes:
        """There is a connection upstream, which has answered: what to send on it."""
        return self.upstream.connected()

    def receive_upstream(self, data: bytes) -> bytes:
        """Take what came from upstream; return what to send there.

        ProtocolError: the connection is to be closed. SessionLostError: and `reset` is due.
        """
        return self._sent(self.upstream.receive(data))

    def flush(self) -> bytes:
        """What can be sent upstream now."""
        return self._sent(self.upstream.flush())

    def _sent(self, data: bytes) -> bytes:
        """This is sent upstream; what is left is for another turn."""
        self.combiner.mark_sent()
        if self.upstream.has_batch:
            self.combiner.mark_due()
        return data

    def lose_upstream(self) -> None:
        """The connection upstream is gone."""
        self.upstream.lost()

    def reset(self, token: bytes) -> None:
        """The session upstream is lost: begin a new one. All clients have been closed before."""
        assert not len(self.clients)
        for session in list(self.sessions):
            self.sessions.end(session)
        while self.go_on():  # what they still wait for is known to the combiner that is about to go
            pass
        self.combiner = self._carrier.combiner = Combiner(self._context)
        self.outbox.others += [DriverTask.READ_ON, DriverTask.ROOM]
        self._open_session(token)

    def check_invariants(self) -> None:
        super().check_invariants()
        self.upstream.check_invariants()
        for rank in self.clients:
            rank.check_invariants()
        assert self.combiner.replies_due == sum(rank.replies_due for rank in self.clients)
