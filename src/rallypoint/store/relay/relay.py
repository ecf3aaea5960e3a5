"""A relay with its sockets: the pump that serves its clients, and a connection upstream that is renewed."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Final

from rallypoint.errors import ProtocolError, SessionLostError
from rallypoint.store.machine.addresses import reason_of
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.relay.core.relay_client import RelayClient
from rallypoint.store.relay.core.upstream import BEAT_SECONDS, BYE
from rallypoint.store.relay.outgoing import Stream
from rallypoint.store.relay.reaching import Race, StoreAddress
from rallypoint.store.rollcall.snapshot import Upstream
from rallypoint.store.server.loops.loop import Callback, Loop
from rallypoint.store.server.loops.pump import Pump, about_this_process
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.sessions import TOKEN_BYTES

logger = logging.getLogger("rallypoint.relay")

_REFUSED: Final = reason_of(errno.ECONNREFUSED)
_REFUSED_SECONDS = 5.0
"""A port that refuses for so long: the store is gone, and its sessions with it, if it has no other place."""


def new_token() -> bytes:
    """A name for a session."""
    return secrets.token_bytes(TOKEN_BYTES)


class Relay(Pump[RelayClient]):
    """Serves ranks and relays on listening sockets, which it owns from now on, by asking its upstream."""

    def __init__(
        self,
        loop: Loop,
        upstream: StoreAddress,
        listeners: Sequence[socket.socket],
        limits: Limits | None = None,
        core: RelayCore | None = None,
    ) -> None:
        """`core`: what it serves, with limits of its own; without, a relay as it is."""
        core = core or RelayCore(new_token(), limits, loop.turn, about_this_process(loop))
        super().__init__(loop, core, listeners)
        self._relay = core
        core.describe_upstream = self._describe_upstream
        self._upstream = upstream
        self._race = Race(loop, upstream, on_won=self._on_won, on_failed=self._on_failed)
        self._connection: Stream | None = None
        self._place = upstream.name  # where it has been last
        self._down_since: float | None = None
        self._heard_at = 0.0
        # Since when no connection has lasted from one tick to the next: one that is broken again at once,
        # each time, is no better than none.
        self._failing_since: float | None = None
        self._refused_since: float | None = None
        self._excused_at = 0.0  # when the store was last heard to be waiting for its engine
        self._steady_ticks = 0
        self._late_bytes = 0  # at the last beat

    def start(self, on_tick: Callback = lambda: None) -> None:
        super().start(on_tick)
        self._dial()
        if self._upstream.moves:
            self.loop.later(BEAT_SECONDS, self._beat)

    def close(self) -> None:
        self._closed = True  # what happens from here on leads to no new connection
        self._race.stop()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.send(BYE)
            connection.close()
        super().close()

    # What clients ask

    def _flush(self) -> None:
        try:
            self._send(self._relay.flush())
            self.deliver()  # what no batch has room for is refused
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Out of memory, or a fault of ours: what was asked has no answer any more."""
        if isinstance(error, MemoryError):
            why = f"its relay, process {os.getpid()} on this machine, is out of memory"
        else:
            logger.exception("the relay failed")
            why = "the relay has lost track of what it asked"
        self._give_up(why)

    def _send(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.send(data)

    # The connection upstream

    def _dial(self) -> None:
        if not self._closed:
            if self._failing_since is None:
                self._failing_since = time.monotonic()
            self._race.begin()

    def _on_won(self, connection: Stream, place: str) -> None:
        self._refused_since = None
        self._place = place
        self._connection = connection
        connection.hand_over(self._on_data, self._on_closed)
        self._send(self._relay.connect())

    def _on_failed(self, why: str) -> None:
        """A place could not be reached. If the store has others, that means nothing: it is at one of them."""
        if self._upstream.moves:
            return
        if why != _REFUSED:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = time.monotonic()
        self._go_down(why)

    def _beat(self) -> None:
        """See whether the other side is alive.

        Only if the store may be elsewhere: to dial one anew that is busy or stopped would not help.
        """
        if self._closed:
            return
        self.loop.later(BEAT_SECONDS, self._beat)
        late_bytes = self._connection.late_bytes if self._connection is not None else 0
        try:
            self._send(self._relay.upstream.beat(is_read=late_bytes != self._late_bytes))
        except ProtocolError as error:
            self._on_closed(error.message)
        self._late_bytes = late_bytes

    def _on_data(self, data: bytes) -> None:
        self._heard_at = time.monotonic()
        try:
            reply = self._relay.receive_upstream(data)
        except SessionLostError as error:
            self._give_up(error.message)
            return
        except ProtocolError as error:
            self._on_closed(error.message)
            return
        except Exception as error:
            self._fail(error)
            return
        self._send(reply)
        if self._down_since is not None and self._relay.upstream.is_up:
            self._report_recovery(self._down_since)
        self.deliver()

    def _report_recovery(self, since: float) -> None:
        seconds = time.monotonic() - since
        logger.warning("the store at %s answers again after %.1f s; nothing is lost", self._place, seconds)
        self._down_since = None
        self._race.rest()

    def _on_closed(self, why: str) -> None:
        """The connection is gone."""
        self._drop_connection()
        if not self._closed:
            self._steady_ticks = 0
            self._refused_since = None
            self._go_down(why)
            self._dial()

    def _go_down(self, why: str) -> None:
        if self._down_since is None:
            # A store that may be elsewhere is asked for signs of life: it has been away since the last one.
            self._down_since = (self._upstream.moves and self._heard_at) or time.monotonic()
            logger.warning(
                "lost the connection to the store at %s: %s; trying %s for %g s",
                *(self._place, why, f"all of {self._upstream.name}" if self._upstream.moves else "again"),
                self._relay.upstream.keeps_seconds,
            )

    def _drop_connection(self) -> None:
        self._relay.lose_upstream()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _give_up(self, why: str) -> None:
        """What was asked has no answer any more: the clients are told by a closed connection."""
        count = len(self._relay.clients)
        logger.error("the store at %s is lost: %s; closing %d clients", self._upstream.name, why, count)
        self.drop_all()
        self._drop_connection()
        self._relay.reset(new_token())
        self._down_since = self._failing_since = self._refused_since = None
        self._dial()

    def _describe_upstream(self) -> Upstream:
        places = tuple(each.name for each in self._upstream.places)
        store = self._upstream.store.decode(errors="replace")
        if self._relay.upstream.is_up:
            return Upstream(places, self._place, store=store)
        since = time.monotonic() - (self._failing_since or self._down_since or time.monotonic())
        trouble, advice = self._race.trouble
        return Upstream(places, "", since, self._race.describe_failures(), trouble, advice, store)

    def _tick(self) -> None:
        super()._tick()
        self._send(self._relay.upstream.tick())
        if self._relay.upstream.is_up:
            self._steady_ticks += 1
            if self._steady_ticks > 1:
                self._failing_since = None
        if len(self._relay.clients) and not self._closed:
            self._check_patience(time.monotonic())

    def _check_patience(self, now: float) -> None:
        """See whether the store has been away for too long.

        One that waits for its engine is there, and keeps its sessions for as long as that takes.
        """
        seconds = self._relay.upstream.keeps_seconds
        if trouble := self._race.trouble.trouble:
            if self._excused_at < (self._failing_since or now):
                logger.warning("%s; the ranks are kept until it does", trouble)
            self._excused_at = now
        if self._failing_since is not None and now - max(self._failing_since, self._excused_at) > seconds:
            told = f" ({self._race.describe_failures()})" if self._upstream.moves else ""
            self._give_up(f"no connection for {seconds:g} s, the limit session_seconds{told}")
        elif self._refused_since is not None and now - self._refused_since > _REFUSED_SECONDS:
            self._give_up(f"nothing has listened there for {_REFUSED_SECONDS:g} s")
