"""What is different on macOS, with its platform simulated on Linux: nothing of this has been run on a Mac."""

from __future__ import annotations

import errno
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from processes import BACKENDS, relaying, serving
from rallypoint import TCPStore
from rallypoint.store.relay import outgoing
from rallypoint.store.server.loops.listening import set_options
from rallypoint.store.server.loops.loop import LegacyLoop
from rallypoint.store.server.neighbours_program import connected_processes
from raw import SECONDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what it takes away is of Linux")

# `select` comes first: other modules choose by what they find there.
MACOS = """
import select
del select.epoll

import psutil, resource, socket, sys

sys.platform = "darwin"
for name in ("TCP_INFO", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "AF_NETLINK"):
    delattr(socket, name)
socket.TCP_KEEPALIVE = 4

def net_connections(kind="inet"):
    raise psutil.AccessDenied()

psutil.net_connections = net_connections
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""


@pytest.fixture
def macos_for_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(MACOS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        accepted, _ = listener.accept()
        with accepted:
            yield client, accepted


@pytest.mark.usefixtures("macos_for_children")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_and_a_relay_serve_more_than_256_clients(backend: str) -> None:
    with (
        tempfile.TemporaryFile("w+") as log,
        serving(backend, log) as server,
        relaying(server.address, log) as relay,
    ):
        store = TCPStore("127.0.0.1", relay.port, timeout=SECONDS)
        crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
        store.set("key", b"value")
        assert store.get("key") == b"value"
        assert store.add("n", 1) == 1
        store.close()
        for each in crowd:
            each.close()
        log.seek(0)
        assert [line for line in log if "listening on" not in line] == []


def test_without_the_table_of_all_connections_those_of_ones_own_processes_are_found(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(kind: str) -> None:
        raise psutil.AccessDenied()

    client, accepted = connection
    monkeypatch.setattr(psutil, "net_connections", refuse)
    [found] = connected_processes({accepted.getsockname()[1]})
    assert (found[0], found[-1]) == (os.getpid(), [client.getsockname()])


def test_idle_connections_are_probed_by_the_name_that_the_option_has_there(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = socket.TCP_KEEPIDLE
    monkeypatch.setattr(socket, "TCP_KEEPALIVE", number, raising=False)
    monkeypatch.delattr(socket, "TCP_KEEPIDLE")
    set_options(connection[0], {"TCP_KEEPIDLE": 17})
    assert connection[0].getsockopt(socket.IPPROTO_TCP, number) == 17


def test_a_relays_connection_that_breaks_while_options_are_set_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(outgoing, "set_options", fail)
    loop = LegacyLoop()
    heard: list[str] = []

    def end(why: str) -> None:
        heard.append(why)
        loop.stop()

    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = (socket.AF_INET, listener.getsockname())
        outgoing.Outgoing(loop, "127.0.0.1", [address], on_open=nothing, on_data=nothing, on_closed=end)
        loop.later(SECONDS, loop.stop)
        loop.run()
    loop.close()
    assert heard == ["Invalid argument"]
