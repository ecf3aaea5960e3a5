"""A random history has the same results on torch's server and on ours, apart from the listed deviations.

Three connections take turns on each server, in lock step, so that there is one order of events; after
every request the replies of all connections are compared, those of woken waits included. Left out, because we
differ on purpose: ADD on a value that is no number or beyond 64 bits, BARRIER (torch counts arrivals and
keeps a key), WAIT on queues (torch leaves whom it woke registered), and a COMPARE_SET that fails on a
missing key (torch wakes the key's waiters).
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from processes import Server, torch_serving
from rallypoint.store.wire.encoding import VALIDATE, counted_request, pack_i64, request
from rallypoint.store.wire.opcodes import Op

_KEYS = [b"/a", b"/b", b"/c", b"/d"]
_COUNTERS = [b"/m", b"/n"]
_COMPARED = [b"/y", b"/z"]
_TEXTS = [b"", b"x", b"yy", b"\x00\xff" * 50]
_STEPS = 400


class _Peer:
    """Raw connections to one server. A PING behind each request tells where its replies end."""

    def __init__(self, port: int) -> None:
        self._socks = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(3)]
        for sock in self._socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(VALIDATE)
        self._buffers = [b"", b"", b""]
        self._nonce = 0

    def ask(self, who: int, message: bytes) -> list[bytes]:
        """Send, and return what each connection has been sent since, in a state of rest."""
        self._socks[who].sendall(message)
        return [self._read_until_ping(index) for index in (who, *(i for i in range(3) if i != who))]

    def _read_until_ping(self, index: int) -> bytes:
        self._nonce += 1
        nonce = b"\xa5\x5a" + self._nonce.to_bytes(2, "little")
        self._socks[index].sendall(request(Op.PING, tail=nonce))
        data = b""
        while not data.endswith(nonce):
            chunk = self._socks[index].recv(1 << 16)
            assert chunk, "the server closed a connection"
            data += chunk
        return data[: -len(nonce)]

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


def _history(seed: int) -> Iterator[tuple[int, bytes]]:
    """Who asks what. At most one WAIT of a connection is pending; it is cancelled before the next."""
    chance = random.Random(seed)
    for key in _COMPARED:
        yield 0, request(Op.COMPARE_SET, key, b"", chance.choice(_TEXTS))
    for _ in range(_STEPS):
        queue = b"/%s %d" % (chance.choice([b"q", b"r"]), seed)  # our server serves all seeds
        yield chance.randrange(3), _random_request(chance, queue)


def _random_request(chance: random.Random, queue: bytes) -> bytes:
    key, counter = chance.choice(_KEYS), chance.choice(_COUNTERS)
    text, other = chance.choice(_TEXTS), chance.choice(_TEXTS)
    some = chance.sample(_KEYS + _COUNTERS, chance.randint(1, 3))
    cancel = request(Op.CANCEL_WAIT)
    return chance.choice(
        [
            request(Op.SET, key, text),
            request(Op.GET, chance.choice([key, counter, *_COMPARED])),
            request(Op.COMPARE_SET, chance.choice(_COMPARED), other, text),
            request(Op.APPEND, key, text),
            request(Op.ADD, counter, tail=pack_i64(chance.randint(-5, 5))),
            request(Op.DELETE_KEY, chance.choice([key, counter, queue])),
            request(Op.GETNUMKEYS),
            request(Op.QUEUE_PUSH, queue, text),
            request(Op.QUEUE_POP, queue),
            request(Op.QUEUE_LEN, queue),
            counted_request(Op.CHECK, [*some, queue][: chance.randint(1, 4)]),
            counted_request(Op.MULTI_GET, some),
            counted_request(Op.MULTI_SET, [key, text, chance.choice(_KEYS), other], blobs_each=2),
            cancel + counted_request(Op.WAIT, some),
            cancel,
        ]
    )


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_same_history_same_results(any_server: Server, seed: int) -> None:
    with torch_serving(use_libuv=True) as torch_port:
        theirs, ours = _Peer(torch_port), _Peer(any_server.port)
        try:
            for step, (who, message) in enumerate(_history(seed)):
                expected = theirs.ask(who, message)
                assert ours.ask(who, message) == expected, f"step {step}: {message!r} by {who}"
        finally:
            theirs.close()
            ours.close()
