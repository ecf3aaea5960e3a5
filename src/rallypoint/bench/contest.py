"""One load with several targets, in turns: a noisy machine is then equally noisy to all of them."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from operator import methodcaller
from typing import Any, Final

from rallypoint.bench.results import BenchError, Entry, Record, Sample, Unit
from rallypoint.bench.targets import Target
from rallypoint.bench.workers import Load, LoadProcess, outcomes

RUN_LIMIT_S: Final = 180.0

Kinds = Mapping[str, type[Target]]
"""The targets that can take part, by name."""


@dataclass(frozen=True)
class Measurement:
    """A load, and how it is measured."""

    command: str
    """The subcommand that measures it."""
    name: str
    load: str
    """In words."""
    session: Callable[[Target, Measurement], Session]
    operation: str = "rank"
    unit: Unit = "time"
    targets: tuple[str, ...] = ()
    """Those that take part; none: those that the user asks for."""
    unfit: Mapping[str, str] = field(default_factory=dict)
    """Targets that cannot do it, or of which it would say nothing, and why."""
    connections: int = 0
    """How many clients there are at a time, where that does not depend on the ranks."""
    rounds: int = 5
    seconds: float = 0.0
    """How long a round is to last; 0: until its work is done."""
    sizes: tuple[int, ...] = ()
    """The usual numbers of ranks, the two quick ones first; none: it has no ranks."""
    ranks: int = 0


class Plan:
    """The measurements of a table that can be done here, and notes on those that cannot."""

    def __init__(
        self, table: Iterable[Measurement], kinds: Kinds, targets: Sequence[str], sizes: Sequence[int] = ()
    ) -> None:
        """With these targets and sizes; without sizes, the usual."""
        self.kinds = kinds
        self.measurements: list[Measurement] = []
        missing = absences(targets, kinds)
        self.notes = [f"{name} is left out: {why}" for name, why in missing.items()]
        self._targets = [name for name in targets if name not in missing]
        for each in table:
            for size in (sizes or each.sizes) if each.sizes else [each.ranks]:
                self._add(each, size)
        if sizes and not any(each.ranks for each in self.measurements):
            self.notes.append("--ranks does not matter to what has no ranks")

    def _add(self, each: Measurement, size: int) -> None:
        """With the targets that can do it here, all at the same time."""
        what = f"{each.name}, {size:,} ranks" if size else each.name
        names = each.targets or self._targets
        connections = max(size, each.connections)
        whys = {name: each.unfit.get(name) or self.kinds[name].hindrance(connections) for name in names}
        self.notes += [f"{what}: {name} is left out: {why}" for name, why in whys.items() if why]
        if kept := tuple(name for name, why in whys.items() if not why):
            load = f"{size:,} {each.load}" if size else each.load
            self.measurements.append(replace(each, load=load, targets=kept, ranks=size))


def absences(names: Iterable[str], kinds: Kinds) -> dict[str, str]:
    """The targets that are not installed here, each with the reason."""
    needs = {name: kinds[name].needs for name in names if kinds[name].needs}
    missing = {name: need for name, need in needs.items() if not find_spec(need) and not shutil.which(need)}
    return {name: f"{need} is not installed" for name, need in missing.items()}


def hurried(each: Measurement, repeat: int, quick: bool) -> Measurement:
    """With that many rounds, 0 being as many as suit; `quick`: fewer and shorter ones, and fewer ranks."""
    if quick:
        rounds, seconds = min(each.rounds // 2, 3), each.seconds / 4
        each = replace(each, rounds=rounds, seconds=seconds, sizes=each.sizes[:2])
    return replace(each, rounds=repeat or each.rounds)


class Session(ABC):
    """A load in progress with one target: it is started, opened once, goes through rounds, and is closed."""

    def __init__(self, target: Target, measurement: Measurement) -> None:
        self.target = target
        self.measurement = measurement
        self.resources = ExitStack()
        self.workers: list[LoadProcess] = []

    def start(self) -> None:
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

    def everyone(self, do: str, **arguments: object) -> list[Any]:
        """Give the same order to all processes; their answers."""
        return outcomes([worker.order(do, **arguments) for worker in self.workers], RUN_LIMIT_S)

    def metered(self, work: Callable[[], Load]) -> Sample:
        """The sample of a load, with what the target spent meanwhile."""
        before = self.target.spent()
        load = work()
        self.target.settle()
        extras = {name: count - before[name] for name, count in self.target.spent().items()}
        cpu = extras.pop("cpu")
        return Sample(
            *(self.value(load), cpu / load.operations, cpu / load.seconds, load.share),
            *(load.percentile(0.5), load.percentile(0.99)),
            extras=extras,
        )

    def value(self, load: Load) -> float:
        """The figure that the record is about."""
        return load.seconds


class Contest:
    """A measurement in progress, and its record, which is filled as it goes."""

    def __init__(self, measurement: Measurement, kinds: Kinds) -> None:
        each = measurement
        entries = {name: Entry(name) for name in each.targets}
        self.record = Record(
            each.command, each.name, each.load, each.operation, each.unit, each.ranks, entries
        )
        self._rounds = each.rounds
        self._sessions = {name: each.session(kinds[name](name, each.ranks), each) for name in each.targets}

    def run(self) -> None:
        """All rounds. In the end, nothing is left of what was started."""
        with ExitStack() as resources:
            for session in self._sessions.values():
                resources.callback(session.close)
            # All servers first: once thousands of ranks have ports, there may be none left to listen on.
            self._attempt(0, methodcaller("start"))
            self._attempt(0, methodcaller("open"))
            for number in range(1, self._rounds + 1):
                self._attempt(number, self._round)

    def _attempt(self, number: int, work: Callable[[Session], None]) -> None:
        """Do something with each target. Another is first each time, and each follows another one.

        One that fails is left out from there on, and all of it is ended.
        """
        names = list(self._sessions)
        first = number // 2 % len(names) if names else 0
        turned = [*names[first:], *names[:first]]
        for name in turned[::-1] if number % 2 else turned:
            try:
                work(self._sessions[name])
            except Exception as error:  # also one of ours: the others can still be measured
                fault = str(error) if isinstance(error, BenchError) else repr(error)
                self.record.entries[name].fault = fault
                self._sessions.pop(name).close()

    def _round(self, session: Session) -> None:
        self.record.entries[session.target.name].samples.append(session.round())
