"""What callers give torch's stores, turned into what ours take: the constructor's parameters, and operations'
arguments. Imports no torch.

torch's bindings take a key as text or as bytes, and keys as anything that can be gone through. Each function
here raises TypeError where they refuse; see `store` for who says so to the caller.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from operator import index
from typing import Any

from rallypoint.store.server.loops.backend import Choice, choose
from rallypoint.store.wire.encoding import I64_MAX, I64_MIN


@dataclass(frozen=True)
class StoreParameters:
    """The parameters of torch's constructor, with its names and defaults."""

    host_name: str
    port: int
    world_size: int | None = None
    is_master: bool = False
    timeout: timedelta | float = timedelta(seconds=300)
    wait_for_workers: bool = True
    multi_tenant: bool = False
    master_listen_fd: int | None = None
    use_libuv: bool | None = None

    def as_given(self) -> dict[str, Any]:
        """The parameters, without those that torch has defaults of its own for."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def place(self) -> tuple[str, int]:
        return self.host_name, self.port

    @property
    def seconds(self) -> float:
        """The time-out."""
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else float(self.timeout)

    @property
    def workers(self) -> int:
        """How many workers a master waits for; 0 if for none. torch's own -1 means that, too."""
        return max(self.world_size or 0, 0) if self.wait_for_workers else 0

    @property
    def backend(self) -> Choice:
        """Of our server: as the caller says, else as USE_LIBUV says. torch's own True is only a default."""
        return Choice.LEGACY if self.use_libuv is False else choose()

    @property
    def is_for_job(self) -> bool:
        """Whether it means the store of the job, as the launcher's variables name it."""
        place = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
        return place == (self.host_name, str(self.port))

    @property
    def is_agents(self) -> bool:
        """Whether the port is that of the store which torchrun's agent holds for its workers.

        A worker that wants to be the master there, by hand, becomes a client: torch's own does so, if it
        cannot bind the port.
        """
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in _TRUE
        return has_agent and os.environ.get("MASTER_PORT") == str(self.port)

    @property
    def is_of_rendezvous(self) -> bool:
        """Whether torch's own rendezvous asks, for a process group or for RPC: it alone shares servers."""
        return self.multi_tenant and self.workers > 0


_TRUE = ("1", "true", "t", "yes", "y")  # as torch reads its switches


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
