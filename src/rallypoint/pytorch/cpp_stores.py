"""torch's own C++ stores, patched where they lack something: queues without libuv, prefixes over our stores.

On a torch without libuv, the C++ client refuses queues, though our server has them. So a client of ours does
them for such a store, on connections of its own, which it makes for the first one.

C++ passes most operations of a `PrefixStore` on to the store below. But to one that is written in Python it
passes no queues and no `list_keys`, and to a client without libuv no queues. torch does not tell a prefix, so
it is noted here. And C++ refuses a `rallypoint.TCPStore`, which it gets from `init_process_group(store=...)`:
so that is wrapped first.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch.distributed as dist

from rallypoint.client.base import Store
from rallypoint.client.tcp import TCPStore
from rallypoint.pytorch.store import PythonStore, as_key
from rallypoint.store.rollcall.identity import Role

QUEUE_METHODS: Final = ("queue_push", "queue_pop", "queue_len")  # torch 2.8 and later

_TorchStore: Any = dist.TCPStore
_host: Any = _TorchStore.host
_port: Any = _TorchStore.port
_libuv: Any = _TorchStore.libuvBackend
_queue_methods: dict[str, Any] = {
    name: getattr(_TorchStore, name) for name in QUEUE_METHODS if hasattr(_TorchStore, name)
}

_clients: weakref.WeakKeyDictionary[Any, PythonStore | None] = weakref.WeakKeyDictionary()
"""The stores whose queues are ours, and the client of each that has used one."""


_PrefixStore: Any = dist.PrefixStore
_init: Any = _PrefixStore.__init__
_clone: Any = getattr(_PrefixStore, "clone", None)
_list_keys: Any = getattr(_PrefixStore, "list_keys", None)

_below: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()
"""The prefix of each `PrefixStore`, and the store below it."""


def install() -> None:
    """Patch torch's `TCPStore` and `PrefixStore`; a second call does nothing. All that works is as before."""
    if _PrefixStore.__init__ is _patched_init:
        return
    _TorchStore.libuvBackend = property(lambda self: has_our_queues(self) or _libuv.fget(self))
    for name, native in _queue_methods.items():
        setattr(_TorchStore, name, _of_client(name, native))
    _PrefixStore.__init__ = _patched_init
    if _clone is not None:
        _PrefixStore.clone = _patched_clone
    if _list_keys is not None:
        _PrefixStore.list_keys = _patched_list_keys
    for name in QUEUE_METHODS:
        if hasattr(_PrefixStore, name):
            setattr(_PrefixStore, name, _passing_on(name, getattr(_PrefixStore, name)))


def take_over_queues(store: Any) -> None:
    """Do the queues of a C++ client that refuses them."""
    _clients[store] = None


def has_our_queues(store: Any) -> bool:
    """Whether the queues of a store are done here: it was to be on libuv, which this torch refuses."""
    return store in _clients


def _of_client(name: str, native: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _clients:
            return native(self, *args, **kwargs)
        return getattr(_client_of(self), name)(*args, **kwargs)

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


def _patched_init(self: Any, prefix: Any, store: Any) -> None:
    base = PythonStore.over(store) if isinstance(store, Store) else store
    _init(self, prefix, base)
    _below[self] = (as_key(prefix), base)


def _patched_clone(self: Any) -> Any:
    if not _is_over_ours(self):
        return _clone(self)
    prefix, store = _below[self]
    return _PrefixStore(prefix, store.clone())


def _patched_list_keys(self: Any) -> Any:
    store = self._underlying_non_prefix_store
    if self not in _below or not isinstance(store, PythonStore):
        return _list_keys(self)
    prefix = _whole_prefix(self)
    return [key[len(prefix) :] for key in store.list_keys() if key.startswith(prefix)]


def _passing_on(name: str, native: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_over_ours(self):
            return native(self, *args, **kwargs)
        prefix, store = _below[self]
        key, *rest = args or (kwargs.pop("key", None),)
        try:
            whole = f"{prefix}/{as_key(key)}".encode(errors="surrogateescape")  # it may be any bytes
        except TypeError:
            return native(self, key, *rest, **kwargs)  # which refuses it
        return getattr(store, name)(whole, *rest, **kwargs)

    return method


def _is_over_ours(prefixed: Any) -> bool:
    """Whether the store below all prefixes has queues of which C++ does not know."""
    store = prefixed._underlying_non_prefix_store
    return prefixed in _below and (isinstance(store, PythonStore) or has_our_queues(store))


def _whole_prefix(prefixed: Any) -> str:
    prefix, store = _below[prefixed]
    return f"{_whole_prefix(store) if store in _below else ''}{prefix}/"
