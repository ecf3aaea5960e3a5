"""More servers that can be measured: redis, ours behind relays or with workers, and torch's as it comes."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Final
from unittest import mock

import psutil

from benchmarks import dialects
from benchmarks.clients import connect
from rallypoint.bench import targets
from rallypoint.bench.clients import HOST, Place
from rallypoint.bench.results import BenchError
from rallypoint.bench.targets import (
    START_LIMIT_S,
    OurLibuv,
    Target,
    TorchTarget,
    cpu_seconds,
    most_connections,
)
from rallypoint.bench.workers import LoadProcess, end_with_parent, outcomes
from rallypoint.store.relay.store_with_workers import auto_workers

REDIS_PROGRAM: Final = "redis-server"
RELAY: Final = "rallypoint-relay"
REDIS: Final = "redis"
WORKERS: Final = "rallypoint-workers"
PURE: Final = "rallypoint-pure"
_REDIS_START_S: Final = 10.0
_FEWEST_WORKERS: Final = 2
"""Also on a machine that has no cores to spare for workers."""

PER_RELAY: Final = 8
"""How many ranks a relay has: those of a machine with eight accelerators."""

FILES_PER_RELAY: Final = 2
"""A relay has one file to listen, and one upstream."""


class _ByName(OurLibuv):
    """A server on uvloop that takes part only if it is asked for."""

    backend = "libuv"

    def pids(self) -> list[int]:
        return [self.pid, *(child.pid for child in psutil.Process(self.pid).children())]


class WithWorkers(_ByName):
    """A server with worker processes, whose costs are its own."""

    workers = auto_workers() or _FEWEST_WORKERS


class Pure(_ByName):
    """A server without its compiled modules."""

    def start(self) -> None:
        with mock.patch.dict(os.environ, {"RALLYPOINT_PURE": "1"}):
            super().start()


class Torchs(TorchTarget):
    """A server of torch's that can make its store anew."""

    server_class = "benchmarks.torch_processes:RenewableServer"

    def renew(self) -> None:
        """In the same process: it drops its store and makes another, as a job that starts again does."""
        self.worker.ask(START_LIMIT_S, "renew")


class TorchAsIs(TorchTarget):
    """A server of torch's as it comes: on a socket that it makes itself."""

    server_class = "benchmarks.torch_processes:ServerAsIs"


def renew(target: Target) -> None:
    """Make a server anew, on the same port, with nothing in it."""
    if isinstance(target, Torchs):
        target.renew()
    else:
        target.stop()
        target.start()


class RedisTarget(Target):
    """A redis server with nothing kept on disk. One loop without threads for I/O, as it comes."""

    dialect = dialects.REDIS
    needs = REDIS_PROGRAM

    def start(self) -> None:
        self.port = self.port or _free_port()
        settings = {
            "bind": HOST,
            "port": str(self.port),
            "save": "",
            "appendonly": "no",
            "protected-mode": "no",
            "tcp-backlog": "65535",
            "maxclients": str(most_connections()),
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [REDIS_PROGRAM, *words],
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            self.pid = self._process.pid
            self.resources.callback(self._process.wait)
            self.resources.callback(self._process.kill)
            if not self._is_ready():
                self.stop()
                log.seek(0)
                said = log.read().decode(errors="replace")[-500:]
                raise BenchError(f"{REDIS_PROGRAM} did not start on port {self.port}: {said}")

    def _is_ready(self) -> bool:
        deadline = time.monotonic() + _REDIS_START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                connect(self.port, self.dialect).close()
                return True
            except ConnectionRefusedError:
                time.sleep(0.002)
        return False


def _free_port() -> int:
    """A port that nobody listens on: redis takes no socket that is bound already."""
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


class BehindRelays(OurLibuv):
    """A server of ours, and a relay for each machine of a job, many in a process.

    A load without ranks has one relay, which all of its clients connect to.
    """

    backend = "libuv"

    def __init__(self, name: str, ranks: int = 0) -> None:
        super().__init__(name, ranks)
        self.per_relay = ranks_per_relay(ranks)
        self.relays = -(-ranks // self.per_relay) or 1
        self._hosts: list[LoadProcess] = []
        self._places: list[Place] = []

    @classmethod
    def hindrance(cls, _: int) -> str:
        return ""  # its ranks are not bounded by the files of one process

    def start(self) -> None:
        begun = time.monotonic()
        super().start()
        files = self.relays * (FILES_PER_RELAY + self.per_relay)
        count = -(-files // most_connections())
        self._hosts = [LoadProcess(self.resources, "benchmarks.relays:RelayProcess") for _ in range(count)]
        # An address for each process: 127.0.0.0/8 is all this machine's.
        addresses = [f"127.0.{number // 250}.{1 + number % 250}" for number in range(count)]
        order = {"upstream": (HOST, self.port), "limit_s": START_LIMIT_S}
        orders = [
            host.order(
                "lead", do="start", **order, host=address, count=len(range(number, self.relays, count))
            )
            for number, (host, address) in enumerate(zip(self._hosts, addresses, strict=True))
        ]
        left = self.ranks
        for address, ports in zip(addresses, outcomes(orders, START_LIMIT_S), strict=True):
            for port in ports:
                self._places.append((address, port, min(left, self.per_relay)))
                left -= self.per_relay
        if not self.ranks:
            self.port = self._places[0][1]
        self.start_seconds = time.monotonic() - begun

    def places(self) -> list[Place]:
        return self._places

    def settle(self) -> None:
        self._lead("settle")

    def spent(self) -> dict[str, float]:
        relays_cpu = sum(cpu_seconds(host.pid) for host in self._hosts)
        return {**super().spent(), "relays_cpu": relays_cpu, "messages": sum(self._lead("messages"))}

    def size(self) -> dict[str, float]:
        """Further figures while its ranks are connected."""
        resident = sum(psutil.Process(host.pid).memory_info().rss for host in self._hosts)
        return {"relays": self.relays, "relays_bytes": resident}

    def _lead(self, do: str) -> list[Any]:
        return outcomes([host.order("lead", do=do) for host in self._hosts], START_LIMIT_S)


def ranks_per_relay(ranks: int) -> int:
    """Eight; more, if the server could not hold the connections of all relays then."""
    per_relay = PER_RELAY
    while -(-ranks // per_relay) > most_connections():
        per_relay *= 2
    return per_relay


USUAL: Final[Mapping[str, type[Target]]] = {
    **targets.TARGETS,
    RELAY: BehindRelays,
    "torch-libuv": Torchs,
    "torch-legacy": Torchs,
    REDIS: RedisTarget,
}
BY_NAME: Final[Mapping[str, type[Target]]] = {WORKERS: WithWorkers, PURE: Pure}
"""Targets that take part only if they are asked for."""
AS_IS: Final[Mapping[str, type[Target]]] = {"torch-libuv-as-is": TorchAsIs, "torch-legacy-as-is": TorchAsIs}
"""torch's servers as they come: they take part beside the others, and are not asked for by name."""
TARGETS: Final = {**USUAL, **BY_NAME, **AS_IS}


def redis_version() -> str:
    """The version of the redis server that is installed."""
    try:
        said = subprocess.run([REDIS_PROGRAM, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "not installed"
    words = dict(word.split("=", 1) for word in said.stdout.split() if "=" in word)
    return words.get("v", said.stdout.strip())
