"""The operations of every store, with torch's names, parameters and results.

Keys are `str`. Values go in as `str` or `bytes` and come out as `bytes`. A time-out is a `timedelta` or a
number of seconds; where none is given, the store's own holds. All stores are safe to use from many
threads; a call that waits in one does not hold up another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

from rallypoint.errors import StoreTimeoutError, UsageError
from rallypoint.store.wire.encoding import I64_MAX, I64_MIN, pack_i64
from rallypoint.text import LONGEST_SENTENCE, shown

Timeout = timedelta | float
Value = str | bytes

_StoreType = TypeVar("_StoreType", bound="Store")

DEFAULT_TIMEOUT = timedelta(seconds=300)

NOTHING = b"\0"
"""To look at a key: compared with this, and set to this, it stays as it is. See `seen`."""

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


def as_keys(keys: Sequence[str]) -> Sequence[str]:
    """The keys; UsageError for a text alone, which would be taken for a list of its letters."""
    if isinstance(keys, str):
        raise UsageError(f"{keys!r} is one key, where a list is wanted", hint=f"write [{keys!r}]")
    return keys


def as_pairs(keys: Sequence[str], values: Sequence[Value]) -> Iterator[tuple[str, Value]]:
    """Keys with their values; UsageError if their numbers differ."""
    if len(keys) != len(values):
        raise UsageError(f"multi_set got {len(keys)} keys, but {len(values)} values")
    return zip(as_keys(keys), values, strict=True)


def seen(found: bytes) -> bytes:
    """The value of a key that was compared with `NOTHING`; empty if there is none."""
    return b"" if found == NOTHING else found


def keys_missing(place: str, missing: Sequence[str], count: int, seconds: float) -> StoreTimeoutError:
    """The error for `count` keys, of which some did not come to the store at `place` in time."""
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
    """A key-value store that the ranks of a job share."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._timeout = to_seconds(timeout)

    # Values

    @abstractmethod
    def set(self, key: str, value: Value) -> None:
        """Store a value, in the place of an older one."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The value of a key; waits for it. StoreTimeoutError names the key if it does not come."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to the number at a key, 0 if there is none, and return the sum.

        A value that is no number is an error: over TCP, the server ends the connection.
        """

    @abstractmethod
    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Store the desired value if the present one is the expected one; return the value after that.

        A key that is not there takes the desired value if the expected one is empty; else it
        stays away, and the expected value comes back.
        """

    @abstractmethod
    def append(self, key: str, value: Value) -> None:
        """Append to the value of a key, which is created if need be."""

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

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store several values at once."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Delete a key; True if it was there. Queues are not touched."""

    @abstractmethod
    def num_keys(self) -> int:
        """How many keys have a value, the store's own for counting workers included, queues left out."""

    @abstractmethod
    def list_keys(self) -> list[str]:
        """The keys that have a value, in no order."""

    # Waiting

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there; a queue that holds something is."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all keys are there. StoreTimeoutError names those that are missing."""

    @abstractmethod
    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until `world_size` callers are at this barrier; then the key can be used again.

        A caller that times out gets a StoreTimeoutError, and is not counted any more.
        """

    # Queues

    @abstractmethod
    def queue_push(self, key: str, value: Value) -> None:
        """Append a value to a queue, and wake one caller that waits for it."""

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue; waits for one, or raises QueueEmptyError if `block` is False."""

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """How many values a queue holds."""

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
