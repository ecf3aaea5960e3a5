"""Which client or relay has written a key last. Pure."""

from __future__ import annotations

from typing import Final

_MOST_KEPT: Final = 1 << 20


class Writers(dict[bytes, int]):
    """The numbers of connections and sessions, by key; as far as they are kept."""

    def trim(self) -> None:
        """About once a second: bound what is kept."""
        if len(self) > _MOST_KEPT:
            self.clear()
