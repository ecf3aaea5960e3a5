"""The events of a server: each of what happens to its clients, once, with who and how long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from ends import Desk, End, Played, arrive
from processes import end, relaying, serving
from rallypoint.store.connect.connecting import connect
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.core.context import About, Close, CoreFault, DriverTask, Enter, GoOn, Pause
from rallypoint.store.core.store import Core
from rallypoint.store.rollcall.events import (
    BarrierComplete,
    Connected,
    Erred,
    Event,
    Hung,
    Joined,
    Left,
    RoundPlanned,
    Stalled,
    Started,
    Stopped,
    Waited,
    Waiting,
)
from rallypoint.store.rollcall.identity import Identity, Role, Source
from rallypoint.store.rollcall.plan import Plan, PlannedMachine
from rallypoint.store.rollcall.question import PLAN, STALL
from rallypoint.store.server.process.startup import EVENTS_VARIABLE
from rallypoint.store.wire.encoding import counted_request, request
from rallypoint.store.wire.opcodes import Op
from raw import SECONDS, RawClient, until
from rolls import rank
from startups import from_line
from test_core import CANCEL_WAIT, barrier, push, set_, wait
from test_snapshots import Clock, hello

pytestmark = pytest.mark.windows


class Observed:
    """A server whose events are kept. Its two clocks differ, as the system's do."""

    def __init__(self) -> None:
        self.clock = Clock(10.0, wall_ahead=1_000.0)
        self.core = Core(turn=self.clock, about=About("1.0", "node-a", 42, "libuv"), wants_events=True)
        self.desk = Desk(self.core)

    def take(self, *kinds: type[Event]) -> list[Event]:
        """The events since; only those of some kinds, if they are named."""
        self.desk.settle()
        events = [
            each
            for each in self.desk.take()
            if not isinstance(each, DriverTask | CoreFault | Close | Enter | GoOn | Pause)
        ]
        return [event for event in events if not kinds or isinstance(event, kinds)]

    def open(self, count: int = 1) -> list[End]:
        ends = self.desk.open(count)
        self.take()
        return ends


@pytest.fixture
def observed() -> Observed:
    return Observed()


# Coming and going


def test_a_client_connects_joins_and_leaves(observed: Observed) -> None:
    (client,) = observed.desk.open()
    observed.clock.now += 1.0
    client.send(hello(rank(3)))
    observed.clock.now += 1.0
    client.close()
    who = Identity("", 0, 3, role=Role.RANK, source=Source.HELLO)
    assert observed.take() == [Connected(1_010.0, 1, "client 0"), Joined(1_011.0, 1, who), Left(1_012.0, 1)]


def test_who_has_never_shaken_hands_has_not_been_here(observed: Observed) -> None:
    """A port scan is no client, though its error is told."""
    connection = observed.core.open("scanner")
    observed.core.close(connection)
    assert observed.take() == []
    observed.core.note_error("scanner", "no VALIDATE")
    assert observed.take() == [Erred(1_010.0, "scanner", "no VALIDATE")]


def test_the_errors_of_one_peer_are_told_a_few_times_a_second(observed: Observed) -> None:
    for number in range(1_000):
        observed.core.note_error(f"10.0.0.5:{number}", "there is no operation 71")
    observed.core.note_error("10.0.0.6:1", "there is no operation 71")
    told = observed.take()
    assert len(told) < 20
    assert told[-1] == Erred(1_010.0, "10.0.0.6:1", "there is no operation 71")
    observed.clock.now += 1.0
    observed.core.end_second()
    left_out = 1_001 - len(told)
    assert observed.take(Erred) == [Erred(1_011.0, "10.0.0.5", f"{left_out} more errors left out")]


# Waits


def test_a_wait_is_told_when_it_has_ended_with_who_ended_it(observed: Observed) -> None:
    first, second = observed.open(2)
    first.send(wait(b"/k", b"/l"))
    observed.clock.now += 0.5
    second.send(set_(b"/k"))
    assert observed.take() == []
    observed.clock.now += 0.25
    second.send(set_(b"/l"))
    assert observed.take() == [Waited(1_010.75, 1, ("k", "l"), 1_010.0, 0.75, 2, by=2)]


@pytest.mark.parametrize("hour", [3600.0, -3600.0])
def test_the_length_of_a_wait_does_not_depend_on_the_time_of_day(observed: Observed, hour: float) -> None:
    """The clock is set, by an hour, while clients wait."""
    first, second, third = observed.open(3)
    first.send(wait(b"/k"))
    second.send(barrier(b"/b", 2))
    observed.clock.now += 2.0
    observed.clock.wall_ahead += hour
    observed.core.end_second()
    third.send(set_(b"/k") + barrier(b"/b", 2))
    lengths = [each.seconds for each in observed.take(Waiting, Waited, BarrierComplete)]  # type: ignore[attr-defined]
    assert lengths == [2.0] * 5
    first.send(wait(b"/l"))
    observed.clock.now += 0.5
    third.send(set_(b"/l"))
    began = 1_012.0 + hour
    assert observed.take() == [Waited(began + 0.5, 1, ("l",), began, 0.5, 1, by=3)]


def test_a_wait_that_is_over_at_once_is_no_event(observed: Observed) -> None:
    first, second = observed.open(2)
    first.send(set_(b"/k") + wait(b"/k") + wait(b"/l"))
    observed.clock.now += 0.005
    second.send(set_(b"/l"))
    assert observed.take() == []


@pytest.mark.parametrize("give_up", [lambda end: end.send(CANCEL_WAIT), lambda end: end.close()])
def test_who_gives_up_has_waited_in_vain(observed: Observed, give_up: Callable[[End], None]) -> None:
    (client,) = observed.open()
    client.send(wait(b"/k"))
    observed.clock.now += 2.0
    give_up(client)
    assert observed.take(Waited) == [Waited(1_012.0, 1, ("k",), 1_010.0, 2.0, 1, gave_up=True)]
    assert observed.take() == []


def test_a_long_wait_is_told_while_it_lasts_and_once(observed: Observed) -> None:
    first, second = observed.open(2)
    first.send(wait(*(b"/%d" % number for number in range(20))))
    observed.clock.now += 0.5
    observed.core.end_second()
    assert observed.take() == []
    observed.clock.now += 0.5
    observed.core.end_second()
    assert observed.take() == [Waiting(1_011.0, 1, tuple("01234567"), 1_010.0, 1.0, 20)]
    observed.clock.now += 1.0
    observed.core.end_second()
    assert observed.take() == []
    second.send(b"".join(set_(b"/%d" % number) for number in range(20)))
    assert observed.take() == [Waited(1_012.0, 1, tuple("01234567"), 1_010.0, 2.0, 20, by=2)]


def test_who_still_waits_when_the_server_stops_has_waited_in_vain(observed: Observed) -> None:
    (client,) = observed.open()
    client.send(wait(b"/k"))
    observed.clock.now += 1.0
    assert observed.core.journal is not None
    observed.core.journal.stopped()
    waited, stopped = observed.take()
    assert waited == Waited(1_011.0, 1, ("k",), 1_010.0, 1.0, 1, gave_up=True)
    assert stopped == Stopped(1_011.0)


def test_a_wait_that_a_pop_elsewhere_leaves_to_another_ends(observed: Observed) -> None:
    """The one who was called leaves; the next in line is called because of that."""
    first, second, third = observed.open(3)
    first.send(wait(b"/q"))
    second.send(wait(b"/q"))
    observed.clock.now += 1.0
    third.send(push(b"/q"))
    assert [each.client for each in observed.take(Waited)] == [1]  # type: ignore[attr-defined]
    first.close()
    assert [(each.client, each.by) for each in observed.take(Waited)] == [(2, 1)]  # type: ignore[attr-defined]
    assert second.take() == b"\x00"


# Barriers


def test_a_barrier_is_told_with_the_last_to_arrive(observed: Observed) -> None:
    first, second, third = observed.open(3)
    for each in (first, second, third):
        each.send(barrier(b"/b", 3))
        observed.clock.now += 1.0
    now = 1_012.0
    assert observed.take() == [
        BarrierComplete(now, "b", 3, 2.0, 3),
        Waited(now, 1, ("b",), 1_010.0, 2.0, 1, by=3),
        Waited(now, 2, ("b",), 1_011.0, 1.0, 1, by=3),
    ]
    second.send(barrier(b"/b", 1))
    assert observed.take() == [BarrierComplete(1_013.0, "b", 1, 0.0, 2)]


def test_a_barrier_is_told_if_a_relay_comes_last_or_first(observed: Observed) -> None:
    (client,) = observed.open()
    relay = Played(observed.desk)
    observed.take()
    client.send(barrier(b"/b", 3))
    observed.clock.now += 1.0
    relay.send(arrive(b"/b", 3, 2))
    assert observed.take() == [
        BarrierComplete(1_011.0, "b", 3, 1.0, 2),
        Waited(1_011.0, 1, ("b",), 1_010.0, 1.0, 1, by=2),
    ]
    relay.send(arrive(b"/c", 3, 2))
    observed.clock.now += 4.0
    client.send(barrier(b"/c", 3))
    assert observed.take() == [BarrierComplete(1_015.0, "c", 3, 4.0, 1)]


# Rounds, stalls, errors


def test_a_plan_is_told_when_it_is_new(observed: Observed) -> None:
    (client,) = observed.open()
    plans = [Plan(number, (PlannedMachine("node-a", 0, 4),)) for number in range(2)]
    for plan in plans:
        for _ in range(2):
            client.send(set_(b"/" + PLAN.encode(), plan.to_json().encode()))
            observed.core.end_second()
        assert observed.take() == [RoundPlanned(1_010.0, plan)]
    long = Plan(0, tuple(PlannedMachine("node-" + "x" * 100, number, 1) for number in range(4_000)))
    for garbage in (b"", b"\xff", b"{}", b"[]", long.to_json().encode()):
        client.send(set_(b"/" + PLAN.encode(), garbage))
        observed.core.end_second()
        assert observed.take() == []


def test_what_a_launcher_says_of_a_stall_is_told_when_it_changes(observed: Observed) -> None:
    (client,) = observed.open()
    key = b"/" + STALL.encode()
    for sent, events in (
        (set_(key, b"rank 3 is late"), [Hung(1_010.0, "rank 3 is late")]),
        (set_(key, b"rank 3 is late"), []),
        (set_(key, b"rank 3\xff"), [Hung(1_010.0, "rank 3\ufffd")]),
        (request(Op.DELETE_KEY, key), [Hung(1_010.0, "")]),
        (request(Op.DELETE_KEY, key), []),
    ):
        client.send(sent)
        observed.core.end_second()
        assert observed.take() == events


# Real ones


def events_in(path: Path) -> list[Event]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = [from_line(line) for line in lines if line]
    return [event for event in found if event is not None]


def await_events(path: Path, holds: Callable[[list[Event]], bool]) -> list[Event]:
    until(lambda: holds(events_in(path)), f"it has only {events_in(path)}")
    return events_in(path)


def of(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("backend", ["libuv", pytest.param("legacy", marks=pytest.mark.slow)])
def test_a_server_writes_what_happens(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    options = ["--events", str(path), "--limit", "stall_seconds=0.5"]
    with serving(backend, options=options) as server:
        deadline = Deadline(SECONDS)
        ranks = [connect(server.host, server.port, deadline, rank(number, "node-a")) for number in range(2)]
        ranks[0].send(counted_request(Op.WAIT, [b"/key"]), deadline)
        await_events(path, lambda events: bool(of(events, Stalled)) and bool(of(events, Waiting)))
        ranks[1].send(request(Op.SET, b"/key", b"v"), deadline)
        assert ranks[0].read(1, deadline) == b"\x00"
        with RawClient(server.port) as stranger:
            stranger.send(b"\xff")
            assert stranger.read_rest() == b""
        for each in ranks:
            each.close()
        await_events(path, lambda events: len(of(events, Left)) == 3)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(SECONDS)
    events = events_in(path)
    assert isinstance(events[0], Started)
    assert (events[0].pid, events[0].backend, events[0].kind) == (server.process.pid, backend, "server")
    assert sys.platform == "win32" or isinstance(events[-1], Stopped), "Windows ends a process at once"
    assert len(of(events, Connected)) == 3
    assert [(each.who.rank, each.who.source) for each in of(events, Joined) if each.who.rank >= 0] == [
        (0, Source.HELLO),
        (1, Source.HELLO),
    ]
    (waited,) = of(events, Waited)
    assert (waited.client, waited.keys, waited.by, waited.gave_up) == (1, ("key",), 2, False)
    assert [each.keys for each in of(events, Waiting)] == [("key",)]
    assert "key" in of(events, Stalled)[0].text
    (error,) = of(events, Erred)
    assert error.reason == "there is no operation 255"
    assert [each.why for each in of(events, Left)] == ["there is no operation 255", "", ""]
    assert {json.loads(line)["pid"] for line in path.read_text().splitlines()} == {server.process.pid}


def test_ranks_behind_a_relay_are_in_the_events_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with ExitStack() as stack:
        server = stack.enter_context(serving("libuv", options=["--events", str(path)]))
        relay = stack.enter_context(relaying(server.address))
        who = rank(6, "node-b")
        client = connect(relay.host, relay.port, Deadline(SECONDS), who)
        client.send(counted_request(Op.WAIT, [b"/missing"]), Deadline(SECONDS))

        def is_known(events: list[Event]) -> bool:
            return any(each.who.rank == 6 for each in of(events, Joined)) and bool(of(events, Waiting))

        events = await_events(path, is_known)
        (joined,) = [each for each in of(events, Joined) if each.who.rank == 6]
        (waiting,) = of(events, Waiting)
        assert (waiting.client, waiting.keys) == (joined.client, ("missing",))
        client.close()
        await_events(path, lambda events: joined.client in [each.client for each in of(events, Left)])


HOSTED = """
import sys
from rallypoint.store.server.process.hosting import host_server
server = host_server("127.0.0.1", 0)
print(server.port, flush=True)
sys.stdin.readline()
server.release()
"""


def test_a_hosted_server_writes_where_the_variable_says(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", HOSTED],
        env={**os.environ, EVENTS_VARIABLE: str(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with closing(connect("127.0.0.1", port, Deadline(SECONDS), rank(2))):
            await_events(path, lambda events: bool(of(events, Joined)))
        events = await_events(path, lambda events: bool(of(events, Left)))
        assert isinstance(events[0], Started)
        assert events[0].pid != process.pid
        assert [each.who.rank for each in of(events, Joined)] == [2]
        process.communicate("\n", timeout=SECONDS)
        await_events(path, lambda events: isinstance(events[-1], Stopped))
    finally:
        end(process)
