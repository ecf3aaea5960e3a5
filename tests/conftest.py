"""What holds for every test, and the fixtures that more than one test module uses."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from processes import BACKENDS, Server, relaying, serving
from raw import empty

if TYPE_CHECKING:
    from engines import EtcdCluster, RedisCluster


_OF_SCHEDULERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "LSB_", "PBS_", "JSM_", "LWS_", "JOB_COMPLETION_INDEX")
"""How variables of a job begin in which the tests themselves may run: `rallypoint run` would obey them."""


def pytest_configure(config: pytest.Config) -> None:
    """Undo what the caller's shell has set: nohup ignores SIGHUP, a job in the background ignores SIGINT.

    And most people's output is buffered, which matters to what cannot be written. A file that a group may
    write is no file of settings.

    All processes that tests start have their temporary files in one folder, which goes with the last test: a
    job that fails leaves a report there, and one that is killed what it had.
    """
    files = tempfile.mkdtemp(prefix="pytest-files-")
    config.add_cleanup(partial(shutil.rmtree, files, ignore_errors=True))
    os.environ["TMPDIR"] = files
    os.umask(0o022)
    os.environ.pop("PYTHONUNBUFFERED", None)
    for name in [name for name in os.environ if name.startswith(_OF_SCHEDULERS)]:
        del os.environ[name]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGHUP", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGCHLD"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)


# The same examples on every machine, and no complaint that a busy one is slow to draw them. Few on Windows:
# what they are for is the same on all systems.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=10 if sys.platform == "win32" else 100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


@contextmanager
def _serving(backend: str, relays: int, folder: Path) -> Iterator[Server]:
    with ExitStack() as stack:
        log = stack.enter_context((folder / "server.log").open("w+"))
        running = stack.enter_context(serving(backend, log))
        for _ in range(relays):
            running = stack.enter_context(relaying(running.address, log))
        yield running


@pytest.fixture(scope="module", params=BACKENDS)
def server_of_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with _serving(request.param, 0, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def server(server_of_module: Server) -> Iterator[Server]:
    """A server process, once on each backend. It serves all tests of a module, which find it without keys.

    So none may end it. Queues are not emptied: each test has its own.
    """
    yield server_of_module
    empty(server_of_module.port)


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((backend, 0), id=backend) for backend in BACKENDS),
        pytest.param(("libuv", 1), id="relay"),
        pytest.param(("libuv", 2), id="relay on a relay", marks=pytest.mark.slow),
    ],
)
def any_server_of_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    backend, relays = request.param
    with _serving(backend, relays, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def any_server(any_server_of_module: Server) -> Iterator[Server]:
    """What clients may find at the address that they are given: a server on each backend, or a relay.

    It serves all tests of a module, which find it without keys. So none may end it. Queues are not emptied.
    """
    yield any_server_of_module
    empty(any_server_of_module.port)


# `engines` imports the clients of engines, which the other tests need not wait for.


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """etcd, with one node."""
    from engines import etcd_cluster

    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """A Redis that loses nothing when it is killed."""
    from engines import redis_cluster

    with redis_cluster(tmp_path_factory.mktemp("redis"), options=("--appendfsync", "always")) as cluster:
        yield cluster
