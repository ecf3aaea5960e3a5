"""A relay with its sockets: the pump that serves its clients, and a connection upstream that is renewed."""

from __future__ import annotations

import errno
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from rallypoint.errors import ProtocolError
from rallypoint.relay.core.ranks import Rank
from rallypoint.relay.core.relay import RelayCore
from rallypoint.relay.core.upstream import BYE, SessionLostError
from rallypoint.relay.outgoing import Address, Outgoing
from rallypoint.rollcall.identity import Role
from rallypoint.server.core.outbox import Work
from rallypoint.server.loops.loop import Callback, Loop
from rallypoint.server.loops.pump import Pump, about_this_process
from rallypoint.server.machine.reasons import reason_of
from rallypoint.stores.client.connecting import connect, format_address, resolve
from rallypoint.stores.client.deadline import Deadline
from rallypoint.stores.client.hello import who_am_i
from rallypoint.wire.limits import Limits
from rallypoint.wire.opcodes import READY
from rallypoint.wire.sessions import ASK, TOKEN_BYTES

logger = logging.getLogger("rallypoint.relay")

_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 1.0
_REFUSED: Final = reason_of(errno.ECONNREFUSED)
_REFUSED_SECONDS: Final = 5.0
"""A port that refuses for so long: the store is gone, and its sessions with it."""


class StoreAddress(NamedTuple):
    """The store or relay upstream of a relay: where it is, and what it can do."""

    name: str
    host: str
    addresses: list[Address]
    knows_sessions: bool


def find_upstream(host: str, port: int, seconds: float) -> StoreAddress:
    """Reach the store or relay at an address; ConnectError when that takes longer than the seconds given."""
    deadline = Deadline(seconds)
    connection = connect(host, port, deadline, who_am_i(Role.AGENT))
    try:
        connection.send(ASK, deadline)
        knows_sessions = connection.read(1, deadline) == READY
    finally:
        connection.close()
    return StoreAddress(format_address(host, port), host, list(resolve(host, port, deadline)), knows_sessions)


def _new_token() -> bytes:
    return secrets.token_bytes(TOKEN_BYTES)


class Relay(Pump[Rank]):
    """Serves ranks and relays on listening sockets, which it owns from now on, by asking its upstream."""

    def __init__(
        self,
        loop: Loop,
        upstream: StoreAddress,
        listeners: Sequence[socket.socket],
        limits: Limits | None = None,
    ) -> None:
        core = RelayCore(_new_token(), limits, loop.turn, about_this_process(loop))
        super().__init__(loop, core, listeners)
        self._relay = core
        self._upstream = upstream
        self._connection: Outgoing | None = None
        self._has_dial = False
        self._pause = _FIRST_PAUSE
        self._down_since: float | None = None
        # Since when no connection has lasted from one tick to the next: one that is broken again at once,
        # each time, is no better than none.
        self._failing_since: float | None = None
        self._refused_since: float | None = None
        self._steady_ticks = 0

    def start(self, on_tick: Callback = lambda: None) -> None:
        super().start(on_tick)
        self._dial()

    def close(self) -> None:
        self._closed = True  # what happens from here on leads to no new connection
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.send(BYE)
            connection.close()
        super().close()

    # What clients ask

    def _work(self, work: Work) -> None:
        if work is Work.FLUSH:
            # Not before all that is ready to be read has been read: what that brings goes along.
            self.loop.later(0, self._flush)
        else:
            super()._work(work)

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

    def _dial_later(self) -> None:
        """Try again after a while, which grows."""
        if not self._has_dial:
            self._has_dial = True
            self.loop.later(self._pause * random.uniform(0.5, 1.0), self._dial)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _dial(self) -> None:
        self._has_dial = False
        if self._closed:
            return
        self._connection = Outgoing(
            self.loop,
            self._upstream.host,
            self._upstream.addresses,
            on_open=self._on_open,
            on_data=self._on_data,
            on_closed=self._on_closed,
        )

    def _on_open(self) -> None:
        self._refused_since = None
        self._send(self._relay.connect())

    def _on_data(self, data: bytes) -> None:
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
            self._come_back(self._down_since)
        self.deliver()

    def _come_back(self, since: float) -> None:
        logger.warning(
            "%s answers again after %.1f s; nothing is lost", self._upstream.name, time.monotonic() - since
        )
        self._down_since = None
        self._pause = _FIRST_PAUSE

    def _on_closed(self, why: str) -> None:
        """The connection is gone, or could not be made."""
        self._drop_connection()
        if self._closed:
            return
        self._steady_ticks = 0
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if why != _REFUSED:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        if self._down_since is None:
            self._down_since = now
            seconds = self._relay.upstream.keeps_seconds
            logger.warning(
                "lost the connection to the store at %s: %s; trying again for %g s",
                *(self._upstream.name, why, seconds),
            )
        self._dial_later()

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
        self._relay.reset(_new_token())
        self._down_since = self._failing_since = self._refused_since = None
        self._dial_later()

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
        seconds = self._relay.upstream.keeps_seconds
        if self._failing_since is not None and now - self._failing_since > seconds:
            self._give_up(f"no connection for {seconds:g} s, the limit session_seconds")
        elif self._refused_since is not None and now - self._refused_since > _REFUSED_SECONDS:
            self._give_up(f"nothing has listened there for {_REFUSED_SECONDS:g} s")
