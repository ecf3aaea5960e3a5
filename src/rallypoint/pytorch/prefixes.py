"""torch's `PrefixStore` over a store of ours: what C++ does not pass on, and stores that are not torch's.

C++ passes most operations of a `PrefixStore` on to the store below. But to one that is written in Python it
passes no queues and no `list_keys`; and a client without libuv refuses queues in C++ (see `queues`). torch
does not tell a prefix, so it is noted here. And C++ refuses a `rallypoint.TCPStore`, which it gets from
`init_process_group(store=...)`: so that is wrapped first.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from rallypoint.client.base import Store
from rallypoint.pytorch import queues
from rallypoint.pytorch.store import PythonStore, as_key

_PrefixStore: Any = dist.PrefixStore
_init: Any = _PrefixStore.__init__
_clone: Any = getattr(_PrefixStore, "clone", None)
_list_keys: Any = getattr(_PrefixStore, "list_keys", None)

_below: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()
"""The prefix of each `PrefixStore`, and the store below it."""


def install() -> None:
    """Patch torch's `PrefixStore`; a second call does nothing. Over torch's own stores it is as before."""
    if _PrefixStore.__init__ is _patched_init:
        return
    _PrefixStore.__init__ = _patched_init
    if _clone is not None:
        _PrefixStore.clone = _patched_clone
    if _list_keys is not None:
        _PrefixStore.list_keys = _patched_list_keys
    for name in queues.METHODS:
        if hasattr(_PrefixStore, name):
            setattr(_PrefixStore, name, _passing_on(name, getattr(_PrefixStore, name)))


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
    return prefixed in _below and (isinstance(store, PythonStore) or queues.are_ours(store))


def _whole_prefix(prefixed: Any) -> str:
    prefix, store = _below[prefixed]
    return f"{_whole_prefix(store) if store in _below else ''}{prefix}/"
