"""A flood of TLS handshakes: other clients are served meanwhile, and what the flood can occupy is limited."""

from __future__ import annotations

import select
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest

from processes import BACKENDS, pause, serving
from rallypoint.store.core.store import Core
from rallypoint.store.server.guard.secret import SECRET_VARIABLE, Secret
from rallypoint.store.server.loops import guarded
from rallypoint.store.server.loops import loop as loops
from rallypoint.store.server.loops.guarded import Door, GuardedLink
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.wire.opcodes import Op
from raw import SECONDS, RawClient, until
from threads import prove, running_here

_SECRET = Secret("5e" * 32, "the test")
_MANY = 300


def _client_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    going = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), going).do_handshake()
    return going.read()


def _connect(stack: ExitStack, port: int, count: int) -> list[socket.socket]:
    return [stack.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS)) for _ in range(count)]


def _readable(socks: list[socket.socket]) -> list[socket.socket]:
    poll = select.poll()
    by_file = {sock.fileno(): sock for sock in socks}
    for file in by_file:
        poll.register(file, select.POLLIN)
    return [by_file[file] for file, _ in poll.poll(0)]


def _has_closed(sock: socket.socket) -> bool:
    try:
        return bool(_readable([sock])) and sock.recv(1, socket.MSG_PEEK) == b""
    except ConnectionError:
        return True


def _prove(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), SECONDS) as sock:
        prove(sock, _SECRET)


@pytest.mark.skipif(not hasattr(select, "poll"), reason="Windows has no poll(), and no SIGSTOP")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_does_not_wait_for_the_handshakes_before_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in handshakes and not in seconds, so the load of this machine does not matter."""
    monkeypatch.setenv(SECRET_VARIABLE, _SECRET.text)
    hello = _client_hello()
    with serving(backend, host="0.0.0.0") as server, RawClient(server.port) as innocent, ExitStack() as stack:
        flood = _connect(stack, server.port, _MANY)
        assert innocent.answers()
        pause(server.process)
        for sock in flood:
            sock.sendall(hello)
        innocent.send(bytes([Op.PING]) + b"next")
        server.process.send_signal(signal.SIGCONT)
        assert innocent.read(4) == b"next"
        assert len(_readable(flood)) < _MANY // 4
        until(lambda: len(_readable(flood)) == _MANY, "every handshake is answered")
        _prove(server.port)


@contextmanager
def _limited(most: int, of_one_address: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(guarded, "_MOST_UNDER_WAY", most)
    monkeypatch.setattr(guarded, "_MOST_OF_ONE_ADDRESS", of_one_address)

    def locked(loop: Loop, listeners: list[socket.socket]) -> Pump[Any]:
        server = Pump(loop, Core(turn=loop.turn), listeners)
        server.door = Door(_SECRET, loop)
        return server

    with running_here(locked) as port:
        yield port


@pytest.mark.skipif(not hasattr(select, "poll"), reason="Windows has no poll()")
@pytest.mark.parametrize("limits", [(1000, 4), (4, 1000)], ids=["of one address", "of all"])
def test_the_oldest_of_too_many_handshakes_gives_way(
    limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hello = _client_hello()
    with _limited(*limits, monkeypatch) as port, ExitStack() as stack:
        flood = _connect(stack, port, 10)
        for sock in flood:  # one after the other, so that their order is known
            sock.sendall(hello)
            assert sock.recv(1 << 16)
        oldest_closed = [True] * 6 + [False] * 4
        until(lambda: [_has_closed(sock) for sock in flood] == oldest_closed, "the oldest are closed")
        _prove(port)
        assert [_has_closed(sock) for sock in flood] == [True] * 7 + [False] * 3
        _prove(port)  # a handshake that is complete counts no more
        assert [_has_closed(sock) for sock in flood] == [True] * 7 + [False] * 3
    assert "its TLS handshake was the oldest of too many that are incomplete" in caplog.text


class _Turns:
    """A loop that is turned by hand."""

    def __init__(self) -> None:
        self.next: list[Callable[[], None]] = []

    def later(self, _seconds: float, callback: Callable[[], None]) -> None:
        self.next.append(callback)


class _Waiting:
    def __init__(self, name: str, served: list[str]) -> None:
        self.address, self._name, self._served = name[0], name, served

    def shake_hands(self) -> None:
        self._served.append(self._name)


def test_addresses_take_turns_and_the_newest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "monotonic", iter(range(100)).__next__)  # one handshake in each turn
    turns, served = _Turns(), list[str]()
    door = Door(_SECRET, cast("Loop", turns))
    for name in ("a1", "a2", "a3", "b1", "c1"):
        door.enqueue(cast("GuardedLink[Any]", _Waiting(name, served)))
    for count in range(1, 6):
        [turn] = turns.next
        turns.next.clear()
        turn()
        assert len(served) == count
    assert served == ["a3", "b1", "c1", "a2", "a1"]
    assert turns.next == []
