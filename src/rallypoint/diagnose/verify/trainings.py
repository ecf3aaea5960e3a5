"""Trainings: their environment, their processes and the end of all of them; and whether they were good.

Each training has a folder, where its ranks leave their reports. All of its processes have the path of the
folder in their environment, so none outlives its training: those with that path are killed in the end.

Ranks in DDP leave every step together, so all have the same steps per second. A laggard is known by the time
that it needs by itself, up to the exchange of gradients: its `working_seconds`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain
from math import isclose
from pathlib import Path
from statistics import median_low
from typing import Annotated, BinaryIO, Final

import psutil

from rallypoint.codec import ReadBy, from_text
from rallypoint.diagnose.verify import SIMULATION
from rallypoint.diagnose.verify.routes import Build, Route
from rallypoint.errors import RallypointError
from rallypoint.exits import exit_text
from rallypoint.launch import environment
from rallypoint.pytorch import asking
from rallypoint.store.machine.system import free_port

SCRIPT: Final = Path(asking.__file__).with_name("training.py")

FOLDER: Final = "RALLYPOINT_VERIFY_FOLDER"

# Variables that another launcher or another training may have left, besides those of a rank.
_DROPPED: Final = ("USE_LIBUV", "RALLYPOINT_JOB")
_DROPPED_PREFIXES: Final = ("PET_", "ACCELERATE_", "RALLYPOINT_VERIFY_")

_POLL_SECONDS: Final = 0.05
_GRACE_SECONDS: Final = 8.0  # for launchers to end their ranks, which they give some seconds in turn
_AFTER_FAILURE_SECONDS: Final = 10.0  # for the others to notice that one has failed, and say so
_EXAMINATION_SECONDS: Final = 120.0
_LOG_CHARACTERS: Final = 40_000


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
class Equipment:
    """The version of torch, whether it has NCCL, and the names of the GPUs."""

    torch: str
    nccl: bool
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class TrainingSettings:
    """The same for all trainings of a check."""

    device: str = "cpu"
    use_libuv: str | None = None
    """The variable USE_LIBUV; None takes it out of the environment."""
    seconds: float = 120.0
    """The time after which a training is ended, and has failed."""


@dataclass(frozen=True)
class Result:
    """The result of one training. It was good if there are no problems; warnings do not count."""

    route: str
    build: Build = field(metadata={"json": "torch"})
    seconds: float
    came_up_seconds: float | None
    """From the start of the command until all ranks had met; None if they did not."""
    reports: tuple[RankReport, ...] = field(metadata={"json": "ranks"})
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    hint: str
    log: str
    """The end of the output of all its processes."""
    attempts: int = 1

    @property
    def ok(self) -> bool:
        return not self.problems


def find_equipment() -> Equipment:
    """Ask torch for it. RallypointError if torch is missing or cannot be used."""
    if find_spec("torch") is None:
        hint = f"install it for {sys.executable}: pip install torch"
        raise RallypointError("torch is not installed for this Python", hint=hint)
    answers = asking.ask(("torch", "devices"), _clean(os.environ), _EXAMINATION_SECONDS)
    problem = answers.error_of("torch") or answers.error_of("devices")
    if problem:
        raise RallypointError(f"torch cannot be imported: {problem}", hint="try python -c 'import torch'")
    version, backends = answers.parts["torch"]["version"], answers.parts["torch"]["backends"]
    if "gloo" not in backends:
        raise RallypointError(f"torch {version} was built without gloo", hint="install another build")
    gpus = tuple(device["name"] for device in answers.parts["devices"]["devices"])
    return Equipment(version, "nccl" in backends, gpus)


def run(route: Route, build: Build, setting: TrainingSettings) -> Result:
    """Train once; a second time if another program took the port between our choice and its use.

    All of its processes have ended when it returns or raises.
    """
    result = _attempt(route, build, setting)
    if not result.ok and any(words in result.log for words in PORT_TAKEN):
        return replace(_attempt(route, build, setting), attempts=2)
    return result


def _attempt(route: Route, build: Build, setting: TrainingSettings) -> Result:
    with tempfile.TemporaryDirectory(prefix="rallypoint-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environ = environment_for(route, build, setting, folder)
        launched_at, began = time.time(), time.monotonic()
        commands = route.commands(str(SCRIPT), name, free_port())
        with (folder / "log").open("wb") as log, _started(commands, environ, log) as processes:
            codes, limit = _await(processes, setting.seconds)
        found = (from_text(RankReport, file.read_text()) for file in folder.glob("rank-*.json"))
        reports = tuple(sorted(found, key=lambda report: report.rank))
        log_end = (folder / "log").read_text(errors="replace")[-_LOG_CHARACTERS:]
    problems = tuple(problems_of(route.ranks, codes, limit, reports))
    came_up_at = max((report.joined_at for report in reports), default=0.0)
    return Result(
        route=route.name,
        build=build,
        seconds=time.monotonic() - began,
        came_up_seconds=came_up_at - launched_at if len(reports) == route.ranks else None,
        reports=reports,
        problems=problems,
        warnings=tuple(warnings_of(launched_at, reports)),
        hint=hint_for(problems, log_end) if problems else "",
        log=log_end,
    )


# The environment -------------------------------------------------------------------------------------------


def environment_for(route: Route, build: Build, setting: TrainingSettings, folder: Path) -> dict[str, str]:
    """The variables of all commands of a training, before those that each command adds."""
    environ = {
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # the log shows where a rank was when it crashed
        **_clean(os.environ),
        FOLDER: str(folder),
        "RALLYPOINT_VERIFY_DEVICE": setting.device,
        # Ranks give up before they are ended, so that the log says what they waited for.
        "RALLYPOINT_VERIFY_TIMEOUT": str(setting.seconds * 0.75),
    }
    if setting.use_libuv is not None:
        environ["USE_LIBUV"] = setting.use_libuv
    if route.injected:
        environ = environment.inject(environ)
    if build is Build.WITHOUT_LIBUV:
        return {**environment.put_on_path(environ, SIMULATION), "RALLYPOINT_SIMULATE": "no-libuv"}
    return environ


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.without_rank(environ).items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }


# Processes -------------------------------------------------------------------------------------------------

_Processes = Sequence[subprocess.Popen[bytes]]


@contextmanager
def _started(
    commands: Iterable[tuple[list[str], dict[str, str]]], environ: Mapping[str, str], log: BinaryIO
) -> Iterator[_Processes]:
    """The processes of the commands; after the block, none of them and of their descendants is left."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for arguments, variables in commands:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env={**environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal reaches this process alone, which ends them
            )
            processes.append(process)
        yield processes
    finally:
        _end(processes, environ[FOLDER])


def _await(processes: _Processes, seconds: float) -> tuple[tuple[int | None, ...], float | None]:
    """Their exit codes, and the limit if that ended them. Once one has failed, the others get little time."""
    until, failed = time.monotonic() + seconds, False
    # Polling is the one way to wait for several processes that every system has.
    while None in (codes := tuple(each.poll() for each in processes)) and time.monotonic() < until:
        if any(codes) and not failed:
            failed, until = True, min(until, time.monotonic() + _AFTER_FAILURE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return codes, seconds if None in codes and not any(codes) else None


def _end(processes: _Processes, folder: str) -> None:
    """End all processes of a training. One that hangs in the kernel is waited for some seconds only."""
    try:  # launchers put their ranks into groups of their own, and end them if they are asked to end
        for process in processes:
            process.terminate()
        _poll(lambda: any(process.poll() is None for process in processes))
    finally:  # a second Ctrl-C comes here at once
        _poll(lambda: _kill_all(folder))
        for process in processes:
            process.kill()
            process.wait()


def _poll(is_left: Callable[[], bool]) -> None:
    until = time.monotonic() + _GRACE_SECONDS
    while is_left() and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def _kill_all(folder: str) -> bool:
    """Kill the processes whose environment names the folder; those of other users do not show it.

    Whether there was one: it may just have started another.
    """
    found = False
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(FOLDER) == folder:
                found = True
                process.kill()
    return found


# Judgement --------------------------------------------------------------------------------------------------

_LEARNED: Final = 0.5
"""The loss has to fall to this part of its first value, or less."""

_TOLERANCE: Final = 1e-5
"""The greatest relative difference between numbers of two ranks that should be equal."""

_EQUAL: Final = {"first loss": "loss_first", "last loss": "loss_last", "parameters": "checksum"}
"""What all ranks have to agree on, and where a report has it."""


def problems_of(
    ranks: int, exit_codes: Sequence[int | None], limit: float | None, reports: Sequence[RankReport]
) -> Iterator[str]:
    """Everything that is wrong with a training of `ranks` ranks, the cause before its consequences.

    A process that had to be ended has no exit code; `limit`: after so many seconds, if that was the reason.
    """
    if limit is not None:
        yield f"it was not done after {limit:g} s"
    for code in sorted({code for code in exit_codes if code}):
        yield f"a process was ended by signal {-code}" if code < 0 else exit_text(code)
    there, expected = {report.rank for report in reports}, set(range(ranks))
    for rank in sorted(expected - there):
        yield f"rank {rank} did not report"
    for rank in sorted(there - expected):
        yield f"there is a rank {rank} too many"
    for report in reports:
        if report.world_size != ranks:
            yield f"rank {report.rank} was in a world of {report.world_size}, not of {ranks}"
    for name, where in _EQUAL.items():
        values = [getattr(report, where) for report in reports]
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

_HINTS: Final = (
    (
        ("without libuv",),
        "this torch refuses libuv, and Rallypoint did not get in its way: RALLYPOINT_PATCH must "
        "not be `never`, and python must not be told to ignore its environment (-E, -I)",
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
        "the log says where the ranks wait; `rallypoint kv list` looks into their "
        "store. A slow machine needs a longer --timeout",
    ),
)
"""What to do if any of some words is among the problems or in the log; the first that fits."""


def hint_for(problems: Sequence[str], log: str) -> str:
    """The advice for a training that failed."""
    text = "\n".join([*problems, log])
    hints = (hint for words, hint in _HINTS if any(word in text for word in words))
    return next(hints, "run this route alone with --json: it shows what each rank said, and more of the log")


def health_rows(trainings: Sequence[Sequence[RankReport]]) -> list[list[str]]:
    """The cells of a table: each rank on each device and backend, over all trainings.

    Steps per second are the least and the most; memory and GPU use are the greatest.
    """
    groups: dict[tuple[int, str, str], list[RankReport]] = {}
    for report in chain.from_iterable(trainings):
        groups.setdefault((report.rank, report.device, report.backend), []).append(report)
    rows = []
    for (rank, device, backend), reports in sorted(groups.items()):
        speeds = [each.steps_per_second for each in reports]
        memory = max(each.peak_memory_bytes or 0 for each in reports)
        uses = [each.gpu_use_percent for each in reports if each.gpu_use_percent is not None]
        held, used = f"{memory / 2**20:,.0f} MiB" if memory else "", f"{max(uses)} %" if uses else ""
        rows.append([str(rank), device, backend, f"{min(speeds):.0f} to {max(speeds):.0f}", held, used])
    return rows
