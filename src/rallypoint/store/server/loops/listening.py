"""Accepting clients on listening sockets: all that are there at once, and none while there is no room."""

from __future__ import annotations

import errno
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Any

from rallypoint.store.machine.addresses import reason_of
from rallypoint.store.server.loops.link import Socket
from rallypoint.store.server.loops.loop import Loop

try:
    from rallypoint.store.server.loops.native import accept_some
except ImportError:  # it is not compiled, or not for this system
    accept_some = None  # type: ignore[assignment]

logger = logging.getLogger("rallypoint.server")

_ACCEPT_AT_ONCE = 1024
_NOT_NOW = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR}
# Linux reports what is wrong with a new connection when it is accepted.
_OF_THE_CLIENT = {
    errno.ECONNABORTED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOPROTOOPT,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EPROTO,
    errno.ETIMEDOUT,
}
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
# After a barrier, all clients fall silent at once. If thousands of probes were due in the same second, the
# system's queue would lose most of them, each time, and live connections would end. So they are spread out.
_PROBES_PER_SECOND = 100
_MOST_SECONDS_LATER = 300
_NAME_ON_MACOS = {"TCP_KEEPIDLE": "TCP_KEEPALIVE"}
# On Linux, accepted sockets inherit the options of the listener: no system call per client.
_INHERITS_OPTIONS = sys.platform == "linux"
_TCP_KEEPIDLE: int = getattr(socket, "TCP_KEEPIDLE", 0)

Arrival = tuple[Socket, Any]
"""A new socket, and the address of its client, as the system gives it."""

Welcome = Callable[[list[Arrival]], None]
"""Takes new, non-blocking sockets."""


class Listening:
    """The listening sockets of one pump, which it owns."""

    def __init__(
        self, loop: Loop, listeners: Sequence[socket.socket], clients: Sized, welcome: Welcome
    ) -> None:
        """`clients`: the connected ones, for a message."""
        self._clients = clients
        self._loop = loop
        self._listeners = list(listeners)
        self._welcome = welcome
        self._is_accepting = False
        self._accepted = 0

    def start(self) -> None:
        for listener in self._listeners:
            listener.setblocking(False)
            set_options(listener, _KEEP_ALIVE)
        self.resume()

    def resume(self) -> None:
        """Accept again, if that was paused. Called about once a second."""
        if self._is_accepting:
            return
        self._is_accepting = True
        for listener in self._listeners:
            self._loop.watch_readable(listener, partial(self._accept_from, listener))

    def close(self) -> None:
        for listener in self._listeners:
            if self._is_accepting:
                self._loop.watch_readable(listener, None)
            listener.close()

    def _accept_from(self, listener: socket.socket) -> None:
        """Accept until none is left, so that a storm of clients costs few turns of the loop.

        First accept, then welcome: the system's backlog is short, and a client that does not fit into it
        tries again a second later. What is gathered to be sent does not wait for that.
        """
        if self._loop.sending is not None:
            self._loop.sending.flush()
        is_more = True
        while self._is_accepting and is_more:
            arrivals = self._accept_some(listener)
            is_more = len(arrivals) >= _ACCEPT_AT_ONCE
            if arrivals:
                self._welcome(arrivals)

    def _accept_some(self, listener: socket.socket) -> list[Arrival]:
        arrivals: list[Arrival] = []
        number = 0
        while len(arrivals) < _ACCEPT_AT_ONCE and not number:
            second, before = divmod(self._accepted, _PROBES_PER_SECOND)
            idle = _KEEP_ALIVE["TCP_KEEPIDLE"] + second % _MOST_SECONDS_LATER
            found, number = _accept(listener, _PROBES_PER_SECOND - before, idle)
            self._accepted += len(found)
            arrivals += found
        if number and number not in _NOT_NOW and number not in _OF_THE_CLIENT:
            self._pause(number)
        return arrivals

    def _pause(self, number: int) -> None:
        logger.warning(
            "cannot accept more clients beside %d: %s; they wait. hint: is the limit of open files too low?",
            len(self._clients),
            reason_of(number),
        )
        self._is_accepting = False
        for listener in self._listeners:
            self._loop.watch_readable(listener, None)


def _accept(listener: socket.socket, most: int, idle: int) -> tuple[list[Arrival], int]:
    """New non-blocking sockets, and why there are no more: the system's error, or 0.

    The system probes them after `idle` seconds of silence.
    """
    family, kind, protocol = int(listener.family), int(listener.type), listener.proto
    if accept_some is not None:
        some, number = accept_some(listener.fileno(), most, idle)
        kind |= socket.SOCK_NONBLOCK
        return [(Socket(family, kind, protocol, file), address) for file, address in some], number
    found: list[Arrival] = []
    try:
        while len(found) < most:
            file, address = listener._accept()
            sock = Socket(family, kind, protocol, file)
            if _make_ready(sock, address, idle):
                found.append((sock, address))
    except OSError as error:
        return found, error.errno or errno.EIO
    return found, 0


def _make_ready(sock: Socket, address: Any, idle: int) -> bool:
    """Set the options of a client's socket; close it and return False if the client has gone already."""
    try:
        if address is not None:  # as on Windows
            sock.setblocking(False)
            if not _INHERITS_OPTIONS:
                set_options(sock, {**_KEEP_ALIVE, "TCP_KEEPIDLE": idle})
            elif idle != _KEEP_ALIVE["TCP_KEEPIDLE"]:
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_KEEPIDLE, idle)
            return True
    except OSError:
        pass
    sock.close()
    return False


def set_options(sock: Socket, times: Mapping[str, int]) -> None:
    """Send without delay, and probe a silent connection after these seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that vanishes sends no FIN: without probes, its ranks would count as present for ever.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in times.items():
        option = getattr(socket, name, None) or getattr(socket, _NAME_ON_MACOS.get(name, ""), None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
