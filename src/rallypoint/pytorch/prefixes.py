"""torch's `PrefixStore` over a store of ours: what C++ does not pass on, and stores that are not torch's.

C++ passes most operations of a `PrefixStore` on to the store below, but to one that is written in Python it
passes no queues and no `list_keys`. And it refuses a `rallypoint.TCPStore`, which it gets from
`init_process_group(store=...)`: so that is wrapped first.
"""

from __future__ import annotations

from typing import Any, Final

import torch.distributed as dist

from rallypoint.pytorch.arguments import as_key
from rallypoint.pytorch.store import PythonStore, full_key
from rallypoint.stores.base import Store

_QUEUES: Final = ("queue_push", "queue_pop", "queue_len")  # torch 2.8 and later

_PrefixStore: Any = dist.PrefixStore
_init: Any = _PrefixStore.__init__
_list_keys: Any = getattr(_PrefixStore, "list_keys", None)


def install() -> None:
    """Patch torch's `PrefixStore`; a second call does nothing. Over torch's own stores it is as before."""
    if _PrefixStore.__init__ is _patched_init:
        return
    _PrefixStore.__init__ = _patched_init
    if _list_keys is not None:
        _PrefixStore.list_keys = _patched_list_keys
    for name in _QUEUES:
        if hasattr(_PrefixStore, name):
            setattr(_PrefixStore, name, _passing_on(name, getattr(_PrefixStore, name)))


def _patched_init(self: Any, prefix: str, store: Any) -> None:
    _init(self, prefix, PythonStore.over(store) if isinstance(store, Store) else store)


def _patched_list_keys(self: Any) -> Any:
    store = self._underlying_non_prefix_store
    if not isinstance(store, PythonStore):
        return _list_keys(self)
    prefix = full_key(self, "")
    return [key[len(prefix) :] for key in store.list_keys() if key.startswith(prefix)]


def _passing_on(name: str, native: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        store = self._underlying_non_prefix_store
        if not isinstance(store, PythonStore):
            return native(self, *args, **kwargs)
        key, *rest = args or (kwargs.pop("key", None),)
        try:
            whole = full_key(self, as_key(key))
        except TypeError:
            return native(self, key, *rest, **kwargs)  # which refuses it
        return getattr(store, name)(whole, *rest, **kwargs)

    return method
