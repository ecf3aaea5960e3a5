"""Clients that mean harm: they ask for as much as they can. On loopback, bounded in count and time.

    python hostile.py PORT KIND CONNECTIONS SECONDS

Keeps sending on all connections, as fast as the server takes it, and reads the replies, until the time is
over. A connection that the server closes is opened again.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from functools import cache
from itertools import count

from ends import TOKEN, batch, session
from rallypoint.store.wire.encoding import VALIDATE, counted_request, pack_i64, request
from rallypoint.store.wire.opcodes import Op

STORED = 10_000
"""Keys that are in the store before: what LIST_KEYS tells."""
_READ = 1 << 20


def stored_key(number: int) -> bytes:
    return b"/stored/%06d" % number


LARGE = b"/large"
KINDS = (
    *("LIST_KEYS", "GETNUMKEYS", "GET", "GET of a large value", "COMPARE_SET of a large value", "MULTI_GET"),
    *("MULTI_SET", "CHECK", "WAIT", "many WAITs", "BARRIER", "ADD", "QUEUE", "SNAPSHOT", "BATCH"),
)


@cache
def requests_of(kind: str, many: int) -> bytes:
    """What is sent on a connection, again and again. `many`: how many keys are in a request."""
    missing = [b"/missing/%d" % number for number in range(many)]
    stored = [stored_key(number % STORED) for number in range(many)]
    cancel = request(Op.CANCEL_WAIT)
    push, pop = request(Op.QUEUE_PUSH, b"/queue", b"value"), request(Op.QUEUE_POP, b"/queue")
    barriers = (request(Op.BARRIER, b"/b%d" % number, tail=pack_i64(2)) for number in range(1_000))
    wires: dict[str, Callable[[], bytes]] = {
        "LIST_KEYS": lambda: request(Op.LIST_KEYS) * 1_500,
        "GETNUMKEYS": lambda: request(Op.GETNUMKEYS) * 50_000,
        "GET": lambda: request(Op.GET, b"") * 5_000,
        "GET of a large value": lambda: request(Op.GET, LARGE) * 100,
        "COMPARE_SET of a large value": lambda: request(Op.COMPARE_SET, LARGE, b"no", b"") * 100,
        "MULTI_GET": lambda: counted_request(Op.MULTI_GET, stored),
        "MULTI_SET": lambda: counted_request(
            Op.MULTI_SET, [each for key in stored for each in (key, b"value")], blobs_each=2
        ),
        "CHECK": lambda: counted_request(Op.CHECK, stored),
        "WAIT": lambda: counted_request(Op.WAIT, missing) + cancel,
        "many WAITs": lambda: b"".join(counted_request(Op.WAIT, [key]) for key in missing[::5]) + cancel,
        "BARRIER": lambda: b"".join(barriers) + cancel,
        "ADD": lambda: request(Op.ADD, b"/counter", tail=pack_i64(1)) * 5_000,
        "QUEUE": lambda: push * 2_000 + pop * 2_000,
        "SNAPSHOT": lambda: b"\x30" + (14).to_bytes(8, "little") + b'{"keys":10000}',
    }
    return wires[kind]()


def attack_of(kind: str, number: int, many: int = 100_000) -> Callable[[], bytes]:
    """What to send next on a connection; the first call is for its beginning."""
    if kind == "BATCH":
        token = TOKEN[:-8] + number.to_bytes(8, "little")
        numbers = count(1)
        adds = [request(Op.ADD, b"/n", tail=pack_i64(1))] * (many // 2)
        beginning = iter([VALIDATE + session(token, keep=0) + b"\x22"])
        return lambda: next(beginning, b"") or batch(next(numbers), 0, request(Op.LIST_KEYS), *adds)
    beginning = iter([VALIDATE])
    wire = requests_of(kind, many)
    return lambda: next(beginning, b"") or wire


class _Attacker:
    def __init__(self, port: int, attack: Callable[[], bytes]) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setblocking(False)
        self._next = attack
        self._unsent = memoryview(b"")

    def go_on(self) -> bool:
        """Read and send what can be; False if the server has closed the connection."""
        try:
            if not self.sock.recv(_READ):
                return False
        except BlockingIOError:
            pass
        except OSError:
            return False
        try:
            if not self._unsent:
                self._unsent = memoryview(self._next())
            self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


def main(port: int, kind: str, connections: int, seconds: float) -> None:
    os.nice(10)  # the attack is on the server, and not on the cores of those who measure it
    with selectors.DefaultSelector() as selector:
        numbers = count()

        def attack() -> None:
            attacker = _Attacker(port, attack_of(kind, next(numbers)))
            selector.register(attacker.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, attacker)

        for _ in range(connections):
            attack()
        end = time.monotonic() + seconds
        print("ready", flush=True)
        while time.monotonic() < end:
            for key, _ in selector.select(0.1):
                if not key.data.go_on():
                    selector.unregister(key.data.sock)
                    key.data.sock.close()
                    attack()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
