"""A process of a replicated store, by itself: how it ends when its log is away or broken."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from zlib import crc32

import pytest

from memory_log import Memory, MemoryLog
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import RallypointError
from rallypoint.store.replica import leading
from rallypoint.store.replica.core.records import link, pack_record
from rallypoint.store.replica.log import EngineAwayError, FencedError, Leadership, LostRecordsError
from rallypoint.store.replica.node import Node
from rallypoint.store.server.loops.loop import LegacyLoop
from rallypoint.store.server.process.binding import reserve
from rallypoint.store.wire.limits import Limits
from raw import until


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """The handlers that a node sets are taken back."""
    numbers = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGBREAK", signal.SIGTERM))
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def run(log: MemoryLog) -> list[socket.socket]:
    """Run a node until it ends; return its sockets."""
    sockets = reserve("127.0.0.1", 0)
    Node(log, Limits(), "a:1", sockets, LegacyLoop).run()
    return sockets


def test_a_stop_ends_it_also_if_the_engine_goes_away_while_it_takes_over() -> None:
    class GoesAway(MemoryLog):
        def acquire(self, seen: Leadership, address: str) -> int:
            term = super().acquire(seen, address)
            memory.is_away = True
            signal.raise_signal(signal.SIGTERM)
            return term

    memory = Memory()
    sockets = run(GoesAway(memory))
    assert memory.leadership.term == 1
    assert [each.fileno() for each in sockets] == [-1]


def test_a_leader_ends_at_once_while_the_engine_is_away() -> None:
    calls, closed = 0, threading.Event()

    class Hangs(MemoryLog):
        def renew(self, term: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise EngineAwayError("no answer")
            if calls > 3:
                os.kill(os.getpid(), signal.SIGTERM)
                self._hang()
            super().renew(term)

        def release(self, _: int) -> None:
            self._hang()

        def _hang(self) -> None:
            closed.wait(20)
            raise EngineAwayError("no answer")

        def close(self) -> None:
            closed.set()

    begun = time.monotonic()
    run(Hangs(Memory()))
    assert calls == 4
    assert time.monotonic() - begun < 10


def test_an_engine_that_never_answers_is_told_of_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, ready = 0, list[int]()

    class Comes(MemoryLog):
        def read(self, sequence: int) -> Sequence[bytes]:
            nonlocal looks
            looks += 1
            if looks < 4:
                raise EngineAwayError("etcd at a:1: no answer")
            return super().read(sequence)

        def acquire(self, seen: Leadership, address: str) -> int:
            signal.raise_signal(signal.SIGTERM)
            raise FencedError("somebody else")

    monkeypatch.setattr(leading, "REMIND_SECONDS", 0.0)
    Node(Comes(Memory()), Limits(), "a:1", reserve("127.0.0.1", 0), LegacyLoop).run(
        lambda: ready.append(looks)
    )
    assert ready == [4]
    first, second, third = caplog.messages
    assert first == (
        "etcd at a:1: no answer; trying again. hint: `rallypoint doctor --engine URL` examines it"
    )
    assert second.startswith("etcd at a:1: no answer (for ")
    assert third.startswith("etcd at a:1: no answer (for ")


def test_a_stop_ends_it_also_while_it_reads_a_long_log() -> None:
    records = [b""]

    class Endless(MemoryLog):
        def read(self, sequence: int) -> Sequence[bytes]:
            assert sequence < 100, "it reads on"
            if sequence == 3:
                signal.raise_signal(signal.SIGTERM)
            records.extend(link([pack_record(0.0, [])], crc32(records[-1])))
            return records[-1:]

        def acquire(self, seen: Leadership, address: str) -> int:
            raise AssertionError("it has not read the log")

    run(Endless(Memory()))
    assert len(records) == 4


def test_checkpoints_take_the_place_of_few_bytes_in_many_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "RECORD_BYTES", leading.CHECKPOINT_BYTES // 10)
    memory, added = Memory(), 0
    sockets = reserve("127.0.0.1", 0)

    def add() -> None:
        nonlocal added
        try:
            with TCPStore("127.0.0.1", sockets[0].getsockname()[1], timeout=30) as store:
                for _ in range(60):
                    store.add("n", 1)
                    added += 1
                    # Those since the last checkpoint, and those before it that are being dropped.
                    until(lambda: len(memory.records) <= 25, "the records before a checkpoint are dropped")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=add)
    client.start()
    Node(MemoryLog(memory), Limits(), "a:1", sockets, LegacyLoop).run()
    client.join()
    assert added == 60


def test_what_ended_the_lead_is_told_though_its_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loses(MemoryLog):
        def append(self, term: int, sequence: int, data: bytes) -> None:
            raise LostRecordsError("records are gone")

    def is_taken(_: object) -> list[socket.socket]:
        raise RallypointError("the port is taken")

    monkeypatch.setattr("rallypoint.store.replica.node.reserve_again", is_taken)
    memory = Memory()
    with pytest.raises(LostRecordsError, match="records are gone"):
        run(Loses(memory))
    with pytest.raises(LostRecordsError, match="nobody goes on with what is left: records are gone"):
        run(MemoryLog(memory))  # which has not seen what was lost


def test_a_loss_that_a_standby_finds_ends_the_leader_too() -> None:
    class KnowsMore(MemoryLog):
        def read(self, sequence: int) -> Sequence[bytes]:
            raise LostRecordsError("record 7 is gone")

    memory = Memory()
    leader = MemoryLog(memory)
    term = leader.acquire(leader.read_leadership(), "b:1")
    with pytest.raises(LostRecordsError, match="record 7 is gone"):
        run(KnowsMore(memory))
    with pytest.raises(LostRecordsError, match="record 7 is gone"):
        leader.renew(term)
