"""A load in progress with one target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from rallypoint.bench.results import Record, Sample, Unit
from rallypoint.bench.targets import Hosts, Target, make_target

_Done = TypeVar("_Done")


class Session(ABC):
    """It is opened once, goes through rounds, and is closed in any case."""

    def __init__(self, target: Target, measurement: Measurement) -> None:
        self.target = target
        self.measurement = measurement
        self.resources = ExitStack()
        self.start_seconds = 0.0
        """How long the target and this session took to start; whoever opens it says so."""
        self.relay_cpu = 0.0
        """What a relay in between has spent during what was metered last."""

    @abstractmethod
    def open(self) -> None:
        """Connect, store what has to be there, and warm up."""

    @abstractmethod
    def round(self) -> Sample:
        """Measure once."""

    def close(self) -> None:
        """Let go of everything, however much of it there is."""
        self.resources.close()

    def metered(self, work: Callable[[], _Done]) -> tuple[_Done, float]:
        """Do some work; return also the CPU time that the server spent meanwhile."""
        before, relay = self.target.cpu_seconds(), self.target.relay_cpu_seconds()
        done = work()
        self.relay_cpu = self.target.relay_cpu_seconds() - relay
        return done, self.target.cpu_seconds() - before


@dataclass(frozen=True)
class Measurement:
    """What is measured: a load, with whom, and how often."""

    command: str
    name: str
    load: str
    """In words."""
    operation: str
    unit: Unit
    session: Callable[[Target, Measurement], Session]
    targets: tuple[str, ...] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)
    """Targets that cannot do it, or of which it would say nothing, and why."""
    connections: int = 0
    """How many clients there are at a time, where that does not depend on the ranks."""
    rounds: int = 5
    quick_rounds: int = 2
    seconds: float = 0.8
    """How long a round lasts, or may be thought to last."""
    is_steady: bool = False
    """Whether a round lasts as long as it is told to."""
    ranks: int = 0
    make_target: Callable[[str, Hosts, int], Target] = make_target

    def record(self) -> Record:
        """An empty record of it."""
        return Record(self.command, self.name, self.load, self.operation, self.unit, self.ranks)
