"""A ninja build seen from outside: its files and its processes are read, and nothing is changed."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from rallypoint.diagnose.builds import ninja
from rallypoint.diagnose.builds.ninja import BuildProgress, CompilerLoad, Console, Output
from rallypoint.diagnose.builds.packages import opened
from rallypoint.errors import UsageError

_POLL_SECONDS: Final = 0.1
_FIRST_STEPS: Final = 5
_NINJA: Final = re.compile(r"(?:ninja|ninja-build|samu)(?:\.exe)?", re.IGNORECASE)


@dataclass(frozen=True)
class _Log:
    """.ninja_log at one moment: read once for a look, so that what is done and what is left fit together."""

    content: bytes = b""
    written: float = 0.0
    """When it was last written to, in seconds since 1970."""
    outputs: tuple[Output, ...] = ()


class BuildWatch:
    """One build folder. `look` as often as you like; `wait` between two looks.

    `log` is a file with what ninja prints, `command` a process that runs the build. Without them, which step
    failed cannot be told.
    """

    def __init__(
        self, build: Path, log: Path | None = None, command: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._build = build.resolve()
        self._log = log
        self._command = command
        self._known: frozenset[str] = frozenset()
        """The outputs that build.ninja has."""
        self._custom: frozenset[str] = frozenset()
        """The outputs of custom commands among them."""
        self._read_at = 0
        """The time stamp of the build.ninja that this is from."""
        self._program: str | None = None
        self._targets: list[str] | None = []
        self._ninja: psutil.Process | None = None
        self._began = 0.0
        """When the run that is watched has begun."""
        self._total: int | None = None
        """How many steps that run has."""
        self._done = 0
        """How many of them were done at the last look. It never falls, even if two runs look like one."""
        self._seen: frozenset[Output] = frozenset()
        """All outputs in the log at the last look."""
        self._older: frozenset[Output] = frozenset()
        """The outputs in the log before that run was found: those of other runs."""
        self._asked = False
        self._meter: _Meter | None = None

    def look(self) -> BuildProgress:
        """The build now. `UsageError` if nothing is built there, `UnreadableError` if its log is damaged."""
        self._read_build_file()
        self._attach()
        running = self.running  # read before the log: if it ends in between, the next look sees all steps
        log = _read_log(self._build / ninja.LOG)
        self._seen = frozenset(log.outputs)
        console = _read_console(self._log) if self._log else Console()
        return self._look_at_run(log, console) if running else self._look_at_rest(log, console)

    @property
    def running(self) -> bool:
        """Whether the command, or a ninja in this folder, has not ended."""
        if self._command is not None:
            return self._command.poll() is None
        return self._ninja is not None and not _is_gone(self._ninja)

    def wait(self, seconds: float) -> None:
        """Wait until the build has ended, at most for `seconds`."""
        until = time.monotonic() + seconds
        while self.running and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)  # only a parent can wait for the end of a process

    def _read_build_file(self) -> None:
        """Read it again if CMake has written it anew. With a command, it need not be there yet."""
        path = self._build / "build.ninja"
        try:
            stamp = path.stat().st_mtime_ns
            if stamp != self._read_at:
                with path.open(encoding="utf-8", errors="replace") as lines:
                    content = [line for line in lines if line.startswith("build ")]
                self._known = frozenset(ninja.read_outputs(content))
                self._custom = frozenset(ninja.read_custom_outputs(content))
                self._program, self._read_at = ninja.find_program(self._build), stamp
        except OSError:
            if self._command is None:
                raise UsageError(
                    f"{self._build} has no build.ninja",
                    hint="name the folder in which ninja builds; torch calls it build",
                ) from None

    def _attach(self) -> None:
        """Find the ninja of this folder. A new one is a new run, whose total has to be asked."""
        if self._ninja is not None and not _is_gone(self._ninja):
            return
        self._ninja = _find_ninja(self._build)
        if self._ninja is None:
            return
        try:
            self._program, self._targets = self._ninja.exe(), ninja.targets_of(self._ninja.cmdline())
            self._began, self._total, self._asked = self._ninja.create_time(), None, False
            self._done, self._older = 0, self._seen
            self._meter = _Meter(self._ninja)
        except psutil.Error:  # it has ended in the meantime
            self._ninja = None

    # A build that runs

    def _look_at_run(self, log: _Log, console: Console) -> BuildProgress:
        mine = self._of_this_run(log) if self._ninja else []
        self._done = max(self._done, ninja.count_steps(mine))
        total = console.total or self._ask_total(log, mine, self._done)
        done = max(self._done, console.done)  # what ninja prints may come later than its log
        done = done if total is None else min(done, total)
        speed = ninja.pace(mine, time.time() - self._began)
        return BuildProgress(
            "running",
            done,
            total,
            None if speed is None else round(speed * 60, 2),
            None if speed is None or total is None else (total - done) / speed,
            self._meter.read() if self._meter else None,
            self._libuv(log.outputs),
            failures=console.failures,
        )

    def _of_this_run(self, log: _Log) -> list[Output]:
        mine = ninja.of_this_run(log.outputs, self._began, log.written)
        return [output for output in mine if output not in self._older]

    def _ask_total(self, log: _Log, mine: Sequence[Output], done: int) -> int | None:
        """Ask once in a run. A dry run counts steps that make no file, even if this run has done them."""
        if self._ninja is not None and not self._asked:
            left = self._ask(log.content)
            self._total = None if left is None else done + left.total - self._always(mine)
            self._asked = True
        return None if self._total is None else max(done, self._total)

    # A build that does not

    def _look_at_rest(self, log: _Log, console: Console) -> BuildProgress:
        left = self._ask(log.content)
        count = None if left is None else max(0, left.total - self._always(log.outputs))
        exit_code = self._command.poll() if self._command else None
        state = ninja.state_of(console, count, exit_code, begun=bool(log.outputs))
        done, total = self._count_at_rest(log, console, count)
        return BuildProgress(
            state,
            done,
            total,
            libuv=self._libuv(log.outputs),
            exit_code=exit_code,
            failures=console.failures,
            next_steps=left.steps[:_FIRST_STEPS] if left and count and state != "complete" else (),
        )

    def _count_at_rest(self, log: _Log, console: Console, left: int | None) -> tuple[int, int | None]:
        """Of the run that was watched; else of the whole build, as ninja would do it from nothing."""
        if console.total:
            return console.done, console.total
        if self._total is not None:
            done = max(self._done, ninja.count_steps(self._of_this_run(log)))
            return done, done if left == 0 else max(done, self._total)
        whole = self._ask(b"")
        if whole is None or left is None:
            return 0, None
        total = max(left, whole.total)
        return total - left, total

    def _always(self, outputs: Sequence[Output]) -> int:
        """How many steps have run and make no file. ninja runs them each time: they are always left."""
        logged = {output.path for output in outputs}
        return sum(not self._exists(path) for path in logged & self._custom)

    def _exists(self, path: str) -> bool:
        return (self._build / path).exists()

    def _libuv(self, outputs: Sequence[Output]) -> ninja.Libuv | None:
        logged = {output.path for output in outputs}
        return ninja.libuv_of(self._known, lambda path: path in logged and self._exists(path))

    def _ask(self, log: bytes) -> Console | None:
        if self._program is None or self._targets is None:
            return None
        return ninja.ask_what_is_left(self._program, self._build, log, self._targets)


def _read_log(path: Path) -> _Log:
    """An empty log if there is none yet."""
    if not path.exists():
        return _Log()
    with opened(path) as file:
        content = file.read()
        written = path.stat().st_mtime  # after reading: a time too late is harmless, one too early is not
        outputs = ninja.parse_log(content.decode("utf-8", "replace")) if content else []
    return _Log(content, written, tuple(outputs))


def _read_console(path: Path) -> Console:
    try:
        return ninja.parse_console(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


# The processes of a build ----------------------------------------------------------------------------------


def _find_ninja(build: Path) -> psutil.Process | None:
    """The ninja that works in a folder: with -C, it has gone there."""
    for process in psutil.process_iter(["name"]):
        if not _NINJA.fullmatch(process.info["name"] or ""):
            continue
        try:
            if not _is_gone(process) and os.path.realpath(process.cwd()) == str(build):
                return process
        except (psutil.Error, OSError):  # it has ended, or is somebody else's
            continue
    return None


def _is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended, even if its parent has not waited for it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


class _Meter:
    """The load of a ninja and its descendants: since its begin, then since the last reading."""

    def __init__(self, ninja: psutil.Process) -> None:
        self._ninja = ninja
        self._moment = ninja.create_time()
        self._seconds = 0.0
        """Of processor time, until the last reading."""

    def read(self) -> CompilerLoad | None:
        """None if it has just ended."""
        try:
            steps, members = len(self._ninja.children()), self._ninja.children(recursive=True)
        except psutil.Error:
            return None
        usage = [use for process in (self._ninja, *members) if (use := _use(process))]
        seconds, now = sum(cpu for cpu, _ in usage), time.time()
        percent = 100 * (seconds - self._seconds) / max(now - self._moment, 0.01)
        self._seconds, self._moment = seconds, now
        return CompilerLoad(steps, round(max(0.0, percent), 1), sum(memory for _, memory in usage))


def _use(process: psutil.Process) -> tuple[float, int] | None:
    """Processor seconds and bytes of memory. Linux also tells the time of children that have ended."""
    try:
        times, memory = process.cpu_times(), process.memory_info().rss
    except psutil.Error:
        return None
    ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return times.user + times.system + ended, memory
