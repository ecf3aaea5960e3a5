"""One client's socket: reading, answering, and holding what the client does not read yet."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from collections.abc import Callable
from struct import Struct
from typing import Any, Generic, Protocol

from rallypoint.compiling import mypyc_attr
from rallypoint.errors import ProtocolError
from rallypoint.store.core.clients import ClientT
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.server.loops.loop import Loop

logger = logging.getLogger("rallypoint.server")

# A read allocates a buffer, and cuts it to size. The interpreter's own allocator has one of this length with
# its header; a longer one would come from the C library, and cost more.
_FEW_BYTES = 448
# For a client that has sent more at once. From 64 KiB on, the C library would trim its heap for each buffer.
_MANY_BYTES = 1 << 15
# A client with more than this to read is not served until it has read.
_ENOUGH_UNSENT = 4 << 20
# How much of it is sent at once: the others wait meanwhile.
_SENT_AT_ONCE = 1 << 18
NOT_NOW = (BlockingIOError, InterruptedError)
"""What a socket raises if it would block."""
_NOT_NOW_NUMBERS = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)

# Reading a descriptor costs less than reading a socket object; only Windows cannot do it.
_READS_SOCKETS_ONLY = sys.platform == "win32"
read_some: Callable[[Any, int], bytes] = socket.socket.recv if _READS_SOCKETS_ONLY else os.read
_write: Callable[[Any, bytes | memoryview], int] = socket.socket.send if _READS_SOCKETS_ONLY else os.write
try:
    from rallypoint.store.server.loops.native import read_some
    from rallypoint.store.server.loops.native import write_some as _write
except ImportError:  # it is not compiled, or not for this system
    pass

# Linux counts bytes for each connection, so nobody here needs to: `struct tcp_info` has them since Linux 4.1.
_BYTE_COUNTS = Struct("=QQ")
_TCP_INFO_BYTES = 136
_CLOSE_WAIT = 8  # the state of a connection whose client has sent FIN, which counts as a byte

Socket = socket.SocketType
"""The base of `socket.socket`. Accepting with it costs half as much: `socket.socket.accept` looks up what
family and type are called, for each client."""


class LinkOwner(Protocol[ClientT]):
    """What a link needs of its pump, where each method is documented."""

    loop: Loop
    core: ServerCore[ClientT]
    unanswered: set[Link[ClientT]]
    """The links that have sent something since the last tick, and were not answered at once."""

    def deliver(self) -> None: ...
    def end(self, link: Link[ClientT]) -> None: ...
    def refuse(self, link: Link[ClientT], error: ProtocolError) -> None: ...
    def drop(self, link: Link[ClientT]) -> None: ...
    def park(self, link: Link[ClientT]) -> None: ...
    def unpark(self, link: Link[ClientT]) -> None: ...
    def note_error(self, client: ClientT, reason: str) -> None: ...
    def watch(self, link: Link[ClientT]) -> None: ...
    def admit(self, link: Link[ClientT], data: bytes) -> None: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Link(Generic[ClientT]):
    """One client's socket, and what remains to be sent on it."""

    __slots__ = (
        *("_file", "_others", "_pump", "_receive", "_room", "_sending", "_unanswered", "_woken"),
        *("_expects_room", "client", "ending", "is_parked", "sock", "unsent"),
    )

    def __init__(self, pump: LinkOwner[ClientT], sock: Socket, client: ClientT) -> None:
        self._pump = pump
        self._file: Any = sock if _READS_SOCKETS_ONLY else sock.fileno()
        self._receive = client.receive
        self._woken = pump.core.outbox.woken
        self._others = pump.core.outbox.others
        self._unanswered = pump.unanswered
        self._sending: Any = pump.loop.sending
        self._room = _FEW_BYTES
        self.sock = sock
        self.client = client
        self.unsent: bytearray | None = None
        self._expects_room = False
        self.ending = False  # it is not read any more, and is closed as soon as all is sent
        self.is_parked = False  # it has too much to read, and is not served until it has read that

    def move(self, pump: LinkOwner[ClientT], client: ClientT) -> None:
        """Become the link of another client, maybe of another pump."""
        self._pump = pump
        self._receive = client.receive
        self._woken = pump.core.outbox.woken
        self._others = pump.core.outbox.others
        self._unanswered = pump.unanswered
        self.client = client
        self.is_parked = False
        if self.unsent is not None:
            client.leave_unread(len(self.unsent))

    def on_readable(self, data: bytes | None = None) -> None:
        """Read once, answer everything at once, and deliver what that means for others. The hot path.

        With `data`, nothing is read: the client has requests left from before.
        """
        try:
            if data is None:
                try:
                    data = read_some(self._file, self._room)
                except OSError as error:
                    if not isinstance(error, NOT_NOW):
                        self._pump.drop(self)
                    return
                if not data:
                    self._pump.end(self)
                    return
                if len(data) == self._room:
                    data = self._read_on(data)
            receive = self._receive  # `self._receive(data)` would look for a method first, and cost more
            reply = receive(data)
            if not reply:
                self._unanswered.add(self)
            elif self.unsent is not None:
                self._hold(reply)
            elif self._sending is not None:
                self._sending.put(self, self._file, reply)
            else:
                try:
                    sent = _write(self._file, reply)
                except OSError as error:
                    self._send_failed(error, reply)
                else:
                    if sent < len(reply):
                        self._hold(memoryview(reply)[sent:])  # a copy less, of what may be long
        except ProtocolError as error:
            self._pump.refuse(self, error)
            return
        except Exception:
            self.fail()
        if self._woken or self._others:
            self._pump.deliver()

    def fail(self) -> None:
        """Close this client, and no other, when memory has run out or our code has failed.

        Nobody knows how much of its last reply has been sent.
        """
        peer, error = self.client.peer, sys.exc_info()[1]
        if isinstance(error, MemoryError):
            self._pump.loop.relieve()
        self._pump.drop(self)
        if not isinstance(error, MemoryError):
            text = "closed %s: the server failed to serve it"
            logger.error(text, peer, exc_info=error, extra={"peer": peer})

    def _read_on(self, data: bytes) -> bytes:
        """Read again if a small buffer was filled, and use a large one from now on."""
        if self._room == _MANY_BYTES:
            return data
        self._room = _MANY_BYTES
        try:
            return data + read_some(self._file, _MANY_BYTES)
        except OSError as error:
            if not isinstance(error, NOT_NOW):  # what it sent before still counts
                self._pump.loop.later(0, self._be_dropped)
            return data

    def _be_dropped(self) -> None:
        """Ask the current pump to drop this link, which may have moved since this was scheduled."""
        self._pump.drop(self)

    def send(self, data: bytes) -> None:
        """Send, or hold what cannot be sent now."""
        if self._sending is not None and self.unsent is None:
            self._sending.put(self, self._file, data)
        else:
            self.send_now(data)

    def was_sent(self, data: bytes, count: int) -> None:
        """Keep what the system has not taken: all but `count` bytes. `go_on` is called next."""
        self.unsent = bytearray(memoryview(data)[max(count, 0) :])

    def go_on(self, count: int) -> None:
        """Go on after a partial send of `count` bytes; a negative count is the system's error."""
        try:
            if count < 0 and -count not in _NOT_NOW_NUMBERS:
                self._pump.drop(self)
            elif self.unsent is not None:  # else it is closed by now
                self.expect_room()
                self._hold(b"")
        except Exception:
            self.fail()

    def send_now(self, data: bytes) -> None:
        """Send by itself, not together with other links."""
        try:
            if self.sock.fileno() < 0:  # an earlier send has failed
                return
            if self.unsent is not None:
                self._hold(data)
                return
            try:
                sent = _write(self._file, data)
            except OSError as error:
                self._send_failed(error, data)
            else:
                if sent < len(data):
                    self._hold(memoryview(data)[sent:])
        except Exception:
            self.fail()

    def flush(self) -> None:
        """Send now what is gathered for this link and others."""
        if self._sending is not None:
            self._sending.flush_of(self.sock.fileno())

    def close(self) -> None:
        """Close the socket, together with others. Nobody may watch it."""
        if self._sending is not None:
            self._sending.put_close(self.sock.detach())
        else:
            self.sock.close()

    def count_bytes(self) -> None:
        """Record the bytes received and sent, as Linux counts them. Does nothing elsewhere."""
        if sys.platform != "linux":
            return
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return
        if len(info) == _TCP_INFO_BYTES:
            sent, received = _BYTE_COUNTS.unpack_from(info, _TCP_INFO_BYTES - _BYTE_COUNTS.size)
            self.client.received, self.client.sent = received - (info[0] == _CLOSE_WAIT), sent

    def _send_failed(self, error: OSError, data: bytes) -> None:
        if isinstance(error, NOT_NOW):
            self._hold(data)
        else:
            self._pump.drop(self)

    @property
    def has_error(self) -> bool:
        """Whether the connection has broken unnoticed. The system reports that only once."""
        return self.sock.fileno() >= 0 and bool(self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def expect_room(self) -> None:
        """Go on when the socket is writable."""
        if not self._expects_room:
            self._expects_room = True
            self._pump.loop.watch_writable(self.sock, self.on_writable)

    def expect_no_room(self) -> None:
        """Forget what is unsent."""
        self.unsent = None
        if self._expects_room:
            self._expects_room = False
            self._pump.loop.watch_writable(self.sock, None)

    def on_writable(self) -> None:
        if self.unsent is not None:
            self._send_unsent(self.unsent)
        if self.unsent is None and self.client.notice_bytes:
            self._woken.append(self.client)
            self._pump.deliver()
        elif self.unsent is None:
            self.expect_no_room()

    def _send_unsent(self, unsent: bytearray) -> None:
        try:
            sent = _write(self._file, memoryview(unsent)[:_SENT_AT_ONCE])
            del unsent[:sent]
        except NOT_NOW:
            return
        except OSError:
            self._pump.drop(self)
            return
        except Exception:
            self.fail()
            return
        self.client.leave_unread(len(unsent))
        if self.is_parked and len(unsent) <= _ENOUGH_UNSENT:
            self.is_parked = False
            self._pump.unpark(self)
        if not unsent:
            self.unsent = None
            if self.ending and not self.client.is_owed:
                self._pump.drop(self)

    def _hold(self, data: bytes | memoryview) -> None:
        if self.unsent is None:
            self.unsent = bytearray()
            self.expect_room()
        self.unsent += data
        self.client.leave_unread(len(self.unsent))
        limit = self._pump.core.limits.unsent_bytes
        if len(self.unsent) > limit:
            self._pump.note_error(
                self.client,
                f"it does not read; more than {limit:,} bytes wait for it, the limit unsent_bytes",
            )
            self._pump.drop(self)
        else:
            self.rest_if_full()

    def rest_if_full(self) -> None:
        """Park this link if its client has too much to read."""
        is_full = self.unsent is not None and len(self.unsent) > _ENOUGH_UNSENT
        if is_full and not self.is_parked and not self.ending:
            self.is_parked = True
            self._pump.park(self)
