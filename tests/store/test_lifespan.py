"""How long a server process serves: with its parent, with connections that own it, or with its clients."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from processes import BACKENDS, end
from rallypoint.store.core.context import DriverTask
from rallypoint.store.core.store import Connection, Core
from rallypoint.store.server.loops.backend import Choice
from rallypoint.store.server.process.hosting import WITH_PARENT, HostedServer, Lifespan, host_server
from rallypoint.store.wire.encoding import VALIDATE, pack_i64, request
from rallypoint.store.wire.opcodes import Op
from raw import SECONDS, RawClient, is_gone, until

SECRET = b"/a secret"
OWN = request(Op.DELETE_KEY, SECRET)
YES, NO = pack_i64(1), pack_i64(0)

# Ownership, without any process


class Owned:
    """A core with an owner key, and how often it was abandoned."""

    def __init__(self) -> None:
        self.core = Core(owner_key=SECRET)

    @property
    def abandoned(self) -> int:
        return self.core.outbox.others.count(DriverTask.ABANDONED)

    def connect(self) -> Connection:
        connection = self.core.open("client")
        assert connection.receive(VALIDATE) == b""
        return connection

    def close(self, connection: Connection) -> int:
        self.core.close(connection)
        self.core.check_invariants()
        return self.abandoned


@pytest.fixture
def owned() -> Owned:
    return Owned()


def test_other_keys_are_deleted_as_ever(owned: Owned) -> None:
    client = owned.connect()
    for key in (b"k", b"a secret", b"/a secret ", b"/A SECRET", b"/a", b""):
        delete = request(Op.DELETE_KEY, key)
        assert client.receive(delete) == NO
        assert client.receive(request(Op.SET, key, b"v") + delete + delete) == YES + NO
    assert owned.close(client) == 0


def test_without_owners_the_key_is_one_like_any_other() -> None:
    core = Core()
    client = core.open("client")
    client.receive(VALIDATE)
    assert client.receive(OWN) == NO
    assert client.receive(request(Op.SET, SECRET, b"v") + OWN) == YES
    core.close(client)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["own", "close"]), st.integers(0, 4)), max_size=25))
def test_any_history_of_owners(history: list[tuple[str, int]]) -> None:
    owned = Owned()
    clients = [owned.connect() for _ in range(5)]
    owners: set[int] = set()
    abandoned = False
    for act, number in history:
        if act == "own":
            assert clients[number].receive(OWN) == (NO if abandoned else YES)
            owners |= set() if abandoned else {number}
        else:
            owned.close(clients[number])
            clients[number] = owned.connect()
            abandoned = abandoned or owners == {number}
            owners -= {number}
        assert owned.abandoned == abandoned


# Server processes with owners


@contextmanager
def hosting(backend: str, lifespan: Lifespan = WITH_PARENT) -> Iterator[HostedServer]:
    server = host_server("127.0.0.1", 0, backend=Choice(backend), lifespan=lifespan)
    try:
        yield server
    finally:
        server.release()
        if not server.await_end(0.01):
            os.kill(server.pid, signal.SIGKILL)
            server.await_end(SECONDS)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server(backend: str) -> Iterator[HostedServer]:
    """A server that lives with its owners."""
    with hosting(backend, Lifespan(owner_key=SECRET.decode())) as running:
        yield running


def own(client: RawClient) -> None:
    client.send(OWN)
    assert client.read(8) == YES


def test_the_server_ends_with_its_last_owner(server: HostedServer) -> None:
    with RawClient(server.port) as guest, RawClient(server.port) as second:
        with RawClient(server.port) as first:
            own(first)
            own(second)
        assert guest.answers()
        with RawClient(server.port) as passer_by:
            assert passer_by.answers()
        assert not server.await_end(0.01)
        second.close()
        assert server.await_end(SECONDS)
        assert guest.read_rest() == b""


def _reset(client: RawClient) -> None:
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


WAYS_TO_GO: dict[str, Callable[[RawClient], object]] = {
    "closes": RawClient.close,
    "resets": _reset,
    "closes its half": lambda client: client.sock.shutdown(socket.SHUT_WR),
    "breaks the protocol": lambda client: client.send(b"\xff" * 9),
}


@pytest.mark.parametrize("go", WAYS_TO_GO.values(), ids=WAYS_TO_GO.keys())
def test_however_an_owner_goes_it_is_gone(server: HostedServer, go: Callable[[RawClient], object]) -> None:
    with RawClient(server.port) as owner, RawClient(server.port) as guest:
        own(owner)
        go(owner)
        assert server.await_end(SECONDS)
        assert guest.read_rest() == b""


def test_torchs_client_owns_a_server_until_it_is_deleted(server: HostedServer) -> None:
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    assert store.delete_key("a secret")
    assert not store.delete_key("another key")
    store.set("key", "value")
    assert store.get("key") == b"value"
    del store
    gc.collect()
    assert server.await_end(SECONDS)


# Server processes and their parents

HOST = """
import os, signal, sys
from rallypoint.store.server.loops.backend import Choice
from rallypoint.store.server.process.hosting import Lifespan, host_server

server = host_server("127.0.0.1", 0, backend=Choice(sys.argv[1]), lifespan=Lifespan(stays_for_clients=True))
fork = os.fork() if "forks" in sys.argv else 0
if "forks" in sys.argv and fork == 0:
    while True:
        signal.pause()
print(server.port, server.pid, fork, flush=True)
sys.stdin.readline()
"""


class Parent(NamedTuple):
    """A process that hosts a server that stays for its clients; and its fork, if it has one."""

    process: subprocess.Popen[str]
    port: int
    server: int
    fork: int


def kill(pid: int) -> None:
    if pid and not is_gone(pid):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def parents() -> Iterator[list[Parent]]:
    """With servers of both backends, and with and without a fork."""
    found: list[Parent] = []
    with ExitStack() as stack:
        for backend, forks in itertools.product(BACKENDS, ("", "forks")):
            process = subprocess.Popen(
                [sys.executable, "-c", HOST, backend, forks],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(end, process)
            assert process.stdout is not None
            found.append(Parent(process, *map(int, process.stdout.readline().split())))
            stack.callback(kill, found[-1].server)
            stack.callback(kill, found[-1].fork)
        yield found


@pytest.fixture
def _quick_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_LIMITS", "handshake_seconds=0.5")


def let_them_look(ports: Sequence[int]) -> None:
    """Wait until servers have looked at what they do once a second, as they do at who is silent."""
    with ExitStack() as stack:
        silent = [stack.enter_context(RawClient(port, shake_hands=False)) for port in ports]
        assert all(client.read_rest() == b"" for client in silent)


unix_only = pytest.mark.skipif(sys.platform == "win32", reason="forks and sends signals")


# What these wait for happens once a second, so they watch servers of both backends at the same time.


@contextmanager
def clients_of(ports: Sequence[int]) -> Iterator[list[RawClient]]:
    with ExitStack() as stack:
        yield [stack.enter_context(RawClient(port)) for port in ports]


@unix_only
@pytest.mark.usefixtures("_quick_handshakes")
@pytest.mark.slow
def test_a_server_that_stays_ends_when_the_last_client_has_gone() -> None:
    """Also if a fork of its parent lives on."""
    with parents() as hosts:
        ports = [host.port for host in hosts]
        with clients_of(ports) as clients, clients_of(ports) as others:
            assert all(client.answers() for client in (*clients, *others))
            for host, other in zip(hosts, others, strict=True):
                host.process.kill()
                host.process.wait(SECONDS)
                other.close()
            let_them_look(ports)
            assert all(client.answers() for client in clients)
        for host in hosts:
            until(lambda: is_gone(host.server), "the server has ended with its last client")  # noqa: B023
            assert not host.fork or not is_gone(host.fork)


@contextmanager
def staying() -> Iterator[list[HostedServer]]:
    with ExitStack() as stack:
        lifespan = Lifespan(stays_for_clients=True)
        yield [stack.enter_context(hosting(backend, lifespan)) for backend in BACKENDS]


@pytest.mark.usefixtures("_quick_handshakes")
def test_a_server_that_stays_waits_for_clients_while_its_parent_lives() -> None:
    with staying() as servers:
        ports = [server.port for server in servers]
        with clients_of(ports) as clients:
            assert all(client.answers() for client in clients)
        let_them_look(ports)
        with clients_of(ports) as clients:
            for server, client in zip(servers, clients, strict=True):
                assert client.answers()
                server.release()
                assert client.read_rest() == b"", "release ends it, whoever is connected"


# Letting go


@pytest.mark.usefixtures("_quick_handshakes")
def test_a_server_that_was_abandoned_is_its_clients() -> None:
    with staying() as servers:
        ports = [server.port for server in servers]
        with clients_of(ports) as clients:
            assert all(client.answers() for client in clients)
            for server in servers:
                server.abandon()
                assert not server.retain()
                server.release()
                server.abandon()
            let_them_look(ports)
            assert not any(is_gone(server.pid) for server in servers)
            assert all(client.answers() for client in clients)
        for server in servers:
            until(lambda server=server: is_gone(server.pid), "it ends with its last client")  # type: ignore[misc]


def test_a_server_that_was_abandoned_is_forgotten_in_silence() -> None:
    server = host_server("127.0.0.1", 0, lifespan=Lifespan(stays_for_clients=True))
    with RawClient(server.port) as client, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert client.answers()
        server.abandon()
        del server
        gc.collect()
        assert client.answers()
    assert caught == []


def test_an_abandoned_server_that_does_not_stay_ends_at_once(backend: str) -> None:
    with hosting(backend) as server, RawClient(server.port) as client:
        assert client.answers()
        server.abandon()
        assert client.read_rest() == b""
        assert server.await_end(SECONDS)
