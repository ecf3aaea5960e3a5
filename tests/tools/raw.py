"""A client that says what a test wants in the pieces that it wants, and waiting for conditions."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import TracebackType

import psutil

from processes import Server
from rallypoint.store.wire.encoding import VALIDATE, blob, request
from rallypoint.store.wire.opcodes import Op

SECONDS = 30.0
"""How long anything may take before a test gives it up: never reached where all is well."""


class RawClient:
    """A socket with a store server at its other end; every wait of it has a deadline."""

    def __init__(self, port: int, host: str = "127.0.0.1", *, shake_hands: bool = True) -> None:
        self.sock = socket.create_connection((host, port), timeout=SECONDS)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if shake_hands:
            self.send(VALIDATE)

    @property
    def name(self) -> str:
        """What the server calls this client in its log."""
        host, port = self.sock.getsockname()[:2]
        return f"{host}:{port}"

    def send(self, *requests: bytes) -> None:
        self.sock.sendall(b"".join(requests))

    def read(self, count: int) -> bytes:
        """Exactly so many bytes; fewer if the server ends the connection."""
        data = bytearray()
        while len(data) < count and (piece := self.sock.recv(count - len(data))):
            data += piece
        return bytes(data)

    def read_number(self) -> int:
        return int.from_bytes(self.read(8), "little", signed=True)

    def read_blob(self) -> bytes:
        return self.read(self.read_number())

    def read_rest(self) -> bytes:
        """All that comes until the server ends the connection."""
        data = bytearray()
        while piece := self.sock.recv(1 << 16):
            data += piece
        return bytes(data)

    def answers(self) -> bool:
        """Whether a PING comes back."""
        self.send(request(Op.PING, tail=b"ping"))
        return self.read(4) == b"ping"

    def get(self, key: bytes) -> bytes:
        self.send(request(Op.GET, key))
        return self.read_blob()

    def set(self, key: bytes, value: bytes) -> None:
        self.send(request(Op.SET, key, value))
        assert self.answers()

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def empty(port: int) -> None:
    """Delete all keys of a server, that of the workers included, which is listed nowhere."""
    with RawClient(port) as client:
        client.send(request(Op.LIST_KEYS))
        keys = [client.read_blob() for _ in range(client.read_number())]
        for key in (*keys, b"init/"):
            client.send(request(Op.DELETE_KEY, key))
            client.read_number()
        client.send(request(Op.GETNUMKEYS))
        assert client.read_number() == 0, "somebody still writes"


def values_reply(*values: bytes) -> bytes:
    """What a server answers to GETs of these values."""
    return b"".join(map(blob, values))


def until(condition: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    """Wait for a condition to hold; fail with `what` if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.005)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def await_log(server: Server, *words: str) -> str:
    """The first line of a server's log that has all these words; waits for it."""
    found: list[str] = []

    def look() -> bool:
        found.extend(line for line in server.read_log().splitlines() if all(word in line for word in words))
        return bool(found)

    until(look, f"a log line with {words}; it has: {server.read_log()}")
    return found[0]
