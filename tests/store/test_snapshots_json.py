"""Snapshots as JSON: rows that are written by hand are as the dataclasses say; what comes is not trusted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rolls
from ends import Desk, Played
from rallypoint.errors import ProtocolError
from rallypoint.store.core.sessions import Session
from rallypoint.store.core.snapshots import quoted, relay_row
from rallypoint.store.core.store import Core
from rallypoint.store.rollcall.identity import Identity
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.question import KEYS_NAMED, key_name
from rallypoint.store.rollcall.snapshot import (
    Barrier,
    Client,
    ClientWait,
    Gone,
    Key,
    Mishap,
    Operation,
    Relay,
    Second,
    Snapshot,
    Value,
)
from rallypoint.store.wire.encoding import VALIDATE, request
from rallypoint.store.wire.opcodes import Op
from rolls import part, plan, rank, ranks, snapshot
from test_core import wait
from test_snapshots import Clock, identities, repeatable, seen_by, told

pytestmark = pytest.mark.windows

# What is told

moments = st.integers(0, 1 << 20).map(lambda eighths: eighths / 8)  # of three digits, so none is rounded
numbers = st.integers(0, 1 << 40)
keys = st.binary(max_size=12)
some_keys = st.lists(keys, min_size=1, max_size=2 * KEYS_NAMED, unique=True)


@repeatable
@given(
    peer=st.text(),
    who=identities,
    counted=st.tuples(numbers, numbers),
    waits=st.lists(st.tuples(moments, some_keys), max_size=3),
    text=st.text(st.characters(max_codepoint=127)),
    now=moments,
)
def test_a_client_is_told_as_its_dataclass_says(
    peer: str,
    who: Identity,
    counted: tuple[int, int],
    waits: list[tuple[float, list[bytes]]],
    text: str,
    now: float,
) -> None:
    clock = Clock(0.125)
    core = Core(turn=clock)
    client = core.open(peer)
    client.receive(VALIDATE)
    for since, missing in waits:
        clock.now = since
        client.receive(wait(*missing))
    clock.now = 0.5
    client.receive(request(Op.REPORT, text.encode()))
    client.who = who
    client.received, client.sent = counted
    clock.now = now
    expected = tuple(
        ClientWait(tuple(map(key_name, missing[:KEYS_NAMED])), len(missing), now - since)
        for since, missing in waits
    )
    found = seen_by(core)
    age = now - 0.5 if text else -1.0
    operations = len(waits) + 1
    assert found.clients == (Client(1, peer, now - 0.125, who, operations, *counted, expected, text, age),)
    assert (found.received, found.sent) == counted


@repeatable
@given(who=identities.filter(lambda each: each.is_rank), why=st.text(), gone=moments, now=moments)
def test_who_is_gone_is_told_as_its_dataclass_says(who: Identity, why: str, gone: float, now: float) -> None:
    clock = Clock(gone)
    core = Core(turn=clock)
    client = core.open("peer")
    client.who, client.why = who, why
    core.close(client)
    clock.now = now
    assert seen_by(core).gone == (Gone(1, who, now - gone, why),)


@repeatable
@given(report=st.none() | st.binary(), peer=st.text(), present=st.booleans(), now=moments, missing=keys)
def test_a_relay_is_told_as_its_dataclass_says(
    report: bytes | None, peer: str, present: bool, now: float, missing: bytes
) -> None:
    """It may say anything of itself: what cannot be read is as good as nothing, and breaks nothing else."""
    core = Core(turn=Clock(0.25))
    relay = Played(Desk(core))
    relay.send(wait(missing), *([told(report)] if report is not None else []))
    (session,) = core.sessions
    session.peer, session.is_present = peer, present
    row = relay_row(session, _told(session), core.waits_behind(session), now)
    age = now - 0.25 if report is not None else -1.0
    waits = (ClientWait((key_name(missing),), 1, now - 0.25),)
    assert _with("relays", f"[{row}]").relays == (Relay(1, peer, now - 0.25, present, None, age, waits),)


def _told(session: Session) -> str:
    slices = quoted(session.told) if session.told is not None else iter(())
    try:
        while True:
            next(slices)
    except StopIteration as end:
        return end.value or ""


def _with(name: str, text: str) -> Snapshot:
    whole = Snapshot("server", "1", "node-a", 1, "libuv", 0.0, 0.0, 0.0).to_json()
    return Snapshot.from_json(f'{whole[:-1]},"{name}":{text}}}')


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 20)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["[]", "{}", "1e999", '{"kind":""}']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _places(content: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in some JSON."""
    yield way
    if isinstance(content, dict | list):
        for name, each in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _places(each, (*way, name))


def _replaced(content: Any, way: tuple[Any, ...], value: Any) -> Any:
    if not way:
        return value
    copy = dict(content) if isinstance(content, dict) else list(content)
    copy[way[0]] = _replaced(copy[way[0]], way[1:], value)
    return copy


_PART = part("node-b", clients=ranks([2], "node-b"), barriers=(Barrier("b", 4, 1, ((3, 1.0),)),))
KNOWN = snapshot(
    clients=(
        rolls.client(1, rank(0), ClientWait(("k", "l"), 9, 1.5)),
        rolls.client(2, told="t", told_seconds=3.0),
    ),
    relays=(rolls.relay(5, part("node-c", relays=(rolls.relay(6, _PART, waits=(rolls.wait("k"),)),))),),
    barriers=(Barrier("b", 4, 3, ((1, 2.0), (5, 1.0))),),
    gone=(Gone(8, rank(3), 2.0, "why"),),
    keys=(Key("k", 1, 2, 3, "rank 0"),),
    value=Value("k", 1, "00"),
    group_writers=((0, 1), (2, 5)),
    rosters=(("job", "{}"),),
    plan=plan(("node-a", 4)),
    stall="rank 3 is late",
    operations=(Operation("GET", 1, 2.0),),
    turn_p50=1.0,
    turn_p99=2.0,
    history=(Second(1.0, 2, 3.0, 4, 5),),
    errors=(Mishap(1.0, "peer", "reason"),),
)
WHOLE: Any = json.loads(KNOWN.to_json())


def test_a_snapshot_is_the_same_when_it_has_been_written_and_read() -> None:
    assert Snapshot.from_json(KNOWN.to_json()) == KNOWN
    with pytest.raises(ProtocolError, match="cannot be read: accepted: ") as caught:
        Snapshot.from_json(json.dumps(WHOLE | {"accepted": 1 << 64}))
    assert "same version" in caught.value.hint


@settings(repeatable, max_examples=600)
@given(way=st.sampled_from(list(_places(WHOLE))), value=json_values)
def test_what_comes_over_the_network_is_read_or_refused_and_what_is_read_has_a_meaning(
    way: tuple[Any, ...], value: Any
) -> None:
    try:
        found = Snapshot.from_json(json.dumps(_replaced(WHOLE, way, value)))
    except ProtocolError:
        return
    judge(found)
