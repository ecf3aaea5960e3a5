"""What happens to the clients of a server, as events for its events file. Pure.

A wait is told of when it ends, and while it lasts only if it is long. Of the errors of one peer, only a few
are told in a second, and then how many were left out. What happens behind relays is not seen here:
`SnapshotChanges` finds it out from snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from rallypoint.store.core.turn import PeerLimit, Turn
from rallypoint.store.rollcall.events import (
    MIN_WAIT,
    STILL_WAITING,
    BarrierComplete,
    Connected,
    Erred,
    Event,
    Hung,
    Joined,
    Left,
    RoundPlanned,
    Started,
    Stopped,
    Waited,
    Waiting,
)
from rallypoint.store.rollcall.identity import Identity
from rallypoint.store.rollcall.plan import Plan
from rallypoint.store.rollcall.question import KEYS_NAMED, STALL_BYTES, key_name
from rallypoint.text import counted

_PLAN_BYTES: Final = 1 << 18
"""Enough for thousands of machines. A longer plan would hold up the server."""


class Numbered(Protocol):
    """A client's connection, or the ticket of a relay."""

    since: float
    """When the client connected, or when the ticket began to wait; by the monotonic clock."""

    @property
    def id(self) -> int:
        """The number by which events call the client or the relay."""


class _Wait:
    __slots__ = ("began", "is_told", "keys", "since")

    def __init__(self, keys: Sequence[bytes], turn: Turn) -> None:
        self.keys = keys
        self.since = turn.now  # its length comes from this clock: the time of day may be set meanwhile
        self.began = turn.wall
        self.is_told = False  # whether an event has said already that it is under way


class EventJournal:
    """Is told what happens to the clients of a core, and makes events of it.

    Most servers write no events: they have no journal, and start sooner without importing what an event is.
    """

    def __init__(self, turn: Turn, put: Callable[[Event], None]) -> None:
        """`put` takes each event, in order."""
        self._turn = turn
        self._put = put
        self._waits: dict[Numbered, _Wait] = {}
        self._errors = PeerLimit()
        self._plan = b""
        self._stall = b""

    # The server

    def started(self, kind: str, host: str, pid: int, version: str, backend: str) -> None:
        """A server or a relay begins to serve."""
        self._put(Started(self._turn.wall, host, pid, version, backend, kind))

    def stopped(self) -> None:
        """The server serves no more. This is the last call."""
        for client in list(self._waits):
            self._end(client, by=0, gave_up=True)
        self._tell_left_out(float("inf"))
        self._put(Stopped(self._turn.wall))

    # Clients

    def connected(self, client: Numbered, peer: str) -> None:
        """A client has shaken hands."""
        self._put(Connected(self._turn.wall, client.id, peer))

    def named(self, client: Numbered, who: Identity) -> None:
        """It is known now which rank or tool the client is."""
        self._put(Joined(self._turn.wall, client.id, who))

    def left(self, client: Numbered, why: str) -> None:
        self._end(client, by=0, gave_up=True)
        self._put(Left(self._turn.wall, client.id, why))

    def erred(self, peer: str, reason: str) -> None:
        """A client was refused, or is closed because of what it did."""
        if self._errors.admits("", peer, self._turn.now):
            self._put(Erred(self._turn.wall, peer, reason))

    def _tell_left_out(self, now: float) -> None:
        for address, count in self._errors.take_left_out(now):
            self._put(Erred(self._turn.wall, address, f"{counted(count, 'more error')} left out"))

    # Waits

    def waits(self, client: Numbered, keys: Sequence[bytes]) -> None:
        """A client begins to wait, for keys or at a barrier."""
        self._waits.setdefault(client, _Wait(keys, self._turn))

    def woken(self, waiters: Sequence[Numbered], by: Numbered) -> None:
        """Clients, and tickets of relays, wait no more because of what another has done."""
        for waiter in waiters:
            self._end(waiter, by=by.id, gave_up=False)

    def gave_up(self, client: Numbered) -> None:
        """A client waits no more, though what it waited for has not come."""
        self._end(client, by=0, gave_up=True)

    def gathered(self, key: bytes, size: int, waiters: Sequence[Numbered], last: Numbered) -> None:
        """A barrier is complete; `last` was the last to arrive. `woken` comes next."""
        seconds = self._turn.now - min(map(self._arrived, waiters))
        self._put(BarrierComplete(self._turn.wall, key_name(key), size, seconds, last.id))

    def _arrived(self, waiter: Numbered) -> float:
        wait = self._waits.get(waiter)
        return wait.since if wait is not None else waiter.since

    # Once a second

    def end_second(self, plan: bytes | bytearray | None, stall: bytes | bytearray | None) -> None:
        """Report waits that have become long, errors left out, and what a launcher has changed."""
        now, wall = self._turn.now, self._turn.wall
        self._tell_left_out(now)
        for client, wait in self._waits.items():
            seconds = now - wait.since
            if not wait.is_told and seconds >= STILL_WAITING:
                wait.is_told = True
                self._put(Waiting(wall, client.id, _names(wait), wait.began, seconds, len(wait.keys)))
        if plan is not None and len(plan) <= _PLAN_BYTES and plan != self._plan:
            self._plan = bytes(plan)
            read = Plan.from_json(self._plan.decode(errors="replace"))
            if read is not None:
                self._put(RoundPlanned(wall, read))
        found = bytes(stall[:STALL_BYTES]) if stall is not None else b""
        if found != self._stall:
            self._stall = found
            self._put(Hung(wall, found.decode(errors="replace")))

    def _end(self, client: Numbered, *, by: int, gave_up: bool) -> None:
        wait = self._waits.pop(client, None)
        if wait is None:
            return
        seconds = self._turn.now - wait.since
        if seconds >= MIN_WAIT:
            wall, count = self._turn.wall, len(wait.keys)
            self._put(Waited(wall, client.id, _names(wait), wait.began, seconds, count, by, gave_up=gave_up))


def _names(wait: _Wait) -> tuple[str, ...]:
    return tuple(key_name(key) for key in wait.keys[:KEYS_NAMED])
