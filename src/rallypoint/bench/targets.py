"""The servers under measurement, each a process of its own: where ranks connect, and what it spends."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final

import psutil

from rallypoint.bench import machine
from rallypoint.bench.clients import HOST, TORCH, Dialect
from rallypoint.bench.results import BenchError
from rallypoint.bench.swarm import RanksAt
from rallypoint.bench.workers import Worker, start
from rallypoint.store.machine.system import client_ports
from rallypoint.store.relay.hosting import host_store
from rallypoint.store.server.loops.backend import Choice

START_LIMIT_S: Final = 60.0
LEAVE_LIMIT_S: Final = 60.0
SPARE_FILES: Final = 8
"""Files that a server may open for itself, besides connections."""


class Target(ABC):
    """A server under measurement; the second word of its name is its backend."""

    dialect: Dialect = TORCH
    needs = ""
    """A Python package or a program that has to be installed."""
    is_relayed = False
    """Whether ranks connect to relays: then they are not bounded by the files of one process."""

    def __init__(self, name: str, ranks: int = 0) -> None:
        self.name = name
        self.backend = name.split("-")[-1]
        self.ranks = ranks
        """For how many ranks it is; 0: for a few clients."""
        self.pid = 0
        """The server's process; 0 while there is none."""
        self.port = 0
        """Where clients connect."""

    @abstractmethod
    def start(self) -> None:
        """Start it; after that, it answers."""

    @abstractmethod
    def stop(self) -> None:
        """End it, if it has been started."""

    def pids(self) -> list[int]:
        """The processes whose costs are the server's."""
        return [self.pid]

    def cpu_seconds(self) -> float:
        """CPU time so far."""
        return sum(map(machine.cpu_seconds, self.pids()))

    def resident_bytes(self) -> int:
        """The memory that it holds."""
        return sum(map(machine.resident_bytes, self.pids()))

    def open_files(self) -> int:
        """How many file descriptors it holds."""
        return sum(map(machine.open_files, self.pids()))

    def places(self, ranks: int) -> list[RanksAt]:
        """Where ranks connect, and from which addresses: one address has not enough ports for all."""
        low, high = client_ports()
        ports = (high - low + 1) * 9 // 10
        whole, rest = divmod(ranks, ports)
        counts = [ports] * whole + [rest] * bool(rest)
        sources = ["", *(f"127.1.{1 + number // 250}.{1 + number % 250}" for number in range(len(counts)))]
        return [(HOST, self.port, source, count) for source, count in zip(sources, counts, strict=False)]

    def last_words(self) -> str:
        """The end of its log, if that does not go to standard error."""
        return ""

    def check_alive(self) -> None:
        """Raise if the server has been started, and its process has ended."""
        if self.pid and not is_alive(self.pid):
            raise BenchError(f"{self.name} died; {self.last_words()}".removesuffix("; "))

    def await_open_files(self, at_most: int) -> None:
        """Wait until it has noticed that clients left: until it holds hardly more descriptors than this."""
        deadline = time.monotonic() + LEAVE_LIMIT_S
        while self.open_files() > at_most + SPARE_FILES:
            self.check_alive()
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name} kept the connections of clients that had left")
            time.sleep(0.02)

    def await_quiet(self) -> None:
        """Wait until it does nothing more: until it takes no CPU time for a while."""
        deadline = time.monotonic() + LEAVE_LIMIT_S
        before, now = -1.0, self.cpu_seconds()
        while now - before > 0.002:
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name} does not come to rest")
            time.sleep(0.1)
            before, now = now, self.cpu_seconds()

    def settle(self) -> None:  # noqa: B027 - most have nothing to do
        """Let what follows from the last load happen before the next is measured."""

    def counters(self) -> dict[str, float]:
        """Further counters since its start."""
        return {}

    def size(self) -> dict[str, float]:
        """Further figures while its ranks are connected."""
        return {}


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


class OurTarget(Target):
    """A server of ours."""

    workers = 0

    def start(self) -> None:
        self._server = host_store(
            HOST, range(self.port, self.port + 1), backend=Choice(self.backend), workers=self.workers
        )
        self.pid, self.port = self._server.pid, self._server.port
        if self._server.backend != self.backend:
            self.stop()
            raise BenchError(f"asked for {self.backend}, and got {self._server.backend}")

    def stop(self) -> None:
        if self.pid:
            self._server.release()
        self.pid = 0


class OurLibuv(OurTarget):
    """The same, on uvloop."""

    needs = "uvloop"


class TorchTarget(Target):
    """A server of torch's, in a process that a server of forks has made."""

    needs = "torch"
    server_class = "rallypoint.pytorch.peers:TorchServer"
    as_is = False
    """On the socket that torch makes itself."""

    def __init__(self, name: str, ranks: int = 0) -> None:
        super().__init__(name, ranks)
        self._resources = ExitStack()

    def start(self) -> None:
        self._worker = start_with_torch(self._resources, self.server_class, self.name)
        self.pid = self._worker.pid
        order = {"use_libuv": self.backend == "libuv", "as_is": self.as_is}
        self.port = self._worker.ask(START_LIMIT_S, do="serve", **order)

    def stop(self) -> None:
        self._resources.close()
        self.pid = 0

    def last_words(self) -> str:
        return self._worker.last_words()


TARGETS: Final[Mapping[str, type[Target]]] = {
    "rallypoint-libuv": OurLibuv,
    "rallypoint-legacy": OurTarget,
    "torch-libuv": TorchTarget,
    "torch-legacy": TorchTarget,
}


# torch's own server and client, whatever the user has asked for elsewhere. And no threads of NumPy's, which
# comes with torch: a process with threads should not fork.
_TORCH_ALONE: Final = {
    "RALLYPOINT_PATCH": "never",
    "RALLYPOINT_CLIENT": "torch",
    "USE_LIBUV": None,
    "OPENBLAS_NUM_THREADS": "1",
}


def start_with_torch(resources: ExitStack, kind: str, name: str) -> Worker:
    """Start a worker with torch in it."""
    with environment(_TORCH_ALONE):
        return start(resources, kind, name, preload="rallypoint.pytorch.peers")


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Change environment variables for the processes that are started meanwhile; None: without it."""
    before = {name: os.environ.get(name) for name in changes}
    _set_variables(changes)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
