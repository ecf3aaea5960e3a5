"""What ends with the default process group, besides what torch ends itself.

torch's own server ends with the C++ store, which the group has held: its port is closed when
`destroy_process_group` returns. Ours is another process, so that call waits for its end. And torch drops the
stores of its rendezvous with the group, while the Python half of our own client is kept, as C++ needs it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rallypoint.pytorch.servers import end_left_servers
from rallypoint.pytorch.store import PythonStore

_destroy: Any = dist.destroy_process_group

_stores: list[PythonStore] = []
"""Those that were made for a process group, and that nobody else has."""


def end_with_group(store: PythonStore) -> None:
    """Close this store when the default process group that uses it is destroyed."""
    _stores.append(store)


def install() -> None:
    """Patch `destroy_process_group`; a second call does nothing.

    To be called early: a script that imports the function by name keeps the one that it got.
    """
    dist.destroy_process_group = _patched_destroy
    distributed_c10d.destroy_process_group = _patched_destroy


@functools.wraps(_destroy)
def _patched_destroy(*args: Any, **kwargs: Any) -> None:
    ending = _stores_in_use()
    _destroy(*args, **kwargs)
    if dist.is_initialized():  # it was another group than the default one
        return
    for store in ending:
        _stores.remove(store)
        store.close()
    end_left_servers()


def _stores_in_use() -> list[PythonStore]:
    """Those of `_stores` that process groups use."""
    if not _stores:
        return []
    used = [store for _, store in distributed_c10d._world.pg_map.values()]
    bases = {id(getattr(store, "_underlying_non_prefix_store", store)) for store in used}
    return [store for store in _stores if id(store) in bases]
