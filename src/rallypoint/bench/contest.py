"""One load with several targets, in turns: a noisy machine is then equally noisy to all of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from operator import methodcaller
from typing import Protocol

from rallypoint.bench import machine
from rallypoint.bench.results import BenchError, Entry, Record, Results, Sample, Unit
from rallypoint.bench.targets import Target
from rallypoint.bench.workers import Load

Kinds = Mapping[str, type[Target]]
"""The targets that can take part, by name."""


class Session(ABC):
    """A load in progress with one target: it is started, opened once, goes through rounds, and is closed."""

    def __init__(self, target: Target, measurement: Measurement) -> None:
        self.target = target
        self.measurement = measurement
        self.resources = ExitStack()
        self.start_seconds = 0.0
        """How long the target and its load took to start."""

    def start(self) -> None:
        """Start the target's server."""
        self.target.start()

    @abstractmethod
    def open(self) -> None:
        """Connect, store what has to be there, and warm up."""

    @abstractmethod
    def round(self) -> Sample:
        """Measure once."""

    def close(self) -> None:
        """Give back everything that was opened, also if not all was; then end the server."""
        self.resources.close()
        self.target.stop()

    def metered(self, work: Callable[[], Load]) -> Sample:
        """The sample of a load, with what the target spent meanwhile."""
        counters, cpu = self.target.counters(), self.target.cpu_seconds()
        load = work()
        cpu = self.target.cpu_seconds() - cpu
        after = self.target.counters()
        extras = {name: after[name] - counters[name] for name in counters}
        per_operation, share = cpu / load.operations, cpu / load.seconds
        return Sample(self.value(load), per_operation, share, load.share, load.p50, load.p99, extras=extras)

    def value(self, load: Load) -> float:
        """The figure that the record is about."""
        return load.seconds


@dataclass(frozen=True)
class Measurement:
    """A load, the targets that take part, and the number of rounds."""

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
    sizes: tuple[int, ...] = ()
    """The usual numbers of ranks; none: it has no ranks."""
    quick_sizes: tuple[int, ...] = ()
    ranks: int = 0

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

    def __init__(self, measurement: Measurement, kinds: Kinds, watcher: Watcher) -> None:
        self._measurement = measurement
        self._watcher = watcher
        self.record = measurement.record()
        self._sessions = {
            name: measurement.session(kinds[name](name, measurement.ranks), measurement)
            for name in measurement.targets
        }

    def run(self) -> None:
        """All rounds; the record is filled as they go. In the end, nothing is left of what was started."""
        with ExitStack() as resources:
            for session in self._sessions.values():
                resources.callback(session.close)
            # All servers first: once thousands of ranks have ports, there may be none left to listen on.
            for name in list(self._sessions):
                self._attempt(name, methodcaller("start"))
            for name in list(self._sessions):
                self._watcher.begin(self._measurement, name, 0)
                self._attempt(name, methodcaller("open"))
            for number in range(1, self._measurement.rounds + 1):
                for name in in_turn(list(self._sessions), number):
                    self._watcher.begin(self._measurement, name, number)
                    self._attempt(name, self._round)

    def _attempt(self, name: str, work: Callable[[Session], None]) -> None:
        """Do something with a target; one that fails is left out from there on."""
        begun, session = time.monotonic(), self._sessions[name]
        try:
            work(session)
        except (BenchError, OSError) as error:
            self._fail(name, str(error))
        except Exception as error:  # of ours, most likely: the others can still be measured
            self._fail(name, f"{type(error).__name__}: {error}")
        if work != self._round:
            session.start_seconds += time.monotonic() - begun

    def _round(self, session: Session) -> None:
        self.record.entries[session.target.name].samples.append(session.round())
        session.target.check_alive()

    def _fail(self, name: str, fault: str) -> None:
        """Leave a target out, and end what belongs to it: it would take CPU time from the others."""
        session = self._sessions.pop(name)
        try:
            session.target.check_alive()
        except BenchError as death:
            fault = f"{fault}; {death}"
        self.record.entries[name].fault = fault
        session.close()
        self._watcher.drop(name, f"{self.record.title}: {fault}")


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: another target is first each time, and each follows another one."""
    first = number // 2 % len(names) if names else 0
    turned = [*names[first:], *names[:first]]
    return turned[::-1] if number % 2 else turned


def new_results(command: str, notes: Sequence[str]) -> Results:
    """Results with nothing measured yet, but all that is known of the machine."""
    return Results(
        command,
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=machine.facts(),
        versions=machine.versions(),
        limits=machine.limits(),
        notes=list(notes),
    )


def measure(measurements: Sequence[Measurement], kinds: Kinds, results: Results, watcher: Watcher) -> None:
    """Measure all of this; an interruption goes on when every process has been ended."""
    begun = time.monotonic()
    try:
        for measurement in measurements:
            contest = Contest(measurement, kinds, watcher)
            results.records.append(contest.record)
            contest.run()
    except KeyboardInterrupt:
        results.interrupted = True
        raise
    finally:
        results.seconds = time.monotonic() - begun
