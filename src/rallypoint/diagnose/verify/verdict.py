"""Judges a training by the reports of its ranks: is it good, which rank lags, what to do. Pure.

Ranks in DDP leave every step together, so the slowest one sets the pace of all, and all have the same steps
per second. A laggard is known by the time that it needs by itself, up to the exchange of gradients: its
`working_seconds`. The others have more `waiting_seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from statistics import median_low
from typing import Annotated, Final

from rallypoint.codec import ReadBy
from rallypoint.exits import exit_text

_LEARNED: Final = 0.5
"""The loss has to fall to this part of its first value, or less."""

_TOLERANCE: Final = 1e-5
"""The greatest relative difference between numbers of two ranks that should be equal."""

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
    return [*_of_ending(ending), *_of_presence(ranks, reports), *_of_agreement(reports), *_of_loss(reports)]


def _of_ending(ending: ProcessEnding) -> list[str]:
    late = [f"it was not done after {ending.deadline:g} s"] if ending.deadline is not None else []
    codes = sorted({code for code in ending.exit_codes if code})
    return [
        *late,
        *(f"a process was ended by signal {-code}" if code < 0 else exit_text(code) for code in codes),
    ]


def _of_presence(ranks: int, reports: Sequence[RankReport]) -> list[str]:
    there = {report.rank for report in reports}
    missing = [f"rank {rank} did not report" for rank in range(ranks) if rank not in there]
    alien = [f"there is a rank {rank} too many" for rank in sorted(there) if rank >= ranks]
    sizes = [
        f"rank {report.rank} was in a world of {report.world_size}, not of {ranks}"
        for report in reports
        if report.world_size != ranks
    ]
    return [*missing, *alien, *sizes]


def _of_agreement(reports: Sequence[RankReport]) -> list[str]:
    numbers = {
        "first loss": [report.loss_first for report in reports],
        "last loss": [report.loss_last for report in reports],
        "parameters": [report.checksum for report in reports],
    }
    return [
        f"the ranks do not agree on the {name}"
        for name, values in numbers.items()
        if any(not isclose(value, values[0], rel_tol=_TOLERANCE) for value in values[1:])
    ]


def _of_loss(reports: Sequence[RankReport]) -> list[str]:
    # "not <=", so that a loss that is no number does not pass.
    return [
        f"rank {report.rank} learned nothing: loss {report.loss_first:.4g} -> {report.loss_last:.4g}"
        for report in reports
        if not report.loss_last <= report.loss_first * _LEARNED
    ]


def warnings_of(launched_at: float, reports: Sequence[RankReport]) -> list[str]:
    """A sentence for each rank that lags well behind the median of all; nothing for one rank alone.

    The median is the lower one, so that of two ranks the faster is the measure. A busy machine makes small
    differences, so a rank has to be behind by a factor and by a time.
    """
    if len(reports) < 2:
        return []
    usual_arrival = median_low(report.ready_at - launched_at for report in reports)
    usual_step = median_low(report.working_seconds for report in reports)
    warnings = []
    for report in reports:
        arrival, step = report.ready_at - launched_at, report.working_seconds
        if arrival > max(1.5 * usual_arrival, usual_arrival + 3.0):
            warnings.append(
                f"rank {report.rank} came to meet the others after {arrival:.1f} s, "
                f"{usual_arrival:.1f} s is usual"
            )
        if step > max(2.0 * usual_step, usual_step + 0.002):
            warnings.append(
                f"rank {report.rank} on {report.device} ({report.host}) lags: it works "
                f"{step * 1000:.1f} ms on a step, {usual_step * 1000:.1f} ms is usual"
            )
    return warnings


PORT_TAKEN: Final = ("EADDRINUSE", "ddress already in use", "another process is utilizing it")
"""The words of logs when another program has taken a port that was free."""

_HINTS: Final = (
    (
        ("without libuv",),
        "this torch refuses libuv, and Rallypoint did not get in its way: RALLYPOINT_PATCH must not be "
        "`never`, and python must not be told to ignore its environment (-E, -I)",
    ),
    (PORT_TAKEN, "another program took the port in the meantime: run this route again"),
    (("No module named",), "a module is missing in the environment of the ranks: install it there"),
    (
        ("is not registered",),
        "torchrun finds the backend by an entry point: install rallypoint into this Python environment",
    ),
    (("out of memory", "OutOfMemoryError"), "free the GPU, or use --device cpu"),
    (
        ("it was not done after",),
        "the log says where the ranks wait; `rallypoint kv list` looks into their store. A slow machine "
        "needs a longer --timeout",
    ),
)


def hint_for(problems: Sequence[str], log: str) -> str:
    """The advice for a training that failed."""
    text = "\n".join([*problems, log])
    hints = (hint for words, hint in _HINTS if any(word in text for word in words))
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
    for training in trainings:
        for report in training:
            groups.setdefault((report.rank, report.device, report.backend), []).append(report)
    return [_health(reports) for _, reports in sorted(groups.items())]


def _health(reports: Sequence[RankReport]) -> RankHealth:
    speeds = [report.steps_per_second for report in reports]
    memory = [each.peak_memory_bytes for each in reports if each.peak_memory_bytes is not None]
    use = [each.gpu_use_percent for each in reports if each.gpu_use_percent is not None]
    return RankHealth(
        rank=reports[0].rank,
        device=reports[0].device,
        backend=reports[0].backend,
        steps_per_second=(min(speeds), max(speeds)),
        peak_memory_bytes=max(memory, default=None),
        gpu_use_percent=max(use, default=None),
    )
