"""Start-ups as events, for the tests of the timeline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rallypoint.store.rollcall.events import (
    Connected,
    Event,
    Joined,
    Started,
    Waited,
    Waiting,
    from_content,
    to_line,
)
from rallypoint.store.rollcall.identity import Identity, Role, Source
from rallypoint.watch.timeline.judgement import Timeline, judge
from rallypoint.watch.timeline.records import RunRecord

BEGIN = 1_790_000_000.0
"""The unix time at which the first one comes, in most of them."""

PID = 7

START = Started(BEGIN - 2.0, "node-a", PID, "0.1.0", "libuv")


def client_of(rank: int) -> int:
    return rank + 1


def key_of(rank: int) -> str:
    """The key that gloo's rank writes in the default group."""
    return f"default_pg/0//cpu//0/{rank}"


def arrival(rank: int, came: float, host: str = "node-a", size: int = -1, pid: int = 0) -> list[Event]:
    """A rank comes, and says who it is."""
    who = Identity(host, pid or 100 + rank, rank, rank, size, Role.RANK, Source.HELLO)
    client = client_of(rank)
    return [
        Connected(BEGIN + came, client, f"10.0.0.{rank % 250}:4000"),
        Joined(BEGIN + came + 0.01, client, who),
    ]


def wait(
    rank: int, began: float, ended: float, key: str, by: int | None = None, *, gave_up: bool = False
) -> list[Event]:
    """A rank waits for a key, until another rank, `by`, writes it."""
    client, time, seconds = client_of(rank), BEGIN + began, ended - began
    under_way = [Waiting(time + 1.0, client, (key,), time, 1.0)] if seconds > 1 else []
    writer = 0 if by is None else client_of(by)
    return [*under_way, Waited(time + seconds, client, (key,), time, seconds, by=writer, gave_up=gave_up)]


def open_wait(rank: int, began: float, key: str) -> Waiting:
    """A rank waits for a key that never comes."""
    return Waiting(BEGIN + began + 1.0, client_of(rank), (key,), BEGIN + began, 1.0)


def straggler(ranks: int, last: int, late: float, per_machine: int = 4) -> list[Event]:
    """All come within a tenth of a second but one, for which the others wait."""
    events: list[Event] = [START]
    for rank in range(ranks):
        came = late if rank == last else 0.1 * rank / ranks
        events += arrival(rank, came, f"node-{rank // per_machine:04}", ranks)
        if rank != last:
            events += wait(rank, came + 0.05, late + 0.02, key_of(last), by=last)
    return in_order(events)


def in_order(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda each: each.time)


def from_line(line: str | bytes) -> Event | None:
    """What a line of an events file says. ValueError for what is no event."""
    try:
        return from_content(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no event: {error}") from None


def record_of(events: Iterable[Event]) -> RunRecord:
    """The record of a file with these events, in which times are rounded."""
    record = RunRecord()
    for event in in_order(events):
        written = from_line(to_line(event, PID))
        assert written is not None
        record.add(written)
    return record


def judged(*events: Event) -> Timeline:
    return judge(record_of(events))


def write_events(path: Path, events: Sequence[Event], pid: int = PID) -> Path:
    path.write_text("".join(f"{to_line(each, pid)}\n" for each in events))
    return path
