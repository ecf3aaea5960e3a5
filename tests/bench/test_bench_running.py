"""A run of the benchmarks: what is planned, targets in turns, and all loads with real targets."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest

from bench_fakes import needs_redis
from benchmarks import loads as bench_loads
from benchmarks import targets
from benchmarks.planning import COMMANDS, TABLE, make_table
from benchmarks.targets import RELAY, TARGETS, USUAL, BehindRelays
from rallypoint.bench import contest, loads
from rallypoint.bench import targets as base
from rallypoint.bench.clients import Place
from rallypoint.bench.contest import Contest, Measurement, Plan, Session, absences, hurried
from rallypoint.bench.loads import check_counts, processes_for, shares_of
from rallypoint.bench.results import BenchError, Sample
from rallypoint.bench.targets import Target, cpu_seconds
from rallypoint.bench.workers import Load
from rallypoint.cli.bench import make_plan
from rallypoint.errors import PortInUseError, UsageError
from rallypoint.store.machine import interfaces

# What is planned


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with room for all, which has all that can be measured: whatever this one has."""
    set_machine(monkeypatch, 20_000)
    monkeypatch.setattr("rallypoint.cli.bench.raise_open_file_limit", lambda: None)
    monkeypatch.setattr(interfaces, "time_look_ups", lambda: interfaces.LookUps(64, 0.01))
    memory = type("Memory", (), {"available": 1 << 36})  # for real clients of torch
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    for module in ("rallypoint.bench.contest", "benchmarks.planning"):
        monkeypatch.setattr(f"{module}.absences", lambda *_: {})


def set_machine(monkeypatch: pytest.MonkeyPatch, connections: int) -> None:
    for module in (base, loads, targets):
        monkeypatch.setattr(module, "most_connections", lambda: connections)


def planned(
    *commands: str,
    targets: Sequence[str] = tuple(USUAL),
    ranks: str = "",
    repeat: int = 0,
    quick: bool = False,
) -> Plan:
    table, _ = make_table(commands or COMMANDS, targets, quick)
    return make_plan(table, TARGETS, targets=",".join(targets), ranks=ranks, repeat=repeat, quick=quick)


def sizes_of(plan: Plan, name: str) -> dict[int, tuple[str, ...]]:
    """With whom a measurement is planned, at which size."""
    return {each.ranks: each.targets for each in plan.measurements if each.name == name}


def find(plan: Plan, name: str) -> Measurement:
    (found,) = [each for each in plan.measurements if each.name == name]
    return found


def test_all_is_planned_where_there_is_room_and_very_many_ranks_through_relays() -> None:
    plan = planned()
    assert {each.name for each in plan.measurements} > {each.name for each in TABLE}
    assert {each.command for each in plan.measurements} == set(COMMANDS)
    for each in plan.measurements:
        assert not set(each.targets) & set(each.unfit)
        assert each.ranks == 0 or f"{each.ranks:,} " in each.load or each.name.startswith(("init-", "tuto"))
    sizes = sizes_of(plan, "init")
    assert (sizes[16_384], sizes[98_304]) == (tuple(USUAL), (RELAY,))
    assert "init, 98,304 ranks: redis is left out: a process may have 20,000 connections here" in plan.notes
    assert 98_304 not in sizes_of(plan, "wakeup") | sizes_of(plan, "restart")


def test_sizes_without_room_for_them_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 4_000)
    plan = planned("init", ranks="4000,4001", targets=["redis"])
    assert list(sizes_of(plan, "init")) == [4_000]
    assert plan.notes == ["init, 4,001 ranks: redis is left out: a process may have 4,000 connections here"]


def test_what_is_not_installed_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert absences(["rallypoint-legacy"], TARGETS) == {}
    monkeypatch.setattr(contest, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    missing = absences(list(USUAL), TARGETS)
    assert missing == {
        "rallypoint-libuv": "uvloop is not installed",
        RELAY: "uvloop is not installed",
        "torch-libuv": "torch is not installed",
        "torch-legacy": "torch is not installed",
        "redis": "redis-server is not installed",
    }
    for module in ("rallypoint.bench.contest", "benchmarks.planning"):
        monkeypatch.setattr(f"{module}.absences", lambda *_: missing)
    plan = planned()
    assert set(plan.notes) >= {f"{name} is left out: {why}" for name, why in missing.items()}
    assert {name for each in plan.measurements for name in each.targets} == {"rallypoint-legacy"}


def test_wishes_are_heeded_and_quick_is_less_of_everything() -> None:
    some = ("redis", "rallypoint-legacy")
    plan = planned("barrier", "ops", ranks="64,8,64", targets=some, repeat=7, quick=True)
    assert sizes_of(plan, "barrier") == dict.fromkeys((64, 8), some)
    assert len(plan.measurements) == 2 * 2 + 13
    assert {each.rounds for each in plan.measurements} == {7}
    usual, quick = planned(), planned(quick=True)
    assert list(sizes_of(quick, "init")) == [1_024, 4_096]
    assert (find(usual, "get").rounds, find(quick, "get").rounds) == (5, 2)
    assert find(quick, "get").seconds == find(usual, "get").seconds / 4
    assert (find(usual, "tutorial-init").ranks, find(quick, "tutorial-init").ranks) == (64, 16)
    assert planned("ops", ranks="8").notes == ["--ranks does not matter to what has no ranks"]


@pytest.mark.parametrize(("seconds", "ranks", "rounds"), [(0.01, 256, 5), (5.0, 64, 3)])
def test_torch_as_it_comes_takes_part_where_torch_does(
    seconds: float, ranks: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer ranks where look-ups stall: it does one for every rank."""
    monkeypatch.setattr(interfaces, "time_look_ups", lambda: interfaces.LookUps(1, seconds))
    table, notes = make_table(("init",), ("torch-legacy", "rallypoint-libuv", "redis"), quick=False)
    (as_is,) = [each for each in table if each.name == "init-as-is"]
    assert as_is.targets == ("torch-legacy-as-is", "rallypoint-libuv")
    assert (as_is.ranks, as_is.rounds) == (ranks, rounds)
    assert ("every rank" in notes[-1]) == (seconds > 1)


def test_if_nothing_is_left_that_is_told_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    for command, ranks, target in (("wakeup", "30000", "redis"), ("restart", "4", RELAY)):
        with pytest.raises(UsageError, match="nothing to measure") as failure:
            planned(command, ranks=ranks, targets=[target])
        assert failure.value.hint
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="needs Linux"):
        planned("init")


# Targets in turns


class FakeTarget(Target):
    """A target without a process."""

    def start(self) -> None:
        pass


class FakeSession(Session):
    """Rounds that take a number each."""

    def __init__(
        self, target: Target, measurement: Measurement, log: list[str], fails: dict[str, str]
    ) -> None:
        super().__init__(target, measurement)
        self.name, self.log, self.number = target.name, log, 0
        self.fails = fails.get(target.name, "")

    def start(self) -> None:
        self.log.append(f"start {self.name}")
        if self.fails == "start":
            raise BenchError("it does not start")

    def open(self) -> None:
        self.log.append(f"open {self.name}")
        if self.fails == "open":
            raise OSError("it does not open")

    def round(self) -> Sample:
        self.number += 1
        self.log.append(f"{self.name}{self.number}")
        if self.fails == f"round {self.number}":
            raise BenchError("a wrong answer")
        if self.fails == f"interrupt {self.number}":
            raise KeyboardInterrupt(signal.SIGTERM)
        return Sample(float(self.number))

    def close(self) -> None:
        self.log.append(f"close {self.name}")
        super().close()


class Game:
    """A contest of fakes, and what happened."""

    def __init__(self, rounds: int = 3, **fails: str) -> None:
        self.log: list[str] = []
        session = partial(FakeSession, log=self.log, fails=fails)
        each = Measurement("ops", "get", "a load", session, targets=tuple("abc"), rounds=rounds)
        self.contest = Contest(each, dict.fromkeys("abc", FakeTarget))

    def play(self) -> Game:
        self.contest.run()
        return self

    @property
    def turns(self) -> str:
        return " ".join(entry for entry in self.log if " " not in entry)

    @property
    def faults(self) -> dict[str, str]:
        return {name: entry.fault for name, entry in self.contest.record.entries.items() if entry.fault}

    def samples(self, name: str) -> list[float]:
        return [sample.value for sample in self.contest.record.entries[name].samples]


def test_targets_take_turns_and_another_is_first_and_follows_another_each_time() -> None:
    game = Game(4).play()
    assert game.turns == "c1 b1 a1 b2 c2 a2 a3 c3 b3 c4 a4 b4"
    assert [game.samples(name) for name in "abc"] == [[1, 2, 3, 4]] * 3
    assert game.faults == {}


def test_all_servers_start_before_any_load_does_and_all_ends_in_reverse() -> None:
    game = Game(0).play()
    assert game.log[:6] == [f"{what} {name}" for what in ("start", "open") for name in "abc"]
    assert game.log[6:] == [f"close {name}" for name in "cba"]


@pytest.mark.parametrize(
    ("fails", "fault", "turns"),
    [
        ("start", "it does not start", "c1 a1 c2 a2 a3 c3"),
        ("open", "OSError('it does not open')", "c1 a1 c2 a2 a3 c3"),
        ("round 2", "a wrong answer", "c1 b1 a1 b2 c2 a2 a3 c3"),
    ],
)
def test_a_target_that_fails_is_left_out_and_the_others_go_on(fails: str, fault: str, turns: str) -> None:
    game = Game(b=fails).play()
    assert game.faults == {"b": fault}
    assert game.turns == turns
    assert game.samples("b") == ([1] if fails == "round 2" else [])
    assert game.samples("a") == game.samples("c") == [1, 2, 3]
    assert {"close a", "close b", "close c"} < set(game.log)


def test_an_interruption_ends_all_and_what_has_been_measured_is_kept() -> None:
    game = Game(b="interrupt 2")
    with pytest.raises(KeyboardInterrupt):
        game.play()
    assert [len(game.samples(name)) for name in "abc"] == [1, 1, 1]
    assert game.log[-3:] == [f"close {name}" for name in "cba"]


# Counts and shares


def test_counts_that_were_each_given_once_are_right() -> None:
    check_counts(Load(counted=[4, 1, 2, 3]))
    check_counts(Load(counted=[8, 7]))
    check_counts(Load(counted=[2, 1], seen=[2, 1]))


@pytest.mark.parametrize(
    ("counted", "seen", "words"),
    [
        ([1, 2, 2, 4], [], "each number"),  # twice
        ([1, 2, 3, 5], [], "each number"),  # left out
        ([1, 2, 3, 4], [0, 4, 4, 4], "lower than"),
        ([1, 2, 3, 4], [1, 2, 3, 3], "lower than"),
        ([1, 2, 3, 4], [2, 5, 4, 4], "from 1 to 5, and they are 4"),
        ([1, 2], [1, 3], "from 1 to 3"),
        ([5, 6], [6, 6], "from 5 to 6"),
    ],
)
def test_counts_that_are_not_are_a_fault(counted: list[int], seen: list[int], words: str) -> None:
    with pytest.raises(BenchError, match=words):
        check_counts(Load(counted=counted, seen=seen))


def test_there_are_as_many_processes_as_ranks_need_and_cores_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for total, most, cores, count in (
        (12_000, 20_000, 2, 1),
        (12_001, 20_000, 2, 2),
        (1_000, 300, 2, 4),
        (18_000, 20_000, 16, 4),
        (60, 20_000, 16, 2),
        (1, 20_000, 16, 1),
    ):
        set_machine(monkeypatch, most)
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert processes_for(total) == count


@pytest.mark.parametrize(
    "places",
    [
        [("h", 1, 40_001)],
        [("h", port, 8) for port in range(24)],
        [("h", port, 8) for port in range(5_000)] + [("h", 9_999, 1)],
    ],
    ids=["one", "few relays", "many relays"],
)
def test_all_ranks_have_a_share_and_no_process_has_many_more(places: list[Place]) -> None:
    shares = shares_of(places, 3)
    assert len(shares) == 3
    given, parts = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for host, port, count in (place for share in shares for place in share):
        given[host, port] += count
        parts[host, port] += 1
    assert given == {(host, port): count for host, port, count in places}
    assert max(parts.values()) == (1 if len(places) >= 24 else 3)
    sums = [sum(place[2] for place in share) for share in shares]
    assert max(sums) - min(sums) <= 8


def test_relays_have_eight_ranks_each_or_as_many_as_a_server_can_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [targets.ranks_per_relay(ranks) for ranks in (1_001, 98_304, 1_000_000)] == [8, 8, 64]
    set_machine(monkeypatch, 10)
    assert targets.ranks_per_relay(1_000) == 128


# Real targets


@contextmanager
def running_target(name: str, size: int = 0) -> Iterator[Target]:
    target = TARGETS[name](name, size)
    try:
        target.start()
        yield target
    finally:
        target.stop()


@pytest.mark.parametrize("name", ["rallypoint-libuv", pytest.param("redis", marks=needs_redis)])
def test_a_target_starts_is_renewed_and_leaves_nothing(name: str) -> None:
    with running_target(name) as target:
        first, port = target.pid, target.port
        assert target.resident_bytes() > 1 << 20
        targets.renew(target)
        assert target.port == port
        second = target.pid
        assert second == first or not psutil.pid_exists(first)  # ours is kept for the new store
    assert not psutil.pid_exists(second)
    assert target.pid == 0
    target.stop()  # a second time is no fault


def test_a_server_whose_port_is_taken_cannot_be_renewed() -> None:
    with running_target("rallypoint-libuv") as target:
        psutil.Process(target.pid).kill()
        target.stop()
        with socket.create_server(("127.0.0.1", target.port)), pytest.raises(PortInUseError):
            targets.renew(target)


def test_relays_share_the_ranks() -> None:
    with running_target(RELAY, 19) as target:
        assert isinstance(target, BehindRelays)
        assert [count for _, _, count in target.places()] == [8, 8, 3]
        assert len({(host, port) for host, port, _ in target.places()}) == 3
        assert target.size()["relays_bytes"] > 1 << 20


def test_a_wait_for_a_target_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_target("rallypoint-legacy") as target:
        target.await_quiet()
        monkeypatch.setattr(base, "REST_LIMIT_S", 0.01)
        spent = iter(range(9))
        monkeypatch.setattr(base, "cpu_seconds", lambda _: next(spent))
        with pytest.raises(BenchError, match="does not come to rest"):
            target.await_quiet()


# Sessions


RANKS = 20
LOADS = {each.name: replace(each, ranks=RANKS if each.sizes else 0) for each in TABLE}
EXTRAS = {"restart": {"renew_seconds"}, "connect-storm": {"dropped", "turned_away"}}


@contextmanager
def in_session(load: Measurement, target: Target) -> Iterator[Session]:
    with closing(load.session(target, replace(load, seconds=load.seconds / 20))) as session:
        session.open()
        yield session


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer clients and keys than are measured; and ranks in two processes."""
    sizes = {"BUSY_CLIENTS": 5, "NEW_CLIENTS": 30, "STORM_CLIENTS": 60, "MANY_KEYS": 1_500}
    for name, size in sizes.items():
        monkeypatch.setattr(bench_loads, name, size)
    monkeypatch.setattr(loads, "MOST_PER_PROCESS", RANKS - 6)


def target_and_load(name: str, load: str) -> Any:
    """Behind relays, only the first is quick; a thousand clients are not."""
    marks = [needs_redis] if name == "redis" else []
    quick = load == "init" if name == RELAY else not load.endswith("-1000")
    marks += [] if quick else [pytest.mark.slow]
    return pytest.param(name, LOADS[load], marks=marks, id=f"{name}, {load}")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("name", "load"),
    [
        target_and_load(name, load)
        for name in ("rallypoint-libuv", "redis", RELAY)
        for load, each in LOADS.items()
        if name not in each.unfit
    ],
)
def test_every_load_with_a_real_target(name: str, load: Measurement) -> None:
    with running_target(name, load.ranks) as target, in_session(load, target) as session:
        for _ in range(2):
            began = time.monotonic()
            sample = session.round()
            seconds = time.monotonic() - began
            assert sample.value > 0
            assert load.unit == "rate" or sample.value < seconds
            assert (sample.cpu is None) == (sample.p50 is None) == (load.name == "restart")
            if sample.p50 is not None and sample.p99 is not None and sample.cpu is not None:
                assert 0 < sample.p50 <= sample.p99 < seconds
                assert sample.cpu >= 0  # of a wait given up, a relay tells nobody
            assert (sample.memory is not None) == (load.name in ("init", "connect-storm"))
            expect_extras(load.name, target, sample.extras)


def expect_extras(load: str, target: Target, extras: dict[str, float]) -> None:
    wanted = EXTRAS.get(load, set())
    if target.name == RELAY:
        wanted = wanted | {"relays_cpu", "messages"}
        if load == "init":
            wanted |= {"relays", "relays_bytes", "whole_seconds"}
            assert (extras["relays"], 3 <= extras["messages"] < 4 * RANKS) == (3, True)
            assert extras["whole_seconds"] > 0
    assert set(extras) == wanted
    assert extras.get("turned_away", 0) == 0


def test_ranks_find_out_a_store_that_was_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    load = LOADS["restart"]
    with running_target("rallypoint-libuv", load.ranks) as target, in_session(load, target) as session:
        monkeypatch.setattr(bench_loads, "renew", lambda _: None)
        with pytest.raises(BenchError, match="a new store counts from 21 on"):
            session.round()


def test_what_a_process_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = sum(psutil.Process(process.pid).cpu_times()[:2])
        assert cpu_seconds(process.pid) == pytest.approx(used, abs=0.05)
        monkeypatch.setattr(os, "scandir", lambda _: (_ for _ in ()).throw(FileNotFoundError()))
        assert cpu_seconds(process.pid) == pytest.approx(used, abs=0.05)
        process.kill()


def test_fewer_rounds_are_at_least_one() -> None:
    for each in TABLE:
        assert hurried(each, 0, quick=True).rounds >= 1
