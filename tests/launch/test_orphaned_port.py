"""The port of a server that has died: a rank that connects there is seen; agents and tools do not count."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import RallypointError
from rallypoint.launch.rendezvous.orphaned_port import OrphanedPort
from rallypoint.store.connect.deadline import Deadline, in_thread
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.question import Question
from rallypoint.store.server.process.hosting import host_server
from rallypoint.store.wire.encoding import VALIDATE, request
from rallypoint.store.wire.opcodes import Op
from raw import until

Address = tuple[str, int]


@pytest.fixture
def orphaned() -> Iterator[tuple[OrphanedPort, Address]]:
    server = host_server("127.0.0.1", 0)
    os.kill(server.pid, signal.SIGTERM if os.name == "nt" else signal.SIGKILL)
    until(lambda: bool(server.how_it_ended()), "the server has ended")
    port = OrphanedPort(server)
    yield port, server.address
    port.close()
    server.release()


def test_torchs_client_is_a_rank_once_its_ping_is_there(orphaned: tuple[OrphanedPort, Address]) -> None:
    port, address = orphaned
    with closing(socket.create_connection(address)) as client:
        client.sendall(VALIDATE)
        assert not port.has_rank()
        client.sendall(request(Op.PING, tail=b"ping"))
        until(port.has_rank, "the rank is seen")


@pytest.mark.parametrize("role", [Role.RANK, Role.UNKNOWN])
def test_our_client_is_a_rank(orphaned: tuple[OrphanedPort, Address], role: Role) -> None:
    port, address = orphaned
    in_thread(lambda: _fails(lambda: TCPStore(*address, timeout=1.0, role=role)), print, print)
    until(port.has_rank, "the rank is seen")


@pytest.mark.parametrize("kind", ["agent", "tool", "nothing sent", "nonsense"])
def test_others_are_disconnected(orphaned: tuple[OrphanedPort, Address], kind: str) -> None:
    port, address = orphaned
    calls: dict[str, Callable[[], object]] = {
        "agent": lambda: TCPStore(*address, timeout=0.5, role=Role.AGENT),
        "tool": lambda: fetch_snapshot(*address, Question(), Deadline(0.5)),
        "nothing sent": lambda: socket.create_connection(address).close(),
        "nonsense": lambda: _say(address, b"GET / HTTP/1.1"),
    }
    over: list[bool] = []
    in_thread(lambda: _fails(calls[kind]), lambda _: over.append(True), lambda _: over.append(True))
    while not over:
        assert not port.has_rank()


def _say(address: Address, words: bytes) -> None:
    with closing(socket.create_connection(address)) as client:
        client.sendall(words)
        assert client.recv(1) == b""


def _fails(call: Callable[[], object]) -> None:
    with suppress(RallypointError, OSError):
        call()
