"""What says between two looks that a job is about to end: it has to be looked at now.

Ranks whose time-out has struck, and those that have lost their connection to one of these, leave a report,
and wait for the look, two seconds at most: when the first of them ends, torchrun ends all others. And torch's
watchdog writes a few words before it ends a process; they are seen where the output of a rank is a file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from rallypoint.launch.reports import ENDING, Reports
from rallypoint.text import excerpt, printable, ranks_text

_WORDS: Final = re.compile(
    rb"(?:Watchdog caught collective operation timeout|[Ww]atchdog got stuck for|Heartbeat monitor timed out"
    rb"|[Dd]ump signal due to a collective timeout|Some NCCL operations have failed or timed out)[^\r\n]*"
)
_MOST_BYTES: Final = 1 << 16
_MOST_CHARACTERS: Final = 160
_OUTPUTS: Final = (1, 2)


class Alarms:
    """The alarms of one machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reports = Reports(folder)
        self._heard: list[str] = []
        self._read: dict[tuple[int, int], int] = {}
        """By file, how much of it has been read."""

    def heard(self, pids: Iterable[int]) -> str | None:
        """Why to look now, at ranks with these processes; None: there is no reason.

        Nothing: ranks are about to end, and only because another one is.
        """
        words = next(self._words(pids), "")  # read also when they are not told, so that they are old then
        self._heard = self._endings()
        if self._heard:
            return self._struck({int(name.rpartition("-")[2]) for name in self._heard})
        return f"the log says `{words}`" if words else None

    def answer(self) -> None:
        """The look has been taken: whoever was heard before it may end."""
        for name in self._heard:
            with suppress(OSError):
                os.unlink(self._folder / name)
        self._heard = []

    def _endings(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if name.startswith(ENDING)]
        except OSError:
            return []

    def _struck(self, pids: set[int]) -> str:
        failures = (each for each in self._reports.failures() if each.who.pid in pids)
        ranks = sorted({each.who.rank for each in failures if each.is_timeout})
        noun = "rank" if len(ranks) == 1 else "ranks"
        return f"a time-out has struck {noun} {ranks_text(ranks)}" if ranks else ""

    def _words(self, pids: Iterable[int]) -> Iterator[str]:
        for text in (self._fresh(f"/proc/{pid}/fd/{number}") for pid in pids for number in _OUTPUTS):
            if found := _WORDS.search(text):
                yield excerpt(printable(found[0].decode(errors="replace")), _MOST_CHARACTERS)

    def _fresh(self, path: str) -> bytes:
        """What has come into a file since it was looked at; nothing if it is none, or is new here."""
        try:
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                return b""
            key, size = (found.st_dev, found.st_ino), found.st_size
            before = self._read.get(key, size)
            self._read[key] = size
            if size <= before:
                return b""
            with open(path, "rb") as file:
                file.seek(max(before, size - _MOST_BYTES))
                return file.read(_MOST_BYTES)
        except OSError:  # the rank is gone, or of another user
            return b""
