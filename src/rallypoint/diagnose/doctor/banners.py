"""What listens on a port where a store should be, by what it says."""

from __future__ import annotations

import socket
from typing import Final

from rallypoint.launch.endpoint import Endpoint
from rallypoint.server.machine.ports import holder_of
from rallypoint.server.process.binding import is_this_machine

_SECONDS: Final = 1.5
_QUESTION: Final = b"GET / HTTP/1.0\r\n\r\n"

# How services begin what they say, by themselves or when asked for a page.
_BEGINNINGS: Final = (
    (b"SSH-", "an SSH server"),
    (b"HTTP/", "a web server"),
    (b"-ERR", "a Redis server"),
    (b"\x15\x03", "a server that speaks TLS"),
    (b"220", "a mail or FTP server"),
)


def describe_stranger(endpoint: Endpoint) -> tuple[str, str]:
    """What is at a port that does not answer as a store does, and what to do about it."""
    what = _recognise(_hear(endpoint))
    holder = holder_of(endpoint.port) if is_this_machine(endpoint.host) else None
    whose = f", held by {holder}" if holder else ""
    return f"at {endpoint} is {what}: no store{whose}", "take another port, the same on all machines"


def _recognise(heard: bytes | None) -> str:
    if heard is None:
        return "a program that accepts connections and does not answer"
    for beginning, what in _BEGINNINGS:
        if heard.startswith(beginning):
            return what
    return f"a program that says {heard[:40]!r}" if heard else "a program that ends every connection"


def _hear(endpoint: Endpoint) -> bytes | None:
    """Its first words; empty if it ends the connection, None if it says nothing."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), _SECONDS) as sock:
            sock.settimeout(_SECONDS)
            sock.sendall(_QUESTION)
            return sock.recv(200)
    except TimeoutError:
        return None
    except OSError:
        return b""
