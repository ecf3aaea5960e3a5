"""A server with several stores at one address: one without a name, and others that clients name by ENTER.

Each has a core and a pump of its own, so it is served, watched and written down as if it had a process to
itself. They share the loop, and the sockets on which clients come: whoever names a store is handed on to its
pump, with what it has sent. A store with a name begins empty when it is first named, and is dropped when
nobody has used it for a minute.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

from rallypoint.errors import LimitError
from rallypoint.server.core.store import Connection, Core
from rallypoint.server.loops.link import Link
from rallypoint.server.loops.loop import Loop
from rallypoint.server.loops.pump import Pump
from rallypoint.server.reporting.events import Events
from rallypoint.wire.encoding import VALIDATE

_IDLE_TICKS: Final = 60


class _NamedPump(Pump[Connection]):
    """Serves the clients that have named one store."""

    idle_ticks = 0
    """For how long nobody has used it."""

    def _tick(self) -> None:
        super()._tick()
        self.idle_ticks = 0 if self.has_clients else self.idle_ticks + 1


class StorePump(Pump[Connection]):
    """Serves the clients of a core, and of others by their names, on listening sockets, which it owns."""

    def __init__(
        self, loop: Loop, core: Core, listeners: Sequence[socket.socket], events: Events | None = None
    ) -> None:
        super().__init__(loop, core, listeners, events)
        self._named: dict[bytes, _NamedPump] = {}

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
            if pump.idle_ticks >= _IDLE_TICKS:
                self._drop_store(name)
        self.core.clients.elsewhere = self.connections - super().connections
        self._lighten_all()

    def _lighten_all(self) -> None:
        """What all stores hold together is bounded as what one of them holds."""
        pumps: list[Pump[Connection]] = [self, *self._named.values()]
        held = sum(pump.core.held for pump in pumps)
        heaviest = max(pumps, key=lambda pump: pump.core.held)
        heaviest.core.lighten(held - heaviest.core.held)
        heaviest.deliver()

    # Names

    def _enter(self, link: Link[Connection], name: bytes) -> None:
        rest = link.client.rest
        try:
            pump = self._named.get(name) or self._open_store(name)
            pump.core.clients.elsewhere = self.connections - 1 - pump.connections
            client = pump.core.open(link.client.peer)
        except LimitError as error:
            self.refuse(link, error)
            return
        self.let_go(link)
        pump.take_over(link, client, VALIDATE + rest)

    def _open_store(self, name: bytes) -> _NamedPump:
        if len(self._named) >= self.core.limits.stores:
            self._make_room()
        events = self._events.of_store(name.decode(errors="replace"))
        core = Core(self.core.limits, self.loop.turn, self.core.about, wants_events=events.are_wanted)
        pump = self._named[name] = _NamedPump(self.loop, core, (), events)
        pump.start()
        return pump

    def _make_room(self) -> None:
        """Drop the store that nobody has used for the longest time."""
        unused = [name for name, pump in self._named.items() if not pump.has_clients]
        if not unused:
            limit = self.core.limits.stores
            raise LimitError(f"one more store with a name than {limit:,}, the limit stores")
        self._drop_store(max(unused, key=lambda name: self._named[name].idle_ticks))

    def _drop_store(self, name: bytes) -> None:
        self._named.pop(name).close()
