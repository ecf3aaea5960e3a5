"""What must not bring a server, its host or a client down: faults, closed streams, forks, stopped peers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import psutil
import pytest

from processes import BACKENDS, Server, end, serving
from rallypoint.client import tcp
from rallypoint.client.local import HashStore
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import (
    ConnectError,
    ConnectionLostError,
    RallypointError,
    StoreTimeoutError,
    UsageError,
)
from rallypoint.store.connect import connecting
from rallypoint.store.connect.connection import Connection
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.core.store import Core
from rallypoint.store.engine import Engine
from rallypoint.store.server.loops.backend import Choice, make_loop
from rallypoint.store.server.loops.listening import Arrival, Listening
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.wire.encoding import pack_u64, request
from rallypoint.store.wire.opcodes import Op
from raw import SECONDS, RawClient, await_log
from threads import running_here

pytestmark = pytest.mark.windows


@pytest.mark.parametrize(
    ("fault", "logged"),
    [
        (ZeroDivisionError, r"the server failed to serve it(.|\n)*ZeroDivisionError"),
        (MemoryError, "out of memory: clients that need more are closed"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fault_in_serving_one_client_is_that_clients_alone(
    backend: str,
    fault: type[Exception],
    logged: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> Sequence[object]:
        raise fault

    def serve(loop: Loop, listeners: list[socket.socket]) -> Pump[Any]:
        return Pump(loop, Core(turn=loop.turn), listeners)

    monkeypatch.setattr(Engine, "push", fail)
    with (
        running_here(serve, backend=backend) as port,
        RawClient(port) as bystander,
        RawClient(port) as unlucky,
    ):
        assert bystander.answers()
        unlucky.send(request(Op.QUEUE_PUSH, b"queue", b"value"))
        assert unlucky.read_rest() == b""
        assert bystander.answers()
    assert re.search(logged, caplog.text)


def test_who_has_gone_when_it_is_accepted_is_closed() -> None:
    """Windows has no address for it then."""

    class Forgetful(socket.socket):
        def _accept(self) -> tuple[int, None]:
            loop.stop()
            return super()._accept()[0], None  # type: ignore[misc]

    welcomed: list[object] = []
    loop, _ = make_loop(Choice.LEGACY)
    with closing(loop), Forgetful() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listening = Listening(loop, [listener], {}, welcomed.extend)
        listening.start()
        with socket.create_connection(listener.getsockname(), timeout=SECONDS) as client:
            loop.run()
            assert client.recv(1) == b""
        listening.close()
    assert not welcomed


@pytest.mark.skipif(sys.platform != "linux", reason="the option has this name on Linux")
def test_few_probes_are_due_in_the_same_second() -> None:
    """16,000 that were due at once were lost by the system's queue, and live connections ended for it."""
    welcomed: list[Arrival] = []
    loop, _ = make_loop(Choice.LEGACY)
    with closing(loop), ExitStack() as clients:
        listener = clients.enter_context(socket.create_server(("127.0.0.1", 0), backlog=512))

        def welcome(arrivals: list[Arrival]) -> None:
            welcomed.extend(arrivals)
            loop.stop()

        listening = Listening(loop, [listener], {}, welcome)
        listening.start()
        for _ in range(300):
            clients.enter_context(socket.create_connection(listener.getsockname(), timeout=SECONDS))
        loop.run()
        due = Counter(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) for sock, _ in welcomed)
        listening.close()
        for sock, _ in welcomed:
            sock.close()
    assert due == {60: 100, 61: 100, 62: 100}


@pytest.mark.parametrize("backend", ["libuv", pytest.param("legacy", marks=pytest.mark.slow)])
def test_a_log_that_nobody_reads_does_not_stop_the_server(backend: str) -> None:
    command = [sys.executable, "-m", "rallypoint", "serve", "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--backend", backend], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[-2].rpartition(":")[2])
        for _ in range(1500):  # a line of some 60 bytes for each, and a pipe takes 65,536
            with RawClient(port, shake_hands=False) as stranger:
                stranger.send(b"GET / HTTP/1.1\r\n")
                assert stranger.sock.recv(1) == b""
        with RawClient(port) as client:
            assert client.answers()
        process.terminate()
        assert process.wait(SECONDS) == (1 if sys.platform == "win32" else 0)
    finally:
        end(process)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells that a client has ended")
@pytest.mark.parametrize("backend", ["libuv", pytest.param("legacy", marks=pytest.mark.slow)])
def test_who_ends_but_never_reads_is_counted_and_in_the_end_closed(backend: str) -> None:
    options = ["--limit", "connections=2", "--limit", "handshake_seconds=0.5"]
    with (
        serving(backend, options=options) as server,
        RawClient(server.port) as writer,
        RawClient(server.port) as leaver,
    ):
        writer.set(b"key", bytes(8 << 20))
        leaver.send(request(Op.GET, b"key") * 8)
        leaver.sock.shutdown(socket.SHUT_WR)
        with RawClient(server.port, shake_hands=False) as third:
            assert third.read_rest() == b""
        assert leaver.name in await_log(server, "did not read its last replies within 0.5 s")
        with RawClient(server.port) as third:
            assert third.answers()


_WITHOUT_STREAMS = """
import os, sys
for number in {closed}:
    os.close(number)
from rallypoint import TCPStore
with TCPStore("localhost", 0, is_master=True, timeout=20) as store:
    store.set("key", "value")
    os._exit(42 if store.get("key") == b"value" else 1)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there, a stream is more than a descriptor")
@pytest.mark.parametrize("closed", [pytest.param((2,), marks=pytest.mark.slow), (0, 1, 2)], ids=str)
def test_a_host_without_standard_streams(closed: tuple[int, ...]) -> None:
    script = _WITHOUT_STREAMS.format(closed=closed)
    assert subprocess.run([sys.executable, "-c", script], timeout=SECONDS).returncode == 42


_FORKED_WHILE_SHARING = """
import os
from rallypoint import TCPStore
from rallypoint.store.server.process import hosting
hosting._sharing.acquire()  # as a thread does that is just starting a server
child = os.fork()
if child == 0:
    with TCPStore("localhost", 0, is_master=True, multi_tenant=True, timeout=20) as store:
        store.set("key", "value")
    os._exit(42)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_in_the_middle_of_a_start_can_start_its_own() -> None:
    run = subprocess.run([sys.executable, "-c", _FORKED_WHILE_SHARING], timeout=SECONDS)
    assert run.returncode == 42


def test_a_second_tenant_is_told_if_the_server_listens_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    with TCPStore("localhost", 0, is_master=True, multi_tenant=True) as first:
        with TCPStore("localhost", first.port, is_master=True, multi_tenant=True):
            assert not caplog.records
        with TCPStore("0.0.0.0", first.port, is_master=True, multi_tenant=True) as third:
            assert third.check([])
    assert "is served already, but not where 0.0.0.0 says" in caplog.text


def test_a_clone_of_a_closed_store(server: Server) -> None:
    store = TCPStore(server.host, server.port)
    store.close()
    with pytest.raises(RallypointError, match="closed"):
        store.clone()


def test_a_socket_that_meets_itself_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port of the range for clients may be given to the very socket that tries to reach it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    class Narcissus(socket.socket):
        def connect(self, address: object) -> None:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(("127.0.0.1", port))
            super().connect(("127.0.0.1", port))

    monkeypatch.setattr(socket, "socket", Narcissus)
    with pytest.raises(ConnectError, match="refused"):
        connecting.connect("127.0.0.1", port, Deadline(0.1))


def test_a_wait_keeps_its_deadline_when_the_server_stands_still(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_GRACE_SECONDS", 0.3)
    with TCPStore(server.host, server.port) as store:
        psutil.Process(server.process.pid).suspend()
        try:
            with pytest.raises(StoreTimeoutError, match=r"gave no answer within 0\.2 s"):
                store.wait(["key"], 0.2)
        finally:
            psutil.Process(server.process.pid).resume()
        store.set("key", "value")
        store.wait(["key"], 20)


def test_a_value_that_a_slow_server_has_popped_is_not_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_GRACE_SECONDS", 20.0)
    with TCPStore(server.host, server.port) as store:
        store.queue_push("queue", "value")
        store.set_timeout(0.05)
        process = psutil.Process(server.process.pid)
        process.suspend()
        going_on = threading.Timer(0.3, process.resume)
        going_on.start()
        try:
            assert store.queue_pop("queue") == b"value"
            with pytest.raises(StoreTimeoutError, match=r"waited 0\.05 s: the queue 'queue' is empty"):
                store.queue_pop("queue")
        finally:
            going_on.join()


def test_an_absurd_length_from_the_server_is_a_lost_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
    ):
        far, _ = listener.accept()
        with far:
            far.sendall(pack_u64(1 << 63) + b"and then nothing")
        with pytest.raises(ConnectionLostError):
            Connection(near, "a stranger").read_blob(Deadline(SECONDS))


def test_values_and_timeouts_that_cannot_be_meant() -> None:
    store = HashStore()
    with pytest.raises(TypeError):
        store.set("key", 3)  # type: ignore[arg-type]
    assert not store.check(["key"])
    with pytest.raises(UsageError, match="'abc' is one key, where a list is wanted"):
        store.wait("abc")
    with pytest.raises(UsageError, match="the port is '29500', which is no number"):
        TCPStore("localhost", "29500")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'localhost:29500' is no host name"):
        TCPStore("localhost:29500", 0, is_master=True)
    for timeout in (float("inf"), float("nan"), 0, -1):
        with pytest.raises(UsageError, match="must be positive and finite"):
            store.set_timeout(timeout)
