"""Judges a training by the reports of its ranks: is it good, which rank lags, what to do. Pure.

Ranks in DDP leave every step together, so all have the same steps per second. A laggard is known by the time
that it needs by itself, up to the exchange of gradients: its `working_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isclose
from statistics import median_low
from typing import Annotated, Final

from rallypoint.codec import ReadBy
from rallypoint.exits import exit_text

_LEARNED: Final = 0.5
"""The loss has to fall to this part of its first value, or less."""

_TOLERANCE: Final = 1e-5
"""The greatest relative difference between numbers of two ranks that should be equal."""

_EQUAL: Final = {"first loss": "loss_first", "last loss": "loss_last", "parameters": "checksum"}
"""What all ranks have to agree on, and where a report has it."""

_Learned = Annotated[float, ReadBy(float)]
"""Also NaN, if a training went wrong."""


@dataclass(frozen=True)
class RankReport:
    """A rank's report about itself. Times are of the wall clock; seconds of a step are the median."""

    rank: int
    world_size: int
    device: str
    backend: str
    host: str
    pid: int
    ready_at: float
    """When it went to meet the others."""
    joined_at: float
    """When it had met them."""
    joined_seconds: float
    """From the start of its process to then."""
    loss_first: _Learned
    loss_last: _Learned
    checksum: _Learned
    """Of the parameters after the last step."""
    steps_per_second: float
    working_seconds: float
    waiting_seconds: float
    peak_memory_bytes: int | None
    gpu_use_percent: int | None


@dataclass(frozen=True)
class ProcessEnding:
    """How the processes of a training ended."""

    exit_codes: tuple[int | None, ...]
    """Of each command; None if it had to be ended."""
    deadline: float | None = None
    """The seconds after which all were ended; None if they ended by themselves."""


def problems_of(ranks: int, ending: ProcessEnding, reports: Sequence[RankReport]) -> list[str]:
    """Everything that is wrong with a training of `ranks` ranks, the cause before its consequences."""
    return list(_problems(ranks, ending, reports))


def _problems(ranks: int, ending: ProcessEnding, reports: Sequence[RankReport]) -> Iterator[str]:
    if ending.deadline is not None:
        yield f"it was not done after {ending.deadline:g} s"
    for code in sorted({code for code in ending.exit_codes if code}):
        yield f"a process was ended by signal {-code}" if code < 0 else exit_text(code)
    there, expected = {report.rank for report in reports}, set(range(ranks))
    for rank in sorted(expected - there):
        yield f"rank {rank} did not report"
    for rank in sorted(there - expected):
        yield f"there is a rank {rank} too many"
    for report in reports:
        if report.world_size != ranks:
            yield f"rank {report.rank} was in a world of {report.world_size}, not of {ranks}"
    for name, field in _EQUAL.items():
        values = [getattr(report, field) for report in reports]
        if any(not isclose(value, values[0], rel_tol=_TOLERANCE) for value in values[1:]):
            yield f"the ranks do not agree on the {name}"
    for report in reports:
        if not report.loss_last <= report.loss_first * _LEARNED:  # a loss that is no number does not pass
            loss = f"{report.loss_first:.4g} -> {report.loss_last:.4g}"
            yield f"rank {report.rank} learned nothing: loss {loss}"


def warnings_of(launched_at: float, reports: Sequence[RankReport]) -> list[str]:
    """A sentence for each rank that lags well behind the median of all.

    The median is the lower one, so that of two ranks the faster is the measure, and one alone never lags. A
    busy machine makes small differences, so a rank has to be behind by a factor and by a time.
    """
    warnings = []
    usual_arrival = median_low([each.ready_at - launched_at for each in reports]) if reports else 0.0
    usual_step = median_low([each.working_seconds for each in reports]) if reports else 0.0
    for each in reports:
        arrival, step = each.ready_at - launched_at, each.working_seconds
        if arrival > max(1.5 * usual_arrival, usual_arrival + 3.0):
            took = f"came to meet the others after {arrival:.1f} s, {usual_arrival:.1f} s is usual"
            warnings.append(f"rank {each.rank} {took}")
        if step > max(2.0 * usual_step, usual_step + 0.002):
            took = f"works {step * 1000:.1f} ms on a step, {usual_step * 1000:.1f} ms is usual"
            warnings.append(f"rank {each.rank} on {each.device} ({each.host}) lags: it {took}")
    return warnings


PORT_TAKEN: Final = ("EADDRINUSE", "ddress already in use", "another process is utilizing it")
"""The words of logs when another program has taken a port that was free."""

_HINTS: Final = {
    (
        "without libuv",
    ): "this torch refuses libuv, and Rallypoint did not get in its way: RALLYPOINT_PATCH must "
    "not be `never`, and python must not be told to ignore its environment (-E, -I)",
    PORT_TAKEN: "another program took the port in the meantime: run this route again",
    ("No module named",): "a module is missing in the environment of the ranks: install it there",
    (
        "is not registered",
    ): "torchrun finds the backend by an entry point: install rallypoint into this Python environment",
    ("out of memory", "OutOfMemoryError"): "free the GPU, or use --device cpu",
    ("it was not done after",): "the log says where the ranks wait; `rallypoint kv list` looks into their "
    "store. A slow machine needs a longer --timeout",
}


def hint_for(problems: Sequence[str], log: str) -> str:
    """The advice for a training that failed."""
    text = "\n".join([*problems, log])
    hints = (hint for words, hint in _HINTS.items() if any(word in text for word in words))
    return next(hints, "run this route alone with --json: it shows what each rank said, and more of the log")


@dataclass(frozen=True)
class RankHealth:
    """One rank on one device and backend, over several trainings."""

    rank: int
    device: str
    backend: str
    steps_per_second: tuple[float, float]
    """The least and the most."""
    peak_memory_bytes: int | None
    gpu_use_percent: int | None


def health_of(trainings: Sequence[Sequence[RankReport]]) -> list[RankHealth]:
    """By rank, device and backend, over all trainings; memory and GPU use are the greatest values."""
    groups: dict[tuple[int, str, str], list[RankReport]] = {}
    for report in chain.from_iterable(trainings):
        groups.setdefault((report.rank, report.device, report.backend), []).append(report)
    return [_health(*key, reports) for key, reports in sorted(groups.items())]


def _health(rank: int, device: str, backend: str, reports: Sequence[RankReport]) -> RankHealth:
    speeds = [each.steps_per_second for each in reports]
    memory = [each.peak_memory_bytes for each in reports if each.peak_memory_bytes is not None]
    use = [each.gpu_use_percent for each in reports if each.gpu_use_percent is not None]
    most = max(memory, default=None), max(use, default=None)
    return RankHealth(rank, device, backend, (min(speeds), max(speeds)), *most)
