"""Processes with torch in them, led by orders: what they answer, and that none of them is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack

import psutil
import pytest

from benchmarks.targets import TARGETS, Torchs
from processes import BACKENDS
from rallypoint import TCPStore
from rallypoint.bench.results import BenchError
from rallypoint.bench.targets import start_with_torch
from rallypoint.bench.workers import LoadProcess
from rallypoint.launch.switches import PATCH_VARIABLE
from rallypoint.store.server.loops.backend import VARIABLE as LIBUV_VARIABLE
from raw import SECONDS, until


@pytest.fixture(autouse=True)
def settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has asked for elsewhere concerns nothing here."""
    monkeypatch.setenv(PATCH_VARIABLE, "always")
    monkeypatch.setenv(LIBUV_VARIABLE, "0")


@pytest.mark.parametrize("name", [*(f"torch-{backend}" for backend in BACKENDS), "torch-libuv-as-is"])
def test_torch_serves_is_renewed_and_stopped(name: str) -> None:
    target = TARGETS[name](name)
    try:
        target.start()
        pid, port = target.pid, target.port
        assert psutil.Process(pid).num_threads() < 30
        with TCPStore("127.0.0.1", port, timeout=SECONDS) as before:
            before.set("key", "value")
            assert before.get("key") == b"value"
            if isinstance(target, Torchs):
                target.renew()
                assert (target.pid, target.port) == (pid, port)
                with TCPStore("127.0.0.1", port, timeout=SECONDS) as after:
                    assert not after.check(["key"])
    finally:
        target.stop()
    until(lambda: not psutil.pid_exists(pid), "the server has ended")


def test_a_server_of_torchs_that_has_died_is_an_error() -> None:
    target = TARGETS["torch-libuv"]("torch-libuv")
    assert isinstance(target, Torchs)
    try:
        target.start()
        psutil.Process(target.pid).kill()
        with pytest.raises(BrokenProcessPool):
            target.renew()
    finally:
        target.stop()


# Ranks


@pytest.fixture(scope="module")
def host() -> Iterator[LoadProcess]:
    """One for all tests; the last ends it."""
    with ExitStack() as resources:
        yield start_with_torch(resources, "benchmarks.torch_processes:TutorialHost")


def family(worker: LoadProcess) -> list[psutil.Process]:
    """All processes below it that live."""
    return psutil.Process(worker.pid).children(recursive=True)


@pytest.mark.parametrize(
    "target",
    [
        *("torch-libuv", "torch-legacy", "rallypoint-libuv"),
        pytest.param("rallypoint-legacy", marks=pytest.mark.slow),
    ],
)
def test_the_tutorial_is_timed_with_every_target(host: LoadProcess, target: str) -> None:
    answer = host.ask(SECONDS, "tutorial", target=target, ranks=4, barriers=3, limit_s=SECONDS)
    assert set(answer) == {"init", "barrier"}, answer
    assert len(answer["barrier"]) == 3
    assert all(0 < seconds < SECONDS for seconds in [answer["init"], *answer["barrier"]])
    assert psutil.Process(host.pid).num_threads() == 1  # a process with more should not fork
    until(lambda: not family(host), "nothing is left of an order")


@pytest.mark.parametrize("target", ["torch-libuv", "rallypoint-libuv"])
def test_a_limit_that_passes_names_ranks_and_leaves_none(host: LoadProcess, target: str) -> None:
    with pytest.raises(BenchError, match=r"rank \d"):
        host.ask(SECONDS, "tutorial", target=target, ranks=4, barriers=1, limit_s=0.001)
    until(lambda: not family(host), "nothing is left of an order")


def test_no_process_outlives_a_program_that_is_killed(host: LoadProcess) -> None:
    """Also in the middle of an order."""
    order = {"target": "rallypoint-libuv", "ranks": 3, "barriers": 300, "limit_s": SECONDS}
    host.order("tutorial", **order)
    until(lambda: len(family(host)) == 4, "three ranks, and our server")
    processes = family(host)
    host.end()
    until(lambda: not any(map(is_alive, processes)), "all processes have ended")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
