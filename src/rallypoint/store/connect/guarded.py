"""A client's socket under TLS, with the proof of the job's secret."""

from __future__ import annotations

import socket
from typing import Final

from rallypoint.errors import AccessError, ConnectionLostError
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.server.guard.secret import Secret, Token
from rallypoint.store.server.guard.tls import Channel, client_channel

_READ_BYTES: Final = 1 << 16


class GuardedSocket:
    """Stands for a socket: what is sent and read goes through a channel."""

    def __init__(self, sock: socket.socket, channel: Channel, deadline: Deadline) -> None:
        self._sock = sock
        self._channel = channel
        self._deadline = deadline
        self.setblocking = sock.setblocking
        self.close = sock.close

    def settimeout(self, seconds: float) -> None:
        """For the next call as a whole, however many pieces come meanwhile."""
        self._deadline = Deadline(seconds)

    def sendall(self, data: bytes) -> None:
        self._send(self._channel.seal(data))

    def recv(self, count: int, flags: int = 0) -> bytes:
        """What has come, be it more than `count` bytes; with flags, what the socket itself has."""
        if flags:
            return self._sock.recv(count, flags)
        while data := self._receive():
            said = self._channel.receive(data)
            if said or self._channel.has_ended:
                return said
        return b""

    def open(self) -> None:
        """Shake hands and prove the secret."""
        self._send(self._channel.begin())
        while not self._channel.is_open:
            data = self._receive()
            if not data:
                raise ConnectionLostError(
                    "it was closed before the job's secret was proved: is it a store with a secret?"
                )
            try:
                self._channel.receive(data)  # nothing is behind the preface before a request
            except AccessError:
                try:
                    self._send(self._channel.take())
                except OSError:  # the reason counts, whether the other end hears of it or not
                    pass
                raise
            self._send(self._channel.take())

    def _send(self, data: bytes) -> None:
        if data:
            self._sock.settimeout(self._deadline.remaining or 1e-6)
            self._sock.sendall(data)

    def _receive(self) -> bytes:
        self._sock.settimeout(self._deadline.remaining or 1e-6)
        return self._sock.recv(_READ_BYTES)


def guard(
    sock: socket.socket, host: str, server: str, proof: Secret | Token, deadline: Deadline
) -> GuardedSocket:
    """Speak TLS with the server, and prove the secret to each other.

    AccessError, which names `server`, if either has not the same secret.
    """
    guarded = GuardedSocket(sock, client_channel(host, proof), deadline)
    try:
        guarded.open()
    except AccessError as error:
        why = f"the store at {server} is not trusted: {error.message}"
        raise AccessError(why, hint=error.hint) from error
    return guarded
