"""`rallypoint serve`, and how a server behaves on real sockets, on each backend."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from command_line import invoke
from processes import BACKENDS, Server, end, has_ipv6, sends_signals, serving, tells_connections
from rallypoint import build
from rallypoint.store.core.store import Core
from rallypoint.store.server.loops.backend import Choice, make_loop
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.server.process.binding import listen
from rallypoint.store.wire.encoding import VALIDATE, counted_request, pack_i64, request
from rallypoint.store.wire.opcodes import Op
from raw import SECONDS, RawClient, await_log, until, values_reply
from threads import running_here

pytestmark = pytest.mark.windows

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what only Linux tells")


@contextmanager
def serve(*options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "serve", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        end(process)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def port_in(line: str) -> int:
    return int(line.split()[-2].rpartition(":")[2])


@pytest.fixture(scope="module", params=BACKENDS)
def limited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with limits of which each concerns one test."""
    limits = ("unsent_bytes=1_000_000", "handshake_seconds=0.5", "connections=30")
    options = [word for limit in limits for word in ("--limit", limit)]
    path = tmp_path_factory.mktemp("limited") / request.param
    with path.open("w+") as log, serving(request.param, log, options) as running:
        yield running


# The command


@sends_signals
@pytest.mark.parametrize(
    ("backend", "number", "name"),
    [("auto", signal.SIGINT, "libuv"), ("legacy", signal.SIGTERM, "legacy")],
)
def test_one_line_when_ready_and_exit_code_0_on_a_signal(
    backend: str, number: signal.Signals, name: str
) -> None:
    with serve("--host", "localhost", "--port", "0", "--backend", backend) as process:
        line = first_line(process)
        port = port_in(line)
        assert line == f"rallypoint: serving on localhost:{port} ({name})\n"
        with RawClient(port) as client:
            assert client.answers()
            process.send_signal(number)
            rest, log = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert rest == ""
    assert "listening on 127.0.0.1:" in log
    assert "Traceback" not in log


@sends_signals
@pytest.mark.parametrize(
    ("backend", "number", "times"),
    [
        ("libuv", signal.SIGTERM, 1),
        ("legacy", signal.SIGINT, 1),
        *(
            pytest.param(backend, number, 5, marks=pytest.mark.slow)
            for backend in BACKENDS
            for number in (signal.SIGINT, signal.SIGTERM)
        ),
    ],
)
def test_a_signal_right_behind_the_line(backend: str, number: signal.Signals, times: int) -> None:
    for _ in range(times):
        with serve("--port", "0", "--backend", backend) as process:
            assert first_line(process)
            process.send_signal(number)
            process.communicate(timeout=SECONDS)
        assert process.returncode == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
def test_the_line_has_the_host_and_the_port_as_they_were_given(host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("no IPv6 here")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    with serve("--host", host, "--port", str(port), "--insecure") as process:
        place = f"[{host}]" if ":" in host else host
        assert first_line(process) == f"rallypoint: serving on {place}:{port} (libuv)\n"
        with RawClient(port, "127.0.0.1" if host == "0.0.0.0" else host) as client:
            assert client.answers()


@pytest.fixture
def _own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a `rallypoint serve` in this process, where the logging is pytest's."""
    monkeypatch.setattr("rallypoint.cli.foreground.settle_in", lambda _: None)


@tells_connections
@pytest.mark.usefixtures("_own_logging")
def test_a_port_in_use_is_exit_code_1_and_names_who_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        said = invoke("serve", "--host", "127.0.0.1", "--port", str(port))
    assert (said.exit_code, said.stdout) == (1, "")
    assert f"port {port} on 127.0.0.1 is in use by process {os.getpid()} (" in str(said.exception)


@pytest.mark.usefixtures("_own_logging")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--limit", "conections=5"], ["no limit called 'conections'", "hint: did you mean connections?"]),
        (["--limit", "key_bytes=many"], ["limit key_bytes is 'many'", "key_bytes=NUMBER"]),
        (["--limit", "key_bytes=0"], ["limit key_bytes is 0, but must be positive"]),
        (["--port", "70000"], ["port 70000 does not exist"]),
        (["--host", "0.0.0.0", "--port", "0"], ["could read and change the store", "or say --insecure"]),
        (["--port", "http"], ["--port"]),
        (["--backend", "asyncio"], ["--backend"]),
        (["--hots", "localhost"], ["--hots"]),
    ],
)
def test_usage_errors_are_exit_code_2(options: list[str], words: list[str]) -> None:
    said = invoke("serve", *options)
    assert (said.exit_code, said.stdout) == (2, "")
    for word in words:
        assert word in str(said.exception)


def test_an_unknown_host_is_served_everywhere_with_a_warning() -> None:
    with serve("--host", "192.0.2.77", "--port", "0", "--insecure") as process:
        line = first_line(process)
        with RawClient(port_in(line)) as client:
            assert client.answers()
        process.terminate()
        _, log = process.communicate(timeout=SECONDS)
    assert "192.0.2.77" in line
    assert log.count("listening on every interface") == 1


# Sockets


@linux
def test_no_names_are_looked_up_for_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reports each look-up to its audit hooks, whatever function asks for it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "def hear(event, arguments):\n"
        "    if event in ('socket.getnameinfo', 'socket.gethostbyaddr', 'socket.gethostbyname',\n"
        "                 'socket.getaddrinfo'):\n"
        "        sys.stderr.write(f'LOOKUP {event} {arguments}\\n')\n"
        "        sys.stderr.flush()\n"
        "sys.addaudithook(hear)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for backend in BACKENDS:
        with (tmp_path / backend).open("w+") as log, serving(backend, log) as server:
            before = server.read_log().count("LOOKUP")
            assert before, "the hook hears nothing, not even the look-up of the server's own address"
            for _ in range(5):
                with RawClient(server.port) as client:
                    assert client.answers()
            with RawClient(server.port) as client:
                client.send(b"\xff")
                assert client.read_rest() == b""
            await_log(server, "closed ")
            assert server.read_log().count("LOOKUP") == before


def data_segments_received(sock: socket.socket) -> int:
    """How many segments with data the other end has sent (tcpi_data_segs_in of Linux)."""
    (count,) = struct.unpack_from("<I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 152)
    assert isinstance(count, int)
    return count


@linux
def test_the_replies_to_one_read_leave_in_one_write(server: Server) -> None:
    with RawClient(server.port) as client:
        client.set(b"key", b"value")
        before = data_segments_received(client.sock)
        batch = [
            request(Op.ADD, b"count", tail=pack_i64(1)),
            request(Op.SET, b"other", b"x"),
            counted_request(Op.CHECK, [b"key", b"missing"]),
            request(Op.GET, b"key"),
            counted_request(Op.WAIT, [b"key"]),
            request(Op.PING, tail=b"last"),
        ]
        client.send(*batch)
        assert client.read(8 + 1 + 13 + 1 + 4) == pack_i64(1) + b"\1" + values_reply(b"value") + b"\0last"
        assert data_segments_received(client.sock) - before == 1


def test_a_client_that_closes_its_side_still_gets_all_replies(server: Server) -> None:
    """More of them than the system keeps for a client that does not read yet."""
    value = os.urandom(100_000)
    with RawClient(server.port) as client:
        client.set(b"key", value)
        client.send(request(Op.GET, b"key") * 200)
        client.sock.shutdown(socket.SHUT_WR)
        assert client.read_rest() == values_reply(value) * 200


def test_what_a_client_says_last_is_done(server: Server) -> None:
    with RawClient(server.port) as watcher:
        watcher.send(counted_request(Op.WAIT, [b"testament"]))
        with RawClient(server.port) as client:
            assert client.answers()  # a client that is gone before it is accepted may be another user's
            client.send(request(Op.SET, b"testament", b"all to the others"))
        assert watcher.read(1) == b"\0"
        assert watcher.get(b"testament") == b"all to the others"


VIOLATIONS = {
    "no such operation": (b"\x63", "there is no operation 99"),
    "a second handshake": (VALIDATE, "a second VALIDATE"),
    "a key that is too long": (b"\x03" + (1 << 40).to_bytes(8, "little"), "limit key_bytes is 8,192"),
    "no number": (
        request(Op.ADD, b"text", tail=pack_i64(1)),
        "ADD to key b'text', whose value b'not a number' is no number",
    ),
}


@pytest.mark.parametrize(("violation", "reason"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_a_violation_ends_the_connection_after_the_replies_before_it(
    server: Server, violation: bytes, reason: str
) -> None:
    with RawClient(server.port) as other, RawClient(server.port) as client:
        other.set(b"text", b"not a number")
        client.send(request(Op.GET, b"text") * 2, violation)
        assert client.read_rest() == values_reply(b"not a number") * 2
        line = await_log(server, f"closed {client.name}: ")
        assert reason in line
        assert other.answers()
        assert other.get(b"text") == b"not a number"


@pytest.mark.parametrize(
    "first", [request(Op.PING, tail=b"ping"), VALIDATE[:-1] + b"\xff", b"GET / HTTP/1.1\r\n"]
)
def test_without_a_handshake_nothing_is_answered(server: Server, first: bytes) -> None:
    with RawClient(server.port, shake_hands=False) as client:
        client.send(first)
        assert read_to_the_end(client) == b""
        await_log(server, f"closed {client.name}: ")


def read_to_the_end(client: RawClient) -> bytes:
    """What comes before the end, be it an orderly one or a reset, as the system gives it to who said more."""
    data = bytearray()
    try:
        while piece := client.sock.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return bytes(data)


@pytest.mark.skipif(sys.platform == "win32", reason="there, a reset discards what has arrived")
def test_replies_before_a_violation_arrive_even_if_much_follows_it(server: Server) -> None:
    with RawClient(server.port) as client:
        client.set(b"key", b"value")
        client.send(request(Op.GET, b"key") * 3 + b"\x63" + bytes(60_000))
        assert read_to_the_end(client) == values_reply(b"value") * 3


# Limits


def test_who_never_reads_is_closed_and_others_notice_nothing(limited: Server) -> None:
    value = bytes(100_000)
    with RawClient(limited.port) as other:
        other.set(b"key", value)
        before = psutil.Process(limited.process.pid).memory_info().rss
        with RawClient(limited.port) as client:
            ask_until_closed(client, request(Op.GET, b"key"), limited)
            line = await_log(limited, f"closed {client.name}: ")
        assert "does not read" in line
        assert "1,000,000 bytes" in line
        assert "limit unsent_bytes" in line
        assert psutil.Process(limited.process.pid).memory_info().rss - before < 20_000_000
        assert other.get(b"key") == value


def ask_until_closed(client: RawClient, question: bytes, server: Server) -> None:
    """Ask one question at a time and read no answer, until the server has had enough."""
    client.sock.setblocking(False)

    def closed() -> bool:
        try:
            client.sock.send(question)
        except BlockingIOError:
            pass
        except OSError:
            return True
        return f"closed {client.name}: " in server.read_log()

    until(closed, "the server closes who does not read")


def test_who_does_not_shake_hands_is_closed(limited: Server) -> None:
    with (
        RawClient(limited.port) as client,
        RawClient(limited.port, shake_hands=False) as silent,
        RawClient(limited.port, shake_hands=False) as slow,
    ):
        slow.send(VALIDATE[:3])
        assert silent.read_rest() == b""
        assert slow.read_rest() == b""
        for late in (silent, slow):
            assert "0.5 s, the limit handshake_seconds" in await_log(limited, f"closed {late.name}: ")
        assert client.answers()


def test_one_connection_too_many(limited: Server) -> None:
    clients: list[RawClient] = []

    def come() -> bool:
        """One more, if there is room: those of the tests before may still be counted."""
        if client := served_by(limited):
            clients.append(client)
        return len(clients) == 30

    try:
        until(come, "30 clients are served")
        with RawClient(limited.port, shake_hands=False) as one_more:
            assert one_more.read_rest() == b""
            assert "than 30, the limit connections" in await_log(limited, f"refused {one_more.name}: ")
        assert all(client.answers() for client in clients)
        clients.pop().close()
        until(come, "a place is free again")
    finally:
        for client in clients:
            client.close()


def served_by(server: Server) -> RawClient | None:
    """A new client, if it gets an answer."""
    client = RawClient(server.port, shake_hands=False)
    try:
        client.send(VALIDATE)
        if client.answers():
            return client
    except ConnectionError:
        pass
    client.close()
    return None


@linux
def test_out_of_open_files(server: Server) -> None:
    """It says so, waits without spinning, and serves those who wait once there is room."""
    process = psutil.Process(server.process.pid)
    told_before = server.read_log().count("cannot accept")

    def times_told() -> int:
        return server.read_log().count("cannot accept") - told_before

    with RawClient(server.port) as first:
        assert first.answers()
        room = 5
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + room, hard))
        clients = [RawClient(server.port) for _ in range(room + 5)]
        try:
            for client in clients:
                client.send(request(Op.PING, tail=b"ping"))
            until(times_told, "it says that it cannot accept")
            line = await_log(server, "cannot accept more clients beside")
            assert "Too many open files" in line
            assert "hint:" in line
            before, began = sum(process.cpu_times()[:2]), time.monotonic()
            until(lambda: times_told() >= 2, "it tries again")
            assert sum(process.cpu_times()[:2]) - before < 0.4
            assert times_told() <= 3 + time.monotonic() - began, "it tries once a second"
            served = with_an_answer(clients)
            assert len(served) == room
            assert first.answers()
            for client in served:
                client.close()
            assert all(client.read(4) == b"ping" for client in clients if client not in served)
        finally:
            for client in clients:
                client.close()
            process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
        assert first.answers()
        newcomer = served_by(server)
        assert newcomer is not None
        newcomer.close()


def with_an_answer(clients: Sequence[RawClient]) -> list[RawClient]:
    """Those of the clients to whom the server has said something."""
    readable, _, _ = select.select([client.sock for client in clients], [], [], 0)
    return [client for client in clients if client.sock in readable]


# The pump, where the system would not do on demand what is needed


@pytest.mark.parametrize("choice", [Choice.LIBUV, Choice.LEGACY])
def test_a_stop_after_the_end_does_no_harm(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal that comes while the server is ending for another reason."""
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)  # they are pytest's
    loop, _ = make_loop(choice)
    Pump(loop, Core(turn=loop.turn), listen("127.0.0.1", 0)).serve(on_ready=loop.stop)
    loop.stop()


class StubbornListener(socket.socket):
    """A listening socket whose first accepts fail with the errors given."""

    failures: list[int]

    def _accept(self) -> Any:
        if self.failures:
            code = self.failures.pop(0)
            raise OSError(code, os.strerror(code))
        return super()._accept()  # type: ignore[misc]


@contextmanager
def pumping(failures: Sequence[int]) -> Iterator[tuple[int, StubbornListener]]:
    listener = StubbornListener()
    listener.failures = list(failures)
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    def serve(loop: Loop, listeners: list[socket.socket]) -> Pump[Any]:
        return Pump(loop, Core(turn=loop.turn), listeners)

    with running_here(serve, backend="legacy", listeners=[listener]) as port:
        yield port, listener


@pytest.mark.skipif(build.in_use() == "compiled", reason="compiled, it is the system alone that can fail")
@pytest.mark.parametrize(
    "code", [errno.ECONNABORTED, errno.EINTR, errno.EPROTO, errno.EPERM, errno.EHOSTUNREACH, errno.ENETDOWN]
)
def test_an_accept_that_fails_is_tried_again(code: int) -> None:
    """Linux hands network errors of a connection on to who accepts it; they are that connection's alone."""
    with pumping([code]) as (port, listener), RawClient(port) as client:
        assert client.answers()
        assert not listener.failures
