"""What a server or relay knows, put together a slice at a time, so that nobody waits for it. Pure.

A snapshot of 16,000 clients takes a tenth of a second. So it is made by a generator, which goes on for a
moment in each turn of the loop, and writes JSON as it goes. What changes meanwhile may be in it or not; each
row is right by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from json.encoder import encode_basestring_ascii as _quote
from typing import TYPE_CHECKING, Any, Final

from rallypoint.codec import to_json, to_text
from rallypoint.rollcall.identity import NOBODY, Identity
from rallypoint.rollcall.snapshot import Question, key_name

if TYPE_CHECKING:
    from rallypoint.server.core.front import Client as Connection
    from rallypoint.server.core.front import Front
    from rallypoint.server.core.sessions import Session

_SLICE_SECONDS: Final = 0.002
_PATIENCE_SECONDS: Final = 1.0
"""How long relays have to tell of themselves, and the system who is behind a connection."""
_FRESH_SECONDS: Final = 0.5
_AT_ONCE: Final = 4
"""As many are made at a time; others wait for their turn, and take no room until then."""
_PAUSE_SECONDS: Final = 0.01

Deliver = Callable[[bytes], None]
"""Takes a snapshot as JSON; nothing if it could not be made."""

Steps = Iterator[bool]
"""Stops wherever another may go on; True: and there is nothing to do but to wait a moment."""

Fields = Iterable[tuple[str, str] | None]
"""Names of a snapshot's fields and what they hold, as JSON; None wherever another may go on."""


@dataclass(frozen=True)
class About:
    """Where a server or relay runs."""

    version: str = ""
    host: str = ""
    pid: int = 0
    backend: str = ""


@dataclass
class _Look:
    """A snapshot that is being made, and for whom."""

    question: Question
    delivers: list[Deliver]
    is_open: bool = True
    """Whether nothing has been put together yet."""
    steps: Steps = field(default_factory=lambda: iter(()))

    def deliver(self, snapshot: bytes, on_fault: Callable[[], None]) -> None:
        """Once to each, whatever becomes of it with another."""
        delivers, self.delivers = self.delivers, []
        for deliver in delivers:
            try:
                deliver(snapshot)
            except Exception:
                on_fault()


class Looks:
    """The snapshots that one server or relay is making."""

    __slots__ = ("_front", "_under_way", "has_work", "on_fault")

    def __init__(self, front: Front[Any]) -> None:
        self._front = front
        self._under_way: list[_Look] = []
        self.has_work: Callable[[], None] = lambda: None
        """Called when there is something for `go_on`: that is to be called soon, until it returns None."""
        self.on_fault: Callable[[], None] = lambda: None
        """Called while an exception is handled that is a fault of ours."""

    def start(self, question: Question, deliver: Deliver) -> None:
        """Make a snapshot; `deliver` is called when it is there, never before this returns.

        Who asks the same before it is begun shares it: when thousands time out together, they all ask.
        """
        for each in self._under_way:
            if each.is_open and each.question == question:
                each.delivers.append(deliver)
                return
        look = _Look(question, [deliver])
        look.steps = self._steps(look)
        self._under_way.append(look)
        if len(self._under_way) == 1:
            self.has_work()

    def go_on(self) -> float | None:
        """Go on for a moment; return after how many seconds to be called again, or None when all is done."""
        end = self._front.clock() + _SLICE_SECONDS
        idle = 0
        while self._under_way and idle < min(len(self._under_way), _AT_ONCE):
            look = self._under_way.pop(0)
            waits = self._next(look)
            if waits is not None:
                self._under_way.insert(_AT_ONCE - 1, look)
            idle = idle + 1 if waits else 0
            if self._front.clock() >= end:
                return 0.0 if self._under_way else None
        return _PAUSE_SECONDS if self._under_way else None

    def _next(self, look: _Look) -> bool | None:
        """Go one step on. A fault of ours is for those alone who asked: nobody else is to wait for ever."""
        try:
            return next(look.steps, None)
        except Exception:
            self.on_fault()
            look.deliver(b"", self.on_fault)
            return None

    def _steps(self, look: _Look) -> Steps:
        front = self._front
        yield from self._gather(front.clock() + _PATIENCE_SECONDS)
        look.is_open = False
        told = {name: to_text(value) for name, value in to_json(front.sum_up(), sparse=True).items()}
        for each in chain(self._rows(front.clock()), front.describe(look.question)):
            yield False
            if each is not None:
                told[each[0]] = each[1]
        text = ",".join([f'"{name}":{value}' for name, value in told.items()])
        yield False
        look.deliver(f"{{{text}}}".encode(), self.on_fault)

    def _gather(self, deadline: float) -> Steps:
        """Ask those who know more: relays, and the system."""
        front = self._front
        now = front.clock()
        asked = []
        for session in list(front.sessions):
            if session.is_present and now - session.told_at > _FRESH_SECONDS:
                session.ask_to_tell()
                asked.append(session)
                yield False
        pending = front.find_processes()
        while front.clock() < deadline and (
            pending() or any(each.is_present and each.told_at < now for each in asked)
        ):
            yield True

    def _rows(self, now: float) -> Fields:
        """Clients, relays, and those who are gone."""
        front = self._front
        clients: list[str] = []
        present: set[int] = set()
        received, sent = front.received_before, front.sent_before
        for connection in list(front.connections):
            count = connection.count_bytes()
            received, sent = received + count[0], sent + count[1]
            if connection.session is None and connection in front.connections:  # or it has gone meanwhile
                clients.append(client_row(front, connection, count, now))
                present.add(connection.who.rank)
            yield None
        yield "received", str(received)
        yield "sent", str(sent)
        yield "clients", as_list(clients)
        relays: list[str] = []
        for session in list(front.sessions):
            relays.append(relay_row(front, session, now))
            yield None
        yield "relays", as_list(relays)
        gone: dict[int, str] = {}
        for number, who, then, why in list(front.gone):
            gone.pop(who.rank, None)  # the latest is at the end
            if who.rank not in present:
                gone[who.rank] = gone_row(number, who, now - then, why)
            yield None
        yield "gone", as_list(gone.values())


# Rows are written by hand, as there are thousands


def as_list(rows: Iterable[str]) -> str:
    return f"[{','.join(rows)}]"


def client_row(front: Front[Any], connection: Connection, count: tuple[int, int], now: float) -> str:
    """A `rollcall.snapshot.Client` as JSON; `count` is of the bytes that it has sent and been sent."""
    return (
        f'{{"id":{connection.id},"peer":{_quote(connection.peer)},"seconds":{now - connection.since:.3f},'
        f'"who":{_who(connection.who)},"operations":{connection.operations},"received":{count[0]},'
        f'"sent":{count[1]}{_waits(front.waits_of(connection), now)}}}'
    )


def relay_row(front: Front[Any], session: Session, now: float) -> str:
    """A `rollcall.snapshot.Relay` as JSON."""
    part = ""
    if session.told is not None:
        told = _quote(session.told.decode(errors="replace"))
        part = f',"part":{told},"part_seconds":{now - session.told_at:.3f}'
    return (
        f'{{"id":{session.id},"peer":{_quote(session.peer)},"seconds":{now - session.since:.3f},'
        f'"present":{"true" if session.is_present else "false"}{part}'
        f"{_waits(front.waits_behind(session), now)}}}"
    )


def gone_row(number: int, who: Identity, seconds: float, why: str) -> str:
    """A `rollcall.snapshot.Gone` as JSON."""
    return f'{{"id":{number},"who":{_who(who)},"seconds":{seconds:.3f},"why":{_quote(why)}}}'


def barrier_row(key: bytes, size: int, arrived: int, members: Iterable[tuple[int, float]]) -> str:
    """A `rollcall.snapshot.Barrier` as JSON; of its members, their ids and for how many seconds they wait."""
    rows = as_list([f"[{number},{seconds:.3f}]" for number, seconds in members])
    return f'{{"key":{_quote(key_name(key))},"size":{size},"arrived":{arrived},"members":{rows}}}'


def key_row(key: bytes, size: int, queued: int, writer: int, writer_is: str) -> str:
    """A `rollcall.snapshot.Key` as JSON."""
    return (
        f'{{"key":{_quote(key_name(key))},"size":{size},"queued":{queued},'
        f'"writer":{writer},"writer_is":{_quote(writer_is)}}}'
    )


def _who(who: Identity) -> str:
    return "{}" if who is NOBODY else to_text(who, sparse=True)


Pending = tuple[list[bytes], int, float]
"""A wait: the first few keys, how many there are, and since when."""


def _waits(pending: Sequence[Pending], now: float) -> str:
    if not pending:
        return ""
    rows = (
        f'{{"keys":[{",".join(_quote(key_name(key)) for key in keys)}],'
        f'"count":{count},"seconds":{now - since:.3f}}}'
        for keys, count, since in pending
    )
    return f',"waits":[{",".join(rows)}]'
