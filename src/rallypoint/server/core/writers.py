"""Which client or relay has written a key last. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_MOST_NOTED: Final = 256
"""Keys of one MULTI_SET. If there are more, their writer is not kept."""
_MOST_KEPT: Final = 1 << 20


class Writers(dict[bytes, int]):
    """The numbers of connections and sessions, by key; as far as they are kept."""

    def note_all(self, keys: Sequence[bytes], writer: int) -> None:
        """Several keys have been written at once. To note very many would take as long as to write them."""
        if len(keys) <= _MOST_NOTED:
            for key in keys:
                self[key] = writer
        elif self:
            for key in self.keys() & set(keys):
                del self[key]

    def trim(self) -> None:
        """About once a second: bound what is kept."""
        if len(self) > _MOST_KEPT:
            self.clear()
