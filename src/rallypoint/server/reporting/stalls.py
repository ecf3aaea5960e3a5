"""Saying in the log who waits for what, when nobody makes progress any more."""

from __future__ import annotations

import logging
import time
from _thread import start_new_thread
from functools import partial
from typing import Any

from rallypoint.errors import ProtocolError
from rallypoint.rollcall.question import Question
from rallypoint.server.core.front import Front
from rallypoint.server.reporting.events import Events

logger = logging.getLogger("rallypoint.server")


class StallReports:
    """Reports when a stall has lasted `Limits.stall_seconds`, and again whenever it is twice as long."""

    def __init__(self, core: Front[Any], events: Events) -> None:
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
        """In a thread: what a snapshot of thousands means takes longer than the loop may stand still.

        `RelayEvents` says why it is not one of `threading`.
        """
        try:
            start_new_thread(self._judge, (snapshot, seconds))
        except RuntimeError as error:  # the system has none to give
            logger.warning("no progress for %.0f s; who waits cannot be told: %s", seconds, error)

    def _judge(self, snapshot: bytes, seconds: float) -> None:
        from rallypoint.rollcall.events import Stalled  # late: every server would start later
        from rallypoint.rollcall.judgement import judge
        from rallypoint.rollcall.snapshot import Snapshot
        from rallypoint.rollcall.words import stall_text
        from rallypoint.rollcall.workers import whole

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
