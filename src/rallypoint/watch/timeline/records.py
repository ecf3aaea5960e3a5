"""The events of one run of a server or relay, in order. Pure.

A file of a long run may have a million lines. So a record keeps only what a start-up is judged by, client by
client, and no event that a later one has made obsolete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from rallypoint.store.rollcall import events
from rallypoint.store.rollcall.identity import NOBODY, Identity
from rallypoint.store.rollcall.plan import Plan


class WaitEnding(str, Enum):
    """How a wait ended."""

    MET = "met"
    """Its keys have come, or its barrier is complete."""
    GIVEN_UP = "given up"
    """It was cancelled, or the client left."""
    OPEN = "open"
    """It had not ended when the events ended."""


class WaitRecord(NamedTuple):
    """One wait of a client; times are unix times. There may be a million of them."""

    client: int
    began: float
    ended: float
    """If it has not ended: the time of the last known event."""
    keys: tuple[str, ...]
    key_count: int
    ending: WaitEnding
    by: int = 0
    """The client that has ended it; 0: not known."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class ClientRecord:
    """One connection; times are unix times, None: not known, or not yet."""

    id: int
    peer: str = ""
    connected: float | None = None
    joined: float | None = None
    who: Identity = NOBODY
    left: float | None = None
    why: str = ""


@dataclass
class RunRecord:
    """One run."""

    writers: list[events.Started] = field(default_factory=list)
    """The processes that wrote the events; empty: the beginning of the run is not in the file any more."""
    first: float = 0.0
    """The time of the first event; 0: there is none."""
    last: float = 0.0
    clients: dict[int, ClientRecord] = field(default_factory=dict)
    waits: list[WaitRecord] = field(default_factory=list)
    """Waits that have ended, in the order of their ends."""
    barriers: list[events.BarrierComplete] = field(default_factory=list)
    stalls: list[events.Stalled] = field(default_factory=list)
    hangs: list[events.Hung] = field(default_factory=list)
    errors: list[events.Erred] = field(default_factory=list)
    plan: Plan | None = None
    """The last one."""
    lost: int = 0
    """Events that could not be written."""
    _open: dict[int, dict[float, events.Waiting]] = field(default_factory=dict)
    """Waits that have not ended, by their clients and beginnings."""

    @property
    def open_waits(self) -> list[WaitRecord]:
        """The waits that have not ended by the end of the file."""
        under_way = (each for waits in self._open.values() for each in waits.values())
        return [_wait(each, self.last, WaitEnding.OPEN) for each in under_way]

    def add(self, event: events.Event) -> None:
        """Take the next event. An event of a client behind a relay may come later than it happened."""
        time = event.time
        if time > self.last:
            self.last = time
        if time < self.first or not self.first:
            self.first = time
        match event:  # the most frequent first
            case events.Waited():
                self._add_waited(event)
            case events.Waiting():
                self._open.setdefault(event.client, {})[event.began] = event
            case events.Connected():
                client = self._client(event.client)
                client.peer, client.connected = event.peer, time
            case events.Joined():
                client = self._client(event.client)
                client.who = event.who
                if client.joined is None:
                    client.joined = time
            case events.Left():
                self._add_left(event)
            case events.BarrierComplete():
                self.barriers.append(event)
            case events.Started():
                self.writers.append(event)
            case events.RoundPlanned():
                self.plan = event.plan
            case events.Stalled():
                self.stalls.append(event)
            case events.Hung():
                self.hangs.append(event)
            case events.Erred():
                self.errors.append(event)
            case events.Lost():
                self.lost += event.count
            case events.Stopped():
                pass  # only its time matters

    def came(self, client: ClientRecord) -> float:
        """When a client connected; if that is not in the file, when the file begins."""
        return self.first if client.connected is None else client.connected

    def _client(self, number: int) -> ClientRecord:
        if number not in self.clients:
            self.clients[number] = ClientRecord(number)
        return self.clients[number]

    def _add_left(self, event: events.Left) -> None:
        client = self._client(event.client)
        client.left, client.why = event.time, event.why
        waits = self._open.pop(event.client, {}).values()
        self.waits += [_wait(each, event.time, WaitEnding.GIVEN_UP) for each in waits]

    def _add_waited(self, event: events.Waited) -> None:
        if event.client in self._open:
            self._open[event.client].pop(event.began, None)
        ending = WaitEnding.GIVEN_UP if event.gave_up else WaitEnding.MET
        self.waits.append(_wait(event, event.began + event.seconds, ending, event.by))


def _wait(event: events.Waiting | events.Waited, ended: float, ending: WaitEnding, by: int = 0) -> WaitRecord:
    return WaitRecord(event.client, event.began, ended, event.keys, event.count, ending, by)


def merge(records: Sequence[RunRecord]) -> RunRecord:
    """One record of several servers and relays of one job, whose clients get new numbers."""
    whole = RunRecord(first=min(each.first for each in records), last=max(each.last for each in records))
    for part in records:
        shift = max(whole.clients, default=0)
        whole.writers += part.writers
        whole.clients |= {
            number + shift: replace(each, id=number + shift) for number, each in part.clients.items()
        }
        whole.waits += [
            each._replace(client=each.client + shift, by=each.by and each.by + shift)
            for each in [*part.waits, *part.open_waits]
        ]
        whole.barriers += [replace(each, last=each.last and each.last + shift) for each in part.barriers]
        whole.stalls += part.stalls
        whole.hangs = sorted([*whole.hangs, *part.hangs], key=lambda each: each.time)
        whole.errors += part.errors
        whole.plan = part.plan or whole.plan
        whole.lost += part.lost
    return whole
