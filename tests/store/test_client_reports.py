"""REPORT: snapshots show what a client last reported of itself, until it leaves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from ends import Desk, relay_on, u64
from processes import relaying, serving
from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import AccessError, UsageError
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.core import snapshots
from rallypoint.store.core.store import Core
from rallypoint.store.rollcall.clients import reporting_clients, whole
from rallypoint.store.rollcall.identity import WORKER, Role
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Client
from rallypoint.store.wire.encoding import VALIDATE, request
from rallypoint.store.wire.opcodes import Op
from raw import SECONDS, RawClient, until
from rolls import client, part, relay, snapshot
from test_snapshots import PING, seen_by
from test_snapshots_relays import Tree

pytestmark = pytest.mark.windows

MOST = 65_536


def tell(text: bytes) -> bytes:
    return b"\x32" + u64(len(text)) + text


each_front = pytest.mark.parametrize(
    "make", [lambda: Desk(Core()), lambda: relay_on(Desk(Core()))[0]], ids=["server", "relay"]
)


@each_front
def test_the_newest_is_told_and_goes_with_the_connection(make: Callable[[], Desk]) -> None:
    desk = make()
    silent, first, second = desk.open(3)
    assert first.ask(tell(b"one") + PING) == b"ping"
    desk.front.turn.now += 2.0
    assert second.ask(tell(b'"two"\n\x00')) == first.ask(tell(b"three")) == b""
    desk.front.turn.now += 1.5
    assert [(each.told, each.told_seconds) for each in seen_by(desk.front).clients] == [
        ("", -1.0),
        ("three", 1.5),
        ('"two"\n\x00', 1.5),
    ]
    assert desk.front.held == len(b"three") + len(b'"two"\n\x00')
    assert silent.connection.told is Core().open("another").told, "who tells nothing takes no room for it"
    first.close()
    second.send(tell(b""))
    assert [each.told for each in seen_by(desk.front).clients] == ["", ""]
    assert desk.front.held == 0


@each_front
def test_what_is_too_long_or_not_ascii_ends_the_connection_and_nothing_is_held(
    make: Callable[[], Desk],
) -> None:
    desk = make()
    (client,) = desk.open()
    client.send(tell(b"x" * MOST))
    assert desk.front.held == MOST
    client.send(b"\x32" + u64(MOST + 1))
    assert client.error is not None
    assert client.error.message == "REPORT with a text of 65,537 bytes; 65536 are allowed"
    (client,) = desk.open()
    client.send(tell(b"before") + tell(b"gr\xc3\xbc\xc3\x9fe"))
    assert client.error is not None
    assert client.error.message == "REPORT with a text that is not ASCII"
    assert desk.front.held == 0


def test_what_a_client_tells_stays_at_its_relay_and_is_told_with_how_old_it_is() -> None:
    tree = Tree()
    upper = tree.relay()
    lower = tree.relay(upper)
    for text, desk in ((b"direct", tree.head), (b"upper", upper), (b"lower", lower)):
        desk.open()[0].send(tell(text))
    tree.run()
    assert [wire.core.upstream.batches for wire in tree.wires] == [0, 0]
    tree.look(tree.head)
    tree.clock.now += 5.0
    told = {each.told: each.told_seconds for each in reporting_clients(tree.look(tree.head, without=[lower]))}
    assert told == {text: pytest.approx(5.0, abs=1.5) for text in ("direct", "upper", "lower")}


def test_times_add_up_over_relays_and_workers() -> None:
    def teller(text: str) -> Client:
        return client(1, told=text, told_seconds=1.0)

    lower = part("node-c", clients=(teller("lower"), client(2)))
    upper = part("node-b", clients=(teller("upper"),), relays=(relay(5, lower, part_seconds=20.0),))
    worker = relay(7, part("node-a", clients=(teller("worker"),)), part_seconds=0.5, peer=f"{WORKER}1:4711")
    told = snapshot(
        clients=(teller("direct"), client(2)),
        relays=(relay(3, upper, part_seconds=3.0), relay(4, None), worker),
    )
    expected = {"direct": 1.0, "upper": 4.0, "lower": 24.0, "worker": 1.5}
    assert {each.told: each.told_seconds for each in reporting_clients(told)} == expected
    assert {each.told: each.told_seconds for each in reporting_clients(whole(told))} == expected


def test_what_all_tell_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of a relay has a limit. What a control character takes in it is counted as well."""
    monkeypatch.setattr(snapshots, "_TOLD_BYTES", 1_000)
    desk = Desk(Core())
    for end, text in zip(desk.open(3), (b"x" * 500, b"\0" * 200, b"y" * 100), strict=True):
        end.send(tell(text))
    found = seen_by(desk.front)
    assert [each.told for each in found.clients] == ["x" * 500, "", "y" * 100]
    assert found.incomplete == "what 1 client told is left out: all together tell too much"


def test_who_may_only_look_tells_nothing() -> None:
    client = Core().open("looker")
    client.restrict_to_snapshots()
    with pytest.raises(AccessError, match="REPORT with a token that may only look"):
        client.receive(VALIDATE + tell(b"text"))


# Real ones


@pytest.mark.parametrize("backend", ["libuv", pytest.param("legacy", marks=pytest.mark.slow)])
def test_launchers_tell_servers_and_relays(backend: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("w+"))
        server = stack.enter_context(serving(backend, log))
        behind = stack.enter_context(relaying(server.address, log))
        agents = [
            stack.enter_context(TCPStore(each.host, each.port, timeout=SECONDS, role=Role.AGENT))
            for each in (server, behind)
        ]

        def told() -> dict[str, Role]:
            found = fetch_snapshot(server.host, server.port, Question(), Deadline(SECONDS))
            assert all(0.0 <= each.told_seconds < SECONDS for each in reporting_clients(found))
            return {each.told: each.who.role for each in reporting_clients(found)}

        for number, agent in enumerate(agents):
            agent.set("k", "v")
            agent.report(f"before {number}")
            agent.wait(["k"])
            agent.report(f"after {number}")  # by the same connection, or both would be there
        assert told() == {"after 0": Role.AGENT, "after 1": Role.AGENT}
        for text in ("größe", "x" * (MOST + 1)):
            with pytest.raises(UsageError, match="cannot be told"):
                agents[1].report(text)
        for place in (server, behind):
            with RawClient(place.port) as stranger:
                stranger.send(request(Op.REPORT, b"\xff"))
                assert stranger.read_rest() == b""
        assert server.read_log().count("REPORT with a text that is not ASCII") == 2
        agents[1].close()
        until(lambda: list(told()) == ["after 0"], "what a client has told that has left")
