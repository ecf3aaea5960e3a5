"""What clients can make a server or a relay occupy: it is counted, bounded, and freed a slice at a time."""

from __future__ import annotations

import itertools
import socket
import sys
import tracemalloc
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from ends import Desk, relay_on
from processes import BACKENDS, relaying, serving
from rallypoint.store.core.context import Close, DriverTask
from rallypoint.store.core.store import Core
from rallypoint.store.engine import Engine
from rallypoint.store.engine.keyspace import Budget
from rallypoint.store.machine.system import memory_bytes
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.server.loops import loop as loops
from rallypoint.store.server.loops import pump as pumps
from rallypoint.store.server.loops.link import Link
from rallypoint.store.server.loops.loop import LegacyLoop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.wire.encoding import VALIDATE, blob, counted_request, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from raw import RawClient, await_log

MIB = 1 << 20
CLIENTS = 9


def waits(client: int, count: int) -> bytes:
    return b"".join(counted_request(Op.WAIT, [b"/missing/%d/%d" % (client, at)]) for at in range(count))


# How much there is


def test_the_smallest_limit_counts(tmp_path: Path) -> None:
    groups = tmp_path / "sys/fs/cgroup"
    job = groups / "slurm/job"
    job.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/slurm/job/step\n")
    unlimited = memory_bytes(tmp_path)
    (job / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path) == unlimited
    (job / "memory.max").write_text(f"{300 * MIB}\n")
    (groups / "memory.max").write_text(f"{400 * MIB}\n")
    assert memory_bytes(tmp_path) == 252 * MIB
    (groups / "memory").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,memory:/of/the/host\n0::/\n")
    (groups / "memory/memory.limit_in_bytes").write_text(f"{200 * MIB}\n")
    assert memory_bytes(tmp_path) == 152 * MIB


def test_limits_fit_into_the_memory_that_there_is() -> None:
    limits = Limits().within(400 * MIB)
    assert limits.stored_bytes == 200 * MIB
    assert limits.held_bytes == limits.relayed_bytes == 100 * MIB
    assert limits.stored_bytes + limits.held_bytes < 400 * MIB
    assert Limits().within(1 << 50).stored_bytes == Limits().stored_bytes


# Waits


def test_waits_are_counted_at_what_they_occupy() -> None:
    budget = Budget()
    engine: Engine[int] = Engine(None, budget)
    tracemalloc.start()
    try:
        for number in range(20_000):
            engine.wait(number % 9, [b"/missing/%d" % number])
            engine.barrier(number % 900, b"/barrier/%d" % (number // 900), 2_000)
        occupied, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.8 * occupied < budget.held < 2.5 * occupied
    for member in range(900):
        engine.withdraw(member)
    assert budget.held == 0


def test_whoever_waits_for_too_much_is_closed_at_once() -> None:
    """Not at the end of the second: by then, memory may have run out."""
    desk = Desk(Core(Limits(held_bytes=100_000)))
    innocent, greedy = desk.open(2)
    innocent.send(waits(0, 20))
    greedy.send(waits(1, 200))
    assert greedy.error is not None
    assert "the limit held_bytes is 100,000" in greedy.error.message
    assert innocent.error is None
    desk.front.check_invariants()


def test_waits_are_counted_in_a_relay_too() -> None:
    relay, wire = relay_on(Desk(Core()), limits=Limits(held_bytes=100_000))
    innocent, greedy, leaver = relay.open(3)
    leaver.send(waits(2, 30))
    wire.run()
    leaver.close()
    innocent.send(waits(0, 20))
    wire.run()
    greedy.send(waits(1, 200))
    assert greedy.error is not None
    assert innocent.error is None
    wire.run()
    relay.front.check_invariants()
    innocent.close()
    wire.run()
    assert relay.front.held == 0


def test_a_client_that_leaves_a_relay_takes_back_its_waits_in_slices() -> None:
    """Other clients' requests would come behind all of them."""
    relay, wire = relay_on(Desk(Core()))
    (client,) = relay.open(1)
    client.send(waits(0, 5_000))
    wire.run()
    assert isinstance(relay.front, RelayCore)
    combiner = relay.front.combiner
    client.close()
    assert combiner.unsent_cost < 200_000
    for _ in range(200):
        wire.run()
    assert not combiner._waits
    assert not combiner.has_unsent


# Long values


def test_a_long_value_is_shared_by_all_who_are_sent_it() -> None:
    core = Core()
    writer, *readers = [core.open(f"client {number}") for number in range(CLIENTS + 1)]
    part = bytes(range(256)) * (MIB // 256)
    writer.receive(VALIDATE)
    for _ in range(16):
        writer.receive(request(Op.APPEND, b"/k", part))
    expected = (16 * MIB).to_bytes(8, "little") + part * 16
    tracemalloc.start()
    try:
        first = [each.receive(VALIDATE + request(Op.GET, b"/k") * 2) for each in readers]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * MIB, "no reader has a copy of its own"
    assert all(0 < len(each) < MIB for each in first)
    writer.receive(request(Op.APPEND, b"/k", b"more"))  # is for who asks from now on
    assert readers[0].receive(b"") == expected[len(first[0]) :][: 1 << 18]
    for reader, got in zip(readers[1:], first[1:], strict=True):
        pieces = [got]
        while sum(map(len, pieces)) < len(expected):
            pieces.append(reader.receive(b""))
        assert b"".join(pieces)[: len(expected)] == expected
        assert reader.has_rest, "the second GET comes behind the first"


def test_a_long_reply_to_multi_get_is_whole() -> None:
    client = Core().open("client")
    client.receive(VALIDATE)
    values = [bytes([number]) * 200_000 for number in range(6)]
    keys = [b"/%d" % number for number in range(6)]
    for key, value in zip(keys, values, strict=True):
        client.receive(request(Op.SET, key, value))
        while client.has_rest:
            client.receive(b"")
    got = client.receive(counted_request(Op.MULTI_GET, keys))
    while client.has_rest:
        got += client.receive(b"")
    assert got == b"".join(map(blob, values))


def test_a_long_reply_is_whole_wherever_its_request_is_cut() -> None:
    """With another request behind it, as a client that does not wait for answers sends it."""
    value, get, next_get = bytes(range(256)) * 4096, request(Op.GET, b"long"), request(Op.GET, b"short")
    for cut in range(1, len(get)):
        core = Core()
        client = core.open("somebody")
        client.receive(VALIDATE + request(Op.SET, b"long", value) + request(Op.SET, b"short", b"x"))
        replies = client.receive(get[:cut]) + client.receive(get[cut:] + next_get)
        while client.has_rest:
            replies += client.receive(b"")
        assert replies == blob(value) + blob(b"x"), f"cut behind {cut} bytes"


def test_readers_of_a_value_that_is_replaced_share_its_charge() -> None:
    size = 4 * MIB
    core = Core(Limits(held_bytes=64 * MIB))
    writer = core.open("writer")
    writer.receive(VALIDATE + request(Op.SET, b"key", bytes(size)))
    for _ in range(12):
        core.open("reader").receive(VALIDATE + request(Op.GET, b"key"))
    writer.receive(request(Op.SET, b"key", b"short"))
    core.end_second()
    assert size // 2 < core.held <= size


def test_values_that_are_replaced_while_they_are_sent_are_charged() -> None:
    core = Core(Limits(held_bytes=4 * MIB))
    writer, *readers = [core.open(f"client {number}") for number in range(6)]
    writer.receive(VALIDATE)
    for number, reader in enumerate(readers):
        writer.receive(request(Op.SET, b"/k", bytes([number]) * (2 * MIB)))
        reader.receive(VALIDATE + request(Op.GET, b"/k"))
    core.end_second()
    assert core.held == 8 * MIB, "the last one is still stored"
    assert DriverTask.LIGHTEN in core.outbox.others
    core.lighten()
    (closing,) = [each for each in core.outbox.take_others() if isinstance(each, Close)]
    assert closing.client in readers[:4]
    for reader in readers:
        core.close(reader)
    core.end_second()
    assert core.held == 0


# Real processes


def test_very_many_who_leave_at_once_are_closed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)

    def monotonic() -> float:
        clock.now += 0.0001
        return float(clock.now)

    loop = LegacyLoop()
    core = Core(turn=loop.turn)
    pump = Pump(loop, core, [socket.create_server(("127.0.0.1", 0))])
    monkeypatch.setattr(pumps, "time", SimpleNamespace(monotonic=monotonic, time=lambda: 0.0))
    monkeypatch.setattr(loops, "monotonic", monotonic)
    monkeypatch.setattr(loop, "begin_turn", lambda: setattr(loop.turn, "now", clock.now))
    ended = [socket.socketpair() for _ in range(100)]
    for ours, theirs in ended:
        theirs.close()
        link = Link(pump, ours, core.open("client"))
        pump._links[link.client] = link
        pump.watch(link)
    seen = [pump.connections]

    def look() -> None:
        seen.append(pump.connections)
        if pump.connections:
            loop.later(0, look)
        else:
            loop.stop()

    loop.later(0, look)
    loop.run()
    pump.close()
    loop.close()
    assert max(before - after for before, after in itertools.pairwise(seen)) < 30


def limited_to(megabytes: int) -> str:
    """A prelude of a server or a relay that may use so much address space from its start."""
    return f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({megabytes} << 20,) * 2)"


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["store", "relay"])
def test_out_of_memory_only_those_who_hold_much_are_closed(kind: str, backend: str) -> None:
    with ExitStack() as stack:
        if kind == "relay":
            store = stack.enter_context(serving(backend))
            running = relaying(store.address, options=["--backend", backend], prelude=limited_to(150))
        else:
            running = serving(backend, prelude=limited_to(150))
        server = stack.enter_context(running)
        innocent, *greedy = [stack.enter_context(RawClient(server.port)) for _ in range(5)]
        for number, client in enumerate(greedy):
            try:
                client.send(waits(number, 60_000))
            except OSError:  # it is closed
                pass
            assert innocent.answers()
        assert stack.enter_context(RawClient(server.port)).answers()
        await_log(server, "it holds the most; the limit held_bytes is 26,738,688")
        for client in greedy:
            with suppress(ConnectionError):
                client.read_rest()
        assert server.read_log().count("closed ") == 1, "one line for all of them"
        assert "Traceback" not in server.read_log()
        assert server.process.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_stored_stays_readable_when_nothing_more_can_be(backend: str) -> None:
    with serving(backend, prelude=limited_to(200)) as server, ExitStack() as stack:
        writer, reader = (stack.enter_context(RawClient(server.port)) for _ in range(2))
        value = bytes(4 * MIB)
        stored = 0
        try:
            while stored < 100:
                writer.send(request(Op.SET, b"/%d" % stored, value), counted_request(Op.CHECK, [b"/k"]))
                if not writer.read(1):
                    break
                stored += 1
        except OSError:  # it is closed
            pass
        assert 10 < stored < 30
        for number in range(stored):
            reader.send(request(Op.GET, b"/%d" % number))
            assert reader.read(8 + len(value))[8:] == value
        await_log(server, "the limit stored_bytes")
