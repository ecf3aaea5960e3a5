"""What Rallypoint adds to the begin and the end of a process group.

When it begins, the process learns its rank, under which it reports its stacks. A launcher names the rank in a
variable, but `torch.multiprocessing.spawn` passes it as an argument; then it is known only here.

A process group can be destroyed and made again on the same port, and each rank does so at its own pace. A
quick one finds the store of the old group, with its keys, which rank 0 will end in a moment. So a rank that
has been in a group of that address waits until the store there ends; or until rank 0 joins it anew, as it
does if something else holds that store. The stores are told apart by how many workers they count, so this
goes for a group of the same size alone. A connection that ends while a store comes up is tried again.

When it ends, torch's own server ends with the C++ store, which the group has held: its port is closed when
`destroy_process_group` returns. Ours is another process, so that call waits for its end. And torch drops the
stores of its rendezvous with the group, while the Python half of our own client is kept, as C++ needs it.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from threading import current_thread, main_thread
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rallypoint.client.tcp import TCPStore
from rallypoint.errors import ConnectError, ConnectionLostError, RallypointError
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.handover import read_handover
from rallypoint.launch.reports import folder_of, report_joined
from rallypoint.launch.stacks.steps import be_rank
from rallypoint.launch.template.preloading import report_modules
from rallypoint.pytorch.parameters import StoreParameters
from rallypoint.pytorch.servers import end_left_servers
from rallypoint.pytorch.store import PythonStore
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.server.process.binding import resolves

T = TypeVar("T")

_LOOK_SECONDS = 0.02
_PAUSE_SECONDS = 0.05
_NAME_SECONDS = 0.2

# torch's words for a connection that the other side has ended.
_CUT = ("got 0 bytes", "reset by peer", "Broken pipe", "forcibly closed", "was aborted")

_joined: dict[tuple[tuple[str, int], int], int] = {}
"""By address and size of a group: how many workers the store counts, once the groups joined are complete."""


def join(wanted: StoreParameters, attempt: Callable[[], T]) -> T:
    """What `attempt` makes: a store that is connected, and counted in as a worker."""
    deadline = Deadline(wanted.seconds)
    is_worker = wanted.is_of_rendezvous and not wanted.is_master
    while True:
        if is_worker:
            _await_successor(wanted, deadline)
        try:
            made = attempt()
        except (dist.DistNetworkError, ConnectionLostError) as error:
            if not _is_cut(error) or deadline.passed:
                raise
            time.sleep(min(_PAUSE_SECONDS, deadline.remaining))
        else:
            if is_worker:
                group = (wanted.place, wanted.workers)
                _joined[group] = _joined.get(group, 0) + wanted.workers
            return made


def await_name(wanted: StoreParameters) -> None:
    """A master, too, waits until its host name is known, as torch's does; ConnectError if it never is."""
    deadline = Deadline(wanted.seconds)
    while wanted.is_master and not resolves(wanted.host_name):
        if deadline.passed:
            raise ConnectError(
                f"the host name {wanted.host_name!r} is not known here",
                hint="use an IP address, or add it to the hosts file",
            )
        time.sleep(min(_NAME_SECONDS, deadline.remaining))


def _is_cut(error: RuntimeError) -> bool:
    is_ours = isinstance(error, ConnectionLostError) or isinstance(error.__cause__, ConnectionLostError)
    return is_ours or any(words in str(error) for words in _CUT)


def _await_successor(wanted: StoreParameters, deadline: Deadline) -> None:
    """If this process has left a group at that address, wait for the end of its store."""
    group = (wanted.place, wanted.workers)
    joined = _joined.get(group)
    if joined is None or dist.is_initialized():
        return
    while not deadline.passed:
        try:
            with TCPStore(*wanted.place, timeout=deadline.remaining, role=Role.TOOL) as store:
                while (count := store.count_workers()) == joined and not deadline.passed:
                    time.sleep(_LOOK_SECONDS)
        except ConnectionLostError:
            continue
        except RallypointError:
            return  # who connects next says it in torch's words
        if count < joined:
            del _joined[group]  # it is another store
        return


@contextmanager
def _as_rank(arguments: tuple[Any, ...]) -> Iterator[None]:
    """While torch makes the store of a rendezvous: tell the launcher which rank this is, and that it joined.

    The arguments are torch's: host, port, rank, world size, time-out. Another torch may have others.
    """
    if folder_of(os.environ) is None or len(arguments) < 5:
        yield
        return
    host, port, rank, world_size, timeout = arguments[:5]
    if not isinstance(rank, int) or rank < 0 or not isinstance(timeout, timedelta):
        yield
        return
    _answer_for_stacks(rank)
    yield
    report_joined(str(Endpoint(host, port)), rank, world_size, timeout.total_seconds())


def _answer_for_stacks(rank: int) -> None:
    given = read_handover(os.environ)
    if given.reports is None or not given.signals or current_thread() is not main_thread():
        return
    be_rank(rank)
    # If it came with the environment, it has been imported under the name that it has there.
    of_start = sys.modules.get("rallypoint_hooks")
    hooks: Any = of_start or import_module("rallypoint.pytorch.injection.rallypoint_hooks")
    hooks.answer_for_stacks(str(given.reports), rank, list(given.signals))


# A function of the same name stands in the module's way.
_rendezvous: Any = import_module("torch.distributed.rendezvous")

_init: Any = dist.init_process_group
_destroy: Any = dist.destroy_process_group
_create_store: Any = _rendezvous._create_c10d_store

_stores: list[PythonStore] = []
"""Those that a rendezvous has made, for a process group or for RPC, and that nobody else has."""


def end_with_group(store: PythonStore) -> None:
    """Close this store when the default process group that uses it is destroyed, or cannot be made."""
    _stores.append(store)


def install() -> None:
    """Patch what makes and destroys process groups; a second call does nothing.

    To be called early: a script that imports one of the functions by name keeps the one that it got.
    """
    for module in (dist, distributed_c10d):
        module.init_process_group = _patched_init_process_group
        module.destroy_process_group = _patched_destroy
    _rendezvous._create_c10d_store = _patched_create_store


@functools.wraps(_create_store)
def _patched_create_store(*args: Any, **kwargs: Any) -> Any:
    """What `env://` and `tcp://` make; under torchrun a client of the agent's store."""
    with _as_rank(args):
        store = _create_store(*args, **kwargs)
    base = getattr(store, "_underlying_non_prefix_store", store)  # older ones add a prefix under torchrun
    if isinstance(base, PythonStore):
        end_with_group(base)
    return store


@functools.wraps(_init)
def _patched_init_process_group(*args: Any, **kwargs: Any) -> None:
    before = list(_stores)
    try:
        with _ended_by_ctrl_c():
            _init(*args, **kwargs)
    except BaseException:
        _close([store for store in _stores if store not in before])
        raise
    report_modules()


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end a launcher's rank while it waits for others: Python would only hear of it afterwards."""
    is_ours = folder_of(os.environ) is not None and current_thread() is main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.wraps(_destroy)
def _patched_destroy(*args: Any, **kwargs: Any) -> None:
    ending = _stores_in_use()
    _destroy(*args, **kwargs)
    if dist.is_initialized():  # it was another group than the default one
        return
    _close(ending)
    end_left_servers()


def _close(stores: list[PythonStore]) -> None:
    for store in stores:
        _stores.remove(store)
        store.close()


def _stores_in_use() -> list[PythonStore]:
    """Those of `_stores` that process groups use."""
    if not _stores:
        return []
    used = [store for _, store in distributed_c10d._world.pg_map.values()]
    bases = {id(getattr(store, "_underlying_non_prefix_store", store)) for store in used}
    return [store for store in _stores if id(store) in bases]
