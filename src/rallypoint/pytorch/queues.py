"""Queues on a torch without libuv: its C++ client refuses them, though our server has them.

So a client of ours does them for such a store, on connections of its own, which it makes for the first one.
C++ passes a `PrefixStore`'s queues on to that refusing client: so these are done here as well.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch.distributed as dist

from rallypoint.pytorch.store import as_torch_errors
from rallypoint.rollcall.identity import Role
from rallypoint.stores.tcp import TCPStore

METHODS: Final = ("queue_push", "queue_pop", "queue_len")  # torch 2.8 and later

_TorchStore: Any = dist.TCPStore
_PrefixStore: Any = dist.PrefixStore
_init_prefixed: Any = _PrefixStore.__init__

_clients: weakref.WeakKeyDictionary[Any, TCPStore | None] = weakref.WeakKeyDictionary()
"""The stores whose queues are ours, and the client of each that has used one."""
_prefixes: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()


def take_over(store: Any) -> None:
    """Do the queues of a C++ client that refuses them."""
    _clients[store] = None


def are_ours(store: Any) -> bool:
    """Whether the queues of a store are done here: it was to be on libuv, which this torch refuses."""
    return store in _clients


def install() -> None:
    """Patch the queues of torch's stores."""
    for name in METHODS:
        for kind, substitute in ((_TorchStore, _of_client), (_PrefixStore, _of_prefix)):
            native = getattr(kind, name, None)
            if native is not None and not hasattr(native, "is_ours"):
                method = substitute(name, native)
                method.is_ours = True
                setattr(kind, name, method)
    _PrefixStore.__init__ = _note_prefix


def _note_prefix(self: Any, prefix: str, store: Any) -> None:
    _init_prefixed(self, prefix, store)
    _prefixes[self] = (prefix, store)


def _of_client(name: str, native: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _clients:
            return native(self, *args, **kwargs)
        with as_torch_errors():
            return getattr(_client_of(self), name)(*args, **kwargs)

    return method


def _of_prefix(name: str, native: Any) -> Any:
    def method(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return native(self, key, *args, **kwargs)
        except NotImplementedError:
            if self not in _prefixes:
                raise
        prefix, store = _prefixes[self]
        return getattr(store, name)(f"{prefix}/{key}", *args, **kwargs)

    return method


def _client_of(store: Any) -> TCPStore:
    client = _clients[store]
    if client is None:
        client = _clients[store] = TCPStore(store.host, store.port, timeout=store.timeout, role=Role.TOOL)
    client.set_timeout(store.timeout)
    return client
