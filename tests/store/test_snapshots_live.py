"""Looking at real servers: nobody waits for who looks, and who does not say who it is may be found."""

from __future__ import annotations

import gc
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from processes import BACKENDS, Server, end, relaying, serving, torch_serving
from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.errors import NotOursError
from rallypoint.store.connect.connecting import connect
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.core.context import DriverTask
from rallypoint.store.core.snapshots import SnapshotStep
from rallypoint.store.core.store import Connection, Core
from rallypoint.store.rollcall.identity import Identity, Role, Source, hello_key
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Client, Snapshot
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump, about_this_process
from rallypoint.store.wire.encoding import VALIDATE, pack_i64, request
from rallypoint.store.wire.opcodes import Op
from raw import SECONDS, RawClient, until
from rolls import rank
from test_core import barrier, set_, wait
from test_snapshots import go_on
from test_snapshots import look as look_request
from threads import running_here

pytestmark = pytest.mark.windows

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what only Linux tells")


class Here(NamedTuple):
    """A server in this process."""

    core: Core
    port: int
    host: str = "127.0.0.1"


@contextmanager
def serving_here(backend: str) -> Iterator[Here]:
    cores: list[Core] = []

    def serve(loop: Loop, listeners: list[socket.socket]) -> Pump[Any]:
        cores.append(Core(None, loop.turn, about_this_process(loop)))
        return Pump(loop, cores[0], listeners)

    with running_here(serve, backend=backend) as port:
        yield Here(cores[0], port)


@pytest.fixture(params=BACKENDS)
def here(request: pytest.FixtureRequest) -> Iterator[Here]:
    """A server without a past, once on each backend."""
    with serving_here(request.param) as found:
        yield found


def look_at(server: Server | Here, question: Question | None = None) -> Snapshot:
    return fetch_snapshot(server.host, server.port, question or Question(), Deadline(SECONDS))


def await_look(server: Server | Here, holds: Callable[[Snapshot], bool]) -> Snapshot:
    """A snapshot, as soon as it is as it should be."""
    found = look_at(server)

    def is_so() -> bool:
        nonlocal found
        found = look_at(server)
        return holds(found)

    until(is_so, "it says something else")
    return found


def others_in(snapshot: Snapshot) -> list[Client]:
    """The clients but for who looks."""
    return [each for each in snapshot.clients if each.who.role is not Role.TOOL]


# In slices

CONNECTIONS = 2_000
KEYS = 12_500

Crowd = tuple[Core, list[Connection]]


def make_crowd() -> Crowd:
    """Many clients, and very many keys."""
    core = Core()
    clients = []
    for number in range(CONNECTIONS):
        client = core.open(f"10.0.{number >> 8}.{number & 255}:4000")
        client.receive(VALIDATE)
        client.who = Identity(f"node-{number // 8}", number, number, number % 8, CONNECTIONS, Role.RANK)
        clients.append(client)
    for number in range(KEYS):
        clients[number % CONNECTIONS].receive(set_(b"/some/key/of/a/job/%d" % number, b"value"))
    for _ in range(300):
        core.end_second()
    return core, clients


@pytest.fixture(scope="module")
def crowd() -> Crowd:
    return make_crowd()


def steps_of(core: Core, question: Question) -> tuple[list[float], bytes]:
    """The CPU time of each step of a look."""
    found: list[bytes] = []
    times: list[float] = []
    core.snapshots.start(question, found.append)
    step: object = None
    while step is not SnapshotStep.DONE:
        began = time.thread_time()
        step = go_on(core)
        times.append(time.thread_time() - began)
    return times, found[0]


def check_steps(core: Core, question: Question, clients: int = CONNECTIONS) -> Snapshot:
    """No step takes more than a small part of the whole, so a slice can end when its time is over.

    What took the processor away for a while, once, does not count: all looks take the same steps.
    """
    if sys.platform == "win32":
        pytest.skip("the clock for CPU time is too coarse there")
    looks = [steps_of(core, question) for _ in range(3)]
    times = [min(each) for each in zip(*(times for times, _ in looks), strict=True)]
    assert max(times) < sum(times) / 10
    snapshot = Snapshot.from_json(looks[0][1])
    assert len(snapshot.clients) == clients
    return snapshot


MANY_KEYS = [b"/missing/%d" % number for number in range(20)]


@pytest.mark.parametrize(
    ("question", "sent"),
    [
        (Question(), b""),
        (Question(keys=KEYS), b""),
        (Question(keys=1_000, search="77"), b""),
        (Question(), barrier(b"/b", CONNECTIONS + 1)),
        (Question(), wait(*MANY_KEYS)),
    ],
    ids=["clients", "all keys", "a search", "all are at a barrier", "all wait for many keys"],
)
def test_a_look_takes_a_moment_at_a_time(crowd: Crowd, question: Question, sent: bytes) -> None:
    core, clients = crowd
    for client in clients:
        client.receive(sent)
    try:
        snapshot = check_steps(core, question)
    finally:
        for client in clients:
            client.receive(request(Op.CANCEL_WAIT))
    is_at_barrier, waits = sent[:1] == bytes([Op.BARRIER]), sent[:1] == bytes([Op.WAIT])
    at_barrier = [(CONNECTIONS, CONNECTIONS)] if is_at_barrier else []
    assert [(each.arrived, len(each.members)) for each in snapshot.barriers] == at_barrier
    counts = {wait.count for each in snapshot.clients for wait in each.waits}
    assert counts == ({len(MANY_KEYS)} if waits else set())


def test_so_it_does_when_most_are_gone() -> None:
    core, clients = make_crowd()
    for client in clients[100:]:
        core.close(client)
    assert len(check_steps(core, Question(), clients=100).gone) == CONNECTIONS - 100


def test_while_all_wait_nothing_is_tried_again_and_again() -> None:
    core = Core()
    core.open("client")
    core.snapshots.start(Question(), lambda _: None)
    core.snapshots.start(Question(keys=1), lambda _: None)
    steps = [core.snapshots.step() for _ in range(4)]
    assert steps == [SnapshotStep.MORE, SnapshotStep.IDLE] * 2, (
        "the system is asked which process the client is"
    )
    core.turn.now += 1.0
    while core.snapshots.step() is not SnapshotStep.DONE:
        pass
    assert core.outbox.others == [DriverTask.SNAPSHOTS, DriverTask.PROCESSES]


# Beside clients


def test_a_look_is_answered_though_its_client_has_ended(here: Here) -> None:
    with RawClient(here.port) as client:
        client.send(look_request())
        client.sock.shutdown(socket.SHUT_WR)
        data = client.read_rest()
        assert len(Snapshot.from_json(data[8:]).clients) == 1
        assert len(others_in(look_at(here))) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="its clock ticks too slowly for a turn")
def test_how_long_answers_take_is_told(here: Here) -> None:
    with RawClient(here.port) as client:
        client.set(b"/k", b"value")
        for _ in range(1_000):
            assert client.get(b"/k") == b"value"

        def is_told(snapshot: Snapshot) -> bool:
            """A second may have ended meanwhile: all of it is told when the next one has."""
            return sum(each.operations for each in snapshot.history) >= 1_002 and snapshot.turn_p50 > 0

        snapshot = await_look(here, is_told)
        (gets,) = [each for each in snapshot.operations if each.name == "GET"]
        assert gets.count == 1_000
        assert 0 < max(each.p99 for each in snapshot.history) < SECONDS
        assert snapshot.turn_p50 <= snapshot.turn_p99 < SECONDS
        assert snapshot.backend == here.core.about.backend
        assert snapshot.pid == os.getpid()
        assert snapshot.host == socket.gethostname()


# Bytes


@linux
@pytest.mark.parametrize("ending", ["end", "reset", "violation"])
def test_the_bytes_of_those_who_are_gone_are_counted(here: Here, ending: str) -> None:
    with RawClient(here.port) as watcher:

        def totals() -> tuple[int, int, int]:
            """Without the looks themselves: this client makes them, and no other."""
            watcher.send(look_request())
            data = watcher.read(int.from_bytes(watcher.read(8), "little"))
            snapshot = Snapshot.from_json(data)
            (own,) = [each for each in snapshot.clients if each.peer == watcher.name]
            return snapshot.received - own.received, snapshot.sent - own.sent, len(snapshot.clients)

        assert totals() == (0, 0, 1)
        client = RawClient(here.port)
        client.send(set_(b"/k", bytes(10_000)) + request(Op.PING, tail=b"ping"))
        assert client.read(4) == b"ping"
        received = len(VALIDATE + set_(b"/k", bytes(10_000))) + 5
        if ending == "violation":
            client.send(b"\xff")
            received += 1
        elif ending == "reset":
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if ending != "violation":
            client.close()
        until(lambda: totals()[2] == 1, "the client is still there")
        assert totals() == (received, 4, 1)
        client.close()


def test_who_has_gone_is_freed_without_a_collection() -> None:
    """What counts its bytes refers to the socket, and that to the connection, until it is closed."""
    gc.collect()
    gc.disable()
    try:
        with serving_here("legacy") as here:
            with RawClient(here.port) as client:
                assert client.answers()
                assert _connections_of(here.core) == 1
            until(lambda: _connections_of(here.core) == 0, "it is kept")
    finally:
        gc.enable()


def _connections_of(core: Core) -> int:
    return sum(type(each) is Connection and each._core is core for each in gc.get_objects())


# Who somebody is

CLIENT = """
import socket, sys
from rallypoint.store.wire.encoding import VALIDATE, request
from rallypoint.store.wire.opcodes import Op
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as sock:
    sock.sendall(VALIDATE + request(Op.PING, tail=b"ping"))
    assert sock.recv(4) == b"ping"
    print("here", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def stranger(port: int, **environ: str) -> Iterator[int]:
    """A client in a process of its own, which does not say who it is."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(port)],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process.pid
    finally:
        end(process)


@linux
@pytest.mark.parametrize("backend", ["libuv", pytest.param("legacy", marks=pytest.mark.slow)])
def test_the_process_behind_a_client_tells_who_it_is(backend: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("w+"))
        server = stack.enter_context(serving(backend, log))
        ranks = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
        pids = [stack.enter_context(stranger(server.port, **each)) for each in (ranks, {"RANK": "x"})]
        snapshot = await_look(server, lambda found: all(each.who.pid for each in others_in(found)))
        found = {each.who.pid: each.who for each in others_in(snapshot)}
        host = socket.gethostname()
        assert found == {
            pids[0]: Identity(host, pids[0], 3, 1, 4, Role.RANK, Source.PROCESS),
            pids[1]: Identity(host, pids[1], source=Source.PROCESS),
        }
        late = stack.enter_context(stranger(server.port, RANK="2"))
        await_look(
            server, lambda found: (2, late) in {(each.who.rank, each.who.pid) for each in found.clients}
        )


@linux
def test_a_relay_finds_the_processes_of_its_own_clients(tmp_path: Path) -> None:
    with ExitStack() as stack:
        logs = [stack.enter_context((tmp_path / name).open("w+")) for name in ("server", "relay")]
        server = stack.enter_context(serving("libuv", logs[0]))
        relay = stack.enter_context(relaying(server.address, logs[1]))
        pid = stack.enter_context(stranger(relay.port, RANK="5"))

        def names(snapshot: Snapshot) -> Sequence[tuple[int, int]]:
            parts = [each.part for each in snapshot.relays if each.part is not None]
            return [(each.who.rank, each.who.pid) for part in parts for each in part.clients]

        snapshot = await_look(server, lambda found: names(found) == [(5, pid)])
        assert others_in(snapshot) == []


def test_who_says_who_it_is_is_not_asked_about() -> None:
    who = rank(9, "elsewhere", pid=1)
    with serving_here("libuv") as here, closing(connect(here.host, here.port, Deadline(SECONDS), who)):
        for _ in range(3):
            (found,) = others_in(look_at(here))
            assert (found.who.host, found.who.rank, found.who.source) == ("elsewhere", 9, Source.HELLO)


@pytest.mark.parametrize("use_libuv", [True, False], ids=["libuv", "legacy"])
def test_torchs_own_server_takes_a_hello_for_a_key_that_is_not_there(use_libuv: bool) -> None:
    with torch_serving(use_libuv) as port, RawClient(port) as client:
        hello = request(Op.DELETE_KEY, b"/" + hello_key(rank(3, "node-a")).encode())
        client.send(request(Op.SET, b"/k", b"v") + request(Op.GETNUMKEYS))
        before = client.read(8)
        client.send(hello + request(Op.GETNUMKEYS))
        assert client.read(16) == pack_i64(0) + before
        assert client.get(b"/k") == b"v"
        with pytest.raises(NotOursError, match="is not Rallypoint's"):
            fetch_snapshot("127.0.0.1", port, Question(), Deadline(SECONDS))
        assert client.get(b"/k") == b"v"
