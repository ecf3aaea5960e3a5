"""What happens to the clients of a server, written to its events file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.errors import ProtocolError
from rallypoint.rollcall.events import (
    MIN_WAIT,
    STILL_WAITING,
    BarrierComplete,
    Connected,
    Erred,
    Joined,
    Left,
    RoundPlanned,
    Stalled,
    Started,
    Stopped,
    Waited,
    Waiting,
)
from rallypoint.rollcall.plan import Plan
from rallypoint.rollcall.relay_events import Overheard
from rallypoint.rollcall.snapshot import KEYS_NAMED, PLAN, Question, Snapshot, key_name
from rallypoint.server.core.front import Client, Observer
from rallypoint.server.core.store import Core
from rallypoint.server.core.tickets import Ticket
from rallypoint.server.reporting.event_file import EventLog

logger = logging.getLogger("rallypoint.server")

_PLAN: Final = b"/" + PLAN.encode()
_PLAN_BYTES: Final = 1 << 18  # of thousands of machines; a longer one would hold up the server
_OVERHEAR_SHARE: Final = 20
"""To look behind relays takes no more than one part in so many of the time."""


def observe(core: Core, path: str) -> None:
    """Have what happens at a store written to a file. UsageError if it cannot be written."""
    core.observer = EventObserver(core, EventLog(Path(path)))


@dataclass
class _Wait:
    keys: Sequence[bytes]
    began: float
    is_told: bool = False
    """Whether the file says already that it is under way."""


class EventObserver(Observer):
    """Turns what it hears into events. Waits are told of when they end, unless they are long."""

    def __init__(self, core: Core, log: EventLog) -> None:
        self._core = core
        self._log = log
        self._waits: dict[object, _Wait] = {}
        self._plan = b""
        self._overheard = Overheard()
        self._is_overhearing = False
        self._next_look = 0.0

    def started(self) -> None:
        about = self._core.about
        self._log.put(
            Started(self._core.wall(), about.host, about.pid, about.version, about.backend, self._core.kind)
        )

    def stopped(self) -> None:
        """The last event; the file is closed behind it."""
        for client in list(self._waits):
            self._end(client, by=0, gave_up=True)
        self._log.put(Stopped(self._core.wall()))
        self._log.close()

    # What it hears

    def connected(self, client: Client) -> None:
        self._log.put(Connected(self._core.wall(), client.id, client.peer))

    def named(self, client: Client) -> None:
        self._log.put(Joined(self._core.wall(), client.id, client.who))

    def left(self, client: Client) -> None:
        self._end(client, by=0, gave_up=True)
        self._log.put(Left(self._core.wall(), client.id, client.why))

    def waits(self, client: Client, keys: Sequence[bytes]) -> None:
        self._waits.setdefault(client, _Wait(keys, self._core.wall()))

    def woken(self, clients: Sequence[object], by: Client | None) -> None:
        for client in clients:
            self._end(client, by=by.id if by is not None else 0, gave_up=False)

    def gave_up(self, client: Client) -> None:
        self._end(client, by=0, gave_up=True)

    def gathered(self, key: bytes, size: int, clients: Sequence[object], last: Client) -> None:
        now = self._core.wall()
        began = min(self._arrived(each, now) for each in clients)
        self._log.put(BarrierComplete(now, key_name(key), size, now - began, last.id))

    def _arrived(self, member: object, now: float) -> float:
        """When a client or a relay came to a barrier."""
        if isinstance(member, Ticket):
            return now - (self._core.clock() - member.since)
        wait = self._waits.get(member)
        return wait.began if wait is not None else now

    def stalled(self, seconds: float, text: str) -> None:
        self._log.put(Stalled(self._core.wall(), seconds, text))

    def erred(self, peer: str, reason: str) -> None:
        self._log.put(Erred(self._core.wall(), peer, reason))

    def look(self) -> None:
        """Tell of waits that have become long, and of a plan that is new."""
        now = self._core.wall()
        for client, wait in self._waits.items():
            if not wait.is_told and isinstance(client, Client) and now - wait.began >= STILL_WAITING:
                wait.is_told = True
                keys = tuple(key_name(key) for key in wait.keys[:KEYS_NAMED])
                self._log.put(Waiting(now, client.id, keys, wait.began, now - wait.began, len(wait.keys)))
        self._tell_plan(now)
        self._core.find_processes()
        if len(self._core.sessions) and not self._is_overhearing and self._core.clock() >= self._next_look:
            self._is_overhearing = True
            self._core.looks.start(Question(), self._overhear)

    def _overhear(self, snapshot: bytes) -> None:
        """In a thread: what a snapshot of thousands says takes longer than the loop may stand still."""
        try:
            threading.Thread(target=self._take_overheard, args=(snapshot,), daemon=True).start()
        except RuntimeError:  # the system has none to give: the next look may find one
            self._is_overhearing = False

    def _take_overheard(self, snapshot: bytes) -> None:
        began = self._core.clock()
        try:
            for event in self._overheard.hear(Snapshot.from_json(snapshot), self._is_there):
                self._log.put(event)
        except ProtocolError as error:
            logger.debug("what relays tell cannot be read: %s", error.message)
        except Exception:  # a fault of ours, which is not to end the events of others
            logger.exception("what relays tell could not be followed")
        finally:
            now = self._core.clock()
            self._next_look = now + _OVERHEAR_SHARE * (now - began)
            self._is_overhearing = False

    def _is_there(self, key: str) -> bool:
        try:
            return not self._core.engine.missing([b"/" + key.encode(errors="surrogateescape")])
        except UnicodeEncodeError:  # no key is named like that
            return False

    def _tell_plan(self, now: float) -> None:
        value = self._core.engine.get(_PLAN)
        if value is None or len(value) > _PLAN_BYTES or value == self._plan:
            return
        self._plan = bytes(value)
        plan = Plan.from_json(self._plan.decode(errors="replace"))
        if plan is not None:
            self._log.put(RoundPlanned(now, plan))

    def _end(self, client: object, *, by: int, gave_up: bool) -> None:
        wait = self._waits.pop(client, None)
        if wait is None or not isinstance(client, Client):
            return
        now = self._core.wall()
        if now - wait.began >= MIN_WAIT:
            keys = tuple(key_name(key) for key in wait.keys[:KEYS_NAMED])
            seconds = now - wait.began
            self._log.put(
                Waited(now, client.id, keys, wait.began, seconds, len(wait.keys), by, gave_up=gave_up)
            )
