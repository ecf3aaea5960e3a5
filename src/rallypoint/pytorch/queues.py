"""Queues on a torch without libuv: its C++ client refuses them, though our server has them.

So a client of ours does them for such a store, on connections of its own, which it makes for the first one.
A `PrefixStore` over such a store passes its queues on in C++, to the client that refuses, and does not tell
its prefix: so that is remembered here.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch.distributed as dist

from rallypoint.pytorch.store import PythonStore
from rallypoint.rollcall.identity import Role
from rallypoint.stores.tcp import TCPStore

METHODS: Final = ("queue_push", "queue_pop", "queue_len")  # torch 2.8 and later

_TorchStore: Any = dist.TCPStore
_host: Any = _TorchStore.host
_port: Any = _TorchStore.port
_PrefixStore: Any = dist.PrefixStore
_new_prefixed: Any = _PrefixStore.__new__
_clone_prefixed: Any = getattr(_PrefixStore, "clone", None)

_clients: weakref.WeakKeyDictionary[Any, PythonStore | None] = weakref.WeakKeyDictionary()
"""The stores whose queues are ours, and the client of each that has used one."""
_prefixed: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()
"""The prefix of each `PrefixStore`, and the store below it."""


def take_over(store: Any) -> None:
    """Do the queues of a C++ client that refuses them."""
    _clients[store] = None


def are_ours(store: Any) -> bool:
    """Whether the queues of a store are done here: it was to be on libuv, which this torch refuses."""
    return store in _clients


def install() -> None:
    """Patch the queues of torch's stores; to be called once."""
    for name in METHODS:
        if hasattr(_TorchStore, name):
            setattr(_TorchStore, name, _of_client(name, getattr(_TorchStore, name)))
            setattr(_PrefixStore, name, _of_prefix(name, getattr(_PrefixStore, name)))
    _PrefixStore.__new__ = _new_and_noted
    if _clone_prefixed is not None:
        _PrefixStore.clone = _patched_clone


def _new_and_noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
    made = _new_prefixed(cls)
    if cls is _PrefixStore and len(given := [*args, *kwargs.values()]) == 2:
        prefix, store = given if isinstance(given[0], str) else reversed(given)
        if isinstance(prefix, str) and isinstance(store, dist.Store):
            _prefixed[made] = (prefix, store)
    return made


def _patched_clone(self: Any) -> Any:
    if self not in _prefixed:
        return _clone_prefixed(self)
    prefix, store = _prefixed[self]
    return _PrefixStore(prefix, store.clone())


def _of_client(name: str, native: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _clients:
            return native(self, *args, **kwargs)
        return getattr(_client_of(self), name)(*args, **kwargs)

    return method


def _of_prefix(name: str, native: Any) -> Any:
    def method(self: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return native(self, key, *args, **kwargs)
        except NotImplementedError:
            if self not in _prefixed or not isinstance(key, str):
                raise
        prefix, store = _prefixed[self]
        return getattr(store, name)(f"{prefix}/{key}", *args, **kwargs)

    return method


def _client_of(store: Any) -> PythonStore:
    client = _clients[store]
    if client is None:
        place = (_host.fget(store), _port.fget(store))
        client = PythonStore(TCPStore(*place, timeout=store.timeout, role=Role.TOOL))
        weakref.finalize(store, client.close).atexit = False
        _clients[store] = client
    client.set_timeout(store.timeout)
    return client
