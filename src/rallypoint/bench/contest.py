"""One load with several targets, in turns: a noisy machine is then equally noisy to all of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Protocol, TypeVar

from rallypoint.bench import machine
from rallypoint.bench.results import BenchError, Entry, Record, Results, Sample, Unit, title
from rallypoint.bench.targets import Hosts, Target, make_target, redis_version
from rallypoint.bench.workers import Load

_Done = TypeVar("_Done")


@dataclass(frozen=True)
class Cost:
    """What a target spent on some work."""

    cpu: float
    extras: dict[str, float]

    def sample(self, value: float, load: Load) -> Sample:
        """The result of a round that did this work."""
        per_operation, share = self.cpu / load.operations, self.cpu / load.seconds
        return Sample(value, per_operation, share, load.share, load.p50, load.p99, extras=self.extras)


class Session(ABC):
    """A load in progress with one target. It is opened once, goes through rounds, and is closed."""

    def __init__(self, target: Target, measurement: Measurement) -> None:
        self.target = target
        self.measurement = measurement
        self.resources = ExitStack()

    @abstractmethod
    def open(self) -> None:
        """Connect, store what has to be there, and warm up."""

    @abstractmethod
    def round(self) -> Sample:
        """Measure once."""

    def close(self) -> None:
        """Give back everything that was opened, also if not all was."""
        self.resources.close()

    def metered(self, work: Callable[[], _Done]) -> tuple[_Done, Cost]:
        """Do some work; return also what the target spent meanwhile."""
        counters, cpu = self.target.counters(), machine.cpu_seconds(self.target.pid)
        done = work()
        cpu = machine.cpu_seconds(self.target.pid) - cpu
        after = self.target.counters()
        return done, Cost(cpu, {name: after[name] - counters[name] for name in counters})


@dataclass(frozen=True)
class Measurement:
    """What is measured: a load, with which targets, and how often."""

    command: str
    name: str
    load: str
    """In words."""
    session: Callable[[Target, Measurement], Session]
    operation: str = "rank"
    unit: Unit = "time"
    targets: tuple[str, ...] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)
    """Targets that cannot do it, or of which it would say nothing, and why."""
    connections: int = 0
    """How many clients there are at a time, where that does not depend on the ranks."""
    rounds: int = 5
    seconds: float = 0.0
    """How long a round is to last; 0: until its work is done."""
    ranks: int = 0
    make_target: Callable[[str, Hosts, int], Target] = make_target

    def record(self) -> Record:
        """A record of it without samples."""
        entries = {name: Entry(name) for name in self.targets}
        return Record(self.command, self.name, self.load, self.operation, self.unit, self.ranks, entries)


class Watcher(Protocol):
    """Is told what is going on."""

    def begin(self, measurement: Measurement, target: str, round_number: int) -> None:
        """A round begins; round 0 is the start of the load."""

    def drop(self, target: str, fault: str) -> None:
        """No more rounds of this target: it has failed."""


class Contest:
    """A measurement in progress."""

    def __init__(self, measurement: Measurement, hosts: Hosts, watcher: Watcher) -> None:
        self._measurement = measurement
        self._hosts = hosts
        self._watcher = watcher
        self.record = measurement.record()
        self._targets: dict[str, Target] = {}
        self._sessions: dict[str, Session] = {}
        self._resources = ExitStack()

    def run(self) -> None:
        """All rounds; the record is filled as they go. In the end, nothing is left of what was started."""
        with self._resources:
            # All servers first: once thousands of ranks have ports, there may be none left to listen on.
            for name in self._measurement.targets:
                self._attempt(name, partial(self._start, name))
            for name in list(self._targets):
                self._watcher.begin(self._measurement, name, 0)
                self._attempt(name, partial(self._open, name))
            for number in range(1, self._measurement.rounds + 1):
                for name in in_turn(list(self._sessions), number):
                    self._watcher.begin(self._measurement, name, number)
                    self._attempt(name, partial(self._round, name))

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        """Do something with a target; one that fails is left out from there on."""
        try:
            work()
        except (BenchError, OSError) as error:
            self._fail(name, str(error))
        except Exception as error:  # of ours, most likely: the others can still be measured
            self._fail(name, f"{type(error).__name__}: {error}")

    def _start(self, name: str) -> None:
        begun = time.monotonic()
        target = self._measurement.make_target(name, self._hosts, self._measurement.ranks)
        self._targets[name] = target
        self._resources.callback(target.stop)
        target.start()
        target.start_seconds = time.monotonic() - begun

    def _open(self, name: str) -> None:
        begun = time.monotonic()
        target = self._targets[name]
        session = self._measurement.session(target, self._measurement)
        self._resources.callback(session.close)
        session.open()
        target.start_seconds += time.monotonic() - begun
        self._sessions[name] = session

    def _round(self, name: str) -> None:
        self.record.entries[name].samples.append(self._sessions[name].round())
        self._targets[name].check_alive()

    def _fail(self, name: str, fault: str) -> None:
        """Leave a target out, and end what belongs to it: it would take CPU time from the others."""
        target, session = self._targets.pop(name, None), self._sessions.pop(name, None)
        try:
            if target and target.pid:
                target.check_alive()
        except BenchError as death:
            fault = f"{fault}; {death}"
        self.record.entries[name].fault = fault
        if session:
            session.close()
        if target:
            target.stop()
        self._watcher.drop(name, f"{title(self.record)}: {fault}")


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: another target is first each time, and each follows another one."""
    first = number // 2 % len(names) if names else 0
    turned = [*names[first:], *names[:first]]
    return turned[::-1] if number % 2 else turned


# A whole run


def new_results(command: str, notes: Sequence[str]) -> Results:
    """Results with nothing measured yet, but all that is known of the machine."""
    return Results(
        command,
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=machine.facts(),
        versions={**machine.versions(), "redis": redis_version()},
        limits=machine.limits(),
        notes=list(notes),
    )


def measure(measurements: Sequence[Measurement], results: Results, watcher: Watcher) -> None:
    """Measure all of this; an interruption goes on when every process has been ended."""
    begun = time.monotonic()
    try:
        with ExitStack() as resources:
            hosts = Hosts(resources)
            for measurement in measurements:
                contest = Contest(measurement, hosts, watcher)
                results.records.append(contest.record)
                contest.run()
    except KeyboardInterrupt:
        results.interrupted = True
        raise
    finally:
        results.seconds = time.monotonic() - begun
