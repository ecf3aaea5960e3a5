"""Several stores at one address, by their names: each for itself, and together bounded."""

from __future__ import annotations

import errno
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from processes import BACKENDS
from rallypoint.client.base import PrefixStore
from rallypoint.client.snapshots import fetch_job_snapshot, fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.codec import to_text
from rallypoint.errors import ConnectError, ConnectionLostError, RallypointError
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.rendezvous.roster import Member, Roster, Size
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.core.store import Core
from rallypoint.store.relay.hosting import host_relay
from rallypoint.store.relay.reaching import find_upstream, knows_names
from rallypoint.store.relay.relay import Relay
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.store.server.events import Events
from rallypoint.store.server.guard import secret as guard
from rallypoint.store.server.guard.secret import Secret
from rallypoint.store.server.loops import link, stores
from rallypoint.store.server.loops.guarded import Door
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump, about_this_process
from rallypoint.store.server.loops.stores import StorePump
from rallypoint.store.server.process.hosting import Lifespan, host_server
from rallypoint.store.wire.encoding import VALIDATE, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from rallypoint.watch.status.report import StatusRequest, report_on
from rallypoint.watch.timeline.reading import read_events
from raw import SECONDS, RawClient, until
from rosters import join
from test_guard import _no_secret, elsewhere, have
from threads import running_here

__all__ = ["_no_secret", "elsewhere", "have"]

_HERE = "127.0.0.1"
_TEXT = "5e" * 32

Make = Callable[[Loop, list[socket.socket]], Pump[Any]]


def _serving(limits: Limits | None = None, events: str = "") -> Make:
    def make(loop: Loop, listeners: list[socket.socket]) -> Pump[Any]:
        log = Events(events)
        about = about_this_process(loop)
        core = Core(limits, loop.turn, about, wants_events=log.are_wanted, has_names=True)
        return StorePump(loop, core, listeners, log)

    return make


def _enter(name: str) -> bytes:
    return request(Op.ENTER, name.encode())


def _add(key: str, amount: int = 1) -> bytes:
    return request(Op.ADD, key.encode(), tail=amount.to_bytes(8, "little", signed=True))


def _look(port: int, name: str = "") -> Snapshot:
    return fetch_snapshot(_HERE, port, Question(), Deadline(SECONDS), name)


class _Clients:
    """Clients of one server, each of a store that it names."""

    def __init__(self, port: int, stack: ExitStack) -> None:
        self._port = port
        self._stack = stack

    def open(self, name: str = "") -> RawClient:
        client = self._stack.enter_context(RawClient(self._port))
        client.send(_enter(name) if name else b"")
        return client

    def count(self, name: str = "") -> int:
        """Add 1 to a key of a store; the sum."""
        client = self.open(name)
        client.send(_add("n"))
        return client.read_number()


def _clients(port: int, stack: ExitStack) -> _Clients:
    return _Clients(port, stack)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_store_is_for_itself(backend: str) -> None:
    with running_here(_serving(), backend=backend) as port, ExitStack() as stack:
        clients = _clients(port, stack)
        assert [clients.count(name) for name in ("a", "b", "", "a", "a", "")] == [1, 1, 1, 2, 3, 2]
        assert (_look(port).key_count, _look(port, "a").key_count) == (1, 1)
        waiter, other = clients.open("a"), clients.open("b")
        waiter.send(b"\x06" + (1).to_bytes(8, "little") + (4).to_bytes(8, "little") + b"late")
        other.send(request(Op.SET, b"late", b""))
        setter = clients.open("a")
        setter.send(request(Op.SET, b"late", b""))
        assert waiter.read(1) == b"\x00"


@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_what_stands_behind_the_name_is_for_that_store(pieces: int) -> None:
    """However the bytes come."""
    said = VALIDATE + _enter("a") + _add("n", 5) + _add("n", 6)
    with running_here(_serving()) as port:
        for start in range(0, len(said), len(said) // pieces or 1):
            if start == 0:
                client = RawClient(port, shake_hands=False)
            client.send(said[start : start + (len(said) // pieces or 1)])
        with client:
            assert (client.read_number(), client.read_number()) == (5, 11)
        assert _look(port).key_count == 0


def test_names_are_bounded_and_what_nobody_uses_makes_room() -> None:
    with running_here(_serving(Limits(stores=2))) as port, ExitStack() as stack:
        clients = _clients(port, stack)
        assert [clients.count("a"), clients.count("b")] == [1, 1]
        with RawClient(port) as third:
            third.send(_enter("c"), _add("n"))
            assert third.read_rest() == b""
        assert "the limit stores" in _look(port).errors[-1].reason
        assert clients.count("a") == 2
        with RawClient(port) as again:
            again.send(_enter("b"), _add("n"))
            assert again.read_number() == 2
        stack.close()
        until(lambda: not any(_look(port, name).clients[:-1] for name in "ab"), "both have no clients")
        for number in range(200):  # thousands of names cost no more than two of them
            assert clients.count(f"new-{number}") == 1
            stack.close()
        assert clients.count("") == 1


class _Watched(StorePump):
    """Tells a test when a second is over, and waits for it then."""

    def __init__(self, loop: Loop, listeners: list[socket.socket], limits: Limits | None = None) -> None:
        about = about_this_process(loop)
        super().__init__(loop, Core(limits, loop.turn, about, has_names=True), listeners)
        self.stands = threading.Event()
        self.goes_on = threading.Event()

    def named(self, name: bytes) -> stores._NamedPump:
        return self._named[name]

    @property
    def names(self) -> list[bytes]:
        return list(self._named)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """While the server does nothing; the second is over behind that."""
        self.goes_on.clear()
        self.stands.clear()
        assert self.stands.wait(SECONDS)
        try:
            yield
        finally:
            self.goes_on.set()

    def _tick(self) -> None:
        self.stands.set()
        self.goes_on.wait(SECONDS)
        super()._tick()


@contextmanager
def _watched(backend: str = "auto", limits: Limits | None = None) -> Iterator[tuple[_Watched, int]]:
    made: list[_Watched] = []

    def make(loop: Loop, listeners: list[socket.socket]) -> Pump[Any]:
        made.append(_Watched(loop, listeners, limits))
        made[0].goes_on.set()
        return made[0]

    with running_here(make, backend=backend) as port:
        try:
            yield made[0], port
        finally:
            made[0].goes_on.set()


def test_a_store_that_nobody_uses_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_IDLE_TICKS", 1)
    with _watched() as (server, port), ExitStack() as stack:
        clients = _clients(port, stack)
        assert clients.count("a") == 1
        stack.close()
        until(lambda: not server.names, "it is dropped")
        assert clients.count("a") == 1, "it begins anew"


def test_a_store_in_use_is_not_dropped_also_if_nobody_is_there_when_a_second_is_over() -> None:
    with _watched() as (server, port), ExitStack() as stack:
        clients = _clients(port, stack)
        assert clients.count("a") == 1
        with server.standing():  # somebody has come since the store's own second was over
            server.named(b"a").idle_ticks = stores._IDLE_TICKS
        with server.standing():
            assert server.names == [b"a"]
            server.named(b"a").idle_ticks = stores._IDLE_TICKS - 1
        stack.close()
        assert clients.count("a") == 2
        assert server.named(b"a").idle_ticks == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_client_that_resets_right_behind_a_name_has_left(backend: str) -> None:
    """What it has sent fills the first read, so the next one finds the reset, before it enters the store."""
    enter = _enter("a")
    fill = request(Op.SET, b"k", bytes(link._FEW_BYTES - len(enter) - len(request(Op.SET, b"k", b""))))
    with _watched(backend) as (server, port), RawClient(port) as client:
        assert client.answers()
        with server.standing():
            client.send(fill + enter)
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        until(lambda: server.names and not server.connections, "it has left the store that it has named")
        assert len(_look(port, "a").clients) == 1
        assert _look(port).key_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_that_cannot_be_made_costs_its_client_alone(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with _watched(backend) as (server, port), ExitStack() as stack:
        clients = _clients(port, stack)
        with monkeypatch.context() as patch:
            patch.setattr(stores._NamedPump, "start", refuse)
            assert clients.open("a").read_rest() == b""
        until(lambda: "the server failed to serve it" in caplog.text, "it is logged")
        assert not server.names
        assert clients.count("a") == 1


def _hoard(client: RawClient, count: int) -> None:
    """Send all of a value of so many bytes, but for the last one."""
    client.send(b"\x01" + (1).to_bytes(8, "little") + b"k" + count.to_bytes(8, "little") + bytes(count - 1))


def test_all_stores_together_may_hold_as_much_as_one() -> None:
    """It does not take until the second is over, and not a second for each client that is too many."""
    with _watched(limits=Limits(held_bytes=1 << 20)) as (server, port), ExitStack() as stack:
        clients = _clients(port, stack)
        hoarders = [clients.open(f"{number}") for number in range(12)]
        with server.standing():
            for hoarder in hoarders:
                _hoard(hoarder, 400 << 10)
        with server.standing():
            held = server.named(b"0").core.held  # all stores share one budget
            assert (400 << 10) < held <= 1 << 20
        assert "held_bytes" in str([_look(port, f"{number}").errors for number in range(12)])
        assert clients.count() == 1


def test_who_does_not_read_is_not_served_in_a_store_with_a_name_either() -> None:
    """Its last request here makes the replies too many that it has not read, and the name comes with it."""
    values = {b"large": bytes(500 << 10), b"small": bytes(8 << 10)}  # the small one leaves time for a name
    with _watched() as (server, port), ExitStack() as stack:
        clients = _clients(port, stack)
        for key, value in values.items():
            clients.open().set(key, value)
        deaf, asked = clients.open(), []
        for key, value in values.items():
            while server.core.held <= link._ENOUGH_UNSENT - len(value):
                deaf.send(request(Op.GET, key))
                asked.append(key)
                until(lambda: server.core.counts().get(Op.GET) == len(asked), "it is answered")
        deaf.send(request(Op.GET, b"small") + _enter("a"))
        deaf.sock.settimeout(1)
        with pytest.raises(TimeoutError):  # nobody reads this
            deaf.send(request(Op.SET, b"k", bytes(1 << 20)) * 64)
        assert _look(port, "a").key_count == 0
        deaf.sock.settimeout(SECONDS)
        assert all(deaf.read_blob() == values[key] for key in [*asked, b"small"])
        until(lambda: _look(port, "a").key_count == 1, "it is served again")


@pytest.mark.parametrize("name", ["", "a", "b"])
def test_a_connection_names_one_store(name: str) -> None:
    with running_here(_serving()) as port, RawClient(port) as client:
        client.send(_enter("a"), _add("n"), _enter(name), _add("n"))
        assert len(client.read_rest()) == 8
        assert "but has named another one before" in _look(port, "a").errors[-1].reason
        assert _look(port).key_count == 0


@pytest.mark.usefixtures("_no_secret")
def test_a_relay_to_a_store_with_a_name() -> None:
    def relay_to(port: int, name: str) -> Make:
        upstream = find_upstream([(_HERE, port)], SECONDS, name)
        return lambda loop, listeners: Relay(loop, upstream, listeners)

    with running_here(_serving()) as port:
        assert knows_names(_HERE, port, SECONDS)
        with (
            running_here(relay_to(port, "job/round/1")) as first,
            running_here(relay_to(port, "job/round/1")) as second,
            running_here(relay_to(port, "job/round/2")) as other,
            TCPStore(_HERE, first, timeout=SECONDS) as one,
            TCPStore(_HERE, second, timeout=SECONDS) as two,
            TCPStore(_HERE, other, timeout=SECONDS) as apart,
        ):
            assert (one.add("n", 1), two.add("n", 1), apart.add("n", 1)) == (1, 2, 1)
            assert len(_look(port, "job/round/1").relays) == 2
            assert not _look(port).relays
            assert not knows_names(_HERE, first, SECONDS), "it passes no names on"
            with pytest.raises(ConnectError, match="has no store named 'x', but only one"):
                find_upstream([(_HERE, first)], SECONDS, "x")


def test_who_looks_where_a_job_meets_sees_the_store_of_its_round() -> None:
    roster = join(Roster(), Member("i", "node-a", 1), Size(1, 1)).publish("node-a:29400/j/round/0-i")

    def meet(store: TCPStore, job: str) -> None:
        meeting = PrefixStore(f"rallypoint/meeting/{job}", store)
        meeting.multi_set(["roster", "names/i"], ['{"names":"names/i"}', to_text(roster)])

    with running_here(_serving()) as port, ExitStack() as stack:
        clients = _clients(port, stack)
        with TCPStore(_HERE, port, timeout=SECONDS) as store:
            meet(store, "j")
            # The store of a round that is over does not come again because somebody looks.
            assert fetch_job_snapshot(_HERE, port, Question(), Deadline(SECONDS)).key_count == 2
            assert _look(port).stores == ()
            clients.count("j/round/0-i")
            seen = fetch_job_snapshot(_HERE, port, Question(), Deadline(SECONDS))
            assert (seen.key_count, len(seen.rosters)) == (1, 1)
            # Of several jobs, none is meant.
            meet(store, "k")
            assert fetch_job_snapshot(_HERE, port, Question(), Deadline(SECONDS)).key_count == 4
            assert fetch_snapshot(_HERE, port, Question(), Deadline(SECONDS), "j/round/0-i").key_count == 1


@pytest.mark.parametrize("names", [("j/meeting", "j/round/0-i"), ("run-1",)])
def test_who_looks_sees_the_only_job_whose_stores_all_have_names(names: tuple[str, ...]) -> None:
    roster = join(Roster(), Member("i", "node-a", 1), Size(1, 1)).publish("node-a:29400/j/round/0-i")
    with running_here(_serving()) as port, ExitStack() as stack:
        for name in names:
            relay = host_relay([(_HERE, port)], store=name)
            stack.callback(relay.release)
            store = stack.enter_context(TCPStore(*relay.address, timeout=SECONDS))
            meeting = PrefixStore("rallypoint/meeting/j", store)
            if name.endswith("/meeting"):
                meeting.multi_set(["roster", "names/i"], ['{"names":"names/i"}', to_text(roster)])
        store.set("of the round", "")
        report = report_on(StatusRequest([Endpoint(_HERE, port)], keys=True))
        assert report.lines()[-1].endswith("of the round"), report.lines()


def test_a_look_at_a_store_that_is_not_there_names_the_others_and_makes_none() -> None:
    with running_here(_serving()) as port, ExitStack() as stack:
        asked = StatusRequest([Endpoint(_HERE, port)], name="job/round/2")
        with pytest.raises(RallypointError, match=r"there is no store named job/round/2 at") as refused:
            report_on(asked)
        assert refused.value.hint == "the only store there has no name"
        clients = _clients(port, stack)
        for number in (1, 0):
            clients.count(f"job/round/{number}")
        with pytest.raises(RallypointError) as refused:
            report_on(asked)
        assert refused.value.hint == "there are: job/round/0, job/round/1"
        assert _look(port).stores == ("job/round/1", "job/round/0")
        report_on(StatusRequest([Endpoint(_HERE, port)], name="job/round/1"))


def _locked(make: Make) -> Make:
    def locked(loop: Loop, listeners: list[socket.socket]) -> Pump[Any]:
        server = make(loop, listeners)
        server.door = Door(Secret(_TEXT, "the test"), loop)
        return server

    return locked


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("backend", BACKENDS)
def test_names_behind_a_door(
    backend: str, have: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TLS; and with a token, one may look at a store with a name, and do nothing else."""
    have(_TEXT)
    with running_here(_locked(_serving()), backend=backend) as port:
        upstream = find_upstream([(_HERE, port)], SECONDS, "a")
        relay = _locked(lambda loop, listeners: Relay(loop, upstream, listeners))
        with running_here(relay) as relay_port, TCPStore(_HERE, relay_port, timeout=SECONDS) as store:
            large = bytes(3 << 20)
            store.set("large", large)
            assert store.get("large") == large
            assert (_look(port, "a").key_count, _look(port).key_count) == (1, 0)
            monkeypatch.delenv(guard.SECRET_VARIABLE)
            monkeypatch.setattr(guard, "_held", [])
            monkeypatch.setenv(guard.LOOK_VARIABLE, Secret(_TEXT, "the test").token)
            assert _look(port, "a").key_count == 1
            with pytest.raises(ConnectionLostError):
                fetch_snapshot(_HERE, port, Question(value="large"), Deadline(SECONDS), "a")
            with pytest.raises(ConnectError):
                fetch_snapshot(_HERE, port, Question(), Deadline(1), "b")
            seen = _look(port)
            assert seen.stores == ("a",)
            assert "a new store, with a token that may only" in seen.errors[-1].reason


def test_a_server_that_stays_for_its_clients_stays_for_those_of_named_stores() -> None:
    server = host_server(_HERE, 0, lifespan=Lifespan(stays_for_clients=True))
    relay = host_relay([(_HERE, server.port)], store="a")
    with closing(TCPStore(*relay.address, timeout=SECONDS)) as store:
        process = psutil.Process(server.pid)
        server.abandon()
        with pytest.raises(psutil.TimeoutExpired):
            process.wait(1.5)
        assert store.add("n", 1) == 1
    relay.release()
    process.wait(SECONDS)


def test_the_events_of_each_store_are_a_run_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with running_here(_serving(events=str(path))) as port, ExitStack() as stack:
        clients = _clients(port, stack)
        for name in ("a", "", "a"):
            clients.count(name)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    starts = [line.get("store") for line in lines if line["event"] == "start"]
    assert starts == [None, "a"]
    assert read_events(path).runs == 2
    of_a = [line for line in lines if line.get("store") == "a" and line["event"] == "connected"]
    assert len(of_a) == 2
