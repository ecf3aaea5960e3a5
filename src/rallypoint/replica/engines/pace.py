"""How many records are read at once: many short ones, few long ones. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

BYTES_PER_READ: Final = 4 << 20
"""How long the records of a read are, about."""

_FEWEST: Final = 32
_MOST: Final = 1024


class Pace:
    """As many as are likely to have `BYTES_PER_READ`, by those that were read before."""

    def __init__(self) -> None:
        self._next = _FEWEST

    def take(self) -> int:
        """How many to ask for. Unless `note` is called, few the next time: they may have been too long."""
        count, self._next = self._next, _FEWEST
        return count

    def note(self, records: Sequence[bytes]) -> None:
        """What has been read."""
        length = sum(map(len, records)) + 1
        self._next = min(max(BYTES_PER_READ * len(records) // length, _FEWEST), _MOST)
