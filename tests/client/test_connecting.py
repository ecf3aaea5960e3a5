"""The client: reaching a server, waiting with others, and what it says when something is wrong."""

from __future__ import annotations

import gc
import linecache
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer
from types import FrameType
from typing import Any

import pytest

from processes import Server, end, has_ipv6, serving
from rallypoint.client import tcp
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import ConnectError, ConnectionLostError, ProtocolError, StoreTimeoutError, UsageError
from rallypoint.store.connect import connecting
from rallypoint.store.connect.connection import Connection
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.server.process.binding import reserve
from raw import SECONDS, RawClient, until

pytestmark = pytest.mark.windows


@pytest.fixture
def store(server: Server) -> Iterator[TCPStore]:
    with TCPStore(server.host, server.port, timeout=SECONDS) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a request has been sent and its answer is awaited."""
    event = threading.Event()
    read = Connection.read

    def note(self: Connection, count: int, deadline: Deadline) -> bytes:
        event.set()
        return read(self, count, deadline)

    monkeypatch.setattr(Connection, "read", note)
    return event


# Reaching a server


def test_every_address_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserve("127.0.0.1", 0)[0] as sock:
        port = sock.getsockname()[1]
        family, kind = socket.AF_INET, socket.SOCK_STREAM
        answer = [(family, kind, 6, "", (host, port)) for host in ("127.0.0.1", "127.0.0.2")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
        with pytest.raises(ConnectError) as caught:
            TCPStore("node-0", port, timeout=0.1)
    message = caught.value.message
    assert f"cannot reach the store at node-0:{port} within 0.1 s" in message
    assert int(re.findall(r"\((\d+) tries\)", message)[0]) > 1
    assert "nothing listens there" in caught.value.hint
    for host in ("127.0.0.1", "127.0.0.2"):
        assert f"\n  {host}:{port}: Connection refused" in caught.value.message


def test_a_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(ConnectError) as caught:
        TCPStore("no-such-host.invalid", 29500, timeout=0.5)
    assert "no-such-host.invalid: name not resolved" in caught.value.message
    assert "the name no-such-host.invalid never resolved" in caught.value.message
    assert "hosts file" in caught.value.hint


def test_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no deadline of its own, but the store has one."""
    over = threading.Event()

    def hang(*_: object, **__: object) -> list[Any]:
        over.wait(SECONDS)
        raise socket.gaierror(socket.EAI_AGAIN, "too late")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        with pytest.raises(ConnectError, match="the resolver does not answer"):
            TCPStore("slow.example.org", 29500, timeout=0.2)
    finally:
        over.set()


def test_a_server_that_accepts_but_never_answers() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with pytest.raises(ConnectError) as caught:
            TCPStore("127.0.0.1", port, timeout=0.2)
    assert f"127.0.0.1:{port}: " in caught.value.message
    assert "gave no answer" in caught.value.message
    assert caught.value.hint


@contextmanager
def strange_server(answer: Callable[[socket.socket, bytes], None]) -> Iterator[int]:
    """A server that does `answer` with each client and the first that it says."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(SECONDS)
            answer(self.request, self.request.recv(1 << 16))

    with TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join(SECONDS)


def test_another_service_is_told_apart_at_once() -> None:
    with (
        strange_server(lambda client, _: client.sendall(b"HTTP/1.1 400 Bad Request\r\n")) as port,
        pytest.raises(ProtocolError, match=f"127.0.0.1:{port} answers, but not as a store does") as caught,
    ):
        TCPStore("127.0.0.1", port, timeout=100 * SECONDS)
    assert "another service" in caught.value.hint


def test_a_service_that_hangs_up() -> None:
    with (
        strange_server(lambda client, said: None) as port,
        pytest.raises(ConnectError, match=f"127.0.0.1:{port}: .*the server closed it"),
    ):
        TCPStore("127.0.0.1", port, timeout=0.2)


def test_a_server_that_comes_late(monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor) -> None:
    tried = threading.Event()
    try_all = connecting._try_all

    def note(*arguments: Any, **named: Any) -> Connection | None:
        connection = try_all(*arguments, **named)
        tried.set()
        return connection

    monkeypatch.setattr(connecting, "_try_all", note)
    with reserve("127.0.0.1", 0)[0] as sock:
        port = sock.getsockname()[1]
        early = pool.submit(TCPStore, "127.0.0.1", port, timeout=SECONDS)
        assert tried.wait(SECONDS)
        with TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=sock.detach()) as late:
            with early.result(SECONDS) as client:
                client.set("key", "value")
            assert late.get("key") == b"value"


def test_brackets_round_an_ipv6_address() -> None:
    if not has_ipv6():
        pytest.skip("no IPv6 here")
    with (
        TCPStore("::1", 0, is_master=True) as master,
        TCPStore("[::1]", master.port) as client,
    ):
        client.set("key", "value")
        assert master.get("key") == b"value"


# Answers


def test_what_is_set_is_there_for_others_at_once(server: Server, store: TCPStore) -> None:
    with RawClient(server.port) as other:
        for number in range(200):
            store.set("key", str(number))
            assert other.get(b"/key") == str(number).encode()
            store.append("key", "!")
            assert other.get(b"/key") == b"%d!" % number
            store.multi_set(["a", "b"], [str(number)] * 2)
            assert other.get(b"/b") == str(number).encode()


@pytest.mark.parametrize(
    ("reply", "seconds", "error", "words"),
    [
        (b"", 0.2, StoreTimeoutError, "127.0.0.1:[0-9]+ gave no answer within 0.2 s"),
        (b"what?", 5, ProtocolError, "answered b'what' where b'done' was due"),
    ],
    ids=["stopped", "something else"],
)
def test_a_server_that_does_not_answer_as_it_should(
    reply: bytes, seconds: float, error: type[Exception], words: str
) -> None:
    """The handshake comes back, and nothing, or nonsense, after it."""

    def shake_hands(client: socket.socket, said: bytes) -> None:
        client.sendall(said[6:10] + bytes(8))  # to the PING, and to the hello
        client.recv(1 << 16)  # the request
        client.sendall(reply)
        client.recv(1 << 16)  # until the client gives up

    with (
        strange_server(shake_hands) as port,
        TCPStore("127.0.0.1", port, timeout=seconds) as store,
        pytest.raises(error, match=words),
    ):
        store.set("key", "value")


def test_a_server_that_dies_ends_a_wait(
    tmp_path: Path, asked: threading.Event, pool: ThreadPoolExecutor
) -> None:
    with (
        (tmp_path / "log").open("w+") as log,
        serving("auto", log) as server,
        TCPStore(server.host, server.port, timeout=10 * SECONDS) as store,
    ):
        asked.clear()  # the store has connected
        waiting: Future[None] = pool.submit(store.wait, ["never"])
        assert asked.wait(SECONDS)
        server.process.kill()
        with pytest.raises(ConnectionLostError, match=f"{server.address} was lost"):
            waiting.result(SECONDS)


def test_idle_connections_that_the_server_has_ended_are_replaced() -> None:
    with TCPStore("localhost", 0, is_master=True) as first:
        client = TCPStore("localhost", first.port, timeout=SECONDS)
        with client._pool.lend(Deadline(SECONDS)), client._pool.lend(Deadline(SECONDS)):
            pass  # now it has two
    with TCPStore("localhost", first.port, is_master=True), client:
        client.set("key", "again")
        assert client.get("key") == b"again"


# Coming together


def test_the_master_does_not_go_on_before_the_last_worker(pool: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port, descriptor = sock.getsockname()[1], sock.detach()
    master = pool.submit(TCPStore, "127.0.0.1", port, 3, True, timeout=SECONDS, master_listen_fd=descriptor)
    with TCPStore("127.0.0.1", port, 3) as first:
        until(lambda: first._add(b"init/", 0) == 2, "the master and the first worker have come")
        assert not master.done()
        with TCPStore("127.0.0.1", port, 3):
            master.result(SECONDS).close()


def test_workers_that_do_not_come_are_missed_in_the_log_and_in_the_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp, "_FIRST_REPORT", 0.05)
    words = r"1 of 2 workers have come to the store .* within 0\.5 s"
    with caplog.at_level(logging.INFO), pytest.raises(StoreTimeoutError, match=words):
        TCPStore("localhost", 0, 2, True, timeout=0.5)
    reports = [record.getMessage() for record in caplog.records if "workers have come to" in record.message]
    assert 1 <= len(reports) <= 4
    assert reports[0].startswith("1 of 2 workers")


@pytest.mark.parametrize(("world_size", "waits"), [(None, True), (-1, True), (3, False)])
def test_without_a_world_size_or_without_waiting_nobody_is_counted(
    world_size: int | None, waits: bool
) -> None:
    with TCPStore("localhost", 0, world_size, True, timeout=SECONDS, wait_for_workers=waits) as store:
        assert store.num_keys() == 0
    with pytest.raises(UsageError, match="TCPStore world size cannot be 0"):
        TCPStore("localhost", 0, 0, True)


# Forks and interruptions


FORK = """
import os, sys
from rallypoint.client.tcp import TCPStore

store = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=30)
store.set("who", "parent")
pids = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        break
    pids.append(pid)
me = "parent" if len(pids) == 3 else f"child {len(pids)}"
try:
    for number in range(100):
        store.set(me, f"{me} {number}")
        assert store.get(me) == f"{me} {number}".encode()
        store.add("sum", 1)
except BaseException as error:
    print(me, repr(error), flush=True)
    os._exit(1)
if me != "parent":
    os._exit(0)
codes = [os.waitpid(pid, 0)[1] for pid in pids]
print(codes, store.add("sum", 0), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_after_a_fork_each_process_has_its_own_connection(server: Server) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FORK, str(server.port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        out, _ = process.communicate(timeout=60)
    finally:
        end(process)
    assert out == "[0, 0, 0] 400\n"


class _InterruptionError(Exception):
    pass


def _is_with(frame: FrameType) -> bool:
    """Whether a line is a `with`: Python handles no signal between its block and its `__exit__`."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith("with ")


def _interrupted(call: Callable[[], object], line: int) -> bool:
    """Make a call that is interrupted at its n-th line of the client's code; False if it has fewer."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not re.search(r"rallypoint[/\\](?:client|store[/\\]connect)\b", frame.f_code.co_filename):
            return None
        if event == "line" and not _is_with(frame):
            left -= 1
            if left == 0:
                raise _InterruptionError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except _InterruptionError:
        return True
    finally:
        sys.settrace(before)
    return False


CALLS: dict[str, tuple[Callable[[TCPStore], object], object]] = {
    "get": (lambda store: store.get("key"), b"value"),
    "multi_get": (lambda store: store.multi_get(["key", "other"]), [b"value", b"other value"]),
    "compare_set": (lambda store: store.compare_set("key", "wrong", "new"), b"value"),
    "set": (lambda store: store.set("key", "value"), None),
    "wait": (lambda store: store.wait(["key"]), None),
    "timed-out wait": (lambda store: time_out(store), ("missing",)),
    "list_keys": (lambda store: sorted(store.list_keys()), ["key", "other"]),
}


def time_out(store: TCPStore) -> tuple[str, ...]:
    try:
        store.wait(["missing"], 0.001)
    except StoreTimeoutError as error:
        return error.keys
    return ()


@pytest.fixture(scope="module")
def served() -> Iterator[int]:
    """The port of a server for those whose calls leave it as it is."""
    with TCPStore("localhost", 0, is_master=True) as master:
        yield master.port


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # it may be interrupted before it closes
@pytest.mark.parametrize(("call", "expected"), CALLS.values(), ids=CALLS.keys())
def test_an_exception_at_any_line_leaves_no_connection_out_of_step(
    served: int, call: Callable[[TCPStore], object], expected: object
) -> None:
    with TCPStore("127.0.0.1", served, timeout=SECONDS) as store:
        store.multi_set(["key", "other"], ["value", "other value"])
        line = 1
        while _interrupted(lambda: call(store), line):
            assert store.get("key") == b"value", f"after an exception at line {line}"
            assert store.multi_get(["other", "key"]) == [b"other value", b"value"]
            assert call(store) == expected, f"after an exception at line {line}"
            line += 1
        assert line > 10, "nothing was interrupted"
    gc.collect()  # here, where a socket that was left open may be told
