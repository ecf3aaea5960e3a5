"""Processes with torch in them, led by orders: what they answer, and that none of them is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from processes import BACKENDS
from rallypoint import TCPStore
from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import Worker, start
from rallypoint.launch.switches import PATCH_VARIABLE
from rallypoint.store.server.loops.backend import VARIABLE as LIBUV_VARIABLE
from raw import SECONDS, until


def family(worker: Worker) -> list[psutil.Process]:
    """All processes below it that live."""
    return psutil.Process(worker.pid).children(recursive=True)


def await_end(processes: list[psutil.Process]) -> None:
    """Wait until they have ended; a process that nobody reaps does not count as alive."""
    until(lambda: not any(map(is_alive, processes)), "all processes have ended")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def serve(peers: Worker, backend: str, *, as_is: bool = False) -> tuple[int, int]:
    """Have torch serve: process and port."""
    pid, port = peers.ask(SECONDS, do="serve", backend=backend, as_is=as_is)
    return pid, port


@pytest.fixture(scope="module")
def shared() -> Iterator[Worker]:
    """One for all tests, until the last ends it; importing torch takes seconds.

    What the user has asked for elsewhere concerns nothing here.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as resources:
        patch.setenv(PATCH_VARIABLE, "always")
        patch.setenv(LIBUV_VARIABLE, "0")
        yield start(resources, "rallypoint.bench.host_torch", "peers")


@pytest.fixture
def peers(shared: Worker) -> Iterator[Worker]:
    yield shared
    until(lambda: not family(shared), "nothing is left of an order")


def connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, timeout=SECONDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_serves_is_renewed_and_stopped(peers: Worker, backend: str) -> None:
    pid, port = serve(peers, backend)
    assert psutil.Process(pid).ppid() == peers.pid
    with connect(port) as before:
        before.set("key", "value")
        assert before.get("key") == b"value"
        assert peers.ask(SECONDS, do="renew", pid=pid) == port
        with connect(port) as after:
            assert not after.check(["key"])
            after.set("key", "another")
            assert after.get("key") == b"another"
    assert peers.ask(SECONDS, do="stop", pid=pid) is None
    assert not psutil.pid_exists(pid)


def test_torch_serves_as_it_comes(peers: Worker) -> None:
    pid, port = serve(peers, "libuv", as_is=True)
    assert peers.ask(SECONDS, do="renew", pid=pid) == port
    with connect(port) as store:
        assert store.add("n", 1) == 1
    peers.ask(SECONDS, do="stop", pid=pid)


def test_a_server_that_has_died_is_an_error_and_is_reaped(peers: Worker) -> None:
    pid, _ = serve(peers, "libuv")
    psutil.Process(pid).kill()
    with pytest.raises(BenchError, match="ended early; by signal 9"):
        peers.ask(SECONDS, do="renew", pid=pid)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    "target",
    [
        *("torch-libuv", "torch-legacy", "rallypoint-libuv"),
        pytest.param("rallypoint-legacy", marks=pytest.mark.slow),
    ],
)
def test_the_tutorial_is_timed_with_every_target(peers: Worker, target: str) -> None:
    answer = peers.ask(SECONDS, do="tutorial", target=target, ranks=4, barriers=3, limit_s=SECONDS)
    assert set(answer) == {"init", "barrier"}, answer
    assert len(answer["barrier"]) == 3
    assert all(0 < seconds < SECONDS for seconds in [answer["init"], *answer["barrier"]])


@pytest.mark.parametrize("target", ["torch-libuv", "rallypoint-libuv"])
def test_a_limit_that_passes_names_ranks_and_leaves_none(peers: Worker, target: str) -> None:
    with pytest.raises(BenchError, match=r"rank \d"):
        peers.ask(SECONDS, do="tutorial", target=target, ranks=4, barriers=1, limit_s=0.001)


def test_a_wrong_order_is_an_error_and_no_more(peers: Worker) -> None:
    for order in ({"do": "dance"}, {"do": "serve", "backend": "epoll"}, {"do": "renew", "pid": 1}):
        with pytest.raises(BenchError):
            peers.ask(SECONDS, **order)
        assert peers.is_alive


def test_it_is_a_single_thread(peers: Worker) -> None:
    """A process with more should not fork."""
    with pytest.raises(BenchError):
        peers.ask(SECONDS, do="nothing")  # it has imported torch by now
    assert psutil.Process(peers.pid).num_threads() == 1


def test_no_process_outlives_a_program_that_is_killed(shared: Worker) -> None:
    """Also in the middle of an order. It is the last test of the program that all share."""
    serve(shared, "libuv")
    processes = start_long_tutorial(shared)
    shared.kill()
    await_end(processes)


def start_long_tutorial(peers: Worker) -> list[psutil.Process]:
    """Have ranks in the middle of it, with a server of ours; all processes then."""
    order = {"target": "rallypoint-libuv", "ranks": 3, "barriers": 300, "limit_s": SECONDS}
    peers.order(do="tutorial", **order)
    # torch's server that was there before, three ranks, and our server
    until(lambda: len(family(peers)) == 5, "all processes are there")
    return family(peers)
