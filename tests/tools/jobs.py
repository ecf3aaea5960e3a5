"""torchrun jobs for tests: agents of one job, each in a session of its own, and always ended."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from processes import free_port as free_port
from rallypoint.client.tcp import TCPStore
from rallypoint.pytorch import cpp_stores, servers, substitution
from rallypoint.pytorch import store as python_stores

SECONDS = 180.0
_MARK = "TEST_JOB"  # in the environment of every process of a job

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist

def say(*words):  # one write, so that lines of several ranks do not mix
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
objects = [{"from": 0}] if rank == 0 else [None]
dist.broadcast_object_list(objects)
dist.new_group([0])
tries = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""
"""The beginning of a worker script: a process group that has been used in earnest."""

DONE = """
dist.barrier()
say("done", rank, "of", world, "sum", total.item(), "objects", objects)
dist.destroy_process_group()
"""


class Job:
    """Agents that were started, and what they print."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = secrets.token_hex(8)
        self._logs: list[IO[str]] = []
        self.agents: list[subprocess.Popen[str]] = []

    def start(
        self,
        script: str | Path,
        options: Sequence[str],
        environ: Mapping[str, str] | None = None,
        command: Sequence[str] = ("-m", "torch.distributed.run"),
        prefix: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """Start one agent: `<prefix> python <command> <options> script.py <arguments>`.

        Of a script that is a text, each agent gets a file of its own.
        """
        number = len(self.agents)
        if isinstance(script, Path):
            path = script
        else:
            path = self._folder / f"script-{number}.py"
            path.write_text(script)
        log = (self._folder / f"log-{number}").open("w+")
        self._logs.append(log)
        agent = subprocess.Popen(
            [*prefix, sys.executable, *command, *options, str(path), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", _MARK: self._mark, **(environ or {})},
            start_new_session=True,
        )
        self.agents.append(agent)
        return agent

    def log(self, number: int = 0) -> str:
        """What an agent and its workers have printed so far."""
        self._logs[number].flush()
        return (self._folder / f"log-{number}").read_text()

    def logs(self) -> str:
        return "\n".join(f"--- agent {number}\n{self.log(number)}" for number in range(len(self.agents)))

    def await_text(self, text: str, number: int = 0, count: int = 1) -> None:
        """Wait until an agent has printed a text so many times."""
        deadline = time.monotonic() + SECONDS
        while self.log(number).count(text) < count:
            assert time.monotonic() < deadline, f"no {text!r}:\n{self.logs()}"
            assert self.agents[number].poll() is None or text in self.log(number), self.logs()
            time.sleep(0.05)

    def await_listening(self, endpoint: str) -> None:
        """Wait until the first agent holds the meeting place."""
        host, _, port = endpoint.rpartition(":")
        TCPStore(host, int(port), timeout=SECONDS).close()

    def wait(self, seconds: float = SECONDS) -> list[int]:
        """The exit codes of all agents."""
        deadline = time.monotonic() + seconds
        for agent in self.agents:
            try:
                agent.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"it hangs:\n{self.logs()}") from None
        return [agent.returncode for agent in self.agents]

    def processes(self) -> list[psutil.Process]:
        """All processes of the job that run, store servers and orphans included."""
        return [process for process in psutil.process_iter() if _has_mark(process, self._mark)]

    def end(self) -> None:
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        for agent in self.agents:
            agent.wait()
        for log in self._logs:
            log.close()


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


@contextmanager
def job(folder: Path) -> Iterator[Job]:
    """A job without agents; all that were started are ended with their workers when the block is left."""
    running = Job(folder)
    try:
        yield running
    finally:
        running.end()


def kill_tree(agent: subprocess.Popen[str]) -> None:
    """End an agent and its workers at once, as a machine that loses power does."""
    children = psutil.Process(agent.pid).children(recursive=True)
    agent.send_signal(signal.SIGKILL)
    for child in children:
        if not _is_server(child):
            child.kill()
    agent.wait()


def own_servers() -> set[int]:
    """The store server processes that this process has started and that run."""
    return {child.pid for child in psutil.Process().children() if _is_server(child)}


def patch_torch(monkeypatch: pytest.MonkeyPatch, install: Callable[[], None] = substitution.install) -> None:
    """Patch the torch of this process, until the end of the test."""
    queue_names = [name for name in cpp_stores.QUEUE_METHODS if hasattr(dist.TCPStore, name)]
    clone = ["clone"] if hasattr(dist.TCPStore, "clone") else []
    for name in ("__new__", "__init__", "host", "port", "libuvBackend", *clone, *queue_names):
        monkeypatch.setattr(dist.TCPStore, name, getattr(dist.TCPStore, name))
    for name in ("__init__", "list_keys", *clone, *queue_names):
        monkeypatch.setattr(dist.PrefixStore, name, getattr(dist.PrefixStore, name))
    for module in (dist, distributed_c10d):
        for name in ("init_process_group", "destroy_process_group"):
            monkeypatch.setattr(module, name, getattr(module, name))
    rendezvous = import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(rendezvous, "_create_c10d_store", rendezvous._create_c10d_store)
    install()


def end_torch_stores() -> None:
    """End the servers behind torch stores that this process has made and dropped."""
    gc.collect()
    for store in list(python_stores._kept):
        store.close()
    for owned in servers._servers.values():
        assert owned.server.await_end(SECONDS), "a store that was dropped still holds its server"
    servers._servers.clear()


def _is_server(process: psutil.Process) -> bool:
    try:
        running = process.status() != psutil.STATUS_ZOMBIE
        return running and any("a server process of rallypoint" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False
