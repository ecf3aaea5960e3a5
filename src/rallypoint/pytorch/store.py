"""`PythonStore`: one of our stores as a `torch.distributed.Store`.

For torch builds whose own C++ client does not work, and for our file store. gloo, NCCL, DDP, new_group and
the object collectives only ask for a `Store`, so they work on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch.distributed as dist

from rallypoint.errors import (
    BindError,
    ConnectError,
    ConnectionLostError,
    PortInUseError,
    QueueEmptyError,
    RallypointError,
)
from rallypoint.stores.base import Store, Value

_GROUP = "default_pg/"  # torch's own prefix

_kept: list[PythonStore] = []


_NETWORK = (BindError, ConnectError, ConnectionLostError, PortInUseError)


def _type_for(error: RallypointError) -> Any:
    if isinstance(error, _NETWORK):
        return dist.DistNetworkError
    if isinstance(error, QueueEmptyError):
        return getattr(dist, "DistQueueEmptyError", dist.DistStoreError)
    return dist.DistStoreError


@contextmanager
def as_torch_errors() -> Iterator[None]:
    """Errors of ours leave the block as those that torch's own store would have raised, with our message."""
    try:
        yield
    except RallypointError as error:
        # Callers look for these words, to try another port.
        prefix = "EADDRINUSE, address already in use: " if isinstance(error, PortInUseError) else ""
        raise _type_for(error)(f"{prefix}{error}") from error


def _passed_on(name: str) -> Callable[..., Any]:
    """The method of this name of our store, with torch's exceptions."""

    def method(self: PythonStore, *args: Any, **kwargs: Any) -> Any:
        with as_torch_errors():
            return getattr(self._store, name)(*args, **kwargs)

    return method


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

    # A TCPStore of torch's has these as well; AttributeError if ours is another kind of store.
    host = property(attrgetter("_store.host"))
    port = property(attrgetter("_store.port"))
    libuvBackend = property(attrgetter("_store.libuvBackend"))  # noqa: N815 - torch's name

    def set(self, key: str, value: Value) -> None:
        self.served_a_group = self.served_a_group or key.startswith(_GROUP)
        with as_torch_errors():
            self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        with as_torch_errors():
            return self._store.add(key, value)

    get = _passed_on("get")
    compare_set = _passed_on("compare_set")
    append = _passed_on("append")
    multi_get = _passed_on("multi_get")
    multi_set = _passed_on("multi_set")
    delete_key = _passed_on("delete_key")
    num_keys = _passed_on("num_keys")
    list_keys = _passed_on("list_keys")
    check = _passed_on("check")
    wait = _passed_on("wait")
    barrier = _passed_on("barrier")
    queue_push = _passed_on("queue_push")
    queue_pop = _passed_on("queue_pop")
    queue_len = _passed_on("queue_len")
    set_timeout = _passed_on("set_timeout")
    has_extended_api = _passed_on("has_extended_api")

    # As C++ and older Python code spell them:
    deleteKey = _passed_on("delete_key")  # noqa: N815
    getNumKeys = _passed_on("num_keys")  # noqa: N815
    multiGet = _passed_on("multi_get")  # noqa: N815
    hasExtendedApi = _passed_on("has_extended_api")  # noqa: N815

    def multiSet(self, keys: Sequence[str], values: Sequence[Any]) -> None:  # noqa: N802
        self.multi_set(keys, [bytes(value) for value in values])

    def compareSet(self, key: str, expected: Any, desired: Any) -> Any:  # noqa: N802
        return self.compare_set(key, bytes(expected), bytes(desired))

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def clone(self) -> PythonStore:
        with as_torch_errors():
            return PythonStore(self._store.clone())

    def close(self) -> None:
        """End our store; a process group that still uses it will fail."""
        self._store.close()
        if self in _kept:
            _kept.remove(self)
