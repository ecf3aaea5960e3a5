"""The port of a round's store or relay that has died while the ranks start.

A rank that connects only now would be refused, and torch's client would try again until its time-out: half an
hour by default. So the agent listens there instead: a rank that connects shows that the round cannot go on.
Agents and tools connect as well; they introduce themselves by a hello.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from rallypoint.errors import RallypointError
from rallypoint.store.rollcall.identity import Role, parse_hello
from rallypoint.store.server.process.hosting import HostedServer
from rallypoint.store.wire.encoding import VALIDATE, request
from rallypoint.store.wire.opcodes import Op

_FIRST_BYTES = VALIDATE + bytes([Op.PING])  # of a client, unless it is a tool
_HELLO_AT = len(VALIDATE) + len(request(Op.PING, tail=bytes(4))) + len(request(Op.DELETE_KEY, b""))
_HELLO_BYTES = 2_048


class OrphanedPort:
    """Listens where a server has died, and reads what clients send first; it answers nothing."""

    def __init__(self, server: HostedServer) -> None:
        self._clients: list[socket.socket] = []
        self._listeners: list[socket.socket] = []
        with suppress(RallypointError):  # something else has the port now
            self._listeners = server.listen_again()
        for listener in self._listeners:
            listener.setblocking(False)

    def has_rank(self) -> bool:
        """Whether a rank has connected. Other clients are disconnected."""
        for listener in self._listeners:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    client.setblocking(False)
                    self._clients.append(client)
        return any(self._is_rank(client) for client in list(self._clients))

    def _is_rank(self, client: socket.socket) -> bool:
        try:
            sent = client.recv(_HELLO_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            sent = b""
        if sent and _FIRST_BYTES.startswith(sent) and sent != _FIRST_BYTES:  # there is more to come
            return False
        who = parse_hello(sent[_HELLO_AT:])  # torch's client sends none
        if sent.startswith(_FIRST_BYTES) and (who is None or who.role not in (Role.AGENT, Role.TOOL)):
            return True
        self._clients.remove(client)
        client.close()
        return False

    def close(self) -> None:
        for each in (*self._listeners, *self._clients):
            each.close()
