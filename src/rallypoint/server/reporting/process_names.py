"""Giving names to clients that do not say who they are: the process behind each, if it is of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from rallypoint.rollcall.identity import NOBODY, Identity, Role, Source
from rallypoint.server.core.clients import Client
from rallypoint.server.core.front import Front
from rallypoint.server.loops.loop import Loop
from rallypoint.server.reporting.neighbours import Found, Neighbours, Process

_AT_ONCE: Final = 500


class ProcessNames:
    """Names the clients of one server or relay, when somebody looks."""

    def __init__(self, loop: Loop, core: Front[Any], listeners: Iterable[socket.socket]) -> None:
        self._loop = loop
        self._core = core
        self._ports = [listener.getsockname()[1] for listener in listeners]
        self._neighbours = Neighbours(loop, self._ports)

    def find(self) -> None:
        """Ask the system for the clients that have no name; it knows them by the ports of the listeners."""
        if not self._ports:
            self._core.processes_found()
            return
        nameless = [each for each in self._core.clients if each.is_nameless]
        self._neighbours.ask(partial(self._name, nameless))

    def close(self) -> None:
        self._neighbours.close()

    def _name(self, clients: Sequence[Client], found: Found) -> None:
        """Some at a time: there may be thousands."""
        for client in clients[:_AT_ONCE]:
            if client.since >= self._neighbours.began:
                continue  # the process that was found may be another one, which had this address before
            address, _, port = client.peer.rpartition(":")
            process = found.get((address, int(port)))
            client.tries += 1
            if process is not None and client.who is NOBODY and client in self._core.clients:
                self._core.clients.name(client, _identity(self._core.about.host, process))
        if len(clients) > _AT_ONCE:
            self._loop.later(0, partial(self._name, clients[_AT_ONCE:], found))
        else:
            self._core.processes_found()


def _identity(host: str, process: Process) -> Identity:
    return Identity(
        host=host,
        pid=process.pid,
        rank=process.rank,
        local_rank=process.local_rank,
        world_size=process.world_size,
        role=Role.RANK if process.rank >= 0 else Role.UNKNOWN,
        source=Source.PROCESS,
    )
