"""How long the system takes to find a name for an address: torch's own server asks on each accept."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LOCAL_CLIENT: Final = "::ffff:127.0.0.1"
"""The address under which torch's own socket, which is one for both families, sees a local client."""

_LOOKUPS: Final = 64
_STALL_S: Final = 1.0


@dataclass(frozen=True)
class LookUps:
    """How long reverse look-ups took."""

    count: int
    seconds: float

    @property
    def stall(self) -> bool:
        """Whether one of them had no answer in time: resolvers lose some, or answer none."""
        return self.seconds > _STALL_S

    def __str__(self) -> str:
        return f"{self.count} look-ups of {LOCAL_CLIENT} took {self.seconds:.3g} s"


def look_up(answered: Callable[[float], object] = lambda _: None) -> LookUps:
    """Some reverse look-ups of a local client's address, until one stalls; `answered` hears of each."""
    begun, count, taken = time.monotonic(), 0, 0.0
    while count < _LOOKUPS and taken <= _STALL_S:
        try:
            socket.getnameinfo((LOCAL_CLIENT, 9, 0, 0), 0)
        except OSError:
            pass  # no name is an answer: what counts is when
        count, taken = count + 1, time.monotonic() - begun
        answered(taken)
    return LookUps(count, taken)
