"""`PythonStore`: one of our stores as a `torch.distributed.Store`.

For torch builds whose own C++ client does not work, and for our file store. gloo, NCCL, DDP, new_group and
the object collectives only ask for a `Store`, so they work on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rallypoint.pytorch.translation import as_torch_errors
from rallypoint.stores.base import Store, Value
from rallypoint.stores.tcp import TCPStore

_GROUP = "default_pg/"  # torch's own prefix

_kept: list[PythonStore] = []


class PythonStore(dist.Store):  # type: ignore[misc]  # torch is not typed here
    """A torch store over one of ours, with torch's exceptions.

    C++ calls back into it from threads of its own, each waiting on a connection of its own. Both
    spellings of the names are there, because C++ and Python use different ones.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.served_a_group = False
        """Whether it has been the store of the default process group."""
        # C++ holds the object, but not its Python half, which would vanish with the last Python
        # reference while a process group still uses it: so it lives as long as the process.
        _kept.append(self)

    def __repr__(self) -> str:
        return f"PythonStore({self._store!r})"

    @property
    def host(self) -> str:
        return self._tcp.host

    @property
    def port(self) -> int:
        return self._tcp.port

    @property
    def libuvBackend(self) -> bool:  # noqa: N802 - torch's name
        return self._tcp.libuvBackend

    @property
    def _tcp(self) -> TCPStore:
        if not isinstance(self._store, TCPStore):
            raise AttributeError(f"{self._store!r} has no address")
        return self._store

    # Values

    def set(self, key: str, value: Value) -> None:
        self.served_a_group = self.served_a_group or key.startswith(_GROUP)
        with as_torch_errors():
            self._store.set(key, value)

    def get(self, key: str) -> bytes:
        with as_torch_errors():
            return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        with as_torch_errors():
            return self._store.add(key, value)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        with as_torch_errors():
            return self._store.compare_set(key, expected_value, desired_value)

    def append(self, key: str, value: Value) -> None:
        with as_torch_errors():
            self._store.append(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with as_torch_errors():
            return self._store.multi_get(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        with as_torch_errors():
            self._store.multi_set(keys, values)

    def delete_key(self, key: str) -> bool:
        with as_torch_errors():
            return self._store.delete_key(key)

    def num_keys(self) -> int:
        with as_torch_errors():
            return self._store.num_keys()

    def list_keys(self) -> list[str]:
        with as_torch_errors():
            return self._store.list_keys()

    # Waiting

    def check(self, keys: Sequence[str]) -> bool:
        with as_torch_errors():
            return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with as_torch_errors():
            self._store.wait(keys, timeout)

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        with as_torch_errors():
            self._store.barrier(key, world_size, timeout)

    # Queues

    def queue_push(self, key: str, value: Value) -> None:
        with as_torch_errors():
            self._store.queue_push(key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        with as_torch_errors():
            return self._store.queue_pop(key, block)

    def queue_len(self, key: str) -> int:
        with as_torch_errors():
            return self._store.queue_len(key)

    # The store itself

    def clone(self) -> PythonStore:
        with as_torch_errors():
            return PythonStore(self._store.clone())

    def close(self) -> None:
        """End our store; a process group that still uses it will fail."""
        self._store.close()
        if self in _kept:
            _kept.remove(self)

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    # The same, as C++ and older Python code spell it

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return self.delete_key(key)

    def getNumKeys(self) -> int:  # noqa: N802
        return self.num_keys()

    def multiGet(self, keys: Sequence[str]) -> list[bytes]:  # noqa: N802
        return self.multi_get(keys)

    def multiSet(self, keys: Sequence[str], values: Sequence[Any]) -> None:  # noqa: N802
        self.multi_set(keys, [bytes(value) for value in values])

    def compareSet(self, key: str, expected: Any, desired: Any) -> bytes:  # noqa: N802
        return self.compare_set(key, bytes(expected), bytes(desired))

    def hasExtendedApi(self) -> bool:  # noqa: N802
        return self.has_extended_api()
