"""Giving names to clients that do not say who they are: the process behind each, if it is of this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from rallypoint.rollcall.identity import NOBODY, Identity, Role, Source
from rallypoint.server.core.front import Client, Front
from rallypoint.server.loops.loop import Loop
from rallypoint.server.reporting.neighbours import Found, Neighbours, Process

_AT_ONCE: Final = 500
_TRIES: Final = 2
"""A client elsewhere is never found; and a process may have had no time yet to be seen."""


class ProcessNames:
    """Names the clients of one server or relay, when somebody looks."""

    def __init__(self, loop: Loop, core: Front[Any], listeners: Iterable[socket.socket]) -> None:
        self._loop = loop
        self._core = core
        self._neighbours = Neighbours(loop, [listener.getsockname()[1] for listener in listeners])
        self._is_asking = False
        core.find_processes = self.find

    def find(self) -> Callable[[], bool]:
        """Ask for those who are not known; the answer tells whether they still may be."""
        if not self._is_asking:
            nameless = [each for each in self._core.connections if each.who is NOBODY and each.tries < _TRIES]
            if nameless:
                self._is_asking = True
                self._neighbours.ask(partial(self._name, nameless))
        return lambda: self._is_asking

    def close(self) -> None:
        self._neighbours.close()

    def _name(self, clients: Sequence[Client], found: Found) -> None:
        """Some at a time: there may be thousands."""
        for client in clients[:_AT_ONCE]:
            if client.since >= self._neighbours.began:
                continue  # who has this address in what was found may be another, who had it before
            address, _, port = client.peer.rpartition(":")
            process = found.get((address, int(port)))
            client.tries += 1
            if process is not None and client.who is NOBODY and client in self._core.connections:
                self._core.name(client, _identity(self._core.about.host, process))
        if len(clients) > _AT_ONCE:
            self._loop.later(0, partial(self._name, clients[_AT_ONCE:], found))
        else:
            self._is_asking = False


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
