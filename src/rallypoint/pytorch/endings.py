"""What ends with the default process group, or with the attempt to make it, besides what torch ends itself.

torch's own server ends with the C++ store, which the group has held: its port is closed when
`destroy_process_group` returns. Ours is another process, so that call waits for its end. And torch drops the
stores of its rendezvous with the group, while the Python half of our own client is kept, as C++ needs it.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import current_thread, main_thread
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rallypoint.launch.reports import folder_of
from rallypoint.pytorch.ranks import Joining
from rallypoint.pytorch.servers import end_left_servers
from rallypoint.pytorch.store import PythonStore

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
        module.init_process_group = _patched_init
        module.destroy_process_group = _patched_destroy
    _rendezvous._create_c10d_store = _patched_create_store


@functools.wraps(_create_store)
def _patched_create_store(*args: Any, **kwargs: Any) -> Any:
    """What `env://` and `tcp://` make; under torchrun a client of the agent's store."""
    joining = Joining.of(args)
    if joining is not None:
        joining.answer()
    store = _create_store(*args, **kwargs)
    if joining is not None:
        joining.report()
    base = getattr(store, "_underlying_non_prefix_store", store)  # older ones add a prefix under torchrun
    if isinstance(base, PythonStore):
        end_with_group(base)
    return store


@functools.wraps(_init)
def _patched_init(*args: Any, **kwargs: Any) -> None:
    before = list(_stores)
    try:
        with _ended_by_ctrl_c():
            _init(*args, **kwargs)
    except BaseException:
        _close([store for store in _stores if store not in before])
        raise


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
