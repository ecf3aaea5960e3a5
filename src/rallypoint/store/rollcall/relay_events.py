"""What has happened behind relays, from one snapshot to the next: a server does not see it happen. Pure.

Snapshots tell how long ago things began, so their times are exact. How long a wait lasted comes from the
server's monotonic clock (`Snapshot.seconds`), as the time of day may be set meanwhile. What begins and ends
between two snapshots is not seen, and what has ended since the last one ended a little earlier than it seems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from rallypoint.store.rollcall.events import (
    MIN_WAIT,
    STILL_WAITING,
    Connected,
    Event,
    Joined,
    Left,
    Waited,
    Waiting,
)
from rallypoint.store.rollcall.identity import NOBODY, Identity, Role
from rallypoint.store.rollcall.snapshot import Client, Snapshot

_FIRST_NUMBER: Final = 1 << 40
"""Clients behind relays are counted from here on: a server has no connections of its own of that number."""

_SAME_SECONDS: Final = 0.5
"""Two looks at one wait do not agree to the millisecond on when it began."""

Path = tuple[int, ...]
"""The ids of the relays on the way to a client, and its own."""


@dataclass
class _Heard:
    """A client, as it was last heard of."""

    number: int
    who: Identity = NOBODY
    keys: tuple[str, ...] = ()
    count: int = 0
    since: float | None = None
    """When its wait began, in seconds after the server's start; None: it does not wait."""
    began: float = 0.0
    """The time of day at which its wait began."""
    is_told: bool = False
    """Whether it has been told that the wait is under way."""


class _Moment(NamedTuple):
    """One moment, by two clocks."""

    wall: float
    """The time of day."""
    up: float
    """Seconds after the server's start."""

    def before(self, seconds: float) -> _Moment:
        return _Moment(self.wall - seconds, self.up - seconds)


class Overheard:
    """The clients behind the relays of one server."""

    def __init__(self) -> None:
        self._heard: dict[Path, _Heard] = {}
        self._numbers = _FIRST_NUMBER

    def hear(self, snapshot: Snapshot, is_there: Callable[[str], bool]) -> Iterator[Event]:
        """What has happened since the last snapshot; `is_there` tells whether the store has a key."""
        now = _Moment(snapshot.time, snapshot.seconds)
        here = dict(_behind(snapshot, (), now))
        for path in [path for path in self._heard if path not in here]:
            heard = self._heard.pop(path)
            yield from _end_wait(heard, now, gave_up=not all(map(is_there, heard.keys)))
            yield Left(now.wall, heard.number)
        for path, (client, then) in here.items():
            if path not in self._heard:
                self._numbers += 1
                self._heard[path] = _Heard(self._numbers)
                yield Connected(then.before(client.seconds).wall, self._numbers, client.peer)
            heard = self._heard[path]
            if client.who != heard.who:
                heard.who = client.who
                yield Joined(now.wall, heard.number, client.who)
            yield from _follow_wait(heard, client, then)


def _follow_wait(heard: _Heard, client: Client, now: _Moment) -> Iterator[Event]:
    wait = max(client.waits, key=lambda each: each.seconds, default=None)
    began = now.before(wait.seconds) if wait is not None else None
    if heard.since is not None and (began is None or abs(began.up - heard.since) > _SAME_SECONDS):
        yield from _end_wait(heard, now if began is None else min(now, began), gave_up=False)
    if wait is not None and began is not None and heard.since is None:
        heard.keys, heard.count, heard.is_told = wait.keys, wait.count, False
        heard.began, heard.since = began
    if heard.since is not None and not heard.is_told and now.up - heard.since >= STILL_WAITING:
        heard.is_told = True
        seconds = now.up - heard.since
        yield Waiting(now.wall, heard.number, heard.keys, heard.began, seconds, heard.count)


def _end_wait(heard: _Heard, now: _Moment, *, gave_up: bool) -> Iterator[Event]:
    if heard.since is not None and (seconds := now.up - heard.since) >= MIN_WAIT:
        yield Waited(now.wall, heard.number, heard.keys, heard.began, seconds, heard.count, gave_up=gave_up)
    heard.since = None


def _behind(snapshot: Snapshot, path: Path, now: _Moment) -> Iterator[tuple[Path, tuple[Client, _Moment]]]:
    """The clients of all relays, and when they were as that says: a relay that is away said it before."""
    for relay in snapshot.relays:
        if relay.part is not None:
            way, then = (*path, relay.id), now.before(max(relay.part_seconds, 0.0))
            for client in relay.part.clients:
                if client.who.role is not Role.TOOL:
                    yield (*way, client.id), (client, then)
            yield from _behind(relay.part, way, then)
