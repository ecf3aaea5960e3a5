"""Trainings: their environment, their processes, and the end of all of them.

Each training has a folder of its own. Its ranks leave their reports there, and all of its processes have the
path of the folder in their environment. No process outlives its training: launchers get time to end their
ranks, then every process with that path is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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
    build: Build
    seconds: float
    came_up_seconds: float | None
    """From the start of the command until all ranks had met; None if they did not."""
    reports: tuple[RankReport, ...]
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
        raise RallypointError(
            "torch is not installed for this Python",
            hint=f"install it for {sys.executable}: pip install torch",
        )
    answers = asking.ask(("torch", "devices"), _clean(os.environ), _EXAMINATION_SECONDS)
    problem = answers.error_of("torch") or answers.error_of("devices")
    if problem:
        raise RallypointError(f"torch cannot be imported: {problem}", hint="try python -c 'import torch'")
    torch, devices = answers.parts["torch"], answers.parts["devices"]["devices"]
    if "gloo" not in torch["backends"]:
        raise RallypointError(
            f"torch {torch['version']} was built without gloo", hint="install another build"
        )
    gpus = tuple(device["name"] for device in devices)
    return Equipment(torch["version"], "nccl" in torch["backends"], gpus)


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
        commands = _fill(route, folder)
        environ = environment_for(route, build, setting, folder)
        launched_at, began = time.time(), time.monotonic()
        with (folder / "log").open("wb") as log, _started(commands, environ, log) as processes:
            ending = _await(processes, setting.seconds)
        reports = _read_reports(folder)
        log_end = (folder / "log").read_text(errors="replace")[-_LOG_CHARACTERS:]
    problems = verdict.problems_of(route.ranks, ending, reports)
    came_up_at = max((report.joined_at for report in reports), default=0.0)
    return Result(
        route=route.name,
        build=build,
        seconds=time.monotonic() - began,
        came_up_seconds=came_up_at - launched_at if len(reports) == route.ranks else None,
        reports=tuple(reports),
        problems=tuple(problems),
        warnings=tuple(verdict.warnings_of(launched_at, reports)),
        hint=verdict.hint_for(problems, log_end) if problems else "",
        log=log_end,
    )


def _fill(route: Route, folder: Path) -> list[Command]:
    words = {"script": str(SCRIPT), "folder": str(folder), "port": str(free_port())}
    return [command.fill(words) for command in route.commands]


def _read_reports(folder: Path) -> list[RankReport]:
    files = folder.glob("rank-*.json")
    return sorted((from_text(RankReport, file.read_text()) for file in files), key=lambda each: each.rank)


# The environment -------------------------------------------------------------------------------------------


def environment_for(route: Route, build: Build, setting: TrainingSettings, folder: Path) -> dict[str, str]:
    """The variables of all commands of a training, before those that each command adds."""
    # With the fault handler the log shows where a rank was when it crashed.
    environ = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **_clean(os.environ)}
    environ[FOLDER] = str(folder)
    environ["RALLYPOINT_VERIFY_DEVICE"] = setting.device
    # Ranks give up before they are ended, so that the log says what they waited for.
    environ["RALLYPOINT_VERIFY_TIMEOUT"] = str(setting.seconds * 0.75)
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


@contextmanager
def _started(
    commands: Sequence[Command], environ: Mapping[str, str], log: BinaryIO
) -> Iterator[list[subprocess.Popen[bytes]]]:
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


def _await(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> ProcessEnding:
    """How they ended. Once one has failed, the others get little time."""
    until, failed = time.monotonic() + seconds, False
    # Polling is the one way to wait for several processes that every system has.
    while None in (codes := _codes(processes)) and time.monotonic() < until:
        if any(codes) and not failed:
            failed, until = True, min(until, time.monotonic() + _AFTER_FAILURE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return ProcessEnding(codes, seconds if None in codes and not any(codes) else None)


def _codes(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int | None, ...]:
    """The exit codes of all; None for a process that is running."""
    return tuple(process.poll() for process in processes)


def _end(processes: Sequence[subprocess.Popen[bytes]], folder: str) -> None:
    try:  # launchers put their ranks into groups of their own, and end them if they are asked to end
        for process in processes:
            process.terminate()
        until = time.monotonic() + _GRACE_SECONDS
        while None in _codes(processes) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
    finally:  # a second Ctrl-C comes here at once
        _kill_all(folder)
        for process in processes:
            process.kill()
            process.wait()


def _kill_all(folder: str) -> None:
    """Kill the processes of a training until none is found: one of them may just have started another.

    A process that hangs in the kernel dies only when that lets go of it, so there is an end to waiting.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    while (found := list(_processes_of(folder))) and time.monotonic() < deadline:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_POLL_SECONDS)


def _processes_of(folder: str) -> Iterator[psutil.Process]:
    """The processes whose environment names the folder; those of other users do not show it."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(FOLDER) == folder:
                yield process
