"""From files to a timeline."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rallypoint.text import counted
from rallypoint.watch.timeline.judgement import judge
from rallypoint.watch.timeline.reading import Reading, read_events
from rallypoint.watch.timeline.records import merge
from rallypoint.watch.timeline.timeline import Timeline


def tell(paths: Sequence[Path], run: int | None = None) -> Timeline:
    """The start-up that these events files tell of, by default of their last runs."""
    with _uncollected():
        readings = [read_events(path, run) for path in paths]
        record = readings[0].record if len(readings) == 1 else merge([each.record for each in readings])
        timeline = judge(record)
    remarks = [remark for each in readings for remark in _remarks(each)]
    return replace(timeline, remarks=(*timeline.remarks, *remarks))


@contextmanager
def _uncollected() -> Iterator[None]:
    """A million small objects are made, and none is garbage: looking for some takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _remarks(reading: Reading) -> Iterator[str]:
    if reading.runs > 1:
        yield f"{reading.path} has {reading.runs} runs, this is number {reading.run}; --run shows another"
    if reading.garbage:
        yield f"{counted(reading.garbage, 'line')} of {reading.path} cannot be read, and were passed over"
    if reading.unknown:
        events = counted(reading.unknown, "event")
        yield f"{events} in {reading.path} are of kinds that this version does not know"
