"""The server behind a torch store that asked to be the master: ours, with the life of torch's own.

torch's server lives as long as the C++ store object, which process groups hold beyond its Python half.
That life cannot be watched from Python, but the store's connection ends with it: so the client, once
connected, deletes a key that only it knows, and the server ends when all connections that did so have closed.

The server ends a moment later than the store. Who drops a store, or destroys a process group, must find the
port closed: so both wait for that moment, with `end_left_servers`.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from rallypoint.client.tcp import TCPStore
from rallypoint.errors import ConnectionLostError, PortInUseError, RallypointError
from rallypoint.launch.reports import LOST, WITHOUT_STORE, lost_server
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.server.loops.backend import Choice
from rallypoint.store.server.process.hosting import HostedServer, Lifespan, host_server

logger = logging.getLogger("rallypoint.torch")

_END_SECONDS = 5.0
_PROBE_SECONDS = 0.1


@dataclass(frozen=True)
class OwnedServer:
    """A server of this process, and the key whose deletion makes a client its owner."""

    server: HostedServer
    owner_key: str

    def add_owner(self, client: Any) -> None:
        """Make a connected store an owner; ConnectionLostError if the last one before it has just gone."""
        if not client.delete_key(self.owner_key):
            raise ConnectionLostError(f"the store server on {self.server.places} is about to end")
        # The C++ store is gone when this is called, unless something in C++ holds it.
        weakref.finalize(client, end_left_servers, self).atexit = False

    def is_owned(self) -> bool:
        """Whether a store of this process still holds it. If not, it has ended on return.

        A store that has gone before this call holds it no more: the server has seen the end of its
        connection when it answers the probe's second request.
        """
        deadline = Deadline(_END_SECONDS)
        while not self.server.await_end(0.0):
            if deadline.passed:
                return True  # it runs, but does not answer: leave it alone
            try:
                with TCPStore(*self.server.address, timeout=_PROBE_SECONDS, role=Role.TOOL) as probe:
                    if probe.delete_key(self.owner_key):
                        return True
                self.server.await_end(deadline.remaining)
            except RallypointError:
                continue  # it is about to end, or it is busy
        return False

    def end(self) -> None:
        """End it, whoever is connected."""
        self.server.release()
        if _servers.get(self.server.port) is self:
            del _servers[self.server.port]


_servers: dict[int, OwnedServer] = {}
_lock = threading.Lock()


def _start_anew() -> None:
    """A fork has no servers, and a thread of its parent may have been starting one."""
    global _lock
    _lock = threading.Lock()
    _servers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def owned_at(port: int) -> OwnedServer | None:
    """The server of this process on a port, if there is one."""
    return _servers.get(port)


def end_left_servers(*owned: OwnedServer) -> None:
    """Wait for the end of those of this process' servers whose stores have gone: of these, or of all."""
    for port, server in list(_servers.items()):
        if (not owned or server in owned) and not server.is_owned() and _servers.get(port) is server:
            del _servers[port]


def open_server(
    host: str, port: int, *, backend: Choice, multi_tenant: bool, listen_fd: int | None
) -> OwnedServer:
    """A server for a master; with `multi_tenant` the one on that port, if this process has one.

    The caller connects a client, and makes that client its owner with `add_owner`.
    """
    with _lock:
        known = _servers.get(port) if listen_fd is None else None
        if known is not None:
            if not known.is_owned():
                _servers.pop(port, None)
            elif multi_tenant:
                return known
            else:
                raise PortInUseError(f"port {port} is in use by another store of this process")
        key = f"rallypoint/owner/{secrets.token_hex(16)}"
        lifespan = Lifespan(owner_key=f"/{key}")  # on the wire, all clients put a slash in front of a key
        server = host_server(host, port, backend=backend, listen_fd=listen_fd, lifespan=lifespan)
        owned = _servers[server.port] = OwnedServer(server, key)
        threading.Thread(target=_report_death, args=(server,), name="rallypoint server", daemon=True).start()
        return owned


def _report_death(server: HostedServer) -> None:
    """Say at once that a server was killed: torch's own errors name an address alone."""
    server.await_end(None)
    if (how := server.how_it_ended()) != "with exit code 0":  # it has not ended with its owners
        lost = lost_server("the job's store", server.pid, server.places, how)
        logger.error("rallypoint: %s %s: %s", lost.server, lost.how, WITHOUT_STORE)
        LOST.leave((lost,))
