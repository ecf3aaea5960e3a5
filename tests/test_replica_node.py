"""A process of a replicated store, by itself: how it ends when its log is away or broken."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Sequence

import pytest

from memory_log import Memory, MemoryLog
from rallypoint.errors import RallypointError
from rallypoint.replica.log import Leadership, LostRecordsError
from rallypoint.replica.node import Node
from rallypoint.server.loops.legacy import LegacyLoop
from rallypoint.server.process.binding import reserve
from rallypoint.wire.limits import Limits


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


def test_what_ended_the_lead_is_told_though_its_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loses(MemoryLog):
        def append(self, term: int, sequence: int, data: bytes) -> None:
            raise LostRecordsError("records are gone")

    def is_taken(_: object) -> list[socket.socket]:
        raise RallypointError("the port is taken")

    monkeypatch.setattr("rallypoint.replica.node.reserve_again", is_taken)
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
    term = leader.acquire(leader.look(), "b:1")
    with pytest.raises(LostRecordsError, match="record 7 is gone"):
        run(KnowsMore(memory))
    with pytest.raises(LostRecordsError, match="record 7 is gone"):
        leader.renew(term)


def test_a_loss_is_told_though_the_engine_cannot_be_told() -> None:
    class GoesAway(MemoryLog):
        def read(self, sequence: int) -> Sequence[bytes]:
            memory.is_away = True
            raise LostRecordsError("record 7 is gone")

    memory = Memory()
    with pytest.raises(LostRecordsError, match="record 7 is gone"):
        run(GoesAway(memory))
