"""Events at a server or relay, one JSON object per line: `--events` writes them, `timeline` reads them.

Every line has `time`, the unix time by the writer's clock, `event`, one of the kinds below, `pid`, the
process that writes it, as servers of one machine may share a file, and `store`, if that one has a name.
Clients are named by the number of their connection, as in a snapshot. A client's identity is in `joined`, as
soon as it is known, and again when more is known. A reader ignores kinds and fields that it does not know:
later versions may have more.

A server does not see what happens behind its relays. `SnapshotChanges` derives it from snapshots.
Snapshots tell how long ago things began, so their times are exact. How long a wait lasted comes from the
server's monotonic clock (`Snapshot.seconds`), as the time of day may be set meanwhile. What begins and ends
between two snapshots is not seen, and what has ended since the last one ended a little earlier than it seems.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from rallypoint.codec import Within, from_json, to_json
from rallypoint.store.rollcall.identity import NOBODY, Identity, Role
from rallypoint.store.rollcall.plan import Plan
from rallypoint.store.rollcall.question import KEYS_NAMED

if TYPE_CHECKING:  # no server without relays needs it
    from rallypoint.store.rollcall.snapshot import Client, Snapshot

MIN_WAIT: Final = 0.01
"""Seconds: shorter waits are not written."""
STILL_WAITING: Final = 1.0
"""Seconds: after this time a wait is written while it lasts, as it may never end."""

_MOST_CHARACTERS: Final = 2048
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would make one for each line

Seconds = Annotated[float, Within(0, 1e11)]
"""A duration, or a unix time: the most is thousands of years from now."""
Number = Annotated[int, Within(0, (1 << 63) - 1)]


@dataclass(frozen=True)
class Event:
    """What has happened, and when."""

    time: Seconds


@dataclass(frozen=True)
class Started(Event):
    """A server or relay has started. All lines before it belong to an earlier run."""

    host: str
    pid: Number
    version: str
    backend: str
    kind: str = "server"
    """Or `relay`."""


@dataclass(frozen=True)
class Connected(Event):
    client: Number
    peer: str


@dataclass(frozen=True)
class Joined(Event):
    """The identity of a client is known. May come long after it connected, and more than once."""

    client: Number
    who: Identity


@dataclass(frozen=True)
class Left(Event):
    client: Number
    why: str = ""
    """The reason in the log; empty if it closed its connection itself."""


@dataclass(frozen=True)
class _OfWait(Event):
    """The facts of a wait, for keys or at a barrier."""

    client: Number
    keys: tuple[str, ...]
    """The first few of them: `KEYS_NAMED`."""
    began: Seconds
    """The unix time at which it began, the same in all lines of one wait."""
    seconds: Seconds
    count: Number = 1
    """How many keys it is for."""


@dataclass(frozen=True)
class Waiting(_OfWait):
    """A client has been waiting for `STILL_WAITING` seconds, and still does."""


@dataclass(frozen=True)
class Waited(_OfWait):
    """A wait of at least `MIN_WAIT` seconds has ended."""

    by: Number = 0
    """The client whose write, or whose arrival at the barrier, has ended it; 0: unknown."""
    gave_up: bool = False
    """It was cancelled, or the client left: what it waited for has not come."""


@dataclass(frozen=True)
class BarrierComplete(Event):
    key: str
    size: Number
    seconds: Seconds
    """From the first arrival to the last."""
    last: Number
    """The client that arrived last; 0: unknown."""


@dataclass(frozen=True)
class RoundPlanned(Event):
    """A launcher has written which machine has which ranks."""

    plan: Plan


@dataclass(frozen=True)
class Stalled(Event):
    """Clients have waited for `seconds` without any progress."""

    seconds: Seconds
    text: str
    """The stall report, as the log has it."""


@dataclass(frozen=True)
class Hung(Event):
    """A launcher has written a report of a stalled job."""

    text: str = ""
    """Empty: the job goes on."""


@dataclass(frozen=True)
class Erred(Event):
    """A connection was closed or refused."""

    peer: str
    reason: str


@dataclass(frozen=True)
class Stopped(Event):
    """The server or relay has stopped serving. It writes nothing more."""


@dataclass(frozen=True)
class Lost(Event):
    """Events are missing before this one: they came too fast, or the disk refused them."""

    count: Number


_KINDS: Final[dict[str, type[Event]]] = {
    "start": Started,
    "connected": Connected,
    "joined": Joined,
    "left": Left,
    "waiting": Waiting,
    "waited": Waited,
    "barrier": BarrierComplete,
    "round": RoundPlanned,
    "stall": Stalled,
    "hang": Hung,
    "error": Erred,
    "stop": Stopped,
    "lost": Lost,
}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


def to_line(event: Event, pid: int, store: str = "") -> str:
    """An event as one line, without its end. Long texts are cut, and keys beyond the first few left out.

    `store` names it if the process has several.
    """
    content = to_json(event, sparse=True)
    for name, value in content.items():
        if type(value) is str:
            content[name] = value[:_MOST_CHARACTERS]
        elif name == "keys":
            content[name] = [each[:_MOST_CHARACTERS] for each in value[:KEYS_NAMED]]
    writer = {"pid": pid, "store": store[:_MOST_CHARACTERS]} if store else {"pid": pid}
    return _encode({"time": content["time"], "event": _NAMES[type(event)], **writer, **content})


def from_content(content: object) -> Event | None:
    """The event of a parsed line; None for a kind that this version does not know.

    ValueError for an invalid event.
    """
    if not isinstance(content, dict) or not isinstance(name := content.get("event"), str):
        raise ValueError("no event: its kind is missing")
    kind = _KINDS.get(name)
    try:
        return from_json(kind, content) if kind is not None else None
    except ValueError as error:
        raise ValueError(f"no event: {error}") from None


_FIRST_NUMBER: Final = 1 << 40
"""Clients behind relays are counted from here on: a server has no connections of its own of that number."""

_SAME_SECONDS: Final = 0.5
"""Two snapshots do not agree to the millisecond on when a wait began."""

RelayPath = tuple[int, ...]
"""The ids of the relays on the way to a client, and its own."""


@dataclass
class _Heard:
    """A client, as of the last snapshot."""

    number: int
    who: Identity = NOBODY
    keys: tuple[str, ...] = ()
    count: int = 0
    since: float | None = None
    """When its wait began, in seconds after the server's start; None: it does not wait."""
    began: float = 0.0
    """The time of day at which its wait began."""
    is_told: bool = False
    """Whether an event has reported the wait while it lasts."""


class _Moment(NamedTuple):
    """One moment, by two clocks."""

    wall: float
    """The time of day."""
    up: float
    """Seconds after the server's start."""

    def before(self, seconds: float) -> _Moment:
        return _Moment(self.wall - seconds, self.up - seconds)


class SnapshotChanges:
    """The clients behind the relays of one server."""

    def __init__(self) -> None:
        self._heard: dict[RelayPath, _Heard] = {}
        self._numbers = _FIRST_NUMBER

    def read(self, snapshot: Snapshot, is_there: Callable[[str], bool]) -> Iterator[Event]:
        """The events since the last snapshot; `is_there` says whether the store has a key."""
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


def _behind(
    snapshot: Snapshot, path: RelayPath, now: _Moment
) -> Iterator[tuple[RelayPath, tuple[Client, _Moment]]]:
    """The clients of all relays, and when each row was true: a relay that is away reported it earlier."""
    for relay in snapshot.relays:
        if relay.part is not None:
            way, then = (*path, relay.id), now.before(max(relay.part_seconds, 0.0))
            for client in relay.part.clients:
                if client.who.role is not Role.TOOL:
                    yield (*way, client.id), (client, then)
            yield from _behind(relay.part, way, then)
