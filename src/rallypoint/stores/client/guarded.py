"""A client's socket under TLS, with the proof of the job's secret."""

from __future__ import annotations

import socket
from typing import Final

from rallypoint.errors import AccessError, ConnectionLostError
from rallypoint.server.guard.channel import Channel, client_channel
from rallypoint.server.guard.secret import Secret, Token
from rallypoint.stores.client.deadline import Deadline

_READ_BYTES: Final = 1 << 16


class GuardedSocket:
    """Stands for a socket: what is sent and read goes through a channel."""

    def __init__(self, sock: socket.socket, channel: Channel) -> None:
        self._sock = sock
        self._channel = channel
        self._said = b""
        """What came right behind the preface."""
        self.settimeout = sock.settimeout
        self.setblocking = sock.setblocking
        self.close = sock.close

    def sendall(self, data: bytes) -> None:
        self._sock.sendall(self._channel.seal(data))

    def recv(self, count: int, flags: int = 0) -> bytes:
        """What has come, be it more than `count` bytes; with flags, what the socket itself has."""
        if flags:
            return self._sock.recv(count, flags)
        while True:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                return b""
            said = self._channel.receive(data)
            if said or self._channel.has_ended:
                return said

    def open(self) -> None:
        """Shake hands and prove the secret, within the time-out of the socket."""
        self._sock.sendall(self._channel.begin())
        while not self._channel.is_open:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionLostError(
                    "it was closed before the job's secret was proved: is it a store with a secret?"
                )
            try:
                self._channel.receive(data)  # nothing is behind the preface before a request
            finally:
                self._sock.sendall(self._channel.take())


def guard(
    sock: socket.socket, host: str, server: str, proof: Secret | Token, deadline: Deadline
) -> GuardedSocket:
    """Speak TLS with the server, and prove the secret to each other.

    AccessError, which names `server`, if either has not the same secret.
    """
    guarded = GuardedSocket(sock, client_channel(host, proof))
    sock.settimeout(deadline.remaining or 1e-6)
    try:
        guarded.open()
    except AccessError as error:
        why = f"the store at {server} is not trusted: {error.message}"
        raise AccessError(why, hint=error.hint) from error
    return guarded
