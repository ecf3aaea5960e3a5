"""The events of a server on their way to its file, what happens behind relays included; and stall reports."""

from __future__ import annotations

import logging
import time
from _thread import start_new_thread
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rallypoint.errors import ProtocolError
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.rollcall.question import Question

if TYPE_CHECKING:  # most servers write no events, and are up sooner without these
    from rallypoint.store.rollcall.events import Event, SnapshotChanges
    from rallypoint.store.server.reporting.event_file import EventLog

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

            from rallypoint.store.server.reporting.event_file import EventLog

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


def _start_thread(work: Callable[..., None], *values: object) -> None:
    """To read a snapshot of thousands of clients takes longer than the loop may stand still.

    RuntimeError if the system has no thread to give. Not by `threading`: out of memory, its threads may die
    before they have reported that they run, and their `start` waits for that for ever.
    """
    start_new_thread(work, values)


class RelayEvents:
    """Looks behind the relays of a server, as the server does not see what happens there."""

    def __init__(self, core: ServerCore[Any], events: Events) -> None:
        self._core = core
        self._events = events
        self._heard: SnapshotChanges | None = None
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
        try:
            _start_thread(self._follow, snapshot)
        except RuntimeError:  # the system has no thread to give: the next look may get one
            self._next_look = 0.0

    def _follow(self, snapshot: bytes) -> None:
        began = time.monotonic()
        try:
            from rallypoint.store.rollcall.events import SnapshotChanges
            from rallypoint.store.rollcall.snapshot import Snapshot

            self._heard = self._heard or SnapshotChanges()
            for event in self._heard.read(Snapshot.from_json(snapshot), self._core.has_key):
                self._events.put(event)
        except ProtocolError as error:
            logger.debug("what relays tell cannot be read: %s", error.message)
        except Exception:  # a fault of ours, which must not end all other events
            logger.exception("what relays tell could not be followed")
        finally:
            now = time.monotonic()
            self._next_look = now + _LOOKING_SHARE * (now - began)


class StallReports:
    """Reports when a stall has lasted `Limits.stall_seconds`, and again whenever it is twice as long."""

    def __init__(self, core: ServerCore[Any], events: Events) -> None:
        self._core = core
        self._events = events
        self._due = core.limits.stall_seconds

    def look(self) -> None:
        """About once a second."""
        core = self._core
        lasted = core.stalled_seconds
        if lasted < core.limits.stall_seconds:
            self._due = core.limits.stall_seconds
        elif lasted >= self._due:
            self._due = 2 * lasted
            core.looks.start(Question(), partial(self._report, lasted))

    def _report(self, seconds: float, snapshot: bytes) -> None:
        try:
            _start_thread(self._judge, snapshot, seconds)
        except RuntimeError as error:  # the system has none to give
            logger.warning("no progress for %.0f s; who waits cannot be told: %s", seconds, error)

    def _judge(self, snapshot: bytes, seconds: float) -> None:
        from rallypoint.store.rollcall.clients import whole
        from rallypoint.store.rollcall.events import Stalled  # late: every server would start later
        from rallypoint.store.rollcall.judgement import judge
        from rallypoint.store.rollcall.roll import stall_text
        from rallypoint.store.rollcall.snapshot import Snapshot

        try:
            roll = judge(whole(Snapshot.from_json(snapshot)))
        except ProtocolError as error:
            text = f"no progress for {seconds:.0f} s; {error.message}"
        else:
            if not roll.awaited:  # those who wait are launchers or tools
                return
            text = stall_text(roll, seconds)
        logger.warning("%s", text)
        self._events.put(Stalled(time.time(), seconds, text))
