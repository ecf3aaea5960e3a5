"""`PythonStore`: one of our stores as a `torch.distributed.Store`; and our errors in torch's words.

For torch builds whose own C++ client does not work, and for our file store. gloo, NCCL, DDP, new_group and
the object collectives only ask for a `Store`, so they work on it. A program should not notice: arguments,
results, exception types and the first words of messages are torch's.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import ceil
from operator import attrgetter
from typing import Any

import torch.distributed as dist

from rallypoint.client.base import Store
from rallypoint.client.file import FileStore
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import (
    BindError,
    ConnectError,
    ConnectionLostError,
    PortInUseError,
    QueueEmptyError,
    RallypointError,
    StoreTimeoutError,
    UsageError,
)
from rallypoint.pytorch.arguments import (
    StoreParameters,
    as_flag,
    as_key,
    as_keys,
    as_number,
    as_timeout,
    as_timeout_or_none,
    as_value,
    as_values,
    milliseconds,
    seconds,
)

_kept: list[PythonStore] = []


_NETWORK = (BindError, ConnectError, ConnectionLostError, PortInUseError)

# torch's words, which callers look for: ours stand behind them.
_WORDS: dict[type[RallypointError], str] = {
    PortInUseError: "EADDRINUSE, address already in use: ",
    QueueEmptyError: "queue is empty: ",
    ConnectionLostError: (
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash? "
    ),
}


def _type_for(error: RallypointError) -> Any:
    if isinstance(error, _NETWORK):
        return dist.DistNetworkError
    if isinstance(error, QueueEmptyError):
        return getattr(dist, "QueueEmptyError", dist.DistStoreError)  # torch 2.8 and later
    return dist.DistStoreError


@contextmanager
def as_torch_errors(late: Callable[[StoreTimeoutError], str] = lambda _: "") -> Iterator[None]:
    """Errors of ours leave the block as those that torch's own store would have raised, with our message.

    `late` gives torch's words for a time-out. A UsageError is a ValueError, as torch's are, and stays.
    """
    try:
        yield
    except UsageError:
        raise
    except RallypointError as error:
        words = late(error) if isinstance(error, StoreTimeoutError) else _WORDS.get(type(error), "")
        raise _type_for(error)(f"{words}{error}") from error


def _operation(name: str, *kinds: Callable[[object], object]) -> Callable[..., Any]:
    """The operation of this name, of our store, for torch's arguments.

    What torch refuses goes to torch's own method, which says so in its own words.
    """
    refuse = getattr(dist.Store, name, None)

    def method(self: PythonStore, *args: object, **kwargs: object) -> Any:
        try:
            if kwargs or len(args) != len(kinds):
                raise TypeError("as many as kinds, by position")
            given = [kind(arg) for kind, arg in zip(kinds, args, strict=True)]
        except TypeError:
            if refuse is None:  # a torch without this operation
                raise
            return refuse(self, *args, **kwargs)
        return self._do(name, *given)

    return method


class PythonStore(dist.Store):  # type: ignore[misc]  # torch is not typed here
    """A torch store over one of ours.

    C++ calls back into it from threads of its own, each waiting on a connection of its own. It looks for some
    methods by names of its own: `deleteKey` and `getNumKeys`. The time-out is kept in C++, since C++ changes
    it there without calling back: `timeout` and `set_timeout` are torch's.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        super().__init__()
        self.set_timeout(store.timeout)
        self._told = store.timeout
        """The time-out that our store was told last."""
        # C++ holds the object, but not its Python half, which would vanish with the last Python
        # reference while a process group still uses it: so it lives as long as the process.
        _kept.append(self)

    @classmethod
    def over(cls, store: Store) -> PythonStore:
        """The torch store over this one: the same one each time."""
        return next((each for each in _kept if each._store is store), None) or cls(store)

    @property  # type: ignore[misc]  # nobody assigns to it
    def __class__(self) -> Any:
        """For `isinstance`: the class of torch's that this stands for."""
        twin = {TCPStore: "TCPStore", FileStore: "FileStore"}.get(type(self._store), "")
        return getattr(dist, twin, PythonStore)

    @property
    def is_open(self) -> bool:
        return any(self is each for each in _kept)

    def __repr__(self) -> str:
        return f"PythonStore({self._store!r})"

    # torch's stores have these as well; AttributeError if ours is another kind of store.
    host = property(attrgetter("_store.host"))
    port = property(attrgetter("_store.port"))
    libuvBackend = property(attrgetter("_store.libuvBackend"))  # noqa: N815 - torch's name
    path = property(attrgetter("_store.path"))

    set = _operation("set", as_key, as_value)
    get = _operation("get", as_key)
    compare_set = _operation("compare_set", as_key, as_value, as_value)
    append = _operation("append", as_key, as_value)
    add = _operation("add", as_key, as_number)
    multi_get = _operation("multi_get", as_keys)
    check = _operation("check", as_keys)
    delete_key = deleteKey = _operation("delete_key", as_key)  # noqa: N815
    num_keys = getNumKeys = _operation("num_keys")  # noqa: N815
    list_keys = _operation("list_keys")
    queue_push = _operation("queue_push", as_key, as_value)
    queue_len = _operation("queue_len", as_key)
    has_extended_api = _operation("has_extended_api")
    _multi_set = _operation("multi_set", as_keys, as_values)
    _wait = _operation("wait", as_keys)
    _wait_for = _operation("wait", as_keys, as_timeout)
    _queue_pop = _operation("queue_pop", as_key, as_flag)
    _barrier = _operation("barrier", as_key, as_number, as_timeout_or_none)

    def wait(self, *args: object, **kwargs: object) -> None:
        (self._wait_for if len(args) == 2 else self._wait)(*args, **kwargs)

    def multi_set(self, *args: object, **kwargs: object) -> None:
        try:
            self._multi_set(*args, **kwargs)
        except UsageError as error:
            raise dist.DistStoreError(
                f"multiSet keys and values vectors must be of same size: {error}"
            ) from error

    def queue_pop(self, key: object, block: object = True) -> Any:
        return self._queue_pop(key, block)

    def barrier(self, key: object, world_size: object, timeout: object = None) -> None:
        self._barrier(key, world_size, timeout)

    def clone(self) -> PythonStore:
        with as_torch_errors():
            return PythonStore(self._in_time().clone())

    def close(self) -> None:
        """End our store; a process group that still uses it will fail."""
        self._store.close()
        if self.is_open:
            _kept.remove(self)

    def _in_time(self) -> Store:
        """Our store, with the time-out that torch has for this one."""
        timeout = self.timeout
        if timeout != self._told:
            self._store.set_timeout(seconds(timeout))
            self._told = timeout
        return self._store

    def _do(self, name: str, *args: Any) -> Any:
        patience = args[-1] if args and isinstance(args[-1], timedelta) else self.timeout
        given = [seconds(arg) if isinstance(arg, timedelta) else arg for arg in args]

        def late(error: StoreTimeoutError) -> str:
            wait = _wait_in_file if isinstance(self._store, FileStore) else _wait_at_server
            return wait(name, args[0] if args else "", milliseconds(patience), error)

        with as_torch_errors(late):
            return getattr(self._in_time(), name)(*given)


def _wait_at_server(name: str, awaited: str | Sequence[str], waited: int, _: StoreTimeoutError) -> str:
    """What torch's TCPStore says of a wait that was too long."""
    if name == "barrier":
        return f"barrier timeout after {waited}ms, key: {awaited}\n"
    if name not in ("get", "multi_get", "wait", "queue_pop"):
        return ""
    keys = [awaited] if isinstance(awaited, str) else awaited
    return f"wait timeout after {waited}ms, keys: {', '.join(f'/{key}' for key in keys)}\n"


def _wait_in_file(name: str, awaited: str | Sequence[str], waited: int, error: StoreTimeoutError) -> str:
    """What torch's FileStore says of a wait that was too long."""
    if name in ("wait", "barrier"):
        return "Wait timeout: "
    if name not in ("get", "multi_get"):
        return ""
    key = error.keys[0] if error.keys else awaited
    return f"Timeout waiting for key: {key} after {waited} ms\n"


_CAME = re.compile(r"(\d+) of (\d+) workers have come")


@contextmanager
def in_torchs_words(wanted: StoreParameters) -> Iterator[None]:
    """Errors of ours leave the block with the types and words of torch's constructor, ours behind them."""
    with as_torch_errors():
        try:
            yield
        except ConnectError as error:
            raise dist.DistNetworkError(f"{_unreached(wanted)} {error}") from error
        except UsageError as error:
            if wanted.is_master or wanted.port or wanted.world_size == 0:  # torch looks at the last one first
                raise
            raise dist.DistNetworkError(f"{_unreached(wanted)} {error}") from error
        except PortInUseError as error:
            raise dist.DistNetworkError(f"{_port_in_use(wanted)} {error}") from error
        except StoreTimeoutError as error:
            if (came := _CAME.search(error.message)) is None:
                raise
            raise dist.DistStoreError(f"{_missing(wanted, *came.groups())} {error}") from error


def _unreached(wanted: StoreParameters) -> str:
    milliseconds = round(1000 * wanted.seconds)
    place = f"({wanted.host_name}, {wanted.port})"
    return f"The client socket has timed out after {milliseconds}ms while trying to connect to {place}."


def _port_in_use(wanted: StoreParameters) -> str:
    return (
        f"The server socket has failed to listen on any local network address. port: {wanted.port}, useIpv6: "
        f"false, code: -{errno.EADDRINUSE}, name: EADDRINUSE, message: address already in use."
    )


def _missing(wanted: StoreParameters, came: str, expected: str) -> str:
    seconds = ceil(wanted.seconds)
    return f"Timed out after {seconds} seconds waiting for clients. {came}/{expected} clients joined."
