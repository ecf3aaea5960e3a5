"""What PyTorch's tutorial on the libuv backend of TCPStore times, with torch's own clients.

Two things: how long rank 0 takes to make its store, which is until all ranks have joined; and a barrier of
all ranks by means of the store, the one that `init_process_group` ends with. Every rank is a process, and
all begin at the same time.

A target of ours runs the same code, with torch's constructor patched as `RALLYPOINT_PATCH=always` has it.
No rank asks a name server: see `ask_no_name_server`. What really serves is checked in every case; to measure
the wrong server would be worse than to measure none.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _store_based_barrier

from rallypoint.launch.switches import PATCH_VARIABLE, Patch

# These two are not used here: they are what `substitute` imports, so that the forks have it already.
from rallypoint.pytorch import schemes, substitution  # noqa: F401
from rallypoint.pytorch.autoload import substitute
from rallypoint.pytorch.forks import Channel, Fork, Forks, Gate, Message, ask_no_name_server
from rallypoint.pytorch.servers import OwnedServer, owned_at

_END_SECONDS = 10.0


@dataclass(frozen=True)
class Serving:
    """Whose server it is, and which of its backends."""

    is_ours: bool
    backend: str


TARGETS = {
    "torch-libuv": Serving(is_ours=False, backend="libuv"),
    "torch-legacy": Serving(is_ours=False, backend="legacy"),
    "rallypoint-libuv": Serving(is_ours=True, backend="libuv"),
    "rallypoint-legacy": Serving(is_ours=True, backend="legacy"),
}


@dataclass(frozen=True)
class Timing:
    """What is to be timed."""

    target: Serving
    ranks: int
    barriers: int
    limit_s: float

    @property
    def patience(self) -> timedelta:
        return timedelta(seconds=self.limit_s)


def run(forks: Forks, timing: Timing, listener: socket.socket) -> Message:
    """Time it: the seconds of rank 0. ForkError if a rank fails, or the limit has passed.

    The server is to serve on `listener`, which is closed here. So the port is known, and can be reached,
    before the server is up.
    """
    with ExitStack() as resources:
        resources.enter_context(listener)
        gates = forks.make_gates(timing.barriers + 2)
        for gate in gates:
            resources.callback(gate.close)
        ranks: list[Fork] = []
        resources.callback(forks.end, ranks)
        for rank in range(timing.ranks):
            member = TimedRank(rank, timing, listener, gates)
            ranks.append(forks.fork(f"rank {rank}", member.take_part))
        listener.close()  # it is rank 0's
        return _lead(forks, timing, ranks, gates)


def _lead(forks: Forks, timing: Timing, ranks: Sequence[Fork], gates: Sequence[Gate]) -> Message:
    """Let the ranks through one gate after the other, each when all are there."""
    deadline = time.monotonic() + timing.limit_s
    for gate in gates:
        forks.hear_all(ranks, deadline)
        gate.open()
    return forks.hear_all(ranks, deadline)[0]


class TimedRank:
    """A rank. It is made in the parent; all else happens in its own process."""

    def __init__(self, rank: int, timing: Timing, listener: socket.socket, gates: Sequence[Gate]) -> None:
        self._rank = rank
        self._timing = timing
        self._listener = listener
        self._host, self._port = listener.getsockname()
        self._first, *self._between, self._last = gates

    def take_part(self, line: Channel) -> None:
        """Do what the tutorial does, in step with the other ranks, and say how long it took."""
        ask_no_name_server()
        if self._timing.target.is_ours:
            os.environ[PATCH_VARIABLE] = Patch.ALWAYS.value
            substitute()
        descriptor = self._listener.detach()
        if self._rank != 0:
            os.close(descriptor)
        self._line_up(line, self._first)
        began = time.perf_counter()
        store = self._make_store(descriptor)
        init = time.perf_counter() - began
        owned = check_server(store, self._timing.target) if self._rank == 0 else None
        barrier = [self._time_barrier(line, gate, store) for gate in self._between]
        self._line_up(line, self._last)
        del store
        if owned is not None and not owned.server.await_end(_END_SECONDS):
            raise RuntimeError(f"the server, process {owned.server.pid}, does not end with its store")
        line.say({"init": init, "barrier": barrier})

    def _line_up(self, line: Channel, gate: Gate) -> None:
        line.say({})
        gate.pass_through()

    def _make_store(self, descriptor: int) -> Any:
        return dist.TCPStore(
            self._host,
            self._port,
            world_size=self._timing.ranks,
            is_master=self._rank == 0,
            timeout=self._timing.patience,
            master_listen_fd=descriptor if self._rank == 0 else None,
            use_libuv=self._timing.target.backend == "libuv",
        )

    def _time_barrier(self, line: Channel, gate: Gate, store: Any) -> float:
        number = self._between.index(gate)
        self._line_up(line, gate)
        began = time.perf_counter()
        _store_based_barrier(
            self._rank, store, f"tutorial-{number}", self._timing.ranks, timeout=self._timing.patience
        )
        return time.perf_counter() - began


def check_server(store: Any, target: Serving) -> OwnedServer | None:
    """Our server behind the store, if it is ours; RuntimeError if the target is another."""
    owned = owned_at(store.port)
    if owned is None:
        serving = Serving(is_ours=False, backend="libuv" if store.libuvBackend else "legacy")
    else:
        serving = Serving(is_ours=True, backend=owned.server.backend)
    if serving != target:
        raise RuntimeError(f"{target} was to serve, and {serving} did")
    return owned
