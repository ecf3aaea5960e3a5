"""Processes with torch in them: its servers, made anew, and ranks with torch's own clients.

Two things are timed with torch's clients, as in PyTorch's tutorial on the libuv backend of TCPStore: how long
rank 0 takes to make its store, which is until all ranks have joined; and a barrier of all ranks by means of
the store, the one that `init_process_group` ends with.

A target of ours runs the same code, with torch's constructor patched as `RALLYPOINT_PATCH=always` has it.
What really serves is checked in every case; to measure the wrong server would be worse than to measure none.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import _store_based_barrier

from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import end_with_parent
from rallypoint.launch.switches import PATCH_VARIABLE, Patch
from rallypoint.pytorch.autoload import substitute
from rallypoint.pytorch.peers import HOST, TorchServer, ask_no_name_server, listening_socket
from rallypoint.pytorch.servers import OwnedServer, owned_at

_BIND_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.02
_END_SECONDS: Final = 10.0
_FORKING: Final = get_context("fork")


class ServerAsIs(TorchServer):
    """torch's server on a socket of torch's own, with look-ups by the name server."""

    def serve(self, use_libuv: bool, port: int = 0) -> int:
        return self.make(use_libuv, port)


class RenewableServer(TorchServer):
    """torch's server, which can be made anew."""

    def serve(self, use_libuv: bool, port: int = 0) -> int:
        self._use_libuv = use_libuv
        return super().serve(use_libuv, port)

    def renew(self) -> int:
        """A server on the port that the one before has just left; the last error, if it stays taken."""
        port = self._store.port
        del self._store  # the server ends with it
        deadline = time.monotonic() + _BIND_SECONDS
        while True:
            try:
                return self.serve(self._use_libuv, port)
            except (OSError, RuntimeError):  # of our socket, and of torch's
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_SECONDS)


# Ranks


class Fork:
    """A forked process, seen from here. It stays until it is ended: an earlier end is a failure."""

    def __init__(self, name: str, work: Callable[..., object], *arguments: Any) -> None:
        self.name = name
        self.line, theirs = _FORKING.Pipe()
        self._process = _FORKING.Process(target=_live, args=(theirs, work, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0
        self.sentinel = self._process.sentinel

    def hear(self) -> Any:
        """Its next message; BenchError if it has failed or ended."""
        try:
            message = self.line.recv()
        except (EOFError, OSError):
            raise BenchError(f"{self.name} ended early; {self.last_words()}") from None
        if isinstance(message, BenchError):
            raise BenchError(f"{self.name}: {message}")
        return message

    def last_words(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        return f"with exit code {code}" if code >= 0 else f"by signal {-code}"

    def end(self) -> None:
        """End the process; nothing is left of it afterwards."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.line.close()


def _live(line: Connection, work: Callable[..., object], arguments: Sequence[Any]) -> None:
    """A fork from beginning to end: its last message is the outcome of its work."""
    end_with_parent()
    try:
        line.send(work(line, *arguments))
    except Exception as error:
        line.send(BenchError(f"{type(error).__name__}: {error}"))
    signal.pause()


def hear_all(forks: Sequence[Fork], deadline: float) -> list[Any]:
    """The next message of each; BenchError if one of them fails, or says nothing in time.

    They are heard in turn. Until the first one speaks, the words of the others do not wake this process: the
    first may be measuring. But the end of any of them is noticed at once.
    """
    heard = []
    by_sentinel = {fork.sentinel: fork for fork in forks}
    for fork in forks:
        ready = wait([fork.line, *by_sentinel], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise BenchError(f"the time is up, and nothing was heard of {fork.name}")
        for ended in by_sentinel.keys() & ready:
            while True:  # its last words, and then its end, which raises
                by_sentinel[ended].hear()
        heard.append(fork.hear())
    return heard


class TutorialHost:
    """Forks ranks, each a process of its own.

    It has to be a single thread: what another one holds locked would stay locked in a fork for ever.
    """

    def __init__(self) -> None:
        for module in ("schemes", "substitution"):
            import_module(f"rallypoint.pytorch.{module}")
        gc.freeze()  # keeps collections from touching, and so copying, what forks share

    def tutorial(self, target: str, ranks: int, barriers: int, limit_s: float) -> dict[str, Any]:
        """The seconds that rank 0 needs for its store and for barriers; see `time_rank`."""
        with ExitStack() as resources:
            listener = resources.enter_context(listening_socket(0))
            # One system call opens a gate for all ranks, so they go on at the same time. At a gate that they
            # pass again, a quick rank could take the place of a slow one.
            gates = [os.eventfd(0, os.EFD_SEMAPHORE) for _ in range(barriers + 2)]
            for gate in gates:
                resources.callback(os.close, gate)
            forks = []
            for rank in range(ranks):
                timing = Timing(target, ranks, barriers, limit_s)
                forks.append(Fork(f"rank {rank}", be_rank, gates, rank, timing, listener))
                resources.callback(forks[-1].end)
            listener.close()  # it is rank 0's
            deadline = time.monotonic() + limit_s
            for gate in gates:
                hear_all(forks, deadline)
                os.eventfd_write(gate, ranks)
            times: dict[str, Any] = hear_all(forks, deadline)[0]
            return times


def be_rank(
    line: Connection, gates: Sequence[int], rank: int, timing: Timing, listener: socket.socket
) -> dict[str, Any]:
    """In a fork: take part as a rank, in step with the others; how long it took."""
    ahead = iter(gates)

    def line_up() -> None:
        line.send("ready")
        os.eventfd_read(next(ahead))

    return time_rank(rank, timing, listener, line_up)


@dataclass(frozen=True)
class Serving:
    """Whose server it is, and which of its backends."""

    is_ours: bool
    backend: str


@dataclass(frozen=True)
class Timing:
    """What is to be timed: a target is `torch` or `rallypoint`, a hyphen, and the backend."""

    target: str
    ranks: int
    barriers: int
    limit_s: float

    @property
    def serving(self) -> Serving:
        """What has to serve."""
        name, _, backend = self.target.partition("-")
        return Serving(name == "rallypoint", backend)


def time_rank(
    rank: int, timing: Timing, listener: socket.socket, line_up: Callable[[], None]
) -> dict[str, Any]:
    """Take part as one rank, in a process of its own; the seconds that the constructor and the barriers took.

    Rank 0 serves on `listener`: so the port is known, and can be reached, before the server is up. `line_up`
    returns when all ranks have called it.
    """
    ask_no_name_server()
    if timing.serving.is_ours:
        os.environ[PATCH_VARIABLE] = Patch.ALWAYS.value
        substitute()
    port = listener.getsockname()[1]
    if rank != 0:
        listener.close()
    line_up()
    began = time.perf_counter()
    store = _make_store(rank, timing, port, listener)
    init = time.perf_counter() - began
    owned = check_server(store, timing.serving) if rank == 0 else None
    barriers = []
    for number in range(timing.barriers):
        line_up()
        began = time.perf_counter()
        patience = timedelta(seconds=timing.limit_s)
        _store_based_barrier(rank, store, f"tutorial-{number}", timing.ranks, timeout=patience)
        barriers.append(time.perf_counter() - began)
    line_up()
    del store
    if owned is not None and not owned.server.await_end(_END_SECONDS):
        raise RuntimeError(f"the server, process {owned.server.pid}, does not end with its store")
    return {"init": init, "barrier": barriers}


def _make_store(rank: int, timing: Timing, port: int, listener: socket.socket) -> Any:
    return dist.TCPStore(
        HOST,
        port,
        world_size=timing.ranks,
        is_master=rank == 0,
        timeout=timedelta(seconds=timing.limit_s),
        master_listen_fd=listener.detach() if rank == 0 else None,
        use_libuv=timing.serving.backend == "libuv",
    )


def check_server(store: Any, wanted: Serving) -> OwnedServer | None:
    """Our server behind the store, if it is ours; RuntimeError if another one serves than is wanted."""
    owned = owned_at(store.port)
    if owned is None:
        serving = Serving(is_ours=False, backend="libuv" if store.libuvBackend else "legacy")
    else:
        serving = Serving(is_ours=True, backend=owned.server.backend)
    if serving != wanted:
        raise RuntimeError(f"{wanted} was to serve, and {serving} did")
    return owned
