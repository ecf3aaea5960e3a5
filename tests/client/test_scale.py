"""Many connections at once on one server, and what an idle one costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from processes import Server, end, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="raises limits as on Linux")

CONNECTIONS = 15_000
SPARE_FILES = 200
BYTES_EACH = 20 * 1024
"""A generous bound for an idle connection; it is about a tenth of that."""

# Some thousand connections from each loopback address: one alone may not have ports enough. They are
# bound to a port only when they connect, and end with a reset: what is left of 15,000 connections
# would hold up the search for a free port, in this test and in the next ones.
CLIENTS = """
import resource, socket, struct, sys
from rallypoint.store.wire.encoding import VALIDATE, blob, request
from rallypoint.store.wire.opcodes import Op

port, count = map(int, sys.argv[1:])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
clients = []
for number in range(count):
    client = socket.socket()
    client.settimeout(60)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
    client.bind((f"127.0.0.{2 + number // 5000}", 0))
    client.connect(("127.0.0.1", port))
    client.sendall(VALIDATE)
    clients.append(client)

def ask_all(question, answer):
    for client in clients:
        client.sendall(question)
    return sum(client.recv(len(answer), socket.MSG_WAITALL) == answer for client in clients)

print(ask_all(request(Op.PING, tail=b"ping"), b"ping"), flush=True)
sys.stdin.readline()
clients[0].sendall(request(Op.SET, b"key", b"value"))
question = request(Op.GET, b"key") + request(Op.PING, tail=b"pong")
print(ask_all(question, blob(b"value") + b"pong"), flush=True)
"""


@pytest.fixture(params=["libuv", pytest.param("legacy", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server that may open as many files as the system lets this user."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < CONNECTIONS + SPARE_FILES:
        pytest.skip(f"a process may open only {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with (tmp_path / "log").open("w+") as log, serving(request.param, log) as running:
            yield running
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_15_000_connections_at_once(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    memory = psutil.Process(server.process.pid).memory_info
    before = memory().rss
    clients = subprocess.Popen(
        [sys.executable, "-c", CLIENTS, str(server.port), str(CONNECTIONS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert clients.stdin is not None
        assert clients.stdout is not None
        assert clients.stdout.readline() == f"{CONNECTIONS}\n"
        each = (memory().rss - before) / CONNECTIONS
        assert psutil.Process(server.process.pid).num_fds() >= CONNECTIONS
        clients.stdin.write("go\n")
        clients.stdin.flush()
        assert clients.stdout.readline() == f"{CONNECTIONS}\n"
    finally:
        end(clients)
    with capsys.disabled():
        print(f"\n{server.backend}: {CONNECTIONS:,} connections, {each:,.0f} bytes each", end=" ")
    assert each < BYTES_EACH
