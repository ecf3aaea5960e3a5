"""The whole relay but its I/O: bytes of its clients and of its upstream in, bytes for them out.

The clients' side is a `Front`, which a pump serves as it serves the store's. The upstream side is for
whoever connects: it sends what `connect` gives, passes what it reads to `receive_upstream`, sends what that
and `flush` return, and says when the connection is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rallypoint.relay.core.child_relays import RelayCarrier
from rallypoint.relay.core.clients import Rank
from rallypoint.relay.core.combining import Combiner
from rallypoint.relay.core.slots import Answer, Line
from rallypoint.relay.core.upstream import Upstream
from rallypoint.rollcall.snapshot import KEYS_NAMED, Question
from rallypoint.server.core.front import Front
from rallypoint.server.core.looks import Fields, Pending, as_list, barrier_row
from rallypoint.wire.limits import Limits
from rallypoint.wire.opcodes import Op
from rallypoint.wire.parser import LOOKS, SERVED, SESSIONS, Forms, carried

_PLACE_BYTES: Final = 128


def _nothing(*_: object) -> None:
    pass


class RelayCore(Front[Rank]):
    """One relay. Not safe for threads."""

    kind = "relay"

    __slots__ = (
        "_is_pressed",
        "_is_telling",
        "_make_token",
        "combiner",
        "forms",
        "has_work",
        "on_pressure",
        "places",
        "upstream",
    )

    def __init__(self, make_token: Callable[[], bytes], limits: Limits | None = None) -> None:
        limits = limits or Limits()
        super().__init__(limits, RelayCarrier(self))
        self.forms: Forms[Rank] = Forms(limits, {**carried(SERVED), **SESSIONS, **LOOKS})
        self._make_token = make_token
        self._is_pressed = False
        self.places = 0
        """Replies that clients wait for, in their order."""
        self.has_work: Callable[[], None] = _nothing
        """Called whenever there may be something for `flush`: that is to be called soon, once."""
        self.on_pressure: Callable[[bool], None] = _nothing
        """Called when it holds so much that clients should not be read, and when they can be again."""
        self._start_anew()

    def _start_anew(self) -> None:
        self.combiner = Combiner()
        self.upstream = Upstream(self.combiner, self._make_token(), self.limits)
        self.upstream.on_tell = self._tell
        self._is_telling = False

    # Clients

    def _make(self, peer: str) -> Rank:
        return Rank(self, peer)

    def _leave(self, connection: Rank) -> None:
        super()._leave(connection)
        connection.leave()

    def close(self, connection: Rank) -> None:
        super().close(connection)
        connection.forget_places()

    def ask(self, line: Line, op: Op, blobs: Sequence[bytes], tail: bytes, answer: Answer) -> None:
        """Ask the store what is answered at once."""
        self.combiner.ask(line, op, blobs, tail, answer)
        self.check_pressure()
        self.has_work()

    def check_pressure(self) -> None:
        limit = self.limits.relayed_bytes
        held = self.combiner.held_bytes + self.places * _PLACE_BYTES
        if held > limit and not self._is_pressed:
            self._is_pressed = True
            self.on_pressure(True)
        elif held <= limit // 2 and self._is_pressed:
            self._is_pressed = False
            self.on_pressure(False)

    # What it knows

    def counts(self) -> dict[Op, int]:
        counts = self.forms.counts(self.operations)
        for op, count in super().counts().items():
            counts[op] = counts.get(op, 0) + count
        return counts

    @property
    def waiting(self) -> int:
        return sum(rank.is_waiting for rank in self.connections)

    def waits_of(self, rank: Rank) -> Sequence[Pending]:
        return rank.pending(KEYS_NAMED)

    def describe(self, _: Question) -> Fields:
        """The barriers at which its clients wait; others may be there through other relays."""
        members: dict[tuple[bytes, int], list[tuple[int, float]]] = {}
        now = self.clock()
        for rank in list(self.connections):
            for name, since in rank.barriers():
                members.setdefault(name, []).append((rank.id, now - since))
            yield None
        rows = [barrier_row(*name, len(found), found) for name, found in members.items()]
        yield "barriers", as_list(rows)

    def _tell(self) -> None:
        """The other side wants to know what this relay knows; once is enough."""
        if self._is_telling:
            return
        self._is_telling = True
        combiner = self.combiner

        def deliver(snapshot: bytes) -> None:
            if combiner is self.combiner:  # or the session that asked is lost
                self._is_telling = False
                combiner.tell(snapshot)
                self.has_work()

        self.looks.start(Question(), deliver)

    # Upstream

    def connect(self) -> bytes:
        """There is a connection upstream: what to send on it first."""
        return self.upstream.connected()

    def receive_upstream(self, data: bytes) -> bytes:
        """Take what came from upstream; return what to send there. `take_woken` comes next.

        ProtocolError: the connection is to be closed. SessionLostError: and `reset` is due.
        """
        reply = self.upstream.receive(data)
        self.check_pressure()
        return reply

    def flush(self) -> bytes:
        """What can be sent upstream now."""
        return self.upstream.flush()

    def lose_upstream(self) -> None:
        """The connection upstream is gone."""
        self.upstream.lost()

    def reset(self) -> None:
        """The session upstream is lost: begin a new one. All clients have been closed before."""
        assert not self.connections
        for session in list(self.sessions):
            self.sessions.end(session)
        self._start_anew()
        self.check_pressure()

    def check_invariants(self) -> None:
        super().check_invariants()
        self.upstream.check_invariants()
        for rank in self.connections:
            rank.check_invariants()
        assert self.places == sum(rank.places for rank in self.connections)
