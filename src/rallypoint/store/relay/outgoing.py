"""Connections that are not of clients: connecting, reading and writing without ever waiting.

`Stream` and `Outgoing` carry bytes. `Control` carries short messages between a server with workers and one of
them; some messages come with a socket.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rallypoint.errors import AccessError, ConnectionLostError
from rallypoint.store.machine.addresses import format_address, reason_of
from rallypoint.store.server.guard.other_users import ServerGuard, goes_plain
from rallypoint.store.server.guard.secret import job_secret
from rallypoint.store.server.loops.link import NOT_NOW
from rallypoint.store.server.loops.listening import set_options
from rallypoint.store.server.loops.loop import Loop

if TYPE_CHECKING:
    from rallypoint.store.server.guard.tls import Channel

Address = tuple[int, Any]
"""The family and the address of a socket."""

_READ_BYTES: Final = 1 << 18
# Windows takes any length at once, and sends it when it can: nobody could see that it is on its way.
_SENT_AT_ONCE: Final = 1 << 16 if sys.platform == "win32" else None
_CONNECT_SECONDS: Final = 5.0
_UNDER_WAY: Final = {0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY}

# A machine that vanishes says nothing: what is sent to it is given up after that many seconds, and while
# nothing is sent, probes find out after about as long.
_SILENCE_SECONDS: Final = 20
_TIMES: Final = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 2,
    "TCP_USER_TIMEOUT": _SILENCE_SECONDS * 1000,
}

Message = dict[str, Any]

_MESSAGE_BYTES: Final = 1 << 16
_SOCKETS_AT_ONCE: Final = 64


class Stream:
    """A connection that is open; it is closed once, for good.

    It calls `on_data` as often as data comes, then `on_closed` with a reason; but nothing after `close`.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket | None,
        *,
        on_data: Callable[[bytes], None],
        on_closed: Callable[[str], None],
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_room` is called when all is sent that had to wait. `sock` may come later."""
        self._loop = loop
        self._sock = sock
        self._on_data = on_data
        self._on_closed = on_closed
        self._on_room = on_room
        self._is_closed = False
        self._unsent = bytearray()
        self.late_bytes = 0
        """How many bytes have had to wait, and are sent by now."""
        if sock is not None:
            sock.setblocking(False)
            loop.watch_readable(sock, self._on_readable)

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    def hand_over(self, on_data: Callable[[bytes], None], on_closed: Callable[[str], None]) -> None:
        """From now on these are called."""
        self._on_data = on_data
        self._on_closed = on_closed

    def send(self, data: bytes) -> None:
        """Send, or hold what cannot be sent now."""
        if data and self._sock is not None:
            self._write(data)

    def _write(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        assert self._sock is not None
        try:
            sent = self._sock.send(memoryview(data)[:_SENT_AT_ONCE])
        except NOT_NOW:
            sent = 0
        except OSError as error:
            self._fail(error)
            return
        if sent < len(data):
            self._unsent += data[sent:]
            self._loop.watch_writable(self._sock, self._on_writable)

    def close(self) -> None:
        """Close at once, and tell nobody."""
        self._is_closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.watch_readable(sock, None)
            self._loop.watch_writable(sock, None)
            sock.close()

    def _on_readable(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(_READ_BYTES)
        except NOT_NOW:
            return
        except OSError as error:
            self._fail(error)
            return
        if not data:
            self._end("it was closed at the other end")
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        """This has come."""
        self._on_data(data)

    def _on_writable(self) -> None:
        assert self._sock is not None
        try:
            count = self._sock.send(self._unsent if _SENT_AT_ONCE is None else self._unsent[:_SENT_AT_ONCE])
        except NOT_NOW:
            return
        except OSError as error:
            self._fail(error)
            return
        del self._unsent[:count]
        self.late_bytes += count
        if not self._unsent:
            self._loop.watch_writable(self._sock, None)
            self._on_room()

    def _fail(self, error: OSError) -> None:
        self._end(error.strerror or str(error))

    def _end(self, why: str) -> None:
        self._disconnect()
        self._report(why)

    def _report(self, why: str) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._on_closed(why)


class Outgoing(Stream):
    """One connection, to the first of some addresses that answers.

    It calls `on_open` before all else.
    """

    def __init__(
        self,
        loop: Loop,
        host: str,
        addresses: Sequence[Address],
        *,
        on_open: Callable[[], None],
        on_data: Callable[[bytes], None],
        on_closed: Callable[[str], None],
    ) -> None:
        """`host` is the name of the machine that has the addresses."""
        super().__init__(loop, None, on_data=on_data, on_closed=on_closed)
        self._host = host
        self._channel: Channel | None = None
        self._left = list(addresses)
        self._on_open = on_open
        self._is_open = False
        self._has_answered = False
        self._early = bytearray()  # what was to be said before it was open
        self._dial("there is no address to connect to")

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent) + len(self._early)

    def send(self, data: bytes) -> None:
        if not data:
            return
        if not self._is_open:
            self._early += data
        else:
            self._write(data if self._channel is None else self._channel.seal(data))

    def _disconnect(self) -> None:
        self._is_open = False
        super()._disconnect()

    def _dial(self, why: str) -> None:
        """Try the next address; what went wrong with the last one is told if there is none."""
        while self._left:
            family, address = self._left.pop(0)
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:  # too many open files, or a family that this machine does not have
                why = error.strerror or str(error)
                continue
            sock.setblocking(False)
            code = sock.connect_ex(address)
            if code in _UNDER_WAY:
                self._sock = sock
                self._loop.watch_writable(sock, self._on_connected)
                self._loop.later(_CONNECT_SECONDS, partial(self._give_up_on, sock))
                return
            sock.close()
            why = reason_of(code)
        # Not at once: the caller of this constructor does not have the object yet.
        self._loop.later(0, partial(self._report, why))

    def _give_up_on(self, sock: socket.socket) -> None:
        if self._sock is sock and not self._is_open:
            self._try_next(f"no answer within {_CONNECT_SECONDS:g} s")

    def _try_next(self, why: str) -> None:
        self._disconnect()
        self._dial(why)

    def _on_connected(self) -> None:
        sock = self._sock
        assert sock is not None
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and _has_met_itself(sock):
            code = errno.ECONNREFUSED
        why = reason_of(code) if code else _objection(sock)
        if why:
            self._try_next(why)
            return
        secret = job_secret()
        try:
            set_options(sock, _TIMES)
            is_plain = secret is None or goes_plain(sock)
        except OSError as error:  # it has broken meanwhile, which macOS tells in any call
            self._try_next(error.strerror or str(error))
            return
        self._left = []
        self._loop.watch_writable(sock, None)
        self._loop.watch_readable(sock, self._on_readable)
        if secret is None or is_plain:
            self._open()
        else:
            from rallypoint.store.server.guard.tls import client_channel  # late: few jobs have a secret

            self._channel = client_channel(self._host, secret)
            self._write(self._channel.begin())

    def _open(self) -> None:
        self._is_open = True
        early, self._early = bytes(self._early), bytearray()
        self._on_open()
        self.send(early)

    def _take(self, data: bytes) -> None:
        assert self._sock is not None
        if not self._has_answered and (why := _objection(self._sock)):
            self._end(why)
            return
        self._has_answered = True
        if self._channel is None:
            self._on_data(data)
        else:
            self._unseal(self._channel, data)

    def _unseal(self, channel: Channel, data: bytes) -> None:
        try:
            said = channel.receive(data)
        except AccessError as error:
            self._write(channel.take())
            self._end(error.message)
            return
        if going := channel.take():
            self._write(going)
        if self._sock is None:  # that could not be sent
            return
        if channel.is_open and not self._is_open:
            self._open()
        if said and self._is_open:
            self._on_data(said)


def _objection(sock: socket.socket) -> str:
    """Why a server is not to be used; empty if it is. To be asked again when the server has answered."""
    try:
        with ServerGuard() as users:
            users.check(sock, format_address(*sock.getpeername()[:2]))
    except (AccessError, ConnectionLostError) as error:
        return error.message
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _has_met_itself(sock: socket.socket) -> bool:
    """Whether a port of the range for clients, on which nobody listens, was taken for both ends."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:
        return False


class Control:
    """One end of the channel, on a Unix socket, which it owns from now on."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        *,
        on_message: Callable[[Message, socket.socket | None], None],
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` is called once, when the other end is gone; nothing is called after `close`."""
        self._loop = loop
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._heard = b""
        self._sockets: deque[socket.socket] = deque()  # that have come, before their messages
        self._unsent: deque[tuple[bytes, socket.socket | None]] = deque()
        self._is_closed = False
        sock.setblocking(False)
        loop.watch_readable(sock, self._on_readable)

    def send(self, message: Message, handed: socket.socket | None = None) -> None:
        """Send a message; a socket that is handed over is closed here."""
        self._unsent.append((json.dumps(message).encode() + b"\n", handed))
        if len(self._unsent) == 1 and not self._is_closed:
            self._send()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.watch_readable(self._sock, None)
            self._loop.watch_writable(self._sock, None)
            self._sock.close()
            for each in (*self._sockets, *(handed for _, handed in self._unsent if handed is not None)):
                each.close()

    def _send(self) -> None:
        """Send what is unsent, as far as there is room."""
        while self._unsent:
            line, handed = self._unsent[0]
            try:
                sent = socket.send_fds(self._sock, [line], [handed.fileno()] if handed is not None else [])
            except NOT_NOW:
                sent = 0
            except OSError:  # it is gone, which is noticed by reading
                return
            if sent and handed is not None:  # it goes with the first byte
                handed.close()
                handed = None
            if sent < len(line):
                self._unsent[0] = line[sent:], handed
                self._loop.watch_writable(self._sock, self._on_writable)
                return
            self._unsent.popleft()

    def _on_writable(self) -> None:
        self._loop.watch_writable(self._sock, None)
        self._send()

    def _on_readable(self) -> None:
        try:
            data, files, _, _ = socket.recv_fds(self._sock, _MESSAGE_BYTES, _SOCKETS_AT_ONCE)
        except NOT_NOW:
            return
        except OSError:
            data, files = b"", []
        self._sockets.extend(socket.socket(fileno=file) for file in files)
        if not data:
            self.close()
            self._on_end()
            return
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            if self._is_closed:
                return
            message = json.loads(line)
            # Without one if this process could not open so many files: the other end sees it closed.
            has_socket = "peer" in message and self._sockets
            self._on_message(message, self._sockets.popleft() if has_socket else None)
