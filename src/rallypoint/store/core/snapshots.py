"""Snapshots of what a server or relay knows, made a slice at a time, so that no client waits for them.

`Snapshots` makes them of any server or relay; `Contents` adds what a store has to tell besides: its keys, its
barriers, and what its keys say about the job.

A snapshot of 16,000 clients takes a tenth of a second. So a generator makes it and writes JSON as it goes;
the driver runs it for a moment in each turn of the loop. A snapshot may or may not include a change that is
made meanwhile; each row is consistent by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from json.encoder import encode_basestring_ascii as _quote
from typing import TYPE_CHECKING, Any, Final, Protocol

from rallypoint.codec import to_json, to_text
from rallypoint.store.core.clients import Client, ClientReport, Clients, Departed
from rallypoint.store.core.context import CoreFault, DriverTask, Outbox
from rallypoint.store.core.sessions import Session, Sessions
from rallypoint.store.core.tickets import Member
from rallypoint.store.core.turn import Turn
from rallypoint.store.engine import Engine
from rallypoint.store.rollcall.identity import NOBODY, WORKER, Identity
from rallypoint.store.rollcall.plan import names_key
from rallypoint.store.rollcall.question import PLAN, STALL, STALL_BYTES, Question, key_name, owing_rank
from rallypoint.text import counted

if TYPE_CHECKING:
    from rallypoint.store.rollcall.snapshot import Snapshot

_PATIENCE_SECONDS: Final = 1.0
"""How long to wait for relays' reports, and for the system to name the processes behind connections."""
_FRESH_SECONDS: Final = 0.5
_AT_ONCE: Final = 4
"""How many snapshots are made at a time. The others wait, and occupy no memory until then."""

_QUOTED_AT_ONCE: Final = 1 << 16
_TOLD_BYTES: Final = 4 << 20
"""How many bytes of JSON clients' reports may occupy in a snapshot: a relay's report has a limit."""

SnapshotCallback = Callable[[bytes], None]
"""Takes a snapshot as JSON; empty if it could not be made."""


class SnapshotStep(Enum):
    """What the driver does after `Snapshots.step`. If that returns a client, the driver counts its bytes."""

    MORE = "go on"
    IDLE = "go on after a moment: there is nothing to do but to wait"
    DONE = "there is nothing left to do"


Fields = Iterable[tuple[str, str] | None]
"""Names of a snapshot's fields and their JSON; None between slices."""


class Subject(Protocol):
    """The server or relay of which snapshots are made."""

    outbox: Outbox[Any]
    clients: Clients[Any]
    sessions: Sessions

    @property
    def turn(self) -> Turn:
        """The time."""

    is_finding: bool
    """Whether the driver is looking for the processes behind clients."""

    def find_processes(self) -> None:
        """Have the driver find the processes behind clients, if some have no name."""

    def request_report(self, session: Session) -> bool:
        """Have a relay report what it knows, soon; False if it cannot be asked now."""

    def sum_up(self) -> Snapshot:
        """The figures, but for those that are sums over all connections."""

    def describe(self, question: Question) -> Fields:
        """The fields that only this kind of server has."""

    def waits_of(self, client: Any) -> Sequence[Pending]:
        """What a client waits for."""

    def waits_behind(self, session: Session) -> Sequence[Pending]:
        """What a relay waits for."""


@dataclass
class _PendingSnapshot:
    """A snapshot that is being made, and the callers that get it."""

    question: Question
    delivers: list[SnapshotCallback]
    is_open: bool = True
    """Whether nothing has been put together yet."""
    steps: Iterator[SnapshotStep | Client] = field(default_factory=lambda: iter(()))


class Snapshots:
    """The snapshots that one server or relay is making."""

    __slots__ = ("_idle", "_subject", "_under_way")

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._under_way: list[_PendingSnapshot] = []
        self._idle = 0  # steps in a row that had nothing to do but to wait

    def start(self, question: Question, deliver: SnapshotCallback) -> None:
        """Make a snapshot; `deliver` is called when it is complete, never before this returns.

        Equal questions share a snapshot that has not begun: thousands of ranks may time out together.
        """
        for each in self._under_way:
            if each.is_open and each.question == question:
                each.delivers.append(deliver)
                return
        pending = _PendingSnapshot(question, [deliver])
        pending.steps = self._steps(pending)
        self._under_way.append(pending)
        if len(self._under_way) == 1:
            self._subject.outbox.others.append(DriverTask.SNAPSHOTS)

    def step(self) -> SnapshotStep | Client:
        """Do one step; return what the driver does next. If that is a client, count its bytes first."""
        if not self._under_way:
            return SnapshotStep.DONE
        pending = self._under_way.pop(0)
        step = self._next(pending)
        if step is SnapshotStep.DONE:
            self._idle = 0
            return SnapshotStep.MORE if self._under_way else SnapshotStep.DONE
        self._under_way.insert(_AT_ONCE - 1, pending)
        if step is not SnapshotStep.IDLE:
            self._idle = 0
            return step
        self._idle += 1
        if self._idle < min(len(self._under_way), _AT_ONCE):
            return SnapshotStep.MORE
        self._idle = 0
        return SnapshotStep.IDLE

    def _next(self, pending: _PendingSnapshot) -> SnapshotStep | Client:
        """After a bug of ours, the callers get an empty snapshot; all other snapshots go on."""
        try:
            return next(pending.steps, SnapshotStep.DONE)
        except Exception as error:
            self._subject.outbox.others.append(CoreFault(error))
            self._deliver(pending, b"")
            return SnapshotStep.DONE

    def _deliver(self, pending: _PendingSnapshot, snapshot: bytes) -> None:
        """Deliver to each caller once, even if delivering to another one fails."""
        delivers, pending.delivers = pending.delivers, []
        for deliver in delivers:
            try:
                deliver(snapshot)
            except Exception as error:
                self._subject.outbox.others.append(CoreFault(error))

    def _steps(self, pending: _PendingSnapshot) -> Iterator[SnapshotStep | Client]:
        subject = self._subject
        yield from self._gather(subject.turn.now + _PATIENCE_SECONDS)
        yield from list(subject.clients)
        pending.is_open = False
        told = {name: to_text(value) for name, value in to_json(subject.sum_up(), sparse=True).items()}
        for each in chain(self._rows(subject.turn.now), subject.describe(pending.question)):
            yield SnapshotStep.MORE
            if each is not None:
                told[each[0]] = each[1]
        text = ",".join([f'"{name}":{value}' for name, value in told.items()])
        yield SnapshotStep.MORE
        self._deliver(pending, f"{{{text}}}".encode())

    def _gather(self, deadline: float) -> Iterator[SnapshotStep]:
        """Request reports from relays, and the processes behind clients from the system."""
        subject = self._subject
        now = subject.turn.now
        relays: list[Session] = []
        workers: list[Session] = []
        for session in list(subject.sessions):
            is_worker = session.peer.startswith(WORKER)
            if session.is_present and (is_worker or now - session.told_at > _FRESH_SECONDS):
                if subject.request_report(session):
                    (workers if is_worker else relays).append(session)
                yield SnapshotStep.MORE
        subject.find_processes()

        def are_due(asked: list[Session]) -> bool:
            return any(each.is_present and each.told_at < now for each in asked)

        while subject.turn.now < deadline and (subject.is_finding or are_due(relays)):
            yield SnapshotStep.IDLE
        # The clients of workers are this server's own: workers get as much time to find processes as it has.
        while subject.turn.now < deadline + _PATIENCE_SECONDS and are_due(workers):
            yield SnapshotStep.IDLE

    def _rows(self, now: float) -> Fields:
        """The rows of clients, of relays, and of clients that have gone."""
        subject = self._subject
        clients: list[str] = []
        present: set[int] = set()
        received, sent = subject.clients.received_before, subject.clients.sent_before
        room, left_out = _TOLD_BYTES, 0
        for client in list(subject.clients):
            received, sent = received + client.received, sent + client.sent
            if client.session is None and client in subject.clients:  # or it has gone meanwhile
                told = told_fields(client.told, now) if client.told.text else ""
                if len(told) > room:
                    told, left_out = "", left_out + 1
                room -= len(told)
                clients.append(client_row(client, told, subject.waits_of(client), now))
                present.add(client.who.rank)
            yield None
        yield "received", str(received)
        yield "sent", str(sent)
        yield "clients", as_list(clients)
        if left_out:
            what = f"what {counted(left_out, 'client')} told is left out: all together tell too much"
            yield "incomplete", _quote(what)
        relays: list[str] = []
        for session in list(subject.sessions):
            part = "" if session.told is None else (yield from quoted(session.told))
            relays.append(relay_row(session, part, subject.waits_behind(session), now))
            yield None
        yield "relays", as_list(relays)
        gone: dict[int, str] = {}
        for each in list(subject.clients.gone):
            gone.pop(each.who.rank, None)  # the latest is at the end
            if each.who.rank not in present:
                gone[each.who.rank] = gone_row(each, now)
            yield None
        yield "gone", as_list(gone.values())


# Rows are written by hand, as there are thousands


def as_list(rows: Iterable[str]) -> str:
    return f"[{','.join(rows)}]"


def told_fields(told: ClientReport, now: float) -> str:
    """A client's report and its age, as fields of its row."""
    return f',"told":{_quote(told.text.decode("ascii"))},"told_seconds":{now - told.at:.3f}'


def client_row(client: Client, told: str, pending: Sequence[Pending], now: float) -> str:
    """A `rollcall.snapshot.Client` as JSON; `told` are the `told_fields`, if there are any."""
    return (
        f'{{"id":{client.id},"peer":{_quote(client.peer)},"seconds":{now - client.since:.3f},'
        f'"who":{_who(client.who)},"operations":{client.operations},"received":{client.received},'
        f'"sent":{client.sent}{told}{_waits(pending, now)}}}'
    )


def quoted(told: bytes) -> Generator[None, None, str]:
    """A relay's report as a JSON text, a slice at a time: it may be long."""
    parts = []
    for start in range(0, len(told), _QUOTED_AT_ONCE):
        # Relays write ASCII. If this one does not, a character may be torn, and is shown as unreadable.
        parts.append(_quote(told[start : start + _QUOTED_AT_ONCE].decode(errors="replace"))[1:-1])
        yield
    return f'"{"".join(parts)}"'


def relay_row(session: Session, told: str, pending: Sequence[Pending], now: float) -> str:
    """A `rollcall.snapshot.Relay` as JSON; `told` is its report, if there is one, as JSON."""
    part = f',"part":{told},"part_seconds":{now - session.told_at:.3f}' if told else ""
    return (
        f'{{"id":{session.id},"peer":{_quote(session.peer)},"seconds":{now - session.since:.3f},'
        f'"present":{"true" if session.is_present else "false"}{part}{_waits(pending, now)}}}'
    )


def gone_row(gone: Departed, now: float) -> str:
    """A `rollcall.snapshot.Gone` as JSON."""
    seconds = f"{now - gone.at:.3f}"
    return f'{{"id":{gone.id},"who":{_who(gone.who)},"seconds":{seconds},"why":{_quote(gone.why)}}}'


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


# What only a store has to tell

_PLAN_KEY: Final = b"/" + PLAN.encode()
_STALL_KEY: Final = b"/" + STALL.encode()
_WORKERS: Final = b"init/"
_GROUP: Final = b"/0//c"  # in all keys that may tell a rank
_MEETING: Final = b"/rallypoint/meeting/"
_ROSTER: Final = b"/roster"
_ROSTERS_TOLD: Final = 16
_ROSTER_BYTES: Final = 1 << 22
_TEXT_BYTES: Final = 1 << 20
_VALUE_BYTES: Final = 1 << 20
_KEYS_TOLD: Final = 100_000
_QUEUED_SUMMED: Final = 10_000


@dataclass(frozen=True)
class Contents:
    """What a store holds, and who has put it there."""

    engine: Engine[Member]
    writers: dict[bytes, int]
    pushers: dict[bytes, int]
    """The same of queues, which are apart from values."""
    clients: Clients[Any]
    sessions: Sessions
    turn: Turn

    @property
    def plan(self) -> bytes | bytearray | None:
        """What a launcher has said about its machines."""
        return self.engine.get(_PLAN_KEY)

    @property
    def stall(self) -> bytes | bytearray | None:
        """What a launcher has found out about a job that stands still."""
        return self.engine.get(_STALL_KEY)

    def describe(self, question: Question) -> Fields:
        """The fields of a snapshot that only a store has."""
        engine = self.engine
        yield "key_count", str(engine.num_keys())
        yield "stored_bytes", str(engine.space.stored_bytes)
        yield "workers", str(_number(engine.get(_WORKERS)))
        yield "plan", to_text(_text(self.plan))
        yield "stall", to_text(_text(self.stall, STALL_BYTES))
        if question.value is not None:
            yield "value", to_text(_value(engine, question.value, min(question.value_bytes, _VALUE_BYTES)))
        if self.clients.names is not None:
            yield "stores", to_text(self.clients.names)
        yield from self._barriers()
        yield from self._keys(question)

    def _barriers(self) -> Fields:
        now, engine = self.turn.now, self.engine
        rows = []
        for key, size, arrived, members in engine.barriers.all():
            waited: dict[int, float] = {}
            for each in members:
                since = engine.barriers.by_member.get(each, {}).get((key, size), now)
                waited[each.id] = max(waited.get(each.id, 0.0), now - since)
                yield None
            rows.append(barrier_row(key, size, arrived, waited.items()))
        yield "barriers", as_list(rows)

    def _keys(self, question: Question) -> Fields:
        """One pass over all keys: those that are searched for, and those that tell of the job."""
        engine, writers = self.engine, self.writers
        wanted, most = question.search, min(question.keys, _KEYS_TOLD)
        rows: list[str] = []
        found = 0
        group: dict[str, None] = {}  # a rank may have several of these keys
        rosters: list[tuple[str, str]] = []
        names = _Names(self.clients, self.sessions)
        for key in list(engine.keys()):
            if _GROUP in key:
                rank = owing_rank(key_name(key))
                if rank >= 0:
                    group[f"[{rank},{writers.get(key, 0)}]"] = None
            elif key.startswith(_MEETING) and key.endswith(_ROSTER) and len(rosters) < _ROSTERS_TOLD:
                job = key_name(key[len(_MEETING) - 1 : -len(_ROSTER)])
                members = key[: -len(_ROSTER)] + names_key(_text(engine.get(key)))
                rosters.append((job, _text(engine.get(members), _ROSTER_BYTES)))
            if not wanted or wanted in key_name(key):
                found += 1
                value = engine.get(key)
                if len(rows) < most and value is not None:
                    writer = writers.get(key, 0)
                    rows.append(key_row(key, len(value), 0, writer, names.of(writer)))
            yield None
        queues = list(engine.space.queues.items())
        for key, queue in queues:
            if not wanted or wanted in key_name(key):
                found += 1
                if len(rows) < most:
                    size = sum(map(len, queue)) if len(queue) <= _QUEUED_SUMMED else -1
                    pusher = self.pushers.get(key, 0)
                    rows.append(key_row(key, size, len(queue), pusher, names.of(pusher)))
            yield None
        yield "queue_count", str(len(queues))
        yield "keys_found", str(found)
        yield "keys", as_list(rows)
        yield "group_writers", as_list(group)
        yield "rosters", to_text(rosters)


class _Names:
    """Who the writers of keys are."""

    def __init__(self, clients: Clients[Any], sessions: Sessions) -> None:
        self._here = {each.id: each for each in clients}
        self._relays = {each.id: each for each in sessions}
        self._gone = {each.id: each.who for each in clients.gone}

    def of(self, number: int) -> str:
        """In words; nothing if that is not known."""
        if number in self._relays:
            peer = self._relays[number].peer
            return f"a client of {peer}" if peer.startswith(WORKER) else f"the relay {peer}"
        here = self._here.get(number)
        who = here.who if here is not None else self._gone.get(number)
        if who is not None and who.rank >= 0:
            return f"rank {who.rank}"
        if who is not None and who.pid:
            return f"process {who.pid} on {who.host}"
        return here.peer if here is not None else ""


def _value(engine: Engine[Member], name: str, most: int) -> dict[str, object] | None:
    """The fields of a `rollcall.snapshot.Value`."""
    try:
        wire_key = name.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # no key is named like that
        return None
    for key in (b"/" + wire_key, wire_key):
        value = engine.get(key)
        if value is not None:
            return {"key": name, "size": len(value), "data": bytes(value[:most]).hex()}
    return None


def _text(value: bytes | bytearray | None, most: int = _TEXT_BYTES) -> str:
    return bytes(value[:most]).decode(errors="replace") if value is not None else ""


def _number(value: bytes | bytearray | None) -> int:
    return int(value) if value is not None and len(value) < 20 and value.isdigit() else 0
