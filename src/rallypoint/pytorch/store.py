"""`PythonStore`: one of our stores as a `torch.distributed.Store`.

For torch builds whose own C++ client does not work, and for our file store. gloo, NCCL, DDP, new_group and
the object collectives only ask for a `Store`, so they work on it. A program should not notice: arguments,
results, exception types and the first words of messages are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter, index
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
from rallypoint.store.wire.encoding import I64_MAX, I64_MIN

# Arguments --------------------------------------------------------------------------------------------------

# torch's bindings take a key as text or as bytes, and keys as anything that can be gone through. Each
# function here raises TypeError where they refuse.

_BYTES = (bytes, bytearray)

_LONGEST = timedelta(seconds=2_000_000)
"""Systems wait no longer than 2**31 milliseconds at a time."""

_SHORTEST = timedelta(milliseconds=1)


def as_key(key: object) -> str:
    return as_value(key).decode(errors="surrogateescape")


def as_value(value: object) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise TypeError("half a character") from None
    if isinstance(value, _BYTES):
        return bytes(value)
    raise TypeError("neither text nor bytes")


def as_keys(keys: object) -> list[str]:
    return [as_key(key) for key in _each(keys)]


def as_values(values: object) -> list[bytes]:
    return [as_value(value) for value in _each(values)]


def as_number(number: object) -> int:
    whole = index(number)  # type: ignore[arg-type]  # it raises TypeError itself
    if not I64_MIN <= whole <= I64_MAX:
        raise TypeError("beyond 64 bits")
    return whole


def as_flag(flag: object) -> bool:
    if not hasattr(flag, "__bool__"):
        raise TypeError("neither true nor false")
    return bool(flag)


def as_timeout(timeout: object) -> timedelta:
    if isinstance(timeout, float):
        return timedelta(seconds=timeout)
    if isinstance(timeout, timedelta):
        return timeout
    raise TypeError("no time-out")


def as_timeout_or_none(timeout: object) -> timedelta | None:
    return None if timeout is None else as_timeout(timeout)


def milliseconds(timeout: timedelta) -> int:
    """A time-out as torch counts it."""
    return int(timeout / _SHORTEST)


def seconds(timeout: timedelta) -> float:
    """A time-out for our stores. To torch, one below 0 means for ever, and 0 that nothing is awaited."""
    if timeout < timedelta(0):
        return _LONGEST.total_seconds()
    return min(max(timeout, _SHORTEST), _LONGEST).total_seconds()


def _each(things: object) -> Iterable[object]:
    if isinstance(things, Iterable) and not isinstance(things, str | bytes | bytearray | Mapping):
        return things
    raise TypeError("no sequence")


# Errors and the store ---------------------------------------------------------------------------------------

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

    C++ calls it from its own threads, each of which waits on a connection of its own, and looks for some
    methods by other names: `deleteKey` and `getNumKeys`. The time-out is kept in C++, which changes it there
    without a call: `timeout` and `set_timeout` are torch's.
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
