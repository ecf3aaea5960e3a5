"""From events files to a timeline. Older parts of a rotated file come first; unreadable lines are counted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from rallypoint.errors import RallypointError, UsageError
from rallypoint.store.rollcall.events import Event, Started, from_content
from rallypoint.text import counted
from rallypoint.watch.timeline.judgement import Timeline, judge
from rallypoint.watch.timeline.records import RunRecord, merge

_LONGEST_LINE: Final = 16 << 20
"""Bytes: a file with longer lines is no events file, and must not fill the memory."""
_AT_ONCE: Final = 512
_HINT: Final = "name a file that `rallypoint serve --events` has written"


@dataclass
class Reading:
    """The content of one events file and its older parts."""

    path: Path
    wanted: int | None
    """The run to read, from 1; None: the last."""
    record: RunRecord = field(default_factory=RunRecord)
    """The run that is wanted, if it is there."""
    runs: int = 0
    garbage: int = 0
    """Lines that are no events."""
    unknown: int = 0
    """Events of kinds that this version does not know."""

    _runs_of: dict[tuple[int, str], int] = field(default_factory=dict)
    """The present run of each store that is in the file: its process, and its name if it has one."""

    @property
    def run(self) -> int:
        """Which run `record` is, from 1."""
        return self.wanted or self.runs

    def add(self, content: Any) -> None:
        """Add an event, as JSON."""
        try:
            event = from_content(content)
        except ValueError:
            self.garbage += 1
        else:
            if event is None:
                self.unknown += 1
            else:
                pid, store = content.get("pid"), content.get("store")
                process = pid if isinstance(pid, int) else 0
                self._add(event, (process, store if isinstance(store, str) else ""))

    def _add(self, event: Event, writer: tuple[int, str]) -> None:
        if isinstance(event, Started) or writer not in self._runs_of:
            self.runs += 1
            self._runs_of[writer] = self.runs
            if self.wanted in (None, self.runs):
                self.record = RunRecord()
        if self._runs_of[writer] == self.run:
            self.record.add(event)

    def remarks(self) -> Iterator[str]:
        if self.runs > 1:
            yield f"{self.path} has {self.runs} runs, this is number {self.run}; --run shows another"
        if self.garbage:
            yield f"{counted(self.garbage, 'line')} of {self.path} cannot be read, and were passed over"
        if self.unknown:
            events = counted(self.unknown, "event")
            yield f"{events} in {self.path} are of kinds that this version does not know"


def read_timeline(paths: Sequence[Path], run: int | None = None) -> Timeline:
    """The start-up that these events files describe, by default of their last runs."""
    readings = [read_events(path, run) for path in paths]
    timeline = judge(readings[0].record if len(readings) == 1 else merge([each.record for each in readings]))
    remarks = [remark for each in readings for remark in each.remarks()]
    return replace(timeline, remarks=(*timeline.remarks, *remarks))


def read_events(path: Path, run: int | None = None) -> Reading:
    """Read a run of an events file, by default the last. UsageError if the file or the run is not there."""
    reading = Reading(path, run)
    lines = _lines_of(_parts_of(path))
    while some := list(islice(lines, _AT_ONCE)):
        for content in _contents_of(some):
            reading.add(content)
    if not reading.runs:
        what = "no event" if reading.garbage else "nothing"
        raise UsageError(f"there is {what} in {path}", hint=_HINT)
    if run is not None and not 1 <= run <= reading.runs:
        raise UsageError(
            f"there is no run {run} in {path}", hint=f"give --run a number from 1 to {reading.runs}"
        )
    return reading


def _parts_of(path: Path) -> list[Path]:
    """An events file and its older parts, the oldest first."""
    if not path.exists() or path.is_dir():
        hint = "name one that `rallypoint serve --events` has written"
        raise UsageError(f"there is no file {path}", hint=hint)
    parts = [path]
    while (older := path.with_name(f"{path.name}.{len(parts)}")).is_file():
        parts.append(older)
    return parts[::-1]


def _lines_of(parts: Sequence[Path]) -> Iterator[bytes]:
    for part in parts:
        try:
            with part.open("rb") as file:
                yield from iter(partial(file.readline, _LONGEST_LINE), b"")
        except OSError as error:
            raise RallypointError(f"cannot read {part}: {error.strerror or error}") from error


def _contents_of(lines: Sequence[bytes]) -> Iterable[object]:
    """The lines as JSON; None for a line that is no JSON. All at once is twice as fast as one by one."""
    contents = _content_of(b"[%b]" % b",".join(lines))
    if isinstance(contents, list) and len(contents) == len(lines):
        return contents
    return (_content_of(line) for line in lines if line.strip())  # one is torn, perhaps the last


def _content_of(text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
