"""Relays of a store that moves: of several upstreams one answers at a time, and beats tell if it does."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ends import BEAT, DONE, SIGN_OF_LIFE, ByHand, frame, i64, note, welcome
from processes import pause, relaying, sends_signals, serving
from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import AccessError, ConnectError, ConnectionLostError, ProtocolError, UsageError
from rallypoint.launch.endpoint import parse_places
from rallypoint.store.connect.connection import Connection
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.core.store import Core
from rallypoint.store.relay import reaching
from rallypoint.store.relay import relay as running
from rallypoint.store.relay.outgoing import Address
from rallypoint.store.relay.reaching import Place, StoreAddress, find_upstream
from rallypoint.store.relay.relay import Relay
from rallypoint.store.rollcall.judgement import trouble_of
from rallypoint.store.rollcall.question import Question
from rallypoint.store.server.loops import pump as pumping
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.wire.encoding import VALIDATE, pack_i64, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from raw import SECONDS, RawClient, until
from threads import Make, running_here

pytestmark = pytest.mark.windows

HOST = "127.0.0.1"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats and ticks come five times as often as they do, and 5 s of refusal are one."""
    monkeypatch.setattr(running, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(running, "_REFUSED_SECONDS", 0.5)
    monkeypatch.setattr(pumping, "TICK_SECONDS", 0.1)


def relay_for(upstream: StoreAddress, **limits: float) -> Make:
    return lambda loop, listeners: Relay(loop, upstream, listeners, Limits(**limits))  # type: ignore[arg-type]


class Moving:
    """A store with three places, as a leader and its standbys have them; it serves at one at a time."""

    def __init__(self, stack: ExitStack) -> None:
        self.core = Core()
        self._stack = stack
        self._sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in self._sockets:
            each.bind((HOST, 0))  # and does not listen: a connect is refused
        self.places = [(HOST, int(each.getsockname()[1])) for each in self._sockets]
        self._serving = stack.enter_context(ExitStack())
        self._is_to_stop, self._has_stopped, self._may_go_on = (threading.Event() for _ in range(3))

    def serve(self, number: int) -> None:
        self._sockets[number].listen()
        self._serving.enter_context(running_here(self._make, listeners=[self._sockets[number]]))

    def _make(self, loop: Loop, listeners: list[socket.socket]) -> Pump[Any]:
        loop.turn = self.core.turn

        def stop_if_told() -> None:
            if self._is_to_stop.is_set():
                self._is_to_stop.clear()
                self._has_stopped.set()
                self._may_go_on.wait()
            else:
                loop.later(0.01, stop_if_told)

        stop_if_told()
        return Pump(loop, self.core, listeners)

    def vanish(self) -> None:
        """Serve nowhere; all connections are closed."""
        self._serving.close()

    def freeze(self) -> None:
        """The process that serves is stopped; its connections stay open, but count for nothing any more."""
        self._is_to_stop.set()
        assert self._has_stopped.wait(SECONDS)
        for client in list(self.core.clients):
            self.core.close(client)
        self._stack.callback(self._serving.pop_all().close)
        self._stack.callback(self._may_go_on.set)

    def relay(self, **limits: float) -> int:
        upstream = find_upstream(self.places, SECONDS)
        return self._stack.enter_context(running_here(relay_for(upstream, **limits)))

    def names(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self.places)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def moving(stack: ExitStack) -> Moving:
    return Moving(stack)


def at(moving: Moving, number: int) -> str:
    host, port = moving.places[number]
    return f"{host}:{port}"


@pytest.mark.usefixtures("quick")
def test_a_store_that_is_stopped_goes_on_elsewhere_and_nothing_is_lost(
    moving: Moving, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped process accepts connections, as its system does; it does not answer a PING."""
    moving.serve(1)
    port = moving.relay()
    rank = stack.enter_context(TCPStore(HOST, port, timeout=SECONDS))
    assert rank.add("n", 1) == 1
    moving.freeze()
    frozen = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(rank.add, "n", 1)
        until(lambda: "no sign of life" in caplog.text, "the relay notices")
        away = time.monotonic() - frozen
        assert not adding.done()
        moving.serve(2)
        assert adding.result(SECONDS) == 2
    counted = re.search(r"answers again after (\S+) s", caplog.text)
    assert counted is not None
    assert float(counted.group(1)) > away - 0.06, "from its last sign of life; told in tenths"
    assert f"lost the connection to the store at {at(moving, 1)}: no sign of life" in caplog.text
    assert f"trying all of {moving.names()} for 60 s" in caplog.text
    assert f"the store at {at(moving, 2)} answers again after" in caplog.text


@pytest.mark.usefixtures("quick")
def test_places_that_refuse_do_not_end_the_session_of_a_store_that_moves(
    moving: Moving, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    moving.serve(0)
    rank = stack.enter_context(TCPStore(HOST, moving.relay(), timeout=SECONDS))
    assert rank.add("n", 1) == 1
    moving.vanish()
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(rank.add, "n", 1)
        until(lambda: "lost the connection" in caplog.text, "the relay notices")
        refused = time.monotonic()
        until(lambda: time.monotonic() - refused > 1.0, "longer than one place may refuse")
        assert not adding.done()
        moving.serve(2)
        assert adding.result(SECONDS) == 2
    assert "is lost:" not in caplog.text


@pytest.mark.usefixtures("quick")
def test_the_session_is_given_up_after_its_time_and_every_place_is_named(
    moving: Moving, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    moving.serve(0)
    rank = stack.enter_context(TCPStore(HOST, moving.relay(session_seconds=1.0), timeout=SECONDS))
    rank.set("key", "value")
    moving.freeze()
    with pytest.raises(ConnectionLostError):
        rank.get("key")
    told = f"the store at {moving.names()} is lost: no connection for 1 s, the limit session_seconds ("
    assert told in caplog.text
    assert f"{at(moving, 0)}: it accepts connections, but does not answer; {at(moving, 1)}: " in caplog.text


@pytest.mark.slow
@sends_signals
def test_a_relay_that_was_stopped_does_not_blame_its_store(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log, ExitStack() as stack:
        server = stack.enter_context(serving("libuv", log))
        relay = stack.enter_context(relaying(f"{HOST}:1,{server.address}", log))
        rank = stack.enter_context(RawClient(relay.port))
        for _ in range(3):
            rank.set(b"/key", b"value")
            pause(relay.process)
            time.sleep(2.5)
            relay.process.send_signal(signal.SIGCONT)
            rank.set(b"/key", b"value")
        assert "lost" not in relay.read_log()


# Beats


def test_beats_are_sent_in_silence_and_three_without_an_answer_are_the_end() -> None:
    upstream = (relay := ByHand()).core.upstream
    assert [upstream.beat() for _ in range(3)] == [b"", BEAT, BEAT]
    relay.core.receive_upstream(SIGN_OF_LIFE[:3])
    assert [upstream.beat() for _ in range(2)] == [b"", BEAT]
    relay.core.receive_upstream(SIGN_OF_LIFE[3:] + frame(1, 0))
    assert [upstream.beat() for _ in range(3)] == [b"", BEAT, BEAT]
    assert upstream.beat(is_read=True) == b""
    assert [upstream.beat() for _ in range(2)] == [BEAT, BEAT]
    with pytest.raises(ProtocolError, match=r"no sign of life for 1\.5 s"):
        upstream.beat()
    relay.core.lose_upstream()
    assert [upstream.beat() for _ in range(9)] == [b""] * 9
    relay.core.connect()
    assert [upstream.beat() for _ in range(3)] == [b"", b"", b""], "a SESSION is to be answered, too"
    relay.core.receive_upstream(welcome(1))
    assert [upstream.beat() for _ in range(2)] == [b"", BEAT]


def test_a_note_is_no_sign_of_life_and_says_why_there_is_none() -> None:
    upstream = (relay := ByHand()).core.upstream
    assert [upstream.beat() for _ in range(2)] == [b"", BEAT]
    relay.core.receive_upstream(note("its engine is away"))
    assert upstream.beat() == BEAT
    relay.core.receive_upstream(note() + note("its engine is still away"))
    with pytest.raises(ProtocolError, match="its engine is still away"):
        upstream.beat()
    with pytest.raises(ProtocolError, match="cannot be read"):
        relay.core.receive_upstream(frame(0, 0, (1, DONE, b"")))


@contextmanager
def played(stack: ExitStack, store: bytes = b"") -> Iterator[tuple[RawClient, socket.socket]]:
    """A rank of a relay whose store the test plays, and its connection to the relay, just welcomed."""
    listener = stack.enter_context(socket.create_server((HOST, 0)))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    listener.settimeout(SECONDS)
    ports = listener.getsockname()[1], 1
    places = [Place(HOST, port, [(socket.AF_INET, (HOST, port))]) for port in ports]
    upstream = StoreAddress(places, True, store)
    port = stack.enter_context(running_here(relay_for(upstream)))
    with listener.accept()[0] as sock:
        sock.settimeout(SECONDS)
        opening = VALIDATE + (request(Op.ENTER, store) if store else b"")
        said = _read(sock, len(opening) + 6)
        assert said[:-4] == opening + BEAT + bytes([Op.PING])
        sock.sendall(SIGN_OF_LIFE + said[-4:])
        assert _read(sock, 49)[0] == Op.SESSION
        sock.sendall(welcome(most_bytes=1 << 30))
        yield stack.enter_context(RawClient(port)), sock


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := sock.recv(count - len(data))):
        data += piece
    return data


def test_a_store_that_takes_long_to_read_is_alive_until_it_reads_no_more(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """The beats come behind a long value, so nothing can come back."""
    with played(stack) as (rank, sock):
        rank.send(request(Op.SET, b"long", bytes(8_000_000)))
        for _ in range(50):
            assert len(_read(sock, 1 << 17)) == 1 << 17
            time.sleep(0.04)  # for longer than a silent store is waited for
        assert "no sign of life" not in caplog.text
        until(lambda: "no sign of life" in caplog.text, "it is given up")


# A store that waits for its engine


@pytest.mark.usefixtures("quick")
def test_a_store_that_waits_for_its_engine_is_waited_for(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For longer than its sessions are kept. It answers beats, but neither a PING nor a batch."""
    monkeypatch.setattr(reaching, "BEAT_SECONDS", 0.1)
    listener = stack.enter_context(socket.create_server((HOST, 0)))
    listener.settimeout(SECONDS)
    place = Place(HOST, listener.getsockname()[1], [(socket.AF_INET, listener.getsockname())])
    port = stack.enter_context(running_here(relay_for(StoreAddress([place, place], True))))

    def accept() -> tuple[socket.socket, bytes]:
        sock = stack.enter_context(listener.accept()[0])
        sock.settimeout(SECONDS)
        return sock, _read(sock, len(VALIDATE) + 6)[-4:]

    (sock, nonce), (other, _) = accept(), accept()
    other.close()
    sock.sendall(SIGN_OF_LIFE + nonce)
    assert _read(sock, 49)[0] == Op.SESSION
    sock.sendall(welcome(keeps=1_000))
    rank = stack.enter_context(RawClient(port))
    rank.send(request(Op.ADD, b"n", tail=pack_i64(1)))
    assert _read(sock, 2) == b"\x22\x21"  # PRESENT, then the batch
    sock.close()
    (sock, nonce), (other, _) = accept(), accept()
    other.close()
    begun = time.monotonic()
    while time.monotonic() - begun < 2.5:
        sock.sendall(note("its engine is away", "look there"))
        assert _read(sock, 1) == BEAT
    told = fetch_snapshot(HOST, port, Question(), Deadline(SECONDS))
    assert trouble_of(told) == ("its engine is away", "look there")
    assert "is lost" not in caplog.text
    sock.sendall(nonce[:2])
    sock.sendall(nonce[2:] + SIGN_OF_LIFE)
    assert _read(sock, 49)[0] == Op.SESSION
    sock.sendall(welcome(1, taken=1) + frame(1, 1, (0, DONE, i64(7))))
    assert rank.read_number() == 7


# Finding it


@pytest.mark.usefixtures("quick")
def test_a_name_is_looked_up_again_and_nobody_waits_for_that(
    moving: Moving, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def resolve(*_: object) -> list[tuple[int, tuple[str, int]]]:
        asked.set()
        assert may_answer.wait(SECONDS)
        return [(socket.AF_INET, moving.places[0])]

    monkeypatch.setattr(reaching, "resolve", resolve)
    monkeypatch.setattr(reaching, "_LOOK_UP_SECONDS", 0.2)
    moving.serve(0)
    old: list[list[Address]] = [[(socket.AF_INET, moving.places[1])], []]
    for addresses in old:
        asked.clear()
        may_answer.clear()
        upstream = StoreAddress([Place("a-name", 29500, addresses)], True)
        with running_here(relay_for(upstream)) as port, RawClient(port) as rank:
            assert asked.wait(SECONDS)
            assert rank.answers()
            rank.send(request(Op.ADD, b"n", tail=pack_i64(0)))
            may_answer.set()
            assert rank.read_number() == 0


def test_the_place_that_answers_is_found_among_those_that_do_not(moving: Moving, stack: ExitStack) -> None:
    silent = stack.enter_context(socket.create_server((HOST, 0)))
    with pytest.raises(ConnectError) as caught:
        find_upstream([*moving.places[:1], silent.getsockname()], 0.3)
    assert "the store answers at none of its addresses" in caught.value.message
    assert f"cannot reach the store at {at(moving, 0)} within 0.3 s" in caught.value.message
    moving.serve(2)
    found = find_upstream([silent.getsockname(), *moving.places], SECONDS)
    assert (found.knows_sessions, found.store, found.moves) == (True, b"", True)
    assert [bool(place.addresses) for place in found.places] == [False, False, False, True]


def test_a_place_that_refuses_this_process_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry cannot help a process without the job's secret; the other places stand by, and refuse."""
    deadlines: list[Deadline] = []

    def refuse(_: str, port: int, deadline: Deadline, *__: object, **___: object) -> Connection:
        deadlines.append(deadline)
        if port == 2:
            raise AccessError("the store at b:2 takes nobody without the job's secret", hint="give it one")
        until(lambda: deadline.passed, "the search ends")
        raise ConnectError("nobody listens")

    monkeypatch.setattr(reaching, "connect", refuse)
    with pytest.raises(AccessError) as caught:
        find_upstream([("a", 1), ("b", 2), ("c", 3)], 10 * SECONDS)
    assert caught.value.hint == "give it one"
    assert deadlines
    assert all(each.passed for each in deadlines)


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("a:1", ["a:1"]),
        ("a:1,b:2,[::1]:3", ["a:1", "b:2", "[::1]:3"]),
        ("a,b,c:29500", ["a:29500", "b:29500", "c:29500"]),
        (" a , [fd00::1], b:2 , c:3", ["a:2", "[fd00::1]:2", "b:2", "c:3"]),
        ("a:1,a,a:1", ["a:1"]),
    ],
)
def test_places_are_written_with_commas(text: str, places: list[str]) -> None:
    assert [str(place) for place in parse_places(text, "--upstream")] == places


@pytest.mark.parametrize("text", ["", ",", "a,b", "a:1,", ",a:1", "a:,b:1", "a:x,b:1", "a:0,b:1", "::1,b:1"])
def test_what_is_no_list_of_places_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--upstream is"):
        parse_places(text, "--upstream")
