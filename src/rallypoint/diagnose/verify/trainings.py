"""Running trainings: their environment, their processes, and what is left of them at the end.

Each training has a folder of its own, in which its ranks leave their reports, and whose path is in the
environment of every process that comes of it. No process outlives its training: launchers get time to end
what they started, then whole process groups are killed, then whatever still has that path.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, Final

from rallypoint.codec import from_text
from rallypoint.diagnose.verify import SIMULATION
from rallypoint.diagnose.verify.routes import Build, Command, Route
from rallypoint.diagnose.verify.verdict import PORT_TAKEN, Ending, Report, hint_for, problems_of, warnings_of
from rallypoint.errors import RallypointError
from rallypoint.launch import environment
from rallypoint.pytorch import asking

SCRIPT: Final = Path(asking.__file__).with_name("training.py")

FOLDER: Final = "RALLYPOINT_VERIFY_FOLDER"

# What another launcher, or another training, may have left in the environment, besides a rank's own.
_DROPPED: Final = ("USE_LIBUV", "RALLYPOINT_REPORTS", "RALLYPOINT_QUIET_AGENT")
_DROPPED_PREFIXES: Final = ("PET_", "ACCELERATE_", "RALLYPOINT_VERIFY_")

_POLL_SECONDS: Final = 0.05
_GRACE_SECONDS: Final = 8.0  # for launchers to end their ranks, which they give some seconds in turn
_AFTER_FAILURE_SECONDS: Final = 10.0  # for the others to notice that one has failed, and say so
_MACHINE_SECONDS: Final = 120.0
_LOG_CHARACTERS: Final = 40_000


@dataclass(frozen=True)
class Machine:
    """What there is to train with."""

    torch: str
    distributed: bool
    gloo: bool
    nccl: bool
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """What all trainings of a check have in common."""

    device: str = "cpu"
    use_libuv: str | None = None
    """The variable USE_LIBUV; None takes it out of the environment."""
    seconds: float = 120.0
    """After these, a training is ended, and has failed."""


@dataclass(frozen=True)
class Result:
    """What came of one training. It was good if there are no problems; warnings do not count."""

    route: str
    build: Build
    seconds: float
    came_up_seconds: float | None
    """From the start of the command until all ranks had met; None if they did not."""
    reports: tuple[Report, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    hint: str
    log: str
    """The end of what all its processes wrote."""
    attempts: int = 1

    @property
    def ok(self) -> bool:
        return not self.problems


def examine_machine() -> Machine:
    """What torch and the machine have. RallypointError if torch is missing or cannot be used."""
    if find_spec("torch") is None:
        raise RallypointError(
            "torch is not installed for this Python",
            hint=f"install it for {sys.executable}: pip install torch",
        )
    answers = asking.ask(("torch", "devices"), _clean(os.environ), _MACHINE_SECONDS)
    problem = answers.error_of("torch") or answers.error_of("devices")
    if problem:
        raise RallypointError(f"torch cannot be imported: {problem}", hint="try python -c 'import torch'")
    torch, devices = answers.parts["torch"], answers.parts["devices"]["devices"]
    machine = Machine(
        torch["version"],
        torch["distributed"],
        "gloo" in torch["backends"],
        "nccl" in torch["backends"],
        tuple(device["name"] for device in devices),
    )
    if not machine.gloo:
        raise RallypointError(f"torch {machine.torch} was built without gloo", hint="install another build")
    return machine


def is_missing(route: Route) -> bool:
    """Whether a package is not installed that the route needs."""
    return bool(route.needs) and find_spec(route.needs) is None


def verify(
    routes: Sequence[Route],
    builds: Sequence[Build],
    setting: Setting,
    on_start: Callable[[Route, Build], None] = lambda _route, _build: None,
    on_result: Callable[[Result], None] = lambda _result: None,
) -> list[Result]:
    """Train by every route with every build, one after the other. An exception ends all processes first."""
    results = []
    for route in routes:
        for build in builds:
            on_start(route, build)
            results.append(run(route, build, setting))
            on_result(results[-1])
    return results


def run(route: Route, build: Build, setting: Setting) -> Result:
    """Train once; a second time if a port was taken by somebody else between our choice and its use."""
    result = _attempt(route, build, setting)
    if not result.ok and any(words in result.log for words in PORT_TAKEN):
        return replace(_attempt(route, build, setting), attempts=2)
    return result


def _attempt(route: Route, build: Build, setting: Setting) -> Result:
    with tempfile.TemporaryDirectory(prefix="rallypoint-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        commands = _fill(route, folder)
        environ = environment_for(route, build, setting, folder)
        launched_at, began = time.time(), time.monotonic()
        with (folder / "log").open("wb") as log, _started(commands, environ, log) as processes:
            ending = _await(processes, setting.seconds)
        reports = _read_reports(folder)
        log_end = (folder / "log").read_text(errors="replace")[-_LOG_CHARACTERS:]
    problems = problems_of(route.ranks, ending, reports)
    return Result(
        route=route.name,
        build=build,
        seconds=time.monotonic() - began,
        came_up_seconds=_came_up(route.ranks, launched_at, reports),
        reports=tuple(reports),
        problems=tuple(problems),
        warnings=tuple(warnings_of(launched_at, reports)),
        hint=hint_for(problems, log_end) if problems else "",
        log=log_end,
    )


def _fill(route: Route, folder: Path) -> list[Command]:
    words = {"script": str(SCRIPT), "folder": str(folder), "port": str(find_free_port())}
    return [command.fill(words) for command in route.commands]


def find_free_port() -> int:
    """A port that is free now: whoever is to use it may find that another was quicker."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _came_up(ranks: int, launched_at: float, reports: Sequence[Report]) -> float | None:
    if len(reports) < ranks:
        return None
    return max(report.joined_at for report in reports) - launched_at


def _read_reports(folder: Path) -> list[Report]:
    files = folder.glob("rank-*.json")
    return sorted((from_text(Report, file.read_text()) for file in files), key=lambda each: each.rank)


# The environment -------------------------------------------------------------------------------------------


def environment_for(route: Route, build: Build, setting: Setting, folder: Path) -> dict[str, str]:
    """What all commands of a training get, before what each of them adds."""
    # Where a rank is ended by a signal of its own doing, the log is to say what it was at.
    environ = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **_clean(os.environ)}
    environ[FOLDER] = str(folder)
    environ["RALLYPOINT_VERIFY_DEVICE"] = setting.device
    # Ranks give up before they are ended: then the log says what they waited for.
    environ["RALLYPOINT_VERIFY_TIMEOUT"] = str(setting.seconds * 0.75)
    if setting.use_libuv is not None:
        environ["USE_LIBUV"] = setting.use_libuv
    if route.injected:
        environ = environment.inject(environ)
    return _simulate(environ) if build is Build.WITHOUT_LIBUV else environ


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.without_rank(environ).items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }


def _simulate(environ: Mapping[str, str]) -> dict[str, str]:
    return {**environment.put_on_path(environ, SIMULATION), "RALLYPOINT_SIMULATE": "no-libuv"}


# Processes -------------------------------------------------------------------------------------------------


@contextmanager
def _started(
    commands: Sequence[Command], environ: Mapping[str, str], log: BinaryIO
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The commands' processes, each leading a group of its own; nothing of them is left behind the block."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            processes.append(_start(command, environ, log))  # noqa: PERF401  # if one fails, the first is kept
        yield processes
    finally:
        _end(processes, environ[FOLDER])


def _start(command: Command, environ: Mapping[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *command.arguments],
        env={**environ, **command.variables},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in a terminal is for us alone: we end them
    )


def _await(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> Ending:
    """How they ended. It does not wait long for the others once one has failed."""
    until, failed = time.monotonic() + seconds, False
    # Asking again and again is the one way to wait for several processes that every system has.
    while None in (codes := _codes(processes)) and time.monotonic() < until:
        if any(codes) and not failed:
            failed, until = True, min(until, time.monotonic() + _AFTER_FAILURE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return Ending(codes, seconds if None in codes and not any(codes) else None)


def _codes(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int | None, ...]:
    """The exit codes of all, asked of each of them; None for who is running."""
    return tuple(process.poll() for process in processes)


def _end(processes: Sequence[subprocess.Popen[bytes]], folder: str) -> None:
    try:
        _ask_to_end(processes)
    finally:  # a second Ctrl-C comes here at once
        for process in processes:
            _kill_group(process)
        _kill_strays(folder)
        for process in processes:
            process.wait()


def _ask_to_end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Launchers put their ranks into groups of their own, and end them if they are asked to end."""
    if None not in _codes(processes):
        return
    for process in processes:
        process.terminate()
    until = time.monotonic() + _GRACE_SECONDS
    while None in _codes(processes) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False)  # noqa: S607
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # the latter is how macOS says that all have ended
        pass


def _kill_strays(folder: str) -> None:
    """Kill what has left its group, until nothing is found: who is found may have been starting others.

    A process that hangs in the kernel dies only when that lets go of it, so there is an end to waiting.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    while (strays := list(_strays(folder))) and time.monotonic() < deadline:
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(_POLL_SECONDS)


def _strays(folder: str) -> Iterator[int]:
    """The processes whose environment names the folder; none where the system does not show environments."""
    mark = f"{FOLDER}={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or it has ended
            continue
        if mark in variables:
            yield int(entry.name)
