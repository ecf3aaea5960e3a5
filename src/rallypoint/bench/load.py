"""What a process of the load did, told by itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from rallypoint.bench.results import Sample, percentile
from rallypoint.bench.workers import Message


@dataclass(frozen=True)
class Load:
    """How many operations, from when to when, at which cost to itself, and how long they took."""

    operations: int
    start: float
    end: float
    cpu: float
    p50: float | None = None
    p99: float | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def share(self) -> float:
        """How much of one core the process took: near 1, it may have been the bottleneck."""
        return self.cpu / self.seconds

    def message(self) -> Message:
        """For the answer of a worker."""
        return asdict(self)


class Stopwatch:
    """The time and the CPU time of this process, from its making on."""

    def __init__(self) -> None:
        self._cpu, self._start = time.process_time(), time.monotonic()

    def stop(self, operations: int, taken: Iterable[float] = ()) -> Load:
        """What was done meanwhile; `taken` are the times that operations took, as far as they were timed."""
        end, cpu = time.monotonic(), time.process_time() - self._cpu
        ordered = sorted(taken)
        p50, p99 = (percentile(ordered, 0.5), percentile(ordered, 0.99)) if ordered else (None, None)
        return Load(operations, self._start, end, cpu, p50, p99)


def sample(value: float, loads: Sequence[Load], cpu: float, operations: int = 0) -> Sample:
    """The result of what these did together, for which the server took that much CPU time."""
    seconds = max(load.end for load in loads) - min(load.start for load in loads)
    operations = operations or sum(load.operations for load in loads)
    return Sample(
        value,
        cpu / operations,
        cpu / seconds,
        max(load.share for load in loads),
        max((load.p50 for load in loads if load.p50 is not None), default=None),
        max((load.p99 for load in loads if load.p99 is not None), default=None),
    )
