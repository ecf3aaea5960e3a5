"""The operations of every store, with torch's names, parameters and results; and `PrefixStore`.

Keys are `str`. Values go in as `str` or `bytes` and come out as `bytes`. A time-out is a `timedelta` or a
number of seconds; where none is given, the store's own holds. All stores are safe to use from many
threads; a call that waits in one does not hold up another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from rallypoint.errors import RallypointError, StoreTimeoutError, UsageError
from rallypoint.store.wire.encoding import I64_MAX, I64_MIN, pack_i64
from rallypoint.store.wire.opcodes import Op
from rallypoint.text import LONGEST_SENTENCE, shown

Timeout = timedelta | float
Value = str | bytes

_StoreType = TypeVar("_StoreType", bound="Store")

DEFAULT_TIMEOUT = timedelta(seconds=300)

NOTHING = b"\0"
"""A COMPARE_SET with this as both values reads a key, and changes nothing. See `seen`."""

_KEYS_SHOWN = 8


def to_seconds(timeout: Timeout) -> float:
    """A time-out as seconds; UsageError unless it is positive."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < math.inf:
        raise UsageError(f"the time-out is {timeout}, but must be positive and finite")
    return seconds


def to_bytes(value: Value) -> bytes:
    """A value as it is stored; TypeError if it is neither text nor bytes."""
    return value.encode() if isinstance(value, str) else bytes(memoryview(value))


def to_text(name: bytes) -> str:
    """A key as the caller knows it, from the bytes of a request."""
    return name.decode(errors="surrogateescape")


def as_keys(keys: Sequence[str]) -> Sequence[str]:
    """The keys; UsageError for a single text, which would be read as a list of its letters."""
    if isinstance(keys, str):
        raise UsageError(f"{keys!r} is one key, where a list is wanted", hint=f"write [{keys!r}]")
    return keys


def seen(found: bytes) -> bytes:
    """The value of a key that was read with `NOTHING`; empty if there is none."""
    return b"" if found == NOTHING else found


def closed_error(store: Store) -> RallypointError:
    """The error of a call to a store that is closed."""
    return RallypointError(f"{store!r} is closed", hint="make a new one, or close it later")


def keys_missing(place: str, missing: Sequence[str], count: int, seconds: float) -> StoreTimeoutError:
    """The error of a wait for `count` keys, some of which were not set at `place` in time."""
    named = ", ".join(shown(key, LONGEST_SENTENCE) for key in missing[:_KEYS_SHOWN])
    more = ", …" if len(missing) > _KEYS_SHOWN else ""
    return StoreTimeoutError(
        f"waited {seconds:g} s at {place}; {len(missing)} of {count} keys are missing: {named}{more}",
        hint="the rank that should set them is late or gone: see its log",
        keys=tuple(missing),
    )


def to_i64(number: int, what: str) -> bytes:
    """A number as the protocol carries it; UsageError if it does not fit into 64 bits."""
    if not I64_MIN <= number <= I64_MAX:
        raise UsageError(f"{what} is {number}, which goes beyond 64 bits")
    return pack_i64(number)


class Store(ABC):
    """A key-value store that the ranks of a job share.

    What does not wait is a request of the wire protocol, which each kind of store carries out in its own way.
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._timeout = to_seconds(timeout)

    # For subclasses

    @abstractmethod
    def _name(self, key: str) -> bytes:
        """A key as a request has it."""

    @abstractmethod
    def _call(self, op: Op, *blobs: bytes, tail: bytes = b"") -> Any:
        """Carry out a request that does not wait, and return its result."""

    # Values

    def set(self, key: str, value: Value) -> None:
        """Store a value, in the place of an older one."""
        self._call(Op.SET, self._name(key), to_bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key; waits for it. StoreTimeoutError names the key if it does not come."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add to the number at a key, 0 if there is none, and return the sum.

        A value that is no number is an error: over TCP, the server ends the connection.
        """
        total: int = self._call(Op.ADD, self._name(key), tail=to_i64(amount, "the amount to add"))
        return total

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Store the desired value if the present one is the expected one; return the value after that.

        A key that is not there takes the desired value if the expected one is empty; else it
        stays away, and the expected value comes back.
        """
        values = to_bytes(expected_value), to_bytes(desired_value)
        found: bytes = self._call(Op.COMPARE_SET, self._name(key), *values)
        return found

    def append(self, key: str, value: Value) -> None:
        """Append to the value of a key, which is created if need be."""
        self._call(Op.APPEND, self._name(key), to_bytes(value))

    def add_and_look(
        self, counter: str, amount: int, key: str, *, after: tuple[str, Value] | None = None
    ) -> tuple[int, bytes]:
        """Add to a number, then look at another key: the sum, and the value, which is empty if there is none.

        `after` is a key, and what is appended to its value before that. Over TCP all of it is one message in
        each direction. It is not one step: other clients may come in between.
        """
        if after is not None:
            self.append(*after)
        return self.add(counter, amount), seen(self.compare_set(key, NOTHING, NOTHING))

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys; waits for all of them."""

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store several values at once."""
        if len(keys) != len(values):
            raise UsageError(f"multi_set got {len(keys)} keys, but {len(values)} values")
        pairs = zip(as_keys(keys), values, strict=True)
        blobs = [part for key, value in pairs for part in (self._name(key), to_bytes(value))]
        self._call(Op.MULTI_SET, *blobs)

    def delete_key(self, key: str) -> bool:
        """Delete a key; True if it was there. Queues are not touched."""
        existed: bool = self._call(Op.DELETE_KEY, self._name(key))
        return existed

    def num_keys(self) -> int:
        """How many keys have a value, the store's own for counting workers included, queues left out."""
        count: int = self._call(Op.GETNUMKEYS)
        return count

    def list_keys(self) -> list[str]:
        """The keys that have a value, in no order."""
        start, names = self._name(""), self._call(Op.LIST_KEYS)
        return [to_text(name[len(start) :]) for name in names if name.startswith(start)]

    # Waiting

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there; a queue that holds something is."""
        are_there: bool = self._call(Op.CHECK, *map(self._name, as_keys(keys)))
        return are_there

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all keys are there. StoreTimeoutError names those that are missing."""

    @abstractmethod
    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until `world_size` callers are at this barrier; then the key can be used again.

        A caller that times out gets a StoreTimeoutError, and is not counted any more.
        """

    # Queues

    def queue_push(self, key: str, value: Value) -> None:
        """Append a value to a queue, and wake one caller that waits for it."""
        self._call(Op.QUEUE_PUSH, self._name(key), to_bytes(value))

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue; waits for one, or raises QueueEmptyError if `block` is False."""

    def queue_len(self, key: str) -> int:
        """How many values a queue holds."""
        length: int = self._call(Op.QUEUE_LEN, self._name(key))
        return length

    # The store itself

    @abstractmethod
    def clone(self) -> Store:
        """Another object for the same store, to be closed on its own."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections, files and servers of this object. It cannot be used any more."""

    def has_extended_api(self) -> bool:
        """Whether append, multi_get, multi_set and the queues work: they do in every store here."""
        return True

    @property
    def timeout(self) -> timedelta:
        """How long calls wait that are given no time-out of their own."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Change how long calls wait that are given no time-out of their own."""
        self._timeout = to_seconds(timeout)

    def _seconds(self, timeout: Timeout | None) -> float:
        return self._timeout if timeout is None else to_seconds(timeout)

    def __enter__(self: _StoreType) -> _StoreType:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PrefixStore(Store):
    """A part of another store: every key goes there as `prefix/key`, as in torch; prefixes nest.

    The underlying store stays its owner's: `close` ends this object and leaves that store open, unless
    it was made by `clone`. The time-out is the underlying store's, and `num_keys` counts all of its keys.
    `list_keys` lists those of this part alone, without the prefix. Errors name keys with the prefix.
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

    def _name(self, key: str) -> bytes:
        return self._store._name(self._full(key))

    def _call(self, op: Op, *blobs: bytes, tail: bytes = b"") -> Any:
        return self._open_store()._call(op, *blobs, tail=tail)

    def get(self, key: str) -> bytes:
        return self._open_store().get(self._full(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._open_store().multi_get(self._all_full(keys))

    def add_and_look(
        self, counter: str, amount: int, key: str, *, after: tuple[str, Value] | None = None
    ) -> tuple[int, bytes]:
        full = None if after is None else (self._full(after[0]), after[1])
        return self._open_store().add_and_look(self._full(counter), amount, self._full(key), after=full)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._open_store().wait(self._all_full(keys), timeout)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        self._open_store().barrier(self._full(key), world_size, timeout)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._open_store().queue_pop(self._full(key), block)

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
            raise closed_error(self)
        return self._store

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _all_full(self, keys: Sequence[str]) -> list[str]:
        return [self._full(key) for key in as_keys(keys)]
