"""The byte pump: sockets in, a `Front` in the middle, sockets out.

A backend only says when a socket can be read or written, and runs the loop. The rest is here: accept
until there is none left, one read for what has come, one write per read, bounded buffers for those who do
not read, and no name look-up anywhere.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from struct import Struct
from typing import Any, Generic

import rallypoint
from rallypoint.errors import LimitError, ProtocolError
from rallypoint.server.core.front import ClientT, Front
from rallypoint.server.core.looks import About
from rallypoint.server.loops.loop import Callback, Loop
from rallypoint.server.reporting.process_names import ProcessNames
from rallypoint.server.reporting.stalls import StallReports

logger = logging.getLogger("rallypoint.server")

TICK_SECONDS = 1.0
"""How often handshakes are checked against their deadline, a paused accept is tried again, and clients are
looked for that have gone unnoticed."""

# A buffer for a read, whatever comes, has to be made and cut to size. One of this length is the
# interpreter's own to give, with its header; a longer one is the C library's, and costs more.
_FEW_BYTES = 448
# For a client that has sent more at a time. Less than what makes the C library tidy up its heap for each
# buffer (64 KiB).
_MANY_BYTES = 1 << 15
_ACCEPT_AT_ONCE = 1024
_NOT_NOW = (BlockingIOError, InterruptedError)
# Linux reports what is wrong with a new connection to whoever accepts it.
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


# Reading a descriptor costs less than reading a socket object; only Windows cannot do it.
_READS_SOCKETS_ONLY = sys.platform == "win32"
_read: Callable[[Any, int], bytes] = socket.socket.recv if _READS_SOCKETS_ONLY else os.read
_write: Callable[[Any, bytes | bytearray], int] = socket.socket.send if _READS_SOCKETS_ONLY else os.write


# Linux counts bytes for each connection, so nobody here needs to: `struct tcp_info` has them since Linux 4.1.
_BYTE_COUNTS = Struct("=QQ")
_TCP_INFO_BYTES = 136
_CLOSE_WAIT = 8  # the state of a connection whose client has said that it ends; that counts as a byte
_PEEKED_BYTES = 16

# What `socket.socket` is made of. To accept by its means costs half as much: `socket.socket.accept` looks up
# how family and type are called, for each client.
_Socket = socket.SocketType


class _Link(Generic[ClientT]):
    """One client's socket and what is still to be sent on it."""

    __slots__ = (
        *("_file", "_pump", "_receive", "_room", "_unanswered", "_woken"),
        *("connection", "ending", "sock", "unsent"),
    )

    def __init__(self, pump: Pump[ClientT], sock: _Socket, connection: ClientT) -> None:
        self._pump = pump
        self._file: Any = sock if _READS_SOCKETS_ONLY else sock.fileno()
        self._receive = connection.receive
        self._woken = pump.core.woken
        self._unanswered = pump.unanswered
        self._room = _FEW_BYTES
        self.sock = sock
        self.connection = connection
        self.unsent: bytearray | None = None
        self.ending = False  # it is read no more, and is closed as soon as all is sent

    def on_readable(self) -> None:
        """Read once, answer with one write, wake whom that wakes. The hot path: no call too many."""
        try:
            data = _read(self._file, self._room)
        except OSError as error:
            if not isinstance(error, _NOT_NOW):
                self._pump.drop(self)
            return
        if not data:
            self._pump.end(self)
            return
        if len(data) == self._room:
            data = self._read_on(data)
        receive = self._receive  # `self._receive(data)` would look for a method first, and cost more
        try:
            reply = receive(data)
        except ProtocolError as error:
            self._pump.refuse(self, error)
            return
        except Exception:  # out of memory, or a fault of ours: this client alone pays for it
            logger.exception("closed %s: the server failed to serve it", self.connection.peer)
            self._pump.drop(self)
            return
        if not reply:
            self._unanswered.add(self)
        elif self.unsent is None:
            try:
                sent = _write(self._file, reply)
            except OSError as error:
                self._send_failed(error, reply)
            else:
                if sent < len(reply):
                    self._hold(reply[sent:])
        else:
            self._hold(reply)
        if self._woken:
            self._pump.deliver()

    def _read_on(self, data: bytes) -> bytes:
        """As much has come as there was room for: if that was little, read again, with more from now on."""
        if self._room == _MANY_BYTES:
            return data
        self._room = _MANY_BYTES
        try:
            return data + _read(self._file, _MANY_BYTES)
        except OSError as error:
            if not isinstance(error, _NOT_NOW):  # what it sent before still counts
                self._pump.loop.later(0, partial(self._pump.drop, self))
            return data

    def send(self, data: bytes) -> None:
        """Send, or hold what cannot be sent now."""
        if self.unsent is not None:
            self._hold(data)
            return
        try:
            sent = _write(self._file, data)
        except OSError as error:
            self._send_failed(error, data)
        else:
            if sent < len(data):
                self._hold(data[sent:])

    def on_readable_timed(self, began: float) -> None:
        """As `on_readable`, in a turn of the loop that began then: see how long it took."""
        try:
            data = self.sock.recv(_PEEKED_BYTES, socket.MSG_PEEK)
        except OSError:
            data = b""
        opcode = self.connection.opcode_in(data) if data else -1
        self.on_readable()
        self._pump.core.traffic.note_duration(opcode, time.monotonic() - began)

    def count_bytes(self) -> tuple[int, int]:
        """Bytes received and sent, as the system counts them; nothing where it does not."""
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except (OSError, AttributeError):
            return 0, 0
        if len(info) < _TCP_INFO_BYTES:
            return 0, 0
        sent, received = _BYTE_COUNTS.unpack_from(info, _TCP_INFO_BYTES - _BYTE_COUNTS.size)
        return received - (info[0] == _CLOSE_WAIT), sent

    def _send_failed(self, error: OSError, data: bytes) -> None:
        if isinstance(error, _NOT_NOW):
            self._hold(data)
        else:
            self._pump.drop(self)

    @property
    def has_error(self) -> bool:
        """Whether the connection has broken without that having been noticed; True but once."""
        return self.sock.fileno() >= 0 and bool(self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def on_writable(self) -> None:
        unsent = self.unsent
        if unsent is None:
            return
        try:
            del unsent[: _write(self._file, unsent)]
        except OSError as error:
            if not isinstance(error, _NOT_NOW):
                self._pump.drop(self)
            return
        if not unsent:
            self.unsent = None
            self._pump.loop.watch_writable(self.sock, None)
            if self.ending and not self.connection.is_owed:
                self._pump.drop(self)

    def _hold(self, data: bytes) -> None:
        if self.unsent is None:
            self.unsent = bytearray()
            self._pump.loop.watch_writable(self.sock, self.on_writable)
        self.unsent += data
        limit = self._pump.core.limits.unsent_bytes
        if len(self.unsent) > limit:
            self._pump.note_error(
                self.connection,
                f"it does not read; more than {limit:,} bytes wait for it, the limit unsent_bytes",
            )
            self._pump.drop(self)


class Pump(Generic[ClientT]):
    """Serves the clients of a core on listening sockets, which it owns from now on."""

    def __init__(self, loop: Loop, core: Front[ClientT], listeners: Sequence[socket.socket]) -> None:
        self.loop = loop
        self.core = core
        core.clock, core.wall, core.began = time.monotonic, time.time, time.monotonic()
        core.progressed = core.began
        core.about = About(rallypoint.__version__, socket.gethostname(), os.getpid(), loop.name)
        loop.sample = _sample
        core.looks.has_work = lambda: loop.later(0, self._look_on)
        core.looks.on_fault = lambda: logger.exception("what this server knows could not be put together")
        self._names = ProcessNames(loop, core, listeners)
        self._stalls = StallReports(core)
        self._listeners = list(listeners)
        self._links: dict[ClientT, _Link[ClientT]] = {}
        self.unanswered: set[_Link[ClientT]] = set()
        """Who, since the last tick, has sent something and got no answer to it at once."""
        self._accepting = False
        self._delivering = False
        self._holding = False
        self._closed = False

    def serve(self, on_ready: Callback = lambda: None, on_tick: Callback = lambda: None) -> None:
        """Accept and serve until the loop's `stop`, SIGINT or SIGTERM; then close every socket.

        `on_ready` is called when accepting. For the main thread of a process, as signals are.
        """
        try:
            self._stop_on_signals()
            self.start(on_tick)
            on_ready()
            self.loop.run()
        finally:
            self.close()
            self.loop.close()

    def start(self, on_tick: Callback = lambda: None) -> None:
        """Accept, and serve whenever the loop runs; call `on_tick` about every second."""

        def tick() -> None:
            if self._closed:
                return
            self.loop.later(TICK_SECONDS, tick)
            self._drop_broken()
            self._expire()
            self._resume_accepting()
            self.core.end_second()
            self._stalls.look()
            on_tick()

        if self.core.observer is not None:
            self.core.observer.started()
        for listener in self._listeners:
            _prepare(listener)
        self._resume_accepting()
        self.loop.later(TICK_SECONDS, tick)

    def close(self) -> None:
        """Close every socket."""
        self._closed = True
        self.drop_all()
        self._names.close()
        if self.core.observer is not None:
            self.core.observer.stopped()
        for listener in self._listeners:
            if self._accepting:
                self.loop.watch_readable(listener, None)
            listener.close()

    def drop_all(self) -> None:
        """Close the connections of all clients at once."""
        for link in list(self._links.values()):
            self.drop(link)

    def hold_readers(self, hold: bool) -> None:
        """Read nothing more from the clients, for as long as that is said: what they send stays with them."""
        self._holding = hold
        for link in self._links.values():
            if not link.ending:
                self.loop.watch_readable(link.sock, None if hold else link.on_readable)

    def note_error(self, connection: ClientT, reason: str) -> None:
        """A connection is about to be closed because of what it did, or did not."""
        connection.why = reason
        logger.warning("closed %s: %s", connection.peer, reason)
        self._remember_error(connection.peer, reason)

    def _remember_error(self, peer: str, reason: str) -> None:
        self.core.traffic.note_error(time.time(), peer, reason)
        if self.core.observer is not None:
            self.core.observer.erred(peer, reason)

    def _look_on(self) -> None:
        """Go on with what those asked for who look, for a moment in each turn."""
        if self._closed:
            return
        pause = self.core.looks.go_on()
        if pause is not None:
            self.loop.later(pause, self._look_on)
        self.deliver()

    def deliver(self) -> None:
        """Send each woken connection its notice.

        A send that fails ends its connection, which may wake more; those are for the call under way.
        """
        if self._delivering:
            return
        self._delivering = True
        try:
            core = self.core
            while core.woken or core.doomed:
                self._notify(core.take_woken())
                for connection, error in core.take_doomed():
                    self.refuse(self._links[connection], error)
        finally:
            self._delivering = False

    def _notify(self, woken: Iterable[ClientT]) -> None:
        """A barrier wakes all clients at once: no call too many here, either."""
        links = self._links
        for connection in woken:
            link = links.get(connection)
            if link is None:  # it has gone because of one before it
                continue
            notice = connection.take_notice()
            if notice:
                link.send(notice)
            if link.ending and link.unsent is None and not connection.is_owed:
                self.drop(link)

    def end(self, link: _Link[ClientT]) -> None:
        """Close, but not before all is sent, or the time for that is over."""
        if (link.unsent is None and not link.connection.is_owed) or link.connection not in self._links:
            self.drop(link)
        elif not link.ending:
            link.ending = True
            self.loop.watch_readable(link.sock, None)
            self.core.end(link.connection, time.monotonic())
            self.deliver()

    def refuse(self, link: _Link[ClientT], error: ProtocolError) -> None:
        """Close because of a violation: answer what came before it, say why, and wake whom that wakes."""
        self.note_error(link.connection, error.message)
        if error.replies:
            link.send(error.replies)
        self.end(link)
        self.deliver()

    def drop(self, link: _Link[ClientT]) -> None:
        """Close at once, whatever is unsent."""
        if link.sock.fileno() < 0:
            return
        self.loop.watch_readable(link.sock, None)
        if link.unsent is not None:
            self.loop.watch_writable(link.sock, None)
            link.unsent = None
        del self._links[link.connection]
        self.unanswered.discard(link)
        self.core.close(link.connection)  # it counts the bytes of the socket
        link.sock.close()
        self.deliver()

    def _stop_on_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: self.loop.stop())

    # Accepting

    def _accept_from(self, listener: socket.socket) -> None:
        """Accept until there is none left, so that a storm of clients costs few turns of the loop.

        First accept, then welcome: the system's backlog is short, and who does not fit into it
        tries again a second later.
        """
        is_more = True
        while self._accepting and is_more:
            arrivals = self._accept_some(listener)
            is_more = len(arrivals) == _ACCEPT_AT_ONCE
            now = time.monotonic()
            for sock, address in arrivals:
                self._welcome(sock, f"{address[0]}:{address[1]}", now)

    def _accept_some(self, listener: socket.socket) -> list[tuple[_Socket, Any]]:
        arrivals: list[tuple[_Socket, Any]] = []
        kind = (int(listener.family), int(listener.type), listener.proto)
        try:
            while len(arrivals) < _ACCEPT_AT_ONCE:
                file, address = listener._accept()  # type: ignore[attr-defined]
                arrivals.append((_Socket(*kind, file), address))
        except _NOT_NOW:
            pass
        except OSError as error:
            if error.errno not in _OF_THE_CLIENT:
                self._pause_accepting(error)
        return arrivals

    def _welcome(self, sock: _Socket, peer: str, now: float) -> None:
        try:
            sock.setblocking(False)
            if not _INHERITS_OPTIONS:
                set_options(sock, _KEEP_ALIVE)
            if self.loop.capacity is not None and len(self._links) >= self.loop.capacity:
                raise LimitError(f"this system's select() watches no more than {self.loop.capacity} clients")
            connection = self.core.open(peer, now)
        except LimitError as error:
            logger.warning("refused %s: %s", peer, error.message)
            self._remember_error(peer, f"refused: {error.message}")
            sock.close()
            return
        except OSError:  # it has gone already
            sock.close()
            return
        link = self._links[connection] = _Link(self, sock, connection)
        connection.count_bytes = link.count_bytes
        if not self._holding:
            self.loop.watch_readable(sock, link.on_readable)

    def _pause_accepting(self, error: OSError) -> None:
        logger.warning(
            "cannot accept more clients beside %d: %s; they wait. hint: is the limit of open files too low?",
            len(self._links),
            error.strerror or os.strerror(error.errno or 0),
        )
        self._accepting = False
        for listener in self._listeners:
            self.loop.watch_readable(listener, None)

    def _resume_accepting(self) -> None:
        if self._accepting:
            return
        self._accepting = True
        for listener in self._listeners:
            self.loop.watch_readable(listener, partial(self._accept_from, listener))

    def _drop_broken(self) -> None:
        """Drop those who reset right behind a request.

        Where the loop tells of that only once, it may have been with that request, and then nothing more
        will come from them. An answer would have failed, but these got none.
        """
        unanswered = list(self.unanswered)
        self.unanswered.clear()
        if self.loop.tells_errors_once:
            for link in unanswered:
                if link.has_error:
                    self.drop(link)

    def _expire(self) -> None:
        for connection, why in self.core.overdue(time.monotonic()):
            if connection in self._links:  # or it has gone because of one before it
                self.note_error(connection, why)
                self.drop(self._links[connection])
        self.deliver()


def _sample(callback: Callback, began: float) -> None:
    """Call back, in a turn of the loop that began then, and see how long that took if it serves a client."""
    link = getattr(callback, "__self__", None)
    if isinstance(link, _Link):
        link.on_readable_timed(began)
    else:
        callback()


# Linux hands the options of a listening socket on to those that it accepts: no system call per client.
_INHERITS_OPTIONS = sys.platform == "linux"


def _prepare(listener: socket.socket) -> None:
    listener.setblocking(False)
    set_options(listener, _KEEP_ALIVE)


def set_options(sock: _Socket, times: Mapping[str, int]) -> None:
    """Send at once, and probe a connection on which nothing comes, at such times."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that vanishes sends no FIN: without probes, its ranks would count as present for ever.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in times.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
