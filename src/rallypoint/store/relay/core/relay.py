"""A relay without its I/O: takes bytes from its clients and from upstream, returns bytes for both. Pure.

A relay answers for the store. It holds one session upstream, at the store or at another relay, and combines
what its clients ask into few requests there. Clients must not be able to tell it from the store, except by
the time it takes:

- *linearizability*: every operation takes effect at one moment between its call and its return;
- *program order*: the requests of one connection take effect in their order;
- *exactly once*: what has an answer was carried out once.

The store carries out one request at a time, and that moment is the moment of the operation. A write without a
reply may be carried out any time later, but before what its client asks next with a reply.

Batches. One batch is under way at a time. What clients ask meanwhile waits for the next one, and nothing is
ever delayed in order to be combined. A batch of nothing but waits and arrivals is not waited for. A batch is
carried out in its order, and a request that joins no other goes to its end.

Joining. A request may join an equal one if that one (a) has not been sent, and (b) stands behind all earlier
requests of the client that joins. Then it is carried out after it was asked, before it is answered, and in
program order. Without (a), the store may have carried out the other one already, and a write that returned
since would be missed. Without (b), a GET after a SET of the same client could join a GET that stands before
that SET.

    GET, CHECK, MULTI_GET  equal reads are one, at one moment, and its reply is everybody's
    SET                    of the same key and the same short value: to do it several times is to do it once
    ADD                    to the same key: one ADD of the sum. If the store answers T, amounts a1, ..., an
                           get T - a2 - ... - an, ..., T, as if carried out in the order of arrival. Only
                           amounts of one sign are added up: then all of these fit into 64 bits if T does. If
                           the store refuses the sum, nothing was done, and each is asked for alone; a client
                           that has gone on meanwhile is refused, as its ADD would be out of order
    BARRIER                of the same key and size: one ARRIVE of their number. The store says how many of
                           them are released; which ones is for the relay to choose. A LEAVE takes some back
                           by number. It may cross a release, so its answer says how many it has taken back
    others                 are sent one by one

Waits. A WAIT for one key may join another one (c) after that was sent. It ends with that one if that one
ended after it had begun: news of the end takes a while, and the key may have come, and gone, before. So each
waiter notes the number of the next batch. If the store had taken that batch, or a later one, when the wait
ended, the waiter began before the end. The store's answer says which batch it had taken; an answer to a
request of a later batch proves it as well, through any number of relays. (An answer to a LEAVE proves
nothing, as a relay on the way may have given it.) A waiter without proof waits anew. WAITs for several keys
join only before they are sent: the store ticks off the keys one by one, and one may have come, and gone,
before the waiter began.

Queues. A push *calls* one waiter: it ends a wait, for one client, which is to pop. The others wait again, *in
turn*: a value for which somebody is called is not there for them. A called client that leaves or cancels
without a pop declines the call, and the store calls the next one, wherever that is.

Values. Every read is asked of the store, but a long value that did not change is not sent again: see
`values`.

The session upstream outlives its connections. Batches and frames are numbered, and each side keeps what it
sent until the other side acknowledges it. When the relay takes the session up on a new connection, both say
the last number that they have received, and send the rest again, unchanged. A number is accepted once, so an
ADD counts once, and its answer is not lost. Combining knows nothing of connections. When the session itself
is given up, what was asked has no answer: the relay closes its clients and begins a new session.

While a session is away, its ranks may be dead: its arrivals do not count at barriers, and pushes call others.
When it is back, it first says who has left (LEAVE), then that it is PRESENT. A relay does to the sessions of
relays below (`downstream`) as the store does; since all rules speak only of what was sent, of answers, and of
the order of one stream, they hold at every level. When a wait ended, in terms of the batches of the relay
below, only the store knows: that relay goes by its answers.

The clients' side is a `ServerCore`, which a pump serves as it serves the store's. The driver of the upstream
side shakes hands, sends what `connect` returns, passes what it reads to `receive_upstream`, sends what that
and `flush` return, and reports when the connection is lost.

    relay_client       a client: its requests to the combiner, its replies in order
    downstream         the sessions of relays below, whose requests go to the combiner as well
    combining          which requests share one, what the next batch is, for whom a wait is over
    upstream_requests  those requests, and what an answer means for each client that shares one
    values             the values that this relay knows
    upstream           the session: numbers, what is kept and sent again, signs of life
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rallypoint.store.core.clients import EXTENSION_METHODS, SESSION_METHODS
from rallypoint.store.core.context import About, Context, DriverTask
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.snapshots import Fields, Pending, as_list, barrier_row
from rallypoint.store.core.turn import Turn
from rallypoint.store.relay.core.combining import Combiner
from rallypoint.store.relay.core.downstream import RelayCarrier
from rallypoint.store.relay.core.relay_client import RelayClient
from rallypoint.store.relay.core.upstream import Upstream
from rallypoint.store.rollcall.question import KEYS_NAMED, Question
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import CLIENT_OPS, Op
from rallypoint.store.wire.parser import RequestTable
from rallypoint.store.wire.requests import Deliver, carried

if TYPE_CHECKING:
    from rallypoint.store.rollcall import snapshot as told


class RelayCore(ServerCore[RelayClient]):
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
        own: dict[Op, Deliver[RelayClient]] = {**SESSION_METHODS, **EXTENSION_METHODS}
        table: RequestTable[RelayClient] = RequestTable(context.limits, {**carried(CLIENT_OPS), **own})
        super().__init__(context, self._carrier, table)
        self.describe_upstream: Callable[[], told.Upstream | None] = lambda: None
        """For snapshots; the driver knows it."""
        self._open_session(token)

    def _open_session(self, token: bytes) -> None:
        self.upstream = Upstream(self.combiner, token, self.limits, self._start_report)
        self._is_reporting = False

    # Clients

    def _make(self, peer: str) -> RelayClient:
        return RelayClient(self, self.combiner, self.request_table, peer)

    def _leave(self, client: RelayClient) -> None:
        super()._leave(client)
        self.combiner.withdraw(client.leave())

    def close(self, client: RelayClient) -> None:
        super().close(client)
        client.forget_replies()

    # What it knows

    @property
    def waiting(self) -> int:
        return sum(rank.is_waiting for rank in self.clients)

    def waits_of(self, rank: RelayClient) -> Sequence[Pending]:
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
            self.snapshots.start(Question(), partial(self._send_report, self.upstream))

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
