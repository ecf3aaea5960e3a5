"""Trainings: their environment, their processes, and the end of all of them.

Each training has a folder, where its ranks leave their reports. All of its processes have the path of the
folder in their environment, so none outlives its training: those with that path are killed in the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, Final

import psutil

from rallypoint.codec import from_text
from rallypoint.diagnose.verify import SIMULATION, verdict
from rallypoint.diagnose.verify.routes import Build, Command, Route
from rallypoint.diagnose.verify.verdict import PORT_TAKEN, ProcessEnding, RankReport
from rallypoint.errors import RallypointError
from rallypoint.launch import environment
from rallypoint.pytorch import asking
from rallypoint.store.machine.ports import free_port

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


def is_missing(route: Route) -> bool:
    """Whether the route needs a package that is not installed."""
    return bool(route.needs) and find_spec(route.needs) is None


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
        words = {"script": str(SCRIPT), "folder": name, "port": str(free_port())}
        commands = [command.fill(words) for command in route.commands]
        environ = environment_for(route, build, setting, folder)
        launched_at, began = time.time(), time.monotonic()
        with (folder / "log").open("wb") as log, _started(commands, environ, log) as processes:
            ending = _await(processes, setting.seconds)
        found = (from_text(RankReport, file.read_text()) for file in folder.glob("rank-*.json"))
        reports = tuple(sorted(found, key=lambda report: report.rank))
        log_end = (folder / "log").read_text(errors="replace")[-_LOG_CHARACTERS:]
    problems = verdict.problems_of(route.ranks, ending, reports)
    came_up_at = max((report.joined_at for report in reports), default=0.0)
    return Result(
        route=route.name,
        build=build,
        seconds=time.monotonic() - began,
        came_up_seconds=came_up_at - launched_at if len(reports) == route.ranks else None,
        reports=reports,
        problems=tuple(problems),
        warnings=tuple(verdict.warnings_of(launched_at, reports)),
        hint=verdict.hint_for(problems, log_end) if problems else "",
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
def _started(commands: Sequence[Command], environ: Mapping[str, str], log: BinaryIO) -> Iterator[_Processes]:
    """The processes of the commands; after the block, none of them and of their descendants is left."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            process = subprocess.Popen(
                [sys.executable, *command.arguments],
                env={**environ, **command.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal reaches this process alone, which ends them
            )
            processes.append(process)
        yield processes
    finally:
        _end(processes, environ[FOLDER])


def _await(processes: _Processes, seconds: float) -> ProcessEnding:
    """How they ended. Once one has failed, the others get little time."""
    until, failed = time.monotonic() + seconds, False
    # Polling is the one way to wait for several processes that every system has.
    while None in (codes := tuple(each.poll() for each in processes)) and time.monotonic() < until:
        if any(codes) and not failed:
            failed, until = True, min(until, time.monotonic() + _AFTER_FAILURE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return ProcessEnding(codes, seconds if None in codes and not any(codes) else None)


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
