"""Queues on a torch without libuv: its C++ client refuses them, though our server has them.

So a client of ours does them for such a store, on connections of its own, which it makes for the first one.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch.distributed as dist

from rallypoint.client.tcp import TCPStore
from rallypoint.pytorch.store import PythonStore
from rallypoint.store.rollcall.identity import Role

METHODS: Final = ("queue_push", "queue_pop", "queue_len")  # torch 2.8 and later

_TorchStore: Any = dist.TCPStore
_host: Any = _TorchStore.host
_port: Any = _TorchStore.port
_libuv: Any = _TorchStore.libuvBackend
_natives: dict[str, Any] = {
    name: getattr(_TorchStore, name) for name in METHODS if hasattr(_TorchStore, name)
}

_clients: weakref.WeakKeyDictionary[Any, PythonStore | None] = weakref.WeakKeyDictionary()
"""The stores whose queues are ours, and the client of each that has used one."""


def take_over(store: Any) -> None:
    """Do the queues of a C++ client that refuses them."""
    _clients[store] = None


def are_ours(store: Any) -> bool:
    """Whether the queues of a store are done here: it was to be on libuv, which this torch refuses."""
    return store in _clients


def install() -> None:
    """Patch the queues of torch's `TCPStore`; a second call does nothing."""
    _TorchStore.libuvBackend = property(lambda self: are_ours(self) or _libuv.fget(self))
    for name, native in _natives.items():
        setattr(_TorchStore, name, _of_client(name, native))


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
