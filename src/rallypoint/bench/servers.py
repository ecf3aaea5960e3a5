"""The servers that can be measured: ours, redis and torch's own, each a process of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Final

from rallypoint.bench import machine
from rallypoint.bench.clients import HOST, connect
from rallypoint.bench.dialects import REDIS as REDIS_DIALECT
from rallypoint.bench.dialects import TORCH, Dialect
from rallypoint.bench.names import PURE, REDIS, RELAY, WORKERS
from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import Worker, end_with_parent, start
from rallypoint.store.relay.hosting import host_store
from rallypoint.store.relay.store_with_workers import auto_workers
from rallypoint.store.server.loops.backend import Choice

REDIS_PROGRAM: Final = "redis-server"
START_LIMIT_S: Final = 60.0
_REDIS_START_S: Final = 10.0
_FEWEST_WORKERS: Final = 2
"""Also on a machine that has no cores to spare for workers."""


class TorchHost:
    """The process that has imported torch, and forks torch's servers and ranks; started when needed."""

    def __init__(self, resources: ExitStack) -> None:
        self._resources = resources
        self._worker: Worker | None = None

    def get(self) -> Worker:
        """The process; a new one, if it has ended."""
        if self._worker is None or not self._worker.is_alive:
            self._worker = start(self._resources, "rallypoint.bench.host_torch", "torch's host")
        return self._worker


class Server(ABC):
    """A running server."""

    pid: int
    port: int

    @abstractmethod
    def renew(self) -> Server:
        """The server made anew, on the same port, with nothing in it."""

    @abstractmethod
    def release(self) -> None:
        """End it; a second time, nothing happens."""

    def last_words(self) -> str:
        """The end of its log, if that does not go to standard error."""
        return ""


class OurServer(Server):
    """A server of ours, on one of its backends; `pure`: without its compiled modules."""

    def __init__(self, backend: str, port: int = 0, workers: int = 0, *, pure: bool = False) -> None:
        with _pure_children() if pure else nullcontext():
            self._server = host_store(HOST, range(port, port + 1), backend=Choice(backend), workers=workers)
        self._backend = backend
        self._workers = workers
        self._pure = pure
        self.pid, self.port = self._server.pid, self._server.port
        if self._server.backend != backend:
            self.release()
            raise BenchError(f"asked for {backend}, and got {self._server.backend}")

    def renew(self) -> OurServer:
        self._server.release()
        return OurServer(self._backend, self.port, self._workers, pure=self._pure)

    def release(self) -> None:
        self._server.release()


@contextmanager
def _pure_children() -> Iterator[None]:
    before = os.environ.get("RALLYPOINT_PURE")
    os.environ["RALLYPOINT_PURE"] = "1"
    try:
        yield
    finally:
        del os.environ["RALLYPOINT_PURE"]
        if before is not None:
            os.environ["RALLYPOINT_PURE"] = before


class RedisServer(Server):
    """A redis server with nothing kept on disk. One loop without threads for I/O, as it comes."""

    def __init__(self, port: int = 0) -> None:
        self.port = port or _free_port()
        settings = {
            "bind": HOST,
            "port": str(self.port),
            "save": "",
            "appendonly": "no",
            "protected-mode": "no",
            "tcp-backlog": "65535",
            "maxclients": str(machine.most_connections()),
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
            if not self._is_ready():
                self.release()
                log.seek(0)
                said = log.read().decode(errors="replace")[-500:]
                raise BenchError(f"{REDIS_PROGRAM} did not start on port {self.port}: {said}")

    def renew(self) -> RedisServer:
        self.release()
        return RedisServer(self.port)

    def release(self) -> None:
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        deadline = time.monotonic() + _REDIS_START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                connect(self.port, REDIS_DIALECT).close()
                return True
            except ConnectionRefusedError:
                time.sleep(0.002)
        return False


def _free_port() -> int:
    """A port that nobody listens on: redis takes no socket that is bound already."""
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


class TorchServer(Server):
    """A server of torch's, in a fork of its host; `as_is`: on the socket that it makes itself."""

    def __init__(self, host: TorchHost, backend: str, as_is: bool) -> None:
        self._host = host.get()
        self.pid, self.port = self._host.ask(START_LIMIT_S, do="serve", backend=backend, as_is=as_is)

    def renew(self) -> TorchServer:
        """In the same process: it drops its store and makes another, as a job that starts again does."""
        self._host.ask(START_LIMIT_S, do="renew", pid=self.pid)
        return self

    def release(self) -> None:
        with suppress(BenchError):  # it has ended before
            self._host.ask(START_LIMIT_S, do="stop", pid=self.pid)

    def last_words(self) -> str:
        return self._host.last_words()


# By name


@dataclass(frozen=True)
class Kind:
    """A server that can be measured: how it is started, and how clients speak to it."""

    serve: Callable[[TorchHost], Server]
    needs: str = ""
    """A Python package or a program that has to be installed."""
    dialect: Dialect = TORCH


def _torch(backend: str, *, as_is: bool = False) -> Kind:
    return Kind(partial(TorchServer, backend=backend, as_is=as_is), "torch")


_LIBUV: Final = Kind(lambda _: OurServer("libuv"), "uvloop")

KINDS: Final = {
    "rallypoint-libuv": _LIBUV,
    "rallypoint-legacy": Kind(lambda _: OurServer("legacy")),
    RELAY: _LIBUV,
    WORKERS: Kind(lambda _: OurServer("libuv", workers=auto_workers() or _FEWEST_WORKERS), "uvloop"),
    PURE: Kind(lambda _: OurServer("libuv", pure=True), "uvloop"),
    "torch-libuv": _torch("libuv"),
    "torch-legacy": _torch("legacy"),
    REDIS: Kind(lambda _: RedisServer(), REDIS_PROGRAM, REDIS_DIALECT),
    "torch-libuv-as-is": _torch("libuv", as_is=True),
    "torch-legacy-as-is": _torch("legacy", as_is=True),
}


def absences(names: Sequence[str]) -> dict[str, str]:
    """The targets that are not installed here, each with the reason."""
    needs = {name: KINDS[name].needs for name in names}
    return {
        name: f"{need} is not installed"
        for name, need in needs.items()
        if need and find_spec(need) is None and shutil.which(need) is None
    }


def redis_version() -> str:
    """The version of the redis server that is installed."""
    try:
        said = subprocess.run([REDIS_PROGRAM, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "not installed"
    words = dict(word.split("=", 1) for word in said.stdout.split() if "=" in word)
    return words.get("v", said.stdout.strip())
