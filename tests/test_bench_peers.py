"""Processes with torch in them, led by orders: what they answer, and that none of them is left behind."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from processes import BACKENDS, end
from rallypoint import TCPStore
from rallypoint.launch.switches import PATCH_VARIABLE
from rallypoint.server.loops.backend import VARIABLE as LIBUV_VARIABLE
from raw import SECONDS, until


class Program:
    """`python -m rallypoint.pytorch.peers`, seen from who leads it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rallypoint.pytorch.peers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def order(self, text: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, **order: object) -> dict[str, Any]:
        """The answer to an order."""
        self.order(json.dumps(order))
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        assert select.select([self.process.stdout], [], [], SECONDS)[0], "no answer"
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def serve(self, backend: str, *, as_is: bool = False) -> tuple[int, int]:
        """Have torch serve: process and port."""
        answer = self.ask(do="serve", backend=backend, as_is=as_is)
        assert set(answer) == {"pid", "port"}, answer
        return answer["pid"], answer["port"]

    def close_orders(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.stdin = None  # or `communicate` would flush it

    def family(self) -> list[psutil.Process]:
        """All processes below it that live."""
        return psutil.Process(self.pid).children(recursive=True)


@contextmanager
def leading() -> Iterator[Program]:
    program = Program()
    try:
        yield program
    finally:
        family = program.family() if program.process.poll() is None else []
        end(program.process)
        await_end(family)


def await_end(processes: list[psutil.Process]) -> None:
    """Wait until they have ended; who has nobody to reap it does not count as alive."""
    until(lambda: not any(map(is_alive, processes)), "all processes have ended")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def shared() -> Iterator[Program]:
    """One for all tests, until the last ends it; importing torch takes seconds.

    What the user has asked for elsewhere concerns nothing here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PATCH_VARIABLE, "always")
        patch.setenv(LIBUV_VARIABLE, "0")
        with leading() as program:
            yield program


@pytest.fixture
def peers(shared: Program) -> Iterator[Program]:
    yield shared
    until(lambda: not shared.family(), "nothing is left of an order")


def connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, timeout=SECONDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_serves_is_renewed_and_stopped(peers: Program, backend: str) -> None:
    pid, port = peers.serve(backend)
    assert psutil.Process(pid).ppid() == peers.pid
    with connect(port) as before:
        before.set("key", "value")
        assert before.get("key") == b"value"
        assert peers.ask(do="renew", pid=pid) == {"port": port}
        with connect(port) as after:
            assert not after.check(["key"])
            after.set("key", "another")
            assert after.get("key") == b"another"
    assert peers.ask(do="stop", pid=pid) == {}
    assert not psutil.pid_exists(pid)
    assert "no server" in peers.ask(do="stop", pid=pid)["error"]


def test_torch_serves_as_it_comes(peers: Program) -> None:
    pid, port = peers.serve("libuv", as_is=True)
    assert peers.ask(do="renew", pid=pid) == {"port": port}
    with connect(port) as store:
        assert store.add("n", 1) == 1
    assert peers.ask(do="stop", pid=pid) == {}


def test_a_server_that_has_died_is_an_error_and_is_reaped(peers: Program) -> None:
    pid, _ = peers.serve("libuv")
    psutil.Process(pid).kill()
    assert "has ended, by signal 9" in peers.ask(do="renew", pid=pid)["error"]
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    "target",
    [
        *("torch-libuv", "torch-legacy", "rallypoint-libuv"),
        pytest.param("rallypoint-legacy", marks=pytest.mark.slow),
    ],
)
def test_the_tutorial_is_timed_with_every_target(peers: Program, target: str) -> None:
    answer = peers.ask(do="tutorial", target=target, ranks=4, barriers=3, limit_s=SECONDS)
    assert set(answer) == {"init", "barrier"}, answer
    assert len(answer["barrier"]) == 3
    assert all(0 < seconds < SECONDS for seconds in [answer["init"], *answer["barrier"]])


@pytest.mark.parametrize("target", ["torch-libuv", "rallypoint-libuv"])
def test_a_limit_that_passes_names_ranks_and_leaves_none(peers: Program, target: str) -> None:
    answer = peers.ask(do="tutorial", target=target, ranks=4, barriers=1, limit_s=0.001)
    assert "rank 0" in answer["error"]


def test_a_wrong_order_is_an_error_and_no_more(peers: Program) -> None:
    for order, word in {
        "no JSON": "JSONDecodeError",
        "[]": "no order",
        '{"do": "dance"}': "no order",
        '{"do": ["serve"]}': "TypeError",
        '{"do": "serve"}': "backend",
        '{"do": "serve", "backend": "epoll"}': "no backend",
        '{"do": "renew", "pid": 1}': "no server",
        '{"do": "tutorial", "target": "?", "ranks": 1, "barriers": 1, "limit_s": 1}': "no target",
        '{"do": "tutorial", "target": "torch-libuv", "ranks": 0, "barriers": 1, "limit_s": 1}': "0 ranks",
    }.items():
        peers.order(order)
        assert word in peers.answer()["error"]
        assert peers.process.poll() is None


def test_it_is_a_single_thread(peers: Program) -> None:
    """A process with more should not fork."""
    peers.ask(do="nothing")  # it has imported torch by now
    assert psutil.Process(peers.pid).num_threads() == 1


def test_the_end_of_orders_ends_all(shared: Program) -> None:
    """Also in the middle of an order. It is the last test of the program that all share."""
    shared.serve("libuv")
    family = start_long_tutorial(shared)
    shared.close_orders()
    assert shared.process.wait(SECONDS) == 0
    await_end(family)


@pytest.mark.slow
def test_no_process_outlives_a_program_that_is_killed() -> None:
    with leading() as program:
        program.serve("legacy")
        family = start_long_tutorial(program)
        program.process.kill()
        program.process.wait(SECONDS)
        await_end(family)


def start_long_tutorial(program: Program) -> list[psutil.Process]:
    """Have ranks in the middle of it, with a server of ours; all processes then."""
    order = {"target": "rallypoint-libuv", "ranks": 3, "barriers": 300, "limit_s": SECONDS}
    program.order(json.dumps({"do": "tutorial", **order}))
    # torch's server that was there before, three ranks, and our server
    until(lambda: len(program.family()) == 5, "all processes are there")
    return program.family()
