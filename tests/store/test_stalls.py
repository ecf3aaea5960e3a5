"""The report of a stall: when it comes, when it does not, and what the log then says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from ends import Desk, End, Played, arrive, leave, relay_on
from processes import Server, relaying, serving
from rallypoint.client.snapshots import fetch_snapshot as look_at
from rallypoint.store.connect.connecting import connect
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.core.snapshots import SnapshotStep
from rallypoint.store.core.store import Core
from rallypoint.store.rollcall.identity import Identity, Role
from rallypoint.store.rollcall.question import Question
from rallypoint.store.server.events import Events, RelayEvents, StallReports
from rallypoint.store.wire.encoding import counted_request, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from raw import SECONDS, RawClient, await_log
from rolls import rank
from test_core import CANCEL_WAIT, add, barrier, get, pop, push, set_, wait
from test_snapshots import PING, Clock, finish, hello, told

pytestmark = pytest.mark.windows

LIMIT = 60.0


class Heard(StallReports):
    """Notes its reports, instead of writing them."""

    def __init__(self, core: Core) -> None:
        super().__init__(core, Events())
        self.seconds: list[float] = []

    def _report(self, seconds: float, snapshot: bytes) -> None:
        self.seconds.append(seconds)


class Watched:
    """A server whose seconds pass by hand."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.clock = Clock(now)
        self.core = Core(Limits(stall_seconds=LIMIT), self.clock)
        self.desk = Desk(self.core)
        self._reports = Heard(self.core)
        self.pass_seconds(1)

    def pass_seconds(self, count: int, each_second: tuple[End, bytes] | None = None) -> list[float]:
        """How long the stalls had lasted that were reported meanwhile."""
        for _ in range(count):
            if each_second is not None:
                each_second[0].send(each_second[1])
            self.clock.now += 1.0
            self.core.end_second()
            before = self.clock.now
            self._reports.tick()
            finish(self.core)
            self.clock.now = before  # however long that took
        found, self._reports.seconds = self._reports.seconds, []
        return found


@pytest.fixture
def watched() -> Watched:
    return Watched()


def _snapshot(core: Core) -> bytes:
    found: list[bytes] = []
    core.snapshots.start(Question(), found.append)
    finish(core)
    return found[0]


def test_a_stall_is_reported_once_and_again_whenever_it_is_twice_as_long(watched: Watched) -> None:
    first, _ = watched.desk.open(2)
    first.send(wait(b"/k"))
    assert watched.pass_seconds(60) == []
    assert watched.pass_seconds(1) == [60.0]
    assert watched.pass_seconds(59) == []
    assert watched.pass_seconds(1) == [120.0]
    assert watched.pass_seconds(1_000) == [240.0, 480.0, 960.0]


def test_without_waits_there_is_no_stall(watched: Watched) -> None:
    (client,) = watched.desk.open()
    assert watched.pass_seconds(200) == []
    client.send(wait(b"/k"))
    assert watched.pass_seconds(10) == []
    client.send(CANCEL_WAIT)
    assert watched.pass_seconds(200) == []


def test_who_begins_to_wait_when_it_is_quiet_already_is_stalled_after_as_long(watched: Watched) -> None:
    """Nobody has come to expect anything of a server that was left alone over the night."""
    (client,) = watched.desk.open()
    watched.pass_seconds(10_000)
    client.send(wait(b"/k"))
    assert watched.pass_seconds(59) == []
    assert watched.pass_seconds(1) == [60.0]
    assert watched.pass_seconds(60) == [120.0]


PROGRESS = [
    set_(b"/p"),
    request(Op.APPEND, b"/p", b"x"),
    counted_request(Op.MULTI_SET, [b"/p", b""], blobs_each=2),
    push(b"/p"),
    pop(b"/p"),
    barrier(b"/p", 1),
]


@pytest.mark.parametrize("sent", PROGRESS)
def test_while_somebody_progresses_there_is_no_stall(watched: Watched, sent: bytes) -> None:
    first, second = watched.desk.open(2)
    first.send(wait(b"/k"))
    assert watched.pass_seconds(300, (second, sent)) == []
    assert watched.pass_seconds(61) == [60.0], "it begins anew"
    second.send(sent)
    assert watched.pass_seconds(60) == []
    assert watched.pass_seconds(1) == [60.0]


POLLS = {
    "CHECK": counted_request(Op.CHECK, [b"/k"]),
    "GET": get(b"/k"),
    "ADD 0": add(b"/n", 0),
    "a sign of life": add(b"/n", 1),
    "torchrun's sign of life": request(Op.COMPARE_SET, b"/state", b"old", b"new"),
    "WAIT with a time-out": wait(b"/other") + CANCEL_WAIT,
    "WAIT for what is there": wait(b"/n"),
    "PING": PING,
    "MULTI_GET": counted_request(Op.MULTI_GET, [b"/k"]),
    "GETNUMKEYS": request(Op.GETNUMKEYS),
    "LIST_KEYS": request(Op.LIST_KEYS),
    "QUEUE_LEN": request(Op.QUEUE_LEN, b"/q"),
    "a hello": hello(rank(1)),
}


@pytest.mark.parametrize("sent", POLLS.values(), ids=list(POLLS))
def test_who_polls_does_not_progress(watched: Watched, sent: bytes) -> None:
    first, second = watched.desk.open(2)
    first.send(wait(b"/k"))
    assert watched.pass_seconds(61, (second, sent)) == [60.0]


def test_who_waits_in_pieces_is_stalled_all_the_same(watched: Watched) -> None:
    """As torch's barrier of ADD and WAIT does, to log in between."""
    (client,) = watched.desk.open()
    client.send(wait(b"/k"))
    found = []
    for _ in range(6):
        found += watched.pass_seconds(11)
        client.send(CANCEL_WAIT)
        found += watched.pass_seconds(1)
        client.send(wait(b"/k"))
    assert found == [60.0]


def test_who_waits_now_and_then_is_not_stalled(watched: Watched) -> None:
    (client,) = watched.desk.open()
    for _ in range(20):
        client.send(wait(b"/k"))
        assert watched.pass_seconds(30) == []
        client.send(CANCEL_WAIT)
        assert watched.pass_seconds(10) == []


def test_while_launchers_and_tools_wait_there_is_nothing_to_report(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of a job, a launcher waits for the others for as long as they train."""
    (client,) = watched.desk.open()
    client.send(hello(Identity(role=Role.AGENT)) + wait(b"/k"))
    reports = StallReports(watched.core, Events())
    with caplog.at_level("WARNING"):
        reports._judge(_snapshot(watched.core), 60.0)
        assert caplog.text == ""
        watched.desk.open()[0].send(wait(b"/k"))
        reports._judge(_snapshot(watched.core), 60.0)
    assert "no progress for" in caplog.text


def test_a_thread_that_dies_at_its_birth_does_not_hold_up_the_loop(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does for want of memory; whoever waits for its first word waits for ever."""
    monkeypatch.setattr(threading.Thread, "_bootstrap", lambda _: None)
    StallReports(watched.core, Events())._report(60.0, _snapshot(watched.core))
    RelayEvents(watched.core, Events())._take(_snapshot(watched.core))


def test_who_polls_does_not_hide_who_waits_at_a_barrier(watched: Watched) -> None:
    """Whoever has waited longest counts, wherever."""
    first, second = watched.desk.open(2)
    first.send(barrier(b"/b", 2))
    for _ in range(2):
        second.send(wait(b"/k"))
        assert watched.pass_seconds(30) == []
        second.send(CANCEL_WAIT)
    second.send(wait(b"/k"))
    assert watched.pass_seconds(1) == [60.0]


def test_who_only_looks_is_no_progress(watched: Watched) -> None:
    (client,) = watched.desk.open()
    client.send(wait(b"/k"))
    reports = []
    for _ in range(61):
        (tool,) = watched.desk.open()
        tool.send(hello(Identity("node-a", 1, role=Role.TOOL)) + b"\x30" + bytes(8))
        finish(watched.core)
        watched.desk.settle()
        tool.close()
        reports += watched.pass_seconds(1)
    assert reports == [60.0]


def test_who_connects_is_progress(watched: Watched) -> None:
    watched.desk.open()[0].send(wait(b"/k"))
    reports = []
    for _ in range(300):
        watched.desk.open()
        reports += watched.pass_seconds(1)
    assert reports == []
    assert watched.pass_seconds(61) == [60.0]


def test_who_leaves_or_says_again_that_it_is_a_tool_is_no_progress(watched: Watched) -> None:
    first, second, tool = watched.desk.open(3)
    tool_hello = hello(Identity(role=Role.TOOL))
    tool.send(tool_hello)
    first.send(wait(b"/k"))
    assert watched.pass_seconds(20) == []
    second.close()
    assert watched.pass_seconds(21, (tool, tool_hello)) == []
    assert watched.pass_seconds(20, (tool, tool_hello)) == [60.0]


# Behind relays


@pytest.mark.parametrize("sent", [wait(b"/k"), arrive(b"/b", 5, 2)])
def test_what_a_relay_waits_for_is_stalled(watched: Watched, sent: bytes) -> None:
    relay = Played(watched.desk)
    relay.send(sent, told(b"{}"))
    assert watched.pass_seconds(61) == [60.0]


def test_a_relay_that_tells_of_itself_is_no_progress_but_what_it_passes_on_is(watched: Watched) -> None:
    relay = Played(watched.desk)
    relay.send(wait(b"/k"))
    reports = []
    for _ in range(61):
        relay.send(told(b"{}"), get(b"/x"), counted_request(Op.CHECK, [b"/x"]), add(b"/n", 1), leave(99))
        reports += watched.pass_seconds(1)
    assert reports == [60.0]
    for sent in (set_(b"/x"), arrive(b"/y", 1, 1)):
        relay.send(sent)
        assert watched.pass_seconds(60) == []
        assert watched.pass_seconds(1) == [60.0]


def test_relays_leave_it_to_the_server() -> None:
    clock = Clock()
    relay, wire = relay_on(Desk(Core()), limits=Limits(stall_seconds=1.0), turn=clock)
    reports = StallReports(relay.front, Events())
    relay.open()[0].send(wait(b"/k") + barrier(b"/b", 2))
    wire.run()
    for _ in range(10):
        clock.now += 1.0
        relay.front.end_second()
        reports.tick()
        assert relay.front.snapshots.step() is SnapshotStep.DONE
    assert relay.front.waiting == 1


# In the log


@contextmanager
def waiting(server: Server, who: Identity, key: bytes) -> Iterator[None]:
    with closing(connect(server.host, server.port, Deadline(SECONDS), who)) as connection:
        connection.send(counted_request(Op.WAIT, [key]), Deadline(SECONDS))
        yield


@pytest.mark.parametrize("backend", ["libuv", pytest.param("legacy", marks=pytest.mark.slow)])
def test_the_log_of_a_server_names_who_waits_for_what(backend: str) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(backend, options=["--limit", "stall_seconds=0.5"]))
        stack.enter_context(waiting(server, rank(0, "node-a", world_size=2), b"/default_pg/0//cpu//0/1"))
        line = await_log(server, "no progress for")
        assert "1 of 2 ranks joined" in line
        waits = await_log(server, "default_pg/0//cpu//0/1")
        assert "rank 0" in waits
        with RawClient(server.port) as client:
            assert client.answers(), "nobody has noticed"
        assert "Traceback" not in server.read_log()


def test_the_log_names_who_waits_behind_a_relay() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving("libuv", options=["--limit", "stall_seconds=0.5"]))
        relay = stack.enter_context(relaying(server.address, options=["--limit", "stall_seconds=0.5"]))
        stack.enter_context(waiting(relay, rank(5, "node-b", world_size=8), b"/missing"))
        assert "rank 5" in await_log(server, "missing", "rank 5")
        assert "progress" not in relay.read_log()
        snapshot = look_at(relay.host, relay.port, Question(), Deadline(SECONDS))
        assert snapshot.kind == "relay"
