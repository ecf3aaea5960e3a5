"""What torch's stores take as arguments, turned into what ours take. Imports no torch.

torch's bindings take a key as text or as bytes, and keys as anything that can be gone through. Each function
here raises TypeError where they refuse; see `store` for who says so to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from operator import index

from rallypoint.store.wire.encoding import I64_MAX, I64_MIN

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
