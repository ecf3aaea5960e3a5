"""torch's own servers and clients, as `rallypoint bench` measures them; it runs each in a process of its own.

Two things are timed with torch's clients, as in PyTorch's tutorial on the libuv backend of TCPStore: how long
rank 0 takes to make its store, which is until all ranks have joined; and a barrier of all ranks by means of
the store, the one that `init_process_group` ends with.

A target of ours runs the same code, with torch's constructor patched as `RALLYPOINT_PATCH=always` has it.
What really serves is checked in every case; to measure the wrong server would be worse than to measure none.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _store_based_barrier

from rallypoint.launch.switches import PATCH_VARIABLE, Patch
from rallypoint.pytorch.autoload import substitute
from rallypoint.pytorch.servers import OwnedServer, owned_at
from rallypoint.store.server.process.binding import BACKLOG

HOST = "127.0.0.1"

_BIND_SECONDS = 30.0
_PAUSE_SECONDS = 0.02
_END_SECONDS = 10.0

logger = logging.getLogger("rallypoint.bench")


def ask_no_name_server() -> None:
    """Let the hosts file alone answer all look-ups of this process.

    torch's server looks up the name of every client that it accepts, and torch's client that of the server
    before it connects: of ::ffff:127.0.0.1, since its socket is an IPv6 one, and no hosts file has that.
    When 64 clients ask a name server at once, it may drop a few questions, which are asked again after five
    seconds. That would be all that is measured then, whichever server it is.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # of glibc alone
    if configure is None or configure(b"hosts", b"files") != 0:
        logger.warning(
            "torch's look-ups of names go to a name server here, and their time is measured as well"
        )


# Servers


def listening_socket(port: int) -> socket.socket:
    """An IPv4 loopback socket, with as long a backlog as the kernel grants.

    torch looks up the name of every client it accepts. On this socket that name is always that of
    127.0.0.1, which the hosts file has, so nothing stalls. torch's own socket would be a dual-stack one,
    whose clients are ::ffff:127.0.0.1: that may take seconds each, and comparing with it would flatter
    Rallypoint.
    """
    return socket.create_server((HOST, port), backlog=BACKLOG)


def make_server(port: int, use_libuv: bool, as_is: bool) -> dist.TCPStore:
    """torch's server, and the client that comes with it; on a socket of torch's own, if `as_is`."""
    make = partial(dist.TCPStore, HOST, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    if as_is:
        return make(port=port)
    listener = listening_socket(port)
    return make(port=listener.getsockname()[1], master_listen_fd=listener.detach())


def make_server_again(port: int, use_libuv: bool, as_is: bool) -> dist.TCPStore:
    """A server on a port that one has just left; the last error, if the port stays taken."""
    deadline = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            return make_server(port, use_libuv, as_is)
        except (OSError, RuntimeError):  # of our socket, and of torch's
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_SECONDS)


# Ranks


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
