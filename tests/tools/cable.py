"""A cable between a client or relay and its store: a test can cut, plug in, block and tap it."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_CHUNK = 1 << 16

Tap = Callable[[bytes, bool], bytes]
"""What is passed on of some bytes; they come from the server if the flag is set."""


class Cable:
    """Passes bytes between whoever connects to `port` and a server, in a thread of its own."""

    def __init__(self, server_port: int, tap: Tap) -> None:
        self._server_port = server_port
        self._tap = tap
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._down: set[socket.socket] = set()  # the ends that face the server
        self._is_plugged = True
        self._is_blocked = False
        self._ended = False
        self._bell, self._alarm = socket.socketpair()
        self.carried_down = 0
        """Bytes that have come from the server."""
        self.connections = 0
        """How many have been made so far."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Break all connections, with a reset; new ones are made as before."""
        with self._lock:
            for end in list(self._pairs):
                self._break(end)

    def unplug(self) -> None:
        """Break all connections, and let none be made until `plug_in`."""
        self._is_plugged = False
        self.cut()

    def plug_in(self) -> None:
        self._is_plugged = True

    def block(self, blocked: bool = True) -> None:
        """Carry nothing towards the server."""
        self._is_blocked = blocked
        self._bell.send(b"!")

    def close(self) -> None:
        self._ended = True
        self._bell.send(b"!")
        self._thread.join(10)
        self.cut()
        for each in (self._listener, self._bell, self._alarm):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._ended:
            try:
                ready = self._selector.select()
            except OSError:  # Windows: another thread has closed one of the sockets meanwhile
                continue
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._alarm:
                    self._alarm.recv(_CHUNK)
                    self._watch()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._carry(key.fileobj)

    def _accept(self) -> None:
        upper, _ = self._listener.accept()
        with self._lock:
            if not self._is_plugged:
                upper.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                upper.close()
                return
            lower = socket.create_connection(("127.0.0.1", self._server_port))
            self.connections += 1
            self._down.add(lower)
            self._pairs[upper], self._pairs[lower] = lower, upper
        self._watch()

    def _watch(self) -> None:
        """Read what may be read: a blocked end is left alone, so that its sender has to stop."""
        with self._lock:
            for end in self._pairs:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                is_watched = end in self._selector.get_map()
                is_wanted = not self._is_blocked or end in self._down
                if is_wanted and not is_watched:
                    self._selector.register(end, selectors.EVENT_READ)
                elif is_watched and not is_wanted:
                    self._selector.unregister(end)

    def _carry(self, end: socket.socket) -> None:
        with self._lock:
            other = self._pairs.get(end)
            if other is None:
                return
            try:
                data = self._tap(end.recv(_CHUNK), end in self._down)
                other.sendall(data)
            except OSError:
                data = b""
            if end in self._down:
                self.carried_down += len(data)
            if not data:
                self._break(end)

    def _break(self, end: socket.socket) -> None:
        other = self._pairs.pop(end, None)
        if other is None:
            return
        del self._pairs[other]
        for each in (end, other):
            self._down.discard(each)
            if each in self._selector.get_map():
                self._selector.unregister(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()


@contextmanager
def cable_to(server_port: int, tap: Tap = lambda data, _: data) -> Iterator[Cable]:
    cable = Cable(server_port, tap)
    try:
        yield cable
    finally:
        cable.close()


@contextmanager
def recording(
    port: int, change: Callable[[bytes], bytes] = lambda data: data
) -> Iterator[tuple[int, list[bytes], list[bytes]]]:
    """A port that passes all on, what clients have sent there, and what they were answered.

    `change` may change what they send.
    """
    asked: list[bytes] = []
    answered: list[bytes] = []

    def tap(data: bytes, is_answer: bool) -> bytes:
        (answered if is_answer else asked).append(data)
        return data if is_answer else change(data)

    with cable_to(port, tap) as cable:
        yield cable.port, asked, answered
