"""The servers under measurement, each a process of its own: where clients connect, and what it spends."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil

from rallypoint.bench.clients import HOST, TORCH, Dialect, Place
from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import LoadProcess
from rallypoint.store.relay.hosting import host_store
from rallypoint.store.server.loops.backend import Choice

START_LIMIT_S: Final = 60.0
REST_LIMIT_S: Final = 60.0
SPARE_FILES: Final = 256
"""Files of a process besides its connections."""


class Target(ABC):
    """A server under measurement."""

    dialect: Dialect = TORCH
    backend = ""
    """By default, the second word of its name."""
    needs = ""
    """A Python package or a program that has to be installed."""

    def __init__(self, name: str, ranks: int = 0) -> None:
        """Prepare for that many ranks; 0: for a few clients."""
        self.name = name
        self.backend = self.backend or "".join(name.split("-")[1:2])
        self.ranks = ranks
        self.resources = ExitStack()
        """What `stop` ends."""
        self.pid = 0
        """The server's process; 0 while there is none."""
        self.port = 0

    @classmethod
    def hindrance(cls, connections: int) -> str:
        """Why it cannot have that many connections here, or nothing."""
        most = most_connections()
        return f"a process may have {most:,} connections here" if connections > most else ""

    @abstractmethod
    def start(self) -> None:
        """Start it; after that, it answers."""

    def stop(self) -> None:
        """End it, if it has been started."""
        self.resources.close()
        self.pid = 0

    def pids(self) -> list[int]:
        """The processes whose costs are the server's."""
        return [self.pid]

    def spent(self) -> dict[str, float]:
        """What it has spent since its start: `cpu`, in seconds, and further counters."""
        return {"cpu": sum(map(cpu_seconds, self.pids()))}

    def resident_bytes(self) -> int:
        return sum(psutil.Process(pid).memory_info().rss for pid in self.pids())

    def places(self) -> list[Place]:
        return [(HOST, self.port, self.ranks)]

    def await_quiet(self) -> None:
        """Wait until it has done all that follows from a load: until it takes no CPU time for a while."""
        deadline = time.monotonic() + REST_LIMIT_S
        before, now = -1.0, self.spent()["cpu"]
        while now - before > 0.002:
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name} does not come to rest")
            time.sleep(0.1)
            before, now = now, self.spent()["cpu"]

    def settle(self) -> None:  # noqa: B027 - most have nothing to do
        """Let what follows from the last load happen before the meter is read."""


class OurTarget(Target):
    """A server of ours."""

    workers = 0

    def start(self) -> None:
        ports = range(self.port, self.port + 1)
        server = host_store(HOST, ports, backend=Choice(self.backend), workers=self.workers)
        self.resources.callback(server.release)
        self.pid, self.port = server.pid, server.port
        if server.backend != self.backend:
            raise BenchError(f"asked for {self.backend}, and got {server.backend}")


class OurLibuv(OurTarget):
    """The same, on uvloop."""

    needs = "uvloop"


class TorchTarget(Target):
    """A server of torch's, in a process that a server of forks has made."""

    needs = "torch"
    server_class = "rallypoint.pytorch.peers:TorchServer"

    def start(self) -> None:
        self.worker = start_with_torch(self.resources, self.server_class)
        self.pid = self.worker.pid
        self.port = self.worker.ask(START_LIMIT_S, "serve", use_libuv=self.backend == "libuv")


TARGETS: Final[Mapping[str, type[Target]]] = {
    "rallypoint-libuv": OurLibuv,
    "rallypoint-legacy": OurTarget,
    "torch-libuv": TorchTarget,
    "torch-legacy": TorchTarget,
}


def start_with_torch(resources: ExitStack, kind: str) -> LoadProcess:
    return LoadProcess(resources, kind, preload="rallypoint.pytorch.peers")


def raise_open_file_limit() -> None:
    """Raise the limit of open files to its maximum: the servers and the processes of the load inherit it."""
    _, hard = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)
    psutil.Process().rlimit(psutil.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """How many connections a process here may have."""
    return psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0] - SPARE_FILES


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    try:
        threads = [Path(each.path, "schedstat").read_bytes() for each in os.scandir(f"/proc/{pid}/task")]
        return sum(int(thread.split()[0]) for thread in threads) / 1e9
    except OSError:  # a system without schedstat: coarser, but there
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
