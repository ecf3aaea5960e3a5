"""Who a client says it is, and how it comes to say so."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ends import Desk, Played, i64
from rallypoint.store.connect.connection import who_am_i
from rallypoint.store.core.store import Core
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.rollcall.identity import (
    NOBODY,
    Identity,
    Role,
    Source,
    hello_key,
    identity_of,
    parse_hello,
)
from rallypoint.store.wire.encoding import request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from rolls import rank
from test_core import set_
from test_looking import PING, hello, repeatable, seen_by
from test_looking_json import identities, json_values

pytestmark = pytest.mark.windows


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def desk(core: Core) -> Desk:
    return Desk(core)


def test_a_client_that_has_said_who_it_is_is_known(desk: Desk) -> None:
    (client,) = desk.open()
    who = Identity("node-b", 77, 3, 1, 8, Role.RANK)
    assert client.ask(hello(who)) == i64(0)
    assert seen_by(desk.front).clients[0].who == replace(who, source=Source.HELLO)
    assert client.ask(hello(replace(who, rank=4))) == i64(0)
    assert seen_by(desk.front).clients[0].who.rank == 4


@pytest.mark.parametrize("make", [Core, lambda: RelayCore(bytes(16))], ids=["server", "relay"])
@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"\xff\xfe", b"[]", b'{"rank":"3"}', b'{"rank":-2}', b'{"role":"king"}', b"[" * 900],
)
def test_a_hello_that_cannot_be_read_changes_nothing(
    make: Callable[[], Core | RelayCore], content: bytes
) -> None:
    desk = Desk(make())
    (client,) = desk.open()
    who = rank(3)
    assert client.ask(hello(who)) == i64(0)
    assert client.ask(request(Op.DELETE_KEY, b"/rallypoint/hello/1/" + content) + PING) == i64(0) + b"ping"
    assert client.connection.who == replace(who, source=Source.HELLO)


@repeatable
@given(who=identities)
def test_a_hello_says_who_somebody_is(who: Identity) -> None:
    assert parse_hello(b"/" + hello_key(who).encode()) == replace(who, source=Source.HELLO)


@pytest.mark.parametrize(
    ("environ", "who"),
    [
        ({}, Identity("node-a", 7)),
        (
            {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"},
            Identity("node-a", 7, 3, 1, 8, Role.RANK),
        ),
        ({"RANK": "0"}, Identity("node-a", 7, 0, role=Role.RANK)),
        ({"RANK": "", "WORLD_SIZE": "8"}, Identity("node-a", 7, world_size=8)),
        ({"RANK": "-1"}, Identity("node-a", 7)),
        ({"RANK": "1" * 10}, Identity("node-a", 7)),
        ({"RANK": "\u0663"}, Identity("node-a", 7)),
        ({"RANK": " 3"}, Identity("node-a", 7)),
    ],
)
def test_the_variables_of_a_launcher_tell_who_a_process_is(environ: dict[str, str], who: Identity) -> None:
    assert identity_of(environ, "node-a", 7) == who


def test_a_name_that_is_too_long_is_cut() -> None:
    assert len(identity_of({}, "h" * 1_000, 7).host) == 255


def test_this_process_says_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    host, pid = socket.gethostname(), os.getpid()
    assert who_am_i() == who_am_i(Role.RANK) == Identity(host, pid, 3, 1, 8, Role.RANK)
    for role in (Role.TOOL, Role.AGENT):
        assert who_am_i(role) == Identity(host, pid, role=role), "no rank, whatever the variables say"
    assert who_am_i(rank=4, world_size=5) == Identity(host, pid, 4, -1, 5, Role.RANK)
    assert who_am_i(rank=3, world_size=5) == Identity(host, pid, 3, 1, 5, Role.RANK)


@repeatable
@given(content=st.binary() | json_values.map(lambda each: json.dumps(each).encode()))
def test_any_hello_is_read_or_is_none(content: bytes) -> None:
    who = parse_hello(b"/rallypoint/hello/1/" + content)
    assert who is None or who.source is Source.HELLO


@pytest.mark.parametrize("make", [Core, lambda limits: RelayCore(bytes(16), limits)])
def test_a_hello_may_be_longer_than_keys(make: Callable[[Limits], Core | RelayCore]) -> None:
    desk = Desk(make(Limits(key_bytes=16)))
    (client,) = desk.open()
    assert client.ask(hello(rank(3, host="h" * 255))) == i64(0)
    assert client.connection.who.rank == 3


def test_what_is_no_hello_is_deleted(desk: Desk) -> None:
    (client,) = desk.open()
    for key in (b"k", b"/rallypoint/hello/1", b"/rallypoint/hello/2/{}", b"rallypoint/hello/1/{}"):
        client.send(set_(key))
        assert client.ask(request(Op.DELETE_KEY, key)) == i64(1)
    assert client.connection.who is NOBODY


def test_a_hello_in_a_batch_is_nobodys(desk: Desk, core: Core) -> None:
    """Relays keep the hellos of their clients to themselves; an older one does not know that."""
    relay = Played(desk)
    assert relay.send(hello(rank(3))) == [(0, 0, i64(0))]
    assert [each.who.rank for each in core.clients] == [-1]
    assert relay.end.connection.who.rank == -1
