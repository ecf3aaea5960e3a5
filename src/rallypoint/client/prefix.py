"""`PrefixStore`: a part of another store, with names of its own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from rallypoint.client.base import Store, Timeout, Value
from rallypoint.errors import RallypointError


class PrefixStore(Store):
    """Every key goes to the underlying store as `prefix/key`, as in torch; prefixes nest.

    The underlying store stays its owner's: `close` ends this object and leaves that store open, unless
    it was made by `clone`. The time-out is the underlying store's, and `num_keys` counts all of its keys.
    Errors name keys with the prefix.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(store.timeout)
        self._prefix = prefix
        self._store = store
        self._owns_store = False
        self._closed = False

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"

    @property
    def underlying_store(self) -> Store:
        """The store that this one is a part of."""
        return self._store

    # Values

    def set(self, key: str, value: Value) -> None:
        self._open_store().set(self._full(key), value)

    def get(self, key: str) -> bytes:
        return self._open_store().get(self._full(key))

    def add(self, key: str, amount: int) -> int:
        return self._open_store().add(self._full(key), amount)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        return self._open_store().compare_set(self._full(key), expected_value, desired_value)

    def append(self, key: str, value: Value) -> None:
        self._open_store().append(self._full(key), value)

    def add_and_look(
        self, counter: str, amount: int, key: str, *, after: tuple[str, Value] | None = None
    ) -> tuple[int, bytes]:
        full = None if after is None else (self._full(after[0]), after[1])
        return self._open_store().add_and_look(self._full(counter), amount, self._full(key), after=full)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._open_store().multi_get(self._all_full(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self._open_store().multi_set(self._all_full(keys), values)

    def delete_key(self, key: str) -> bool:
        return self._open_store().delete_key(self._full(key))

    def num_keys(self) -> int:
        """How many keys the whole underlying store has, as in torch; `list_keys` lists this part alone."""
        return self._open_store().num_keys()

    def list_keys(self) -> list[str]:
        """The keys of this part, without the prefix."""
        start = self._full("")
        return [key[len(start) :] for key in self._open_store().list_keys() if key.startswith(start)]

    # Waiting

    def check(self, keys: Sequence[str]) -> bool:
        return self._open_store().check(self._all_full(keys))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._open_store().wait(self._all_full(keys), timeout)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        self._open_store().barrier(self._full(key), world_size, timeout)

    # Queues

    def queue_push(self, key: str, value: Value) -> None:
        self._open_store().queue_push(self._full(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._open_store().queue_pop(self._full(key), block)

    def queue_len(self, key: str) -> int:
        return self._open_store().queue_len(self._full(key))

    # The store itself

    def clone(self) -> PrefixStore:
        """The same part of a clone of the underlying store, which the new object's `close` closes."""
        twin = PrefixStore(self._prefix, self._open_store().clone())
        twin._owns_store = True
        return twin

    def close(self) -> None:
        """End this object. The underlying store stays open, unless this is a clone."""
        self._closed = True
        if self._owns_store:
            self._store.close()

    @property
    def timeout(self) -> timedelta:
        """The underlying store's."""
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        """Change the underlying store's."""
        self._store.set_timeout(timeout)

    def _open_store(self) -> Store:
        if self._closed:
            raise RallypointError(f"{self!r} is closed", hint="make a new one, or close it later")
        return self._store

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _all_full(self, keys: Sequence[str]) -> list[str]:
        return [self._full(key) for key in keys]
