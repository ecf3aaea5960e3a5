"""Relays as processes: what their clients see, also when the way to the store breaks."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from cable import Cable, cable_to
from command_line import invoke
from processes import Server, is_wine, relaying, sends_signals, serving, torch_serving
from rallypoint.build import in_use
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import (
    ConnectionLostError,
    ServerStartError,
    StoreTimeoutError,
    UsageError,
)
from rallypoint.store.core.store import Core
from rallypoint.store.relay import relay as running
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.relay.hosting import host_relay
from rallypoint.store.relay.reaching import find_upstream
from rallypoint.store.relay.relay import Relay
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.server.process.hosting import host_server
from rallypoint.store.wire.encoding import counted_request, pack_i64, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from raw import SECONDS, RawClient, await_log, empty, until
from threads import Make, running_here

pytestmark = pytest.mark.windows

RANKS = 8

counts_files = pytest.mark.skipif(sys.platform == "win32", reason="only elsewhere is a socket an open file")
unclear = pytest.mark.skipif(is_wine(), reason="it fails under Wine; why is not known yet")


@dataclass
class Site:
    """A store, a cable, a relay at its end, and clients of both."""

    server: Server
    cable: Cable
    log: IO[str]
    stack: ExitStack
    shared: Server | None = None

    def relay(self, *options: str) -> Server:
        """One that is there, if it has no options of its own; tests leave it as it was."""
        if self.shared is not None and not options:
            return self.shared
        return self.new_relay(self.stack.enter_context(cable_to(self.server.port)), *options)

    def new_relay(self, cable: Cable, *options: str) -> Server:
        self.cable = cable
        return self.stack.enter_context(relaying(cable.address, self.log, options))

    def connect(self, server: Server, timeout: float = SECONDS) -> TCPStore:
        return self.stack.enter_context(TCPStore(server.host, server.port, timeout=timeout))

    def raw(self, server: Server) -> RawClient:
        return self.stack.enter_context(RawClient(server.port))


@contextmanager
def building(folder: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("a+"))
        server = stack.enter_context(serving("libuv", log))
        cable = stack.enter_context(cable_to(server.port))
        yield Site(server, cable, log, stack)


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with building(tmp_path_factory.mktemp("site")) as site:
        site.shared = site.new_relay(site.cable)
        yield site


@pytest.fixture
def site(module_site: Site) -> Iterator[Site]:
    """That of the module, without keys, its log empty. No test may end its server or its relay."""
    module_site.log.truncate(0)
    with ExitStack() as stack:
        yield replace(module_site, stack=stack)
    empty(module_site.server.port)


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """One that the test may break."""
    with building(tmp_path) as site:
        yield site


def barrier(key: bytes, size: int) -> bytes:
    return request(Op.BARRIER, key, tail=pack_i64(size))


def ping_all(clients: Sequence[RawClient]) -> None:
    """All that these have sent has been carried out: their PINGs go to the store if they wait."""
    for client in clients:
        assert client.answers()


# The command


@sends_signals
def test_a_relay_says_where_it_serves_and_ends_when_told(own_site: Site) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        relay = own_site.relay()
        with TCPStore(relay.host, relay.port, timeout=SECONDS) as store:
            assert store.add(f"n{number}", 1) == 1
        relay.process.send_signal(number)
        assert relay.process.wait(SECONDS) == 0
    assert "closed" not in own_site.server.read_log()


def test_an_upstream_that_cannot_be_is_a_usage_error() -> None:
    for upstream in ("", "localhost:0", "localhost:x", "localhost:70000"):
        refused = invoke("relay", "--upstream", upstream)
        assert isinstance(refused.exception, UsageError), upstream
        assert "HOST:PORT" in refused.exception.hint
    command = [sys.executable, "-m", "rallypoint", "relay", "--upstream", "node-a"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (result.returncode, result.stdout) == (2, "")
    assert "HOST:PORT" in result.stderr


def test_a_relay_says_that_its_upstream_is_not_there() -> None:
    with pytest.raises(ServerStartError, match=r"cannot reach the store at 127\.0\.0\.1:1 within 0\.3 s"):
        host_relay([("127.0.0.1", 1)], seconds=0.3)


@pytest.mark.skipif(sys.platform == "win32", reason="what a hosted process prints is not captured")
@pytest.mark.parametrize("quiet", [True, False])
def test_of_two_relays_of_a_machine_one_says_that_the_store_was_away(
    quiet: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    store = host_server("localhost", 0)
    relay = host_relay([store.address], quiet=quiet)
    try:
        with TCPStore(*relay.address, timeout=60) as client:
            client.set("key", "value")
            store.release()
            with pytest.raises(ConnectionLostError):
                client.get("key")
        said = capfd.readouterr().err
        assert ("lost the connection" in said) is not quiet, said
        assert "is lost: nothing has listened there" in said, "that is told in any case"
    finally:
        relay.release()


# What clients see


def test_a_value_that_eight_ranks_read_crosses_the_network_once(site: Site) -> None:
    size = 1 << 20
    relay = site.relay()
    site.connect(site.server).set("big", b"x" * size)
    ranks = [site.connect(relay) for _ in range(RANKS)]
    before = site.cable.carried_down
    for rank in ranks:  # one after the other: nothing can be combined on the way
        assert rank.get("big") == b"x" * size
    assert size < site.cable.carried_down - before < size + 10_000
    site.connect(site.server).set("big", b"y" * size)
    assert {rank.get("big") for rank in ranks} == {b"y" * size}


@counts_files
def test_a_rank_that_dies_is_uncounted_at_once(site: Site) -> None:
    relay = site.relay()
    alive, dying = site.raw(relay), site.raw(relay)
    other = site.raw(site.server)
    for client in (alive, dying):
        client.send(barrier(b"b", 3))
    ping_all([alive, dying])
    process = psutil.Process(relay.process.pid)
    files = process.num_fds()
    dying.close()
    until(lambda: process.num_fds() < files, "the relay has noticed")
    ping_all([alive])  # that goes to the store, behind the news
    other.send(barrier(b"b", 3))
    ping_all([other, alive])  # and no STOP_WAITING before the PING
    late = site.raw(relay)
    late.send(barrier(b"b", 3))
    assert [client.read(1) for client in (alive, other, late)] == [b"\0"] * 3


def test_a_client_that_ends_its_half_gets_its_replies(site: Site) -> None:
    relay = site.relay()
    client = site.raw(relay)
    client.send(*[request(Op.ADD, b"n", tail=pack_i64(1)) for _ in range(100)])
    client.sock.shutdown(1)
    assert client.read_rest() == b"".join(pack_i64(number) for number in range(1, 101))


# A way that breaks


@unclear
def test_a_cut_costs_a_delay_and_nothing_else(site: Site) -> None:
    relay = site.relay()
    ranks = [site.connect(relay) for _ in range(RANKS)]
    waiting = [site.raw(relay), site.raw(relay)]
    waiting[0].send(counted_request(Op.WAIT, [b"/late"]))
    waiting[1].send(barrier(b"b", 2))
    ping_all(waiting)
    done = threading.Event()
    connections = site.cable.connections

    def cut() -> None:
        while not done.wait(0.02):
            site.cable.cut()

    def add(rank: TCPStore) -> list[int]:
        numbers: list[int] = []
        while len(numbers) < 50 or site.cable.connections - connections <= 3:
            numbers.append(rank.add("n", 1))
        return numbers

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        with ThreadPoolExecutor(RANKS) as pool:
            seen = sorted(number for numbers in pool.map(add, ranks) for number in numbers)
    finally:
        done.set()
        cutter.join()
    assert seen == list(range(1, len(seen) + 1))
    assert site.connect(site.server).add("n", 0) == len(seen)
    site.connect(site.server).set("late", "now")
    assert waiting[0].read(1) == b"\0"
    other = site.raw(site.server)
    other.send(barrier(b"b", 2))
    assert [waiting[1].read(1), other.read(1)] == [b"\0", b"\0"]
    assert "nothing is lost" in site.server.read_log()


def test_ranks_are_told_when_the_way_is_down_for_too_long(site: Site) -> None:
    relay = site.relay("--limit", "session_seconds=1")
    rank = site.connect(relay)
    rank.set("key", "value")
    site.cable.unplug()
    with pytest.raises(ConnectionLostError):
        rank.add("n", 1)
    await_log(relay, "no connection for 1 s, the limit session_seconds; closing 1 clients")
    site.cable.plug_in()
    again = site.connect(relay)
    assert again.get("key") == b"value"
    # Whether the store had taken it before the cut is not known; that it was not done twice is.
    assert again.add("n", 0) in (0, 1)


def relay_of(port: int) -> Make:
    return lambda loop, listeners: Relay(loop, find_upstream([("127.0.0.1", port)], SECONDS), listeners)


def server_with(**limits: float) -> Make:
    return lambda loop, listeners: Pump(loop, Core(Limits(**limits), loop.turn), listeners)  # type: ignore[arg-type]


def test_a_relay_that_ends_leaves_no_session_behind() -> None:
    cores: list[Core] = []

    def serve(loop: Loop, listeners: list[socket.socket]) -> Pump[Any]:
        cores.append(Core(turn=loop.turn))
        return Pump(loop, cores[0], listeners)

    with running_here(serve) as upstream:
        with running_here(relay_of(upstream)) as port, TCPStore("127.0.0.1", port, timeout=SECONDS) as rank:
            rank.set("key", "value")
            assert len(cores[0].sessions) == 1
        until(lambda: not len(cores[0].sessions), "the session ends with its relay, and not with its time")


def test_ranks_are_told_soon_when_the_store_is_gone_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "_REFUSED_SECONDS", 0.5)
    with ExitStack() as stack:
        server = stack.enter_context(ExitStack())
        upstream = server.enter_context(running_here(server_with()))
        port = stack.enter_context(running_here(relay_of(upstream)))
        rank = stack.enter_context(TCPStore("127.0.0.1", port, timeout=SECONDS))
        rank.set("key", "value")
        server.close()
        with pytest.raises(ConnectionLostError):
            rank.get("key")
        assert "nothing has listened there for 0.5 s; closing 1 clients" in caplog.text


@pytest.mark.skipif(in_use() == "compiled", reason="a method that is compiled cannot be replaced")
def test_a_relay_that_runs_out_of_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run_out(*_: object) -> bytes:
        raise MemoryError

    with (
        running_here(server_with()) as upstream,
        running_here(relay_of(upstream)) as port,
        TCPStore("127.0.0.1", port, timeout=SECONDS) as rank,
    ):
        rank.set("key", "value")
        with monkeypatch.context() as patch:
            patch.setattr(RelayCore, "receive_upstream", run_out)
            with pytest.raises(ConnectionLostError):
                rank.get("key")
        assert f"its relay, process {os.getpid()} on this machine, is out of memory; closing 1" in caplog.text
        assert rank.get("key") == b"value"


def test_a_store_that_started_anew_is_not_taken_for_the_old_one(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        upstream = first.enter_context(running_here(server_with()))
        port = stack.enter_context(running_here(relay_of(upstream)))
        rank = stack.enter_context(RawClient(port))
        rank.set(b"/key", b"old")
        first.close()
        rank.send(request(Op.ADD, b"/n", tail=pack_i64(1)))
        stack.enter_context(running_here(server_with(), upstream))
        with suppress(ConnectionResetError):
            assert rank.read_rest() == b""
        assert "has started anew; closing 1 clients" in caplog.text
        again = stack.enter_context(TCPStore("127.0.0.1", port, timeout=SECONDS))
        assert not again.check(["key", "n"])


@counts_files
def test_a_relay_that_dies_takes_only_its_own_ranks_along(site: Site) -> None:
    doomed, healthy = site.new_relay(site.cable), site.relay()
    lost, kept = site.raw(doomed), site.raw(healthy)
    for client in (lost, kept):
        client.send(barrier(b"b", 3))
    ping_all([lost, kept])
    process = psutil.Process(site.server.process.pid)
    files = process.num_fds()
    doomed.process.kill()
    assert lost.read_rest() == b""
    until(lambda: process.num_fds() < files, "the store has noticed")
    direct = site.raw(site.server)
    direct.send(barrier(b"b", 3))
    ping_all([direct, kept])  # the lost rank does not count
    third = site.raw(healthy)
    third.send(barrier(b"b", 3))
    assert [client.read(1) for client in (kept, direct, third)] == [b"\0"] * 3


# Bounds


@unclear
def test_a_relay_reads_no_more_than_its_upstream_takes(own_site: Site) -> None:
    site = own_site
    relay = site.relay("--limit", "relayed_bytes=1000000")
    rank = site.raw(relay)
    ping_all([rank])
    site.cable.block()
    resident = psutil.Process(relay.process.pid).memory_info().rss
    rank.sock.settimeout(1.0)
    with pytest.raises(TimeoutError):
        rank.sock.sendall(request(Op.SET, b"key", b"v" * 100_000) * 500)
    assert psutil.Process(relay.process.pid).memory_info().rss - resident < 30_000_000
    site.cable.block(False)
    assert site.connect(relay).add("n", 1) == 1


def test_a_rank_that_does_not_read_is_closed(site: Site) -> None:
    relay = site.relay("--limit", "unsent_bytes=10000000")
    site.raw(site.server).set(b"big", b"x" * 4_000_000)
    rank, other = site.raw(relay), site.raw(relay)
    for _ in range(50):
        try:
            rank.send(request(Op.GET, b"big"))
        except OSError:
            break
        assert other.answers()
    await_log(relay, "closed", "the limit unsent_bytes")
    assert other.get(b"big") == b"x" * 4_000_000


# A store of torch's own


@pytest.mark.parametrize(
    "use_libuv", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["libuv", "legacy"]
)
def test_a_server_without_sessions_gets_a_connection_per_rank(use_libuv: bool, tmp_path: Path) -> None:
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("w+"))
        port = stack.enter_context(torch_serving(use_libuv))
        relay = stack.enter_context(relaying(f"127.0.0.1:{port}", log))
        second = stack.enter_context(relaying(relay.address, log))
        assert relay.read_log().count("knows no sessions, as a store of torch's own") == 2
        ranks = [stack.enter_context(TCPStore(second.host, second.port, timeout=SECONDS)) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            waiting = pool.submit(ranks[0].get, "late")
            assert sorted(pool.map(lambda rank: rank.add("n", 1), ranks[1:])) == [1, 2, 3]
            ranks[1].set("late", b"x" * 4_000_000)
            assert waiting.result(SECONDS) == b"x" * 4_000_000
        with pytest.raises(StoreTimeoutError):
            ranks[2].wait(["never"], 0.05)
        assert ranks[2].add("n", 0) == 3


def test_clients_that_are_gone_before_a_long_reply_are_no_fault(tmp_path: Path) -> None:
    """The relay finds out when it sends the first part of it."""
    with (
        (tmp_path / "log").open("w+") as log,
        serving("libuv", log) as server,
        relaying(server.address, log) as relay,
        RawClient(relay.port) as bystander,
    ):
        bystander.set(b"/long", bytes(1 << 20))
        for _ in range(30):
            with ExitStack() as stack:
                for _ in range(20):
                    client = stack.enter_context(RawClient(relay.port))
                    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    client.send(request(Op.GET, b"/long"))
        assert bystander.answers()
        assert "Traceback" not in relay.read_log()
