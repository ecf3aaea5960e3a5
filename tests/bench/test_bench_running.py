"""A run of `rallypoint bench`: what is planned, targets in turns, and all loads with real targets."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest

from bench_fakes import needs_redis
from benchmarks import loads as bench_loads
from benchmarks import targets
from benchmarks.planning import COMMANDS, TABLE, make_plan
from benchmarks.targets import RELAY, TARGETS, USUAL, BehindRelays
from rallypoint.bench import contest, loads, machine
from rallypoint.bench import planning as plans
from rallypoint.bench import targets as base
from rallypoint.bench.contest import Contest, Measurement, Session
from rallypoint.bench.loads import check_counts, processes_for, shares_of
from rallypoint.bench.planning import BenchPlan, Wish, absences
from rallypoint.bench.results import BenchError, Results, Sample
from rallypoint.bench.swarm import RanksAt
from rallypoint.bench.targets import Target
from rallypoint.errors import PortInUseError, UsageError
from rallypoint.store.machine import interfaces
from raw import until

# What is planned

GIB = 1 << 30


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with room for all, which has all that can be measured: whatever this one has."""
    settings: dict[str, Callable[[], object]] = {
        "most_connections": lambda: 20_000,
        "available_bytes": lambda: 64 * GIB,
        "raise_open_file_limit": lambda: None,
    }
    for name, value in settings.items():
        monkeypatch.setattr(machine, name, value)
    monkeypatch.setattr(interfaces, "time_look_ups", lambda: interfaces.LookUps(64, 0.01))
    monkeypatch.setattr(plans, "absences", lambda *_: {})


def wish(*commands: str, targets: Sequence[str] = (), **options: Any) -> Wish:
    return Wish(commands or COMMANDS, tuple(targets) or tuple(USUAL), **options)


def sizes_of(plan: BenchPlan, name: str) -> dict[int, tuple[str, ...]]:
    """With whom a measurement is planned, at which size."""
    return {each.ranks: each.targets for each in plan.measurements if each.name == name}


def find(plan: BenchPlan, name: str) -> Measurement:
    (found,) = [each for each in plan.measurements if each.name == name]
    return found


def test_all_is_planned_where_there_is_room() -> None:
    plan = make_plan(wish())
    planned = {each.name for each in plan.measurements}
    assert planned > {each.name for each in TABLE}
    assert {each.command for each in plan.measurements} == set(COMMANDS)
    for each in plan.measurements:
        assert not set(each.targets) & set(each.unfit)
        assert each.rounds >= 1
        assert each.ranks == 0 or f"{each.ranks:,} " in each.load


def test_very_many_ranks_are_brought_up_where_that_is_the_point_through_relays_and_seldom() -> None:
    plan = make_plan(wish("init", "wakeup", "restart"))
    planned = sizes_of(plan, "init")
    assert (planned[16_384], planned[98_304]) == (tuple(USUAL), (RELAY,))
    direct = ", ".join(each for each in USUAL if each != RELAY)
    why = "a process may have 20,000 connections here; through relays it is measured"
    assert f"init, 98,304 ranks: {direct} left out: {why}" in plan.notes
    assert 98_304 not in sizes_of(plan, "wakeup") | sizes_of(plan, "restart")
    rounds = {each.ranks: each.rounds for each in plan.measurements if each.name == "init"}
    assert (rounds[16_384], rounds[98_304]) == (5, 3)


@pytest.mark.parametrize(
    ("name", "room", "other", "why"),
    [
        ("most_connections", 4_000, "rallypoint-libuv", "a process may have 4,000 connections here"),
        ("available_bytes", 10_000 * plans.BYTES_PER_RANK, RELAY, "there is not enough memory"),
    ],
)
def test_sizes_without_room_for_them_are_left_out(
    name: str, room: int, other: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, name, lambda: room)
    plan = make_plan(wish("init", ranks=(4_000, 4_001), targets=("redis", other)))
    assert list(sizes_of(plan, "init")) == [4_000]
    assert plan.notes == [f"init, 4,001 ranks: redis, {other} left out: {why}"]


def test_what_is_not_installed_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {name: "torch is not installed" for name in USUAL if name.startswith("torch-")}
    monkeypatch.setattr(plans, "absences", lambda *_: {**absent, "redis": "redis-server is not installed"})
    plan = make_plan(wish())
    assert plan.notes[:3] == [
        "torch-libuv is left out: torch is not installed",
        "torch-legacy is left out: torch is not installed",
        "redis is left out: redis-server is not installed",
    ]
    took_part = {name for each in plan.measurements for name in each.targets}
    assert took_part == {"rallypoint-libuv", "rallypoint-legacy", RELAY}
    assert not any(each.name.startswith(("tutorial", "init-as-is")) for each in plan.measurements)
    assert not any("look-ups" in note for note in plan.notes)


def test_an_absence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert absences(["rallypoint-legacy"], TARGETS) == {}
    monkeypatch.setattr(plans, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert absences(list(USUAL), TARGETS) == {
        "rallypoint-libuv": "uvloop is not installed",
        RELAY: "uvloop is not installed",
        "torch-libuv": "torch is not installed",
        "torch-legacy": "torch is not installed",
        "redis": "redis-server is not installed",
    }


def test_wishes_are_heeded() -> None:
    some = ("redis", "rallypoint-legacy")
    plan = make_plan(wish("barrier", "ops", ranks=(64, 8, 64), targets=some, repeat=7, quick=True))
    assert sizes_of(plan, "barrier") == dict.fromkeys((64, 8), some)
    assert len(plan.measurements) == 2 * 2 + 13
    assert {each.rounds for each in plan.measurements} == {7}
    assert {each.command for each in plan.measurements} == {"barrier", "ops"}


def test_quick_is_less_of_everything() -> None:
    usual, quick = make_plan(wish()), make_plan(wish(quick=True))
    assert list(sizes_of(quick, "init")) == [1_024, 4_096]
    assert find(usual, "get").rounds == 5
    assert list(sizes_of(quick, "restart")) == [4_096]
    assert find(quick, "get").rounds == 2
    for name in ("get", "one-get", "cancel"):
        assert find(quick, name).seconds == find(usual, name).seconds / 4
    assert (find(usual, "tutorial-init").ranks, find(quick, "tutorial-init").ranks) == (64, 16)


@pytest.mark.parametrize(("seconds", "ranks", "rounds"), [(0.01, 256, 5), (5.0, 64, 3)])
def test_torch_as_it_comes_takes_part_where_torch_does(
    seconds: float, ranks: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer ranks where look-ups stall: it does one for every rank."""
    monkeypatch.setattr(interfaces, "time_look_ups", lambda: interfaces.LookUps(1, seconds))
    plan = make_plan(wish("init", ranks=(2,), targets=("torch-legacy", "rallypoint-libuv", "redis")))
    planned = find(plan, "init-as-is")
    assert planned.targets == ("torch-legacy-as-is", "rallypoint-libuv")
    assert (planned.ranks, planned.rounds) == (ranks, rounds)
    assert ("every rank" in plan.notes[-1]) == (seconds > 1)


def test_if_nothing_is_left_that_is_told_with_reasons() -> None:
    for command, ranks, target in (("wakeup", 30_000, "redis"), ("restart", 4, RELAY)):
        with pytest.raises(UsageError, match="nothing to measure") as failure:
            make_plan(wish(command, ranks=(ranks,), targets=(target,)))
        assert failure.value.hint


# Targets in turns


Fails = dict[str, str]


class FakeTarget(Target):
    """A target without a process."""

    is_dead = False

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def check_alive(self) -> None:
        if self.is_dead:
            raise BenchError("it died")


class FakeSession(Session):
    """Rounds that take a number each."""

    target: FakeTarget

    def __init__(
        self, target: Target, measurement: Measurement, log: list[str], fails: dict[str, str]
    ) -> None:
        super().__init__(target, measurement)
        self.name, self.log, self.number = target.name, log, 0
        self.fails = fails.get(target.name, "")
        self.target.is_dead = self.fails == "dead"

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


FAKES = dict.fromkeys("abc", FakeTarget)


class FakeWatcher:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []
        self.drops: list[tuple[str, str]] = []

    def begin(self, measurement: Measurement, target: str, round_number: int) -> None:
        self.steps.append((target, round_number))

    def drop(self, target: str, fault: str) -> None:
        self.drops.append((target, fault))


class Game:
    """A contest of fakes, and what happened."""

    def __init__(self, rounds: int = 3, **fails: str) -> None:
        self.log: list[str] = []
        self.watcher = FakeWatcher()
        session = partial(FakeSession, log=self.log, fails=fails)
        self.measurement = Measurement("ops", "get", "a load", session, targets=tuple("abc"), rounds=rounds)
        self.contest = Contest(self.measurement, FAKES, self.watcher)

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
    begun = [("a", 0), ("b", 0), ("c", 0), ("c", 1), ("b", 1), ("a", 1), ("b", 2)]
    assert game.watcher.steps[: len(begun)] == begun
    assert len(game.watcher.steps) == 15


def test_all_servers_start_before_any_load_does_and_all_ends_in_reverse() -> None:
    game = Game(0).play()
    assert game.log[:6] == [f"{what} {name}" for what in ("start", "open") for name in "abc"]
    assert game.log[6:] == [f"close {name}" for name in "cba"]


@pytest.mark.parametrize(
    ("fails", "fault", "turns"),
    [
        ("start", "it does not start", "c1 a1 c2 a2 a3 c3"),
        ("open", "it does not open", "c1 a1 c2 a2 a3 c3"),
        ("round 2", "a wrong answer", "c1 b1 a1 b2 c2 a2 a3 c3"),
    ],
)
def test_a_target_that_fails_is_left_out_and_the_others_go_on(fails: str, fault: str, turns: str) -> None:
    game = Game(b=fails).play()
    assert game.faults == {"b": fault}
    assert game.turns == turns
    assert game.samples("b") == ([1] if fails == "round 2" else [])
    assert game.samples("a") == game.samples("c") == [1, 2, 3]
    assert game.watcher.drops == [("b", f"get: {fault}")]
    assert {"close a", "close b", "close c"} < set(game.log)


def test_a_server_that_has_died_is_told_besides_what_it_led_to() -> None:
    game = Game(1, a="dead").play()
    assert game.faults["a"].endswith("it died")


def test_what_has_been_measured_when_it_is_interrupted_is_kept_and_all_is_ended() -> None:
    game = Game(b="interrupt 2")
    first, second = game.measurement, replace(game.measurement, name="never")
    results = Results("a command", "now")
    with pytest.raises(KeyboardInterrupt) as stop:
        contest.measure([first, second], FAKES, results, game.watcher)
    assert stop.value.args == (signal.SIGTERM,)
    assert results.interrupted
    assert results.seconds > 0
    (record,) = results.records
    assert {name: len(entry.samples) for name, entry in record.entries.items()} == {"a": 1, "b": 1, "c": 1}
    assert game.log[-3:] == [f"close {name}" for name in "cba"]


# Counts and shares


def counts(counted: list[int], seen: list[int] | None = None) -> dict[str, list[int]]:
    return {"counted": counted} if seen is None else {"counted": counted, "seen": seen}


def test_counts_that_were_each_given_once_are_right() -> None:
    check_counts(4, [counts([4, 1]), counts([2, 3])])
    check_counts(2, [counts([8, 7])], before=6)
    check_counts(2, [counts([2], [2]), counts([1], [1])])
    check_counts(3, [{}])  # they did not count themselves


def test_counts_that_are_not_are_a_fault() -> None:
    for answers, before, words in (
        ([counts([1, 2]), counts([2, 4])], 0, "each number"),  # twice
        ([counts([1, 2]), counts([3])], 0, "each number"),  # missing
        ([counts([1, 2]), counts([3, 5])], 0, "each number"),  # left out
        ([counts([0, 1]), counts([2, 3])], 0, "each number"),
        ([counts([1, 2]), counts([2, 3, 4])], 0, "each number"),  # twice, and none missing
        ([counts([1, 2]), counts([3, 4])], 1, "each number"),
        ([counts([1, 2], [0, 4]), counts([3, 4], [4, 4])], 0, "lower than"),
        ([counts([1, 2], [1, 2]), counts([3], [3]), counts([4], [3])], 0, "lower than"),
        ([counts([1, 2], [2, 5]), counts([3, 4], [4, 4])], 0, "the last must see all"),
    ):
        with pytest.raises(BenchError, match=words):
            check_counts(4, answers, before)


def test_there_are_as_many_processes_as_ranks_need_and_cores_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for total, most, cores, count in (
        (18_000, 20_000, 2, 1),
        (18_001, 20_000, 2, 2),
        (1_000, 300, 2, 4),
        (18_000, 20_000, 16, 4),
        (2_500, 20_000, 16, 2),
        (100, 20_000, 16, 1),
    ):
        monkeypatch.setattr(machine, "most_connections", lambda most=most: most)
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert processes_for(total) == count


@pytest.mark.parametrize(
    "places",
    [
        [("h", 1, "", 40_001)],
        [("h", 1, "", 25_408), ("h", 1, "127.1.1.1", 14_593)],
        [("h", port, "", 8) for port in range(24)],
        [("h", port, "", 8) for port in range(5_000)] + [("h", 9_999, "", 1)],
    ],
    ids=["one", "two sources", "few relays", "many relays"],
)
def test_all_ranks_have_a_share_and_no_process_has_many_more(places: list[RanksAt]) -> None:
    shares = shares_of(places, 3)
    assert len(shares) == 3
    given, parts = Counter[tuple[str, int, str]](), Counter[tuple[str, int, str]]()
    for place in (place for share in shares for place in share):
        given[place[:3]] += place[3]
        parts[place[:3]] += 1
    assert given == {place[:3]: place[3] for place in places}
    assert max(parts.values()) == (1 if len(places) >= 24 else 3)
    sums = [sum(place[3] for place in share) for share in shares]
    assert max(sums) - min(sums) <= 8


# Where ranks connect


def test_ranks_that_need_more_ports_come_from_further_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.bench.targets.client_ports", lambda: (1_001, 2_000))
    target = FakeTarget("a")
    target.port = 1
    assert target.places(900) == [("127.0.0.1", 1, "", 900)]
    assert target.places(2_000) == [
        ("127.0.0.1", 1, "", 900),
        ("127.0.0.1", 1, "127.1.1.1", 900),
        ("127.0.0.1", 1, "127.1.1.2", 200),
    ]
    many = target.places(900 * 300)
    assert len({source for _, _, source, _ in many}) == 300
    for _, _, source, _ in many[1:]:
        socket.inet_aton(source)
        assert source.startswith("127.1.")


def test_relays_have_eight_ranks_each_or_as_many_as_a_server_can_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [targets.ranks_per_relay(ranks) for ranks in (1_001, 98_304, 1_000_000)] == [8, 8, 64]
    monkeypatch.setattr(machine, "most_connections", lambda: 10)
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
        target.check_alive()
        assert machine.resident_bytes(target.pid) > 1 << 20
        assert machine.open_files(target.pid) > 3
        targets.renew(target)
        assert target.port == port
        second = target.pid
        assert second == first or not psutil.pid_exists(first)  # ours is kept for the new store
    assert not psutil.pid_exists(second)
    assert target.pid == 0
    target.stop()  # a second time is no fault


def test_a_server_that_died_is_told_and_may_fail_to_be_renewed() -> None:
    target = TARGETS["rallypoint-libuv"]("rallypoint-libuv")
    target.start()
    process = psutil.Process(target.pid)
    process.kill()
    until(lambda: process.status() == psutil.STATUS_ZOMBIE, "it is dead")
    with pytest.raises(BenchError, match="rallypoint-libuv died"):
        target.check_alive()
    with socket.create_server(("127.0.0.1", target.port)), pytest.raises(PortInUseError):
        targets.renew(target)
    target.stop()


def test_relays_share_the_ranks() -> None:
    with running_target(RELAY, 19) as target:
        assert isinstance(target, BehindRelays)
        assert [count for _, _, _, count in target.places(19)] == [8, 8, 3]
        assert len({(host, port) for host, port, _, _ in target.places(19)}) == 3
        assert target.size()["relays_bytes"] > 1 << 20


def test_waits_for_a_target_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_target("rallypoint-legacy") as target:
        target.await_quiet()
        target.await_open_files(machine.open_files(target.pid))
        monkeypatch.setattr(base, "LEAVE_LIMIT_S", 0.01)
        with pytest.raises(BenchError, match="kept the connections"):
            target.await_open_files(-100)
        spent = iter(range(9))
        monkeypatch.setattr(machine, "cpu_seconds", lambda _: next(spent))
        with pytest.raises(BenchError, match="does not come to rest"):
            target.await_quiet()


# Sessions


RANKS = 20
LOADS = {each.name: replace(each, ranks=RANKS if each.sizes else 0) for each in TABLE}
EXTRAS = {
    "init": {"messages", "swarm_cpu", "whole_seconds"},
    "barrier": {"messages", "swarm_cpu"},
    "barrier-trickle": {"messages", "swarm_cpu"},
    "wakeup": {"swarm_cpu"},
    "restart": {"renew_seconds"},
    "connect-storm": {"dropped", "turned_away"},
}


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
    monkeypatch.setattr(loads, "RANKS_PER_PROCESS", RANKS - 6)


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
            if sample.p50 is not None:
                assert sample.p99 is not None
                assert 0 < sample.p50 <= sample.p99 < seconds
            assert (sample.cpu is None) == (load.name == "restart")
            assert sample.cpu is None or sample.cpu >= 0  # of a wait given up, a relay tells nobody
            assert (sample.memory is not None) == (load.name in ("init", "connect-storm"))
            expect_extras(load.name, target, sample.extras)


def expect_extras(load: str, target: Target, extras: dict[str, float]) -> None:
    if target.name == RELAY:
        wanted = EXTRAS.get(load, set()) | {"relays_cpu", "messages"}
        assert set(extras) == wanted | ({"relays", "relays_bytes"} if load == "init" else set())
        assert extras.get("relays", 3) == 3
        assert load != "init" or 3 <= extras["messages"] < 4 * RANKS
        return
    assert set(extras) == EXTRAS.get(load, set())
    assert extras.get("turned_away", 0) == 0
    if load == "init":
        assert extras["messages"] == 4 * RANKS
        assert extras["whole_seconds"] > 0
    elif "messages" in extras:
        assert 6 * RANKS + 1 <= extras["messages"] <= 7 * RANKS


def test_ranks_find_out_a_store_that_was_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    target_of = running_target("rallypoint-libuv")
    with target_of as target, in_session(LOADS["restart"], target) as session:
        monkeypatch.setattr(bench_loads, "renew", lambda _: None)
        with pytest.raises(BenchError, match="did not give each number from 1 on"):
            session.round()


# The machine


def test_what_a_process_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getpid()
    assert machine.cpu_seconds(me) == pytest.approx(sum(psutil.Process().cpu_times()[:2]), rel=0.2, abs=0.5)
    assert machine.resident_bytes(me) == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    files = machine.open_files(me)
    with open(os.devnull):
        assert machine.open_files(me) == files + 1
    monkeypatch.setattr(os, "scandir", no_scandir)
    assert machine.cpu_seconds(me) == pytest.approx(sum(psutil.Process().cpu_times()[:2]), rel=0.2, abs=0.5)


def no_scandir(_: str) -> Sequence[Any]:
    raise FileNotFoundError


def test_measurements_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    plans.check_system()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="needs Linux"):
        plans.check_system()
