"""When a process that stands by takes over: it has seen no sign of the leader for a while. Pure."""

from __future__ import annotations

from typing import Final

from rallypoint.store.replica.core.leader import LEASE_SECONDS
from rallypoint.store.replica.log import Leadership

RENEW_SECONDS: Final = 0.3
"""How often a leader says that it is alive."""
SILENCE_SECONDS: Final = LEASE_SECONDS + RENEW_SECONDS
"""After so long without a sign, its lease is over: it was renewed before the last sign was seen. Clocks of
two machines need not agree for that; but a second has to last equally long on both, within a quarter."""


class Watch:
    """What has been seen of the leader."""

    __slots__ = ("_since", "seen")

    def __init__(self) -> None:
        self.seen: Leadership | None = None
        """What was seen last."""
        self._since = 0.0

    def look(self, now: float, seen: Leadership) -> bool:
        """The engine has answered this, and now is when the answer has come: whether to take over.

        Then `Log.acquire` is due, with `seen`. It fails if there was a sign of the leader meanwhile.
        """
        if seen != self.seen:
            self.seen, self._since = seen, now
        return not seen.address or now - self._since >= SILENCE_SECONDS
