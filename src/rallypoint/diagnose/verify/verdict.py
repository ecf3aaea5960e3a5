"""What a training's reports come to: whether it was good, which rank lags, and what to do. Pure.

Ranks in DDP leave every step together, so the slowest one sets the pace of all and the steps per second of
all are the same. What tells a laggard is the time that a rank needs by itself, up to the exchange of
gradients: its `working_seconds`. The others show up with much `waiting_seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from statistics import median_low
from typing import Annotated, Final

from rallypoint.codec import ReadBy

LEARNED: Final = 0.5
"""The loss has to fall to this part of its first value, or less."""

AGREEMENT: Final = 1e-5
"""How far, relatively, numbers of two ranks may be apart that are to be the same."""

_Learned = Annotated[float, ReadBy(float)]
"""Also NaN, if a training went wrong."""


@dataclass(frozen=True)
class Report:
    """What one rank said of itself. Times are of the wall clock; seconds of a step are the median."""

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
class Ending:
    """How the processes of a training ended."""

    exit_codes: tuple[int | None, ...]
    """Of each command; None if it had to be ended."""
    deadline: float | None = None
    """The seconds after which all were ended; None if they ended by themselves."""


def problems_of(ranks: int, ending: Ending, reports: Sequence[Report]) -> list[str]:
    """Everything that is wrong with a training of `ranks` ranks, the cause before its consequences."""
    return [*_of_ending(ending), *_of_presence(ranks, reports), *_of_agreement(reports), *_of_loss(reports)]


def _of_ending(ending: Ending) -> list[str]:
    late = [f"it was not done after {ending.deadline:g} s"] if ending.deadline is not None else []
    codes = sorted({code for code in ending.exit_codes if code})
    return [*late, *(_describe_code(code) for code in codes)]


def _describe_code(code: int) -> str:
    return f"a process was ended by signal {-code}" if code < 0 else f"exit code {code}"


def _of_presence(ranks: int, reports: Sequence[Report]) -> list[str]:
    there = {report.rank for report in reports}
    missing = [f"rank {rank} did not report" for rank in range(ranks) if rank not in there]
    alien = [f"there is a rank {rank} too many" for rank in sorted(there) if rank >= ranks]
    sizes = [
        f"rank {report.rank} was in a world of {report.world_size}, not of {ranks}"
        for report in reports
        if report.world_size != ranks
    ]
    return [*missing, *alien, *sizes]


_SAME: Final = {"loss_first": "first loss", "loss_last": "last loss", "checksum": "parameters"}


def _of_agreement(reports: Sequence[Report]) -> list[str]:
    problems = []
    for name, meaning in _SAME.items():
        values = [getattr(report, name) for report in reports]
        if any(not isclose(value, values[0], rel_tol=AGREEMENT) for value in values[1:]):
            problems.append(f"the ranks do not agree on the {meaning}")
    return problems


def _of_loss(reports: Sequence[Report]) -> list[str]:
    # "Not below", so that a loss that is no number does not pass.
    return [
        f"rank {report.rank} learned nothing: loss {report.loss_first:.4g} -> {report.loss_last:.4g}"
        for report in reports
        if not report.loss_last <= report.loss_first * LEARNED
    ]


@dataclass(frozen=True)
class Lag:
    """Of what a rank must have more than the others to be a laggard: by factor, and by seconds."""

    factor: float
    seconds: float

    def is_behind(self, value: float, usual: float) -> bool:
        return value > usual * self.factor and value - usual > self.seconds


# A step of this training takes about a millisecond, so a busy machine makes a difference of one.
_STEP: Final = Lag(factor=2.0, seconds=0.002)
_ARRIVAL: Final = Lag(factor=1.5, seconds=3.0)


def warnings_of(launched_at: float, reports: Sequence[Report]) -> list[str]:
    """A sentence for each rank that lags well behind the median of all; nothing for one rank alone.

    The median is the lower one, so that of two ranks the faster is the measure.
    """
    if len(reports) < 2:
        return []
    arrival = median_low(report.ready_at - launched_at for report in reports)
    step = median_low(report.working_seconds for report in reports)
    warnings = []
    for report in reports:
        arrived = report.ready_at - launched_at
        if _ARRIVAL.is_behind(arrived, arrival):
            warnings.append(
                f"rank {report.rank} came to meet the others after {arrived:.1f} s, {arrival:.1f} s is usual"
            )
        if _STEP.is_behind(report.working_seconds, step):
            warnings.append(
                f"rank {report.rank} on {report.device} ({report.host}) lags: it works "
                f"{report.working_seconds * 1000:.1f} ms on a step, {step * 1000:.1f} ms is usual"
            )
    return warnings


PORT_TAKEN: Final = ("EADDRINUSE", "ddress already in use", "another process is utilizing it")
"""What logs say when a port that was free has been taken meanwhile."""

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
    """What to do about a training that failed."""
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


def health_of(trainings: Sequence[Sequence[Report]]) -> list[RankHealth]:
    """By rank, device and backend, over all trainings; of memory and GPU use, the most."""
    groups: dict[tuple[int, str, str], list[Report]] = {}
    for training in trainings:
        for report in training:
            groups.setdefault((report.rank, report.device, report.backend), []).append(report)
    return [_health(reports) for _, reports in sorted(groups.items())]


def _health(reports: Sequence[Report]) -> RankHealth:
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
