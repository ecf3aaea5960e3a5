"""What a store holds, for those who look: its keys, its barriers, and what keys tell of the job. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rallypoint.codec import to_text
from rallypoint.rollcall.snapshot import PLAN, Question, Value, key_name
from rallypoint.rollcall.torch_keys import owing_rank
from rallypoint.server.core.looks import Fields, as_list, barrier_row, key_row
from rallypoint.server.core.tickets import Ticket

if TYPE_CHECKING:
    from rallypoint.server.core.store import Core

WORKERS: Final = b"init/"
_GROUP: Final = b"/0//c"  # in all keys that may tell a rank
_MEETING: Final = b"/rallypoint/meeting/"
_ROSTER: Final = b"/roster"
_ROSTERS_TOLD: Final = 16
_TEXT_BYTES: Final = 1 << 20
_VALUE_BYTES: Final = 1 << 20
_KEYS_TOLD: Final = 100_000
_QUEUED_SUMMED: Final = 10_000


def describe_store(core: Core, question: Question) -> Fields:
    """All of a store that a snapshot tells."""
    engine = core.engine
    yield "key_count", str(engine.num_keys())
    yield "stored_bytes", str(engine.stored_bytes)
    yield "workers", str(_number(engine.get(WORKERS)))
    yield "plan", to_text(_text(engine.get(b"/" + PLAN.encode())))
    if question.value is not None:
        value = _value(core, question.value, min(question.value_bytes, _VALUE_BYTES))
        yield "value", to_text(value, sparse=True)
    yield from _barriers(core)
    yield from _keys(core, question)


def _barriers(core: Core) -> Fields:
    now, engine = core.clock(), core.engine
    rows = []
    for key, size, arrived, members in engine.barriers():
        waited: dict[int, float] = {}
        for each in members:
            if isinstance(each, Ticket):
                number, since = each.session.id, each.since
            else:
                number, since = each.id, engine.barriers_of(each).get((key, size), now)
            waited[number] = max(waited.get(number, 0.0), now - since)
            yield None
        rows.append(barrier_row(key, size, arrived, waited.items()))
    yield "barriers", as_list(rows)


def _keys(core: Core, question: Question) -> Fields:
    """One pass over all keys: those that are searched for, and those that tell of the job."""
    engine, writers = core.engine, core.writers
    wanted, most = question.search, min(question.keys, _KEYS_TOLD)
    rows: list[str] = []
    found = 0
    group: dict[str, None] = {}  # a rank may have several such keys
    rosters: list[tuple[str, str]] = []
    names = _Names(core)
    for key in list(engine.keys()):
        if _GROUP in key:
            rank = owing_rank(key_name(key))
            if rank >= 0:
                group[f"[{rank},{writers.get(key, 0)}]"] = None
        elif key.startswith(_MEETING) and key.endswith(_ROSTER) and len(rosters) < _ROSTERS_TOLD:
            job = key_name(key[len(_MEETING) - 1 : -len(_ROSTER)])
            rosters.append((job, _text(engine.get(key))))
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
                pusher = core.pushers.get(key, 0)
                rows.append(key_row(key, size, length, pusher, names.of(pusher)))
        yield None
    yield "queue_count", str(len(queues))
    yield "keys_found", str(found)
    yield "keys", as_list(rows)
    yield "group_writers", as_list(group)
    yield "rosters", to_text(rosters)


class _Names:
    """Who the writers of keys are."""

    def __init__(self, core: Core) -> None:
        self._here = {each.id: each for each in core.connections}
        self._relays = {each.id: each for each in core.sessions}
        self._gone = {number: who for number, who, _, _ in core.gone}

    def of(self, number: int) -> str:
        """In words; nothing if that is not known."""
        if number in self._relays:
            return f"the relay {self._relays[number].peer}"
        here = self._here.get(number)
        who = here.who if here is not None else self._gone.get(number)
        if who is not None and who.rank >= 0:
            return f"rank {who.rank}"
        if who is not None and who.pid:
            return f"process {who.pid} on {who.host}"
        return here.peer if here is not None else ""


def _value(core: Core, name: str, most: int) -> Value | None:
    try:
        wire_key = name.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # no key is named like that
        return None
    for key in (b"/" + wire_key, wire_key):
        value = core.engine.get(key)
        if value is not None:
            return Value(name, len(value), bytes(value[:most]).hex())
    return None


def _text(value: bytes | bytearray | None) -> str:
    return bytes(value[:_TEXT_BYTES]).decode(errors="replace") if value is not None else ""


def _number(value: bytes | bytearray | None) -> int:
    return int(value) if value is not None and len(value) < 20 and value.isdigit() else 0
