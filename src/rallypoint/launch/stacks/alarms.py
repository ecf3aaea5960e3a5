"""The ranks of this machine that are about to end: all ranks have to be looked at now.

Ranks whose time-out has struck, and those that have lost their connection to one of these, leave a report,
and wait for the look, two seconds at most: when the first of them ends, torchrun ends all others.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rallypoint.launch.reports import ENDING, Reports
from rallypoint.text import named_ranks


class Alarms:
    """The alarms of one machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reports = Reports(folder)
        self._heard: list[str] = []

    def heard(self) -> str | None:
        """Why to look now; None if there is no reason. Empty if ranks end only because another one does."""
        try:
            self._heard = [name for name in os.listdir(self._folder) if name.startswith(ENDING)]
        except OSError:
            self._heard = []
        if not self._heard:
            return None
        pids = {int(name.rpartition("-")[2]) for name in self._heard}
        failures = (each for each in self._reports.failures() if each.who.pid in pids)
        ranks = sorted({each.who.rank for each in failures if each.is_timeout})
        return f"a time-out has struck {named_ranks(ranks)}" if ranks else ""

    def answer(self) -> None:
        """The look has been taken: the ranks that were heard before it may end."""
        for name in self._heard:
            with suppress(OSError):
                os.unlink(self._folder / name)
        self._heard = []
