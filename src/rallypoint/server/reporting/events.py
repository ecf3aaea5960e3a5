"""The events of a server on their way to its file: its own, and what it learns of clients behind relays."""

from __future__ import annotations

import logging
import time
from _thread import start_new_thread
from typing import TYPE_CHECKING, Any, Final

from rallypoint.errors import ProtocolError
from rallypoint.rollcall.question import Question
from rallypoint.server.core.front import Front

if TYPE_CHECKING:  # most servers write no events, and are up sooner without these
    from rallypoint.rollcall.events import Event
    from rallypoint.rollcall.relay_events import Overheard
    from rallypoint.server.reporting.event_file import EventLog

logger = logging.getLogger("rallypoint.server")

_LOOKING_SHARE: Final = 20
"""Following the clients behind relays takes no more than a twentieth of the time."""
_LONGEST_LOOK: Final = 60.0
"""After so many seconds a look has failed, and another one is begun: out of memory, nobody may say so."""


class Events:
    """Writes events to a file, if one is named. Safe for threads. UsageError if it cannot be written."""

    def __init__(self, path: str = "") -> None:
        self._store = ""
        self._log: EventLog | None = None
        if path:
            from pathlib import Path

            from rallypoint.server.reporting.event_file import EventLog

            self._log = EventLog(Path(path))

    @property
    def are_wanted(self) -> bool:
        return self._log is not None

    def of_store(self, name: str) -> Events:
        """The events of another store of this server, for the same file. They end with these."""
        others = Events()
        others._store, others._log = name, self._log
        return others

    def put(self, event: Event) -> None:
        if self._log is not None:
            self._log.put(event, self._store)

    def close(self) -> None:
        if self._log is not None and not self._store:
            self._log.close()


class RelayEvents:
    """Looks behind the relays of a server, as the server does not see what happens there."""

    def __init__(self, core: Front[Any], events: Events) -> None:
        self._core = core
        self._events = events
        self._heard: Overheard | None = None
        self._next_look = 0.0

    def look(self) -> None:
        """About once a second."""
        if not self._events.are_wanted or not len(self._core.sessions):
            return
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LONGEST_LOOK
            self._core.looks.start(Question(), self._take)

    def _take(self, snapshot: bytes) -> None:
        """In a thread: to follow thousands of clients takes longer than the loop may stand still.

        Not by `threading`: out of memory, its threads may die before they have said that they run, and their
        `start` waits for that word for ever.
        """
        try:
            start_new_thread(self._follow, (snapshot,))
        except RuntimeError:  # the system has no thread to give: the next look may get one
            self._next_look = 0.0

    def _follow(self, snapshot: bytes) -> None:
        began = time.monotonic()
        try:
            from rallypoint.rollcall.relay_events import Overheard
            from rallypoint.rollcall.snapshot import Snapshot

            self._heard = self._heard or Overheard()
            for event in self._heard.hear(Snapshot.from_json(snapshot), self._core.has_key):
                self._events.put(event)
        except ProtocolError as error:
            logger.debug("what relays tell cannot be read: %s", error.message)
        except Exception:  # a fault of ours, which must not end all other events
            logger.exception("what relays tell could not be followed")
        finally:
            now = time.monotonic()
            self._next_look = now + _LOOKING_SHARE * (now - began)
