"""An engine that does not answer: since when, why, and what the log of the process says of it."""

from __future__ import annotations

import logging
import time
from typing import Final

from rallypoint.store.replica.log import EngineAwayError
from rallypoint.text import duration

logger = logging.getLogger("rallypoint.store.replica")

REMIND_SECONDS = 60.0
_HINT: Final = "`rallypoint doctor --engine URL` examines it"


class Absence:
    """What is known of an engine that is away. Threads may share it: at worst, a line is logged twice."""

    def __init__(self, name: str, then: str) -> None:
        """`name` is the engine's; `then` is what happens as long as it is away, for the log."""
        self._name = name
        self._then = then
        self._remind_at = 0.0
        self.since: float | None = None
        """Since when it has not answered, by the monotonic clock; None if it does."""
        self.error: EngineAwayError | None = None
        """The last one."""

    def begin(self, error: EngineAwayError) -> None:
        """It has not answered: the log says so, and again every minute."""
        now = time.monotonic()
        self.error = error
        since = self.since
        if since is None:
            since = self.since = now
        elif now < self._remind_at:
            return
        self._remind_at = now + REMIND_SECONDS
        so_far = f" (for {duration(now - since)})" if now > since else ""
        logger.warning("%s%s; %s. hint: %s", error.message, so_far, self._then, error.hint or _HINT)

    def end(self) -> None:
        """It has answered."""
        since, self.since = self.since, None
        if since is not None:
            logger.warning("%s answers again after %.1f s", self._name, time.monotonic() - since)
