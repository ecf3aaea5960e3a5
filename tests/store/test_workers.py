"""A server with workers: what clients see, and what becomes of them when one of its processes ends."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from command_line import invoke
from processes import Server, relaying, serving
from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import AccessError, ServerStartError, UsageError
from rallypoint.launch.rendezvous.servers import workers_for
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.core.store import Core
from rallypoint.store.machine.system import holder_of
from rallypoint.store.relay import store_with_workers as server_head
from rallypoint.store.relay.hosting import host_store
from rallypoint.store.relay.store_with_workers import auto_workers, parse_workers
from rallypoint.store.rollcall.clients import reporting_clients, whole
from rallypoint.store.rollcall.identity import Identity, Role, hello_key
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Relay, Snapshot
from rallypoint.store.server.guard import secret as guard
from rallypoint.store.server.guard.other_users import INSECURE_VARIABLE
from rallypoint.store.server.guard.secret import make_secret
from rallypoint.store.server.loops import pump
from rallypoint.store.server.loops.backend import Choice, make_loop
from rallypoint.store.server.process.binding import ANY_PORT, listen
from rallypoint.store.server.process.hosting import Lifespan
from rallypoint.store.wire.encoding import counted_request, pack_i64, request
from rallypoint.store.wire.opcodes import STOP_WAITING, Op
from rallypoint.watch.status.views import summary
from raw import SECONDS, RawClient, await_log, empty, is_gone, until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no workers on Windows")

WORKERS = 2
MANY = 40
"""So many clients are never all of one worker."""


@contextmanager
def with_workers(folder: Path, *options: str) -> Iterator[Server]:
    with (
        (folder / "log").open("w+") as log,
        serving("libuv", log, ["--workers", str(WORKERS), *options]) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests that end none of its processes."""
    with with_workers(tmp_path_factory.mktemp("workers")) as running:
        yield running


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    yield shared
    empty(shared.port)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def connect(server: Server, stack: ExitStack, count: int = MANY) -> list[RawClient]:
    """Clients that are ranks, and are served."""
    clients = [stack.enter_context(RawClient(server.port)) for _ in range(count)]
    for rank, client in enumerate(clients):
        who = Identity(host="node-a", pid=1000 + rank, rank=rank, world_size=count, role=Role.RANK)
        client.send(request(Op.DELETE_KEY, b"/" + hello_key(who).encode()))
        client.read_number()
    return clients


def seen(server: Server, question: Question | None = None) -> Snapshot:
    return fetch_snapshot(server.host, server.port, question or Question(), Deadline(SECONDS))


def counters(told: Snapshot) -> Counter[str]:
    """All that must not go down."""
    fields = ("received", "sent", "accepted", "error_count")
    counts = {name: int(getattr(told, name)) for name in fields}
    return Counter(counts | {each.name: each.count for each in told.operations})


def workers_of(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [each for each in children if server_head.WORKER_PROCESS.module in each.cmdline()]


def clients_of(process: psutil.Process, clients: Sequence[RawClient]) -> list[RawClient]:
    """Those whose connections are of this process."""
    theirs = {each.raddr.port for each in process.net_connections("tcp") if each.raddr}
    return [each for each in clients if each.sock.getsockname()[1] in theirs]


def is_closed(client: RawClient) -> bool:
    client.sock.settimeout(SECONDS)
    try:
        return client.sock.recv(1) == b""
    except ConnectionResetError:
        return True


# What clients see


def test_what_clients_of_all_workers_tell_is_seen(server: Server, stack: ExitStack) -> None:
    for number, client in enumerate(connect(server, stack)):
        client.send(request(Op.REPORT, b"%d" % number) + request(Op.PING, tail=b"ping"))
        assert client.read(4) == b"ping"
    told = {each.told: each.who.rank for each in reporting_clients(seen(server))}
    assert told == {str(number): number for number in range(MANY)}


def test_clients_of_all_workers_have_one_store(server: Server, stack: ExitStack) -> None:
    clients = connect(server, stack)
    for client in clients:
        client.send(request(Op.ADD, b"/n", tail=pack_i64(1)))
    assert sorted(each.read_number() for each in clients) == list(range(1, MANY + 1))
    for client in clients[1:]:
        client.send(request(Op.BARRIER, b"/b", tail=pack_i64(MANY)))
    assert seen(server).barriers[0].arrived == MANY - 1
    clients[0].send(request(Op.BARRIER, b"/b", tail=pack_i64(MANY)))
    assert {each.read(1) for each in clients} == {STOP_WAITING}


def test_a_look_sees_the_whole(server: Server, stack: ExitStack) -> None:
    before = seen(server)
    clients = connect(server, stack)
    for client in clients[1:]:
        client.send(request(Op.BARRIER, b"/b", tail=pack_i64(MANY)))
        client.send(request(Op.GET, b"/k"))
    assert {each.read_blob() for each in clients[1:]} == {b""}
    told = seen(server)
    assert {each.name for each in clients} <= {each.peer for each in told.clients}
    assert len({each.id for each in told.clients}) == len(told.clients)
    assert not told.relays
    assert [each.peer.split(":")[0] for each in told.own_workers] == ["worker-1", "worker-2"]
    assert {int(each.peer.split(":")[1]) for each in told.own_workers} == {
        each.pid for each in workers_of(server)
    }
    assert all(each.clients > 0 for each in told.own_workers)
    roll = judge(told)
    assert not roll.remarks
    assert any("and 2 workers on" in line for line in summary(told, roll))
    assert [each.rank for each in roll.ranks if each.is_here] == list(range(MANY))
    assert {each.host for each in roll.ranks} == {"node-a"}
    assert roll.gatherings[0].missing == (0,)
    counts = [Counter({each.name: each.count for each in told.operations}) for told in (before, told)]
    asked = counts[1] - counts[0]
    assert asked["GET"] == asked["BARRIER"] == MANY - 1  # as often as they were asked, combined or not
    assert told.accepted - before.accepted > MANY
    assert told.received > before.received


def test_many_looks_at_once(server: Server, stack: ExitStack) -> None:
    clients = [stack.enter_context(RawClient(server.port)) for _ in range(MANY)]
    for client in clients:
        client.send(request(Op.SNAPSHOT, Question().to_json()))
    for client in clients:
        assert Snapshot.from_json(client.read_blob()).kind == "server"


def test_a_worker_that_tells_nothing_is_told_of(server: Server) -> None:
    told = replace(seen(server), relays=(Relay(7, "worker-3:4711", 60.0, present=True),))
    assert "worker-3:4711 tells nothing of its clients" in " ".join(judge(whole(told)).remarks)


# When a process ends


def test_a_worker_that_is_killed_takes_its_own_clients_alone(tmp_path: Path, stack: ExitStack) -> None:
    events = tmp_path / "events"
    server = stack.enter_context(with_workers(tmp_path, "--events", str(events)))
    clients = connect(server, stack)
    victim, other = workers_of(server)
    theirs = clients_of(victim, clients)
    rest = [each for each in clients if each not in theirs]
    assert theirs
    assert rest
    theirs[0].send(request(Op.BARRIER, b"/b", tail=pack_i64(len(rest))))
    assert theirs[0].answers()
    before = counters(seen(server))
    victim.send_signal(signal.SIGKILL)
    assert all(map(is_closed, theirs))
    assert all(each.answers() for each in rest)
    line = await_log(server, "worker-", f":{victim.pid} ", "by signal SIGKILL")
    assert before <= counters(seen(server)), "what it had told is lost with it"
    assert "all others go on" in line
    # Who is gone does not count.
    for client in rest[1:]:
        client.send(request(Op.BARRIER, b"/b", tail=pack_i64(len(rest))))
        assert client.answers()
    rest[0].send(request(Op.BARRIER, b"/b", tail=pack_i64(len(rest))))
    assert {each.read(1) for each in rest} == {STOP_WAITING}
    assert all(each.answers() for each in connect(server, stack))  # some by the new one
    now = {each.pid for each in workers_of(server)}
    assert len(now) == WORKERS
    assert victim.pid not in now
    assert other.pid in now
    told = seen(server)
    assert any("SIGKILL" in each.reason for each in told.errors)
    assert "SIGKILL" in events.read_text()


def test_a_relay_goes_on_when_its_worker_ends(tmp_path: Path, stack: ExitStack) -> None:
    server = stack.enter_context(with_workers(tmp_path))
    log = stack.enter_context((tmp_path / "relay").open("w+"))
    relay = stack.enter_context(relaying(server.address, log))
    store = stack.enter_context(TCPStore(relay.host, relay.port, timeout=SECONDS))
    assert store.add("n", 1) == 1
    told = seen(server)
    assert [each.part.host if each.part else "" for each in told.relays] == [socket.gethostname()]
    assert told.relays[0].peer not in {each.peer for each in told.clients}
    for worker in workers_of(server):
        worker.send_signal(signal.SIGKILL)
        assert store.add("n", 1) > 1
    assert store.add("n", 1) == 4
    assert "nothing is lost" in (tmp_path / "relay").read_text()


def test_all_processes_end_with_the_head(tmp_path: Path, stack: ExitStack) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        server = stack.enter_context(with_workers(tmp_path))
        clients = connect(server, stack, 4)
        workers = workers_of(server)
        server.process.send_signal(number)
        assert all(map(is_closed, clients))
        server.process.wait(SECONDS)
        if number is not signal.SIGKILL:
            assert all(is_gone(each.pid) for each in workers)  # it has waited for them
            assert server.process.returncode == 0
        for worker in workers:
            until(partial(is_gone, worker.pid), "the worker has ended")
        assert holder_of(server.port) is None
        assert "lost" not in (tmp_path / "log").read_text()


def test_a_worker_that_cannot_be_started_is_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(server_head, "ServerProcess", fail)
    monkeypatch.setattr(pump, "stop_on_signals", lambda _: None)
    loop, _ = make_loop(Choice.LEGACY)
    server = server_head.Head(loop, Core(turn=loop.turn), listen("127.0.0.1", 0, WORKERS), None, WORKERS)
    with pytest.raises(ServerStartError, match="too many open files"):
        server.serve()


def test_a_server_that_stays_for_its_clients_stays_for_those_of_workers() -> None:
    server = host_store("127.0.0.1", ANY_PORT, workers=WORKERS, lifespan=Lifespan(stays_for_clients=True))
    workers = psutil.Process(server.pid).children()
    with TCPStore("127.0.0.1", server.port) as store:
        server.abandon()
        enough = time.monotonic() + 1.5  # it looks every second whether to end
        until(lambda: store.add("n", 1) and time.monotonic() > enough, "it answers all the time")
    for pid in (server.pid, *(each.pid for each in workers)):
        until(partial(is_gone, pid), "it has ended with its last client")


# Who comes in


def test_workers_have_the_door_of_their_server(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS ends at the worker; what it passes on is plain, and nobody else can reach that."""
    monkeypatch.setattr(guard, "_held", [])
    monkeypatch.setenv(guard.SECRET_VARIABLE, make_secret())
    monkeypatch.setenv(INSECURE_VARIABLE, "1")  # users are not looked at: so clients of this machine prove it
    server = stack.enter_context(with_workers(tmp_path))
    log = stack.enter_context((tmp_path / "relay").open("w+"))
    relay = stack.enter_context(relaying(server.address, log))
    stores = [TCPStore(each.host, each.port, timeout=SECONDS) for each in (server, relay)]
    for store in stores:
        stack.enter_context(store)
    stores[0].set("large", bytes(3 << 20))
    assert len(stores[1].get("large")) == 3 << 20
    assert len(seen(server).relays) == 1
    monkeypatch.setattr(guard, "_held", [])
    monkeypatch.setenv(guard.SECRET_VARIABLE, make_secret())
    with pytest.raises(AccessError, match="is not trusted"):
        TCPStore(server.host, server.port, timeout=SECONDS)


# Limits and options


def test_limits_are_those_of_all_workers_together(tmp_path: Path, stack: ExitStack) -> None:
    limits = ("--limit", f"connections={MANY}", "--limit", "held_bytes=60_000_000")
    server = stack.enter_context(with_workers(tmp_path, *limits))
    clients = connect(server, stack)
    # Each worker knows by now how many the other has, or will in a second.
    until(lambda: all(_is_refused(server) for _ in range(MANY)), "the limit is reached")
    await_log(server, f"one more connection than {MANY}, the limit connections")
    greedy = clients.pop()
    greedy.send(counted_request(Op.WAIT, [b"/%0200d" % number for number in range(60_000)]))
    assert is_closed(greedy)
    await_log(server, greedy.name, "it holds the most")
    assert all(each.answers() for each in clients)


def _is_refused(server: Server) -> bool:
    with RawClient(server.port) as client:
        try:
            return not client.answers()
        except ConnectionError:
            return True


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--workers", "some"), "--workers is 'some'"),
        (("--workers", "65"), "--workers is '65'"),
        (("--workers", "2", "--engine", "redis://localhost/0"), "--workers and --engine do not go together"),
    ],
)
def test_what_cannot_be(options: Sequence[str], words: str) -> None:
    done = invoke("serve", "--port", "0", *options)
    assert done.exit_code == 2
    assert words in str(done.exception)


def test_there_are_none_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert parse_workers("0", "--workers") == 0
    assert auto_workers() == 0
    with pytest.raises(UsageError, match="no workers on Windows"):
        parse_workers("1", "--workers")


def test_by_itself_the_store_of_a_large_job_without_relays_has_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cores, workers in ((2, 0), (8, 2), (16, 4), (100, 4)):
        monkeypatch.setattr(server_head, "usable_cores", lambda found=cores: found)
        assert workers_for(256, have_relays=False) == workers
        assert workers_for(255, have_relays=False) == workers_for(4096, have_relays=True) == 0


@pytest.mark.slow
def test_a_job_trains_on_a_store_with_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "print('rank', dist.get_rank(), 'passed', flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    command = ["run", "--nproc-per-node=2", "--rdzv-conf=workers=2", str(script)]
    done = subprocess.run([sys.executable, "-m", "rallypoint", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rank 0 passed" in done.stdout
    assert "rank 1 passed" in done.stdout
