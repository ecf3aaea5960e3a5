"""What a head and one of its workers say to each other besides requests: short messages, some with a socket.

A message is a line of JSON. A worker hands a socket over to have the head serve it as one more client.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from rallypoint.store.server.loops.link import NOT_NOW
from rallypoint.store.server.loops.loop import Loop

Message = dict[str, Any]

_READ_BYTES: Final = 1 << 16
_SOCKETS_AT_ONCE: Final = 64


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

    def say(self, message: Message, handed: socket.socket | None = None) -> None:
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
            data, files, _, _ = socket.recv_fds(self._sock, _READ_BYTES, _SOCKETS_AT_ONCE)
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
