"""A server with several stores at one address: one without a name, and others that clients name by ENTER.

Each has a core and a pump of its own, as if it had a process to itself. They share the loop and the listening
sockets: a client that names a store is handed on to its pump, with what it has sent. A named store begins
empty when it is first named, and is dropped when nobody has used it for a minute.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from typing import Final

from rallypoint.errors import AccessError, LimitError, ProtocolError
from rallypoint.store.core.store import Connection, Core
from rallypoint.store.server.events import Events
from rallypoint.store.server.loops.link import Link
from rallypoint.store.server.loops.loop import Callback, Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.wire.encoding import VALIDATE

_IDLE_TICKS: Final = 60


class _NamedPump(Pump[Connection]):
    """Serves the clients of one named store."""

    def __init__(self, loop: Loop, core: Core, events: Events, lighten: Callback) -> None:
        """`lighten` is called when all stores together hold more than the limit held_bytes."""
        super().__init__(loop, core, (), events)
        self._lighten_all = lighten
        self.idle_ticks = 0
        """For how many ticks nobody has used it."""

    @property
    def is_idle(self) -> bool:
        """Whether nobody has used it for long."""
        return self.idle_ticks >= _IDLE_TICKS and not self.has_clients

    def _tick(self) -> None:
        super()._tick()
        self.idle_ticks = 0 if self.has_clients else self.idle_ticks + 1

    def _lighten(self) -> None:
        self._lighten_all()

    def _enter(self, link: Link[Connection], name: bytes) -> None:
        wanted = f"the store named {name.decode(errors='replace')!r}" if name else "the store without a name"
        self.refuse(link, ProtocolError(f"it wants {wanted}, but has named another one before"))


class StorePump(Pump[Connection]):
    """Serves the clients of a core, and of others by their names, on listening sockets, which it owns."""

    def __init__(
        self, loop: Loop, core: Core, listeners: Sequence[socket.socket], events: Events | None = None
    ) -> None:
        super().__init__(loop, core, listeners, events)
        self._named: dict[bytes, _NamedPump] = {}
        self._tell_names()

    def drop_together(self) -> None:
        for pump in self._named.values():
            pump.drop_together()
        super().drop_together()

    def close(self) -> None:
        for pump in self._named.values():
            pump.close()
        super().close()

    @property
    def has_clients(self) -> bool:
        return super().has_clients or any(pump.has_clients for pump in self._named.values())

    @property
    def connections(self) -> int:
        return super().connections + sum(pump.connections for pump in self._named.values())

    def _tick(self) -> None:
        super()._tick()
        for name, pump in list(self._named.items()):
            if pump.is_idle:
                self._drop_store(name)
        self.core.clients.elsewhere = self.connections - super().connections

    def _lighten_all(self) -> None:
        """Close the clients that hold the most, of all stores: the limit held_bytes is for all together."""
        self.core.budget.is_reported = False
        before = math.inf
        while not self._closed and self.core.budget.is_over and self.core.held < before:
            before = self.core.held
            heaviest = max((self, *self._named.values()), key=lambda pump: pump.core.most_held)
            heaviest.core.lighten()
            heaviest.deliver()

    def _lighten(self) -> None:
        """Soon, not now: a pump that is delivering closes nobody until it is done."""
        self.loop.later(0, self._lighten_all)

    # Names

    def _enter(self, link: Link[Connection], name: bytes) -> None:
        rest = link.client.rest
        link.flush()
        if self._links.get(link.client) is not link:  # it is gone
            return
        try:
            pump = self._named.get(name) or self._open_store(name, link.client.is_snapshot_only)
            pump.core.clients.elsewhere = self.connections - 1 - pump.connections
            client = pump.core.open(link.client.peer)
        except ProtocolError as error:
            self.refuse(link, error)
            return
        except Exception:
            link.fail()
            return
        pump.idle_ticks = 0
        self.let_go(link)
        pump.take_over(link, client, VALIDATE + rest)

    def _open_store(self, name: bytes, is_snapshot_only: bool) -> _NamedPump:
        if is_snapshot_only:
            raise AccessError("a new store, with a token that may only see who is here")
        if len(self._named) >= self.core.limits.stores:
            self._make_room()
        events = self._events.of_store(name.decode(errors="replace"))
        core = Core(
            self.core.limits,
            self.loop.turn,
            self.core.about,
            wants_events=events.are_wanted,
            beside=self.core,
        )
        pump = _NamedPump(self.loop, core, events, self._lighten)
        pump.start()
        self._named[name] = pump
        self._tell_names()
        return pump

    def _make_room(self) -> None:
        """Drop the store that has been unused for the longest time."""
        unused = [name for name, pump in self._named.items() if not pump.has_clients]
        if not unused:
            limit = self.core.limits.stores
            raise LimitError(f"one more store with a name than {limit:,}, the limit stores")
        self._drop_store(max(unused, key=lambda name: self._named[name].idle_ticks))

    def _drop_store(self, name: bytes) -> None:
        pump = self._named.pop(name)
        while pump.core.go_on():  # until ended sessions hold nothing any more
            pass
        pump.close()
        self._tell_names()

    def _tell_names(self) -> None:
        self.core.clients.names = tuple(name.decode(errors="replace") for name in self._named)
