"""What a store adds to its snapshots: its keys, its barriers, and what its keys say about the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from rallypoint.codec import to_text
from rallypoint.store.core.clients import Clients
from rallypoint.store.core.looks import Fields, as_list, barrier_row, key_row
from rallypoint.store.core.registry import Sessions
from rallypoint.store.core.tickets import Member
from rallypoint.store.core.turn import Turn
from rallypoint.store.engine import Engine
from rallypoint.store.rollcall.identity import WORKER
from rallypoint.store.rollcall.plan import names_key
from rallypoint.store.rollcall.question import PLAN, STALL, STALL_BYTES, Question, key_name
from rallypoint.store.rollcall.torch_keys import owing_rank

_PLAN_KEY: Final = b"/" + PLAN.encode()
_STALL_KEY: Final = b"/" + STALL.encode()
WORKERS: Final = b"init/"
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
        yield "stored_bytes", str(engine.stored_bytes)
        yield "workers", str(_number(engine.get(WORKERS)))
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
        for key, size, arrived, members in engine.barriers():
            waited: dict[int, float] = {}
            for each in members:
                since = engine.barriers_of(each).get((key, size), now)
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
        queues = engine.queues()
        for key, length in queues:
            if not wanted or wanted in key_name(key):
                found += 1
                if len(rows) < most:
                    size = sum(map(len, engine.queued(key))) if length <= _QUEUED_SUMMED else -1
                    pusher = self.pushers.get(key, 0)
                    rows.append(key_row(key, size, length, pusher, names.of(pusher)))
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
