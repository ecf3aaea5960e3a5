"""A ninja build seen from outside: its files and its processes are read, and nothing is changed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from rallypoint.diagnose.builds import progress
from rallypoint.diagnose.builds.compilers import Meter, find_ninja, is_gone
from rallypoint.diagnose.builds.libraries import UnreadableError
from rallypoint.diagnose.builds.ninja import (
    Console,
    Output,
    parse_console,
    parse_log,
    read_custom_outputs,
    read_outputs,
    sets_its_own_folder,
)
from rallypoint.diagnose.builds.ninja_left import LOG, Left, ask, find_program
from rallypoint.diagnose.builds.progress import Snapshot
from rallypoint.errors import UsageError

_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True)
class _Log:
    """.ninja_log at one moment: read once for a look, so that what is done and what is left fit together."""

    content: bytes = b""
    written: float = 0.0
    """When it was last written to, in seconds since 1970."""
    outputs: tuple[Output, ...] = ()


class Watch:
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
        """Those of custom commands."""
        self._askable = False
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
        """How many of them were done at the last look."""
        self._seen: frozenset[Output] = frozenset()
        """What was logged at the last look."""
        self._older: frozenset[Output] = frozenset()
        """What was logged before that run was found, and is none of its own."""
        self._asked = False
        self._meter: Meter | None = None

    def look(self) -> Snapshot:
        """How far it is now. `UsageError` if nothing is built there, `UnreadableError` if its log is none."""
        self._read_build_file()
        self._attach()
        running = self.running  # asked first: an end after this is seen by the next look, with all its steps
        log = _read_log(self._build / LOG)
        self._seen = frozenset(log.outputs)
        console = _read_console(self._log) if self._log else None
        return self._look_at_run(log, console) if running else self._look_at_rest(log, console)

    @property
    def running(self) -> bool:
        """Whether the command, or a ninja in this folder, has not ended."""
        if self._command is not None:
            return self._command.poll() is None
        return self._ninja is not None and not is_gone(self._ninja)

    def wait(self, seconds: float) -> None:
        """Until the build has ended, or so long."""
        until = time.monotonic() + seconds
        while self.running and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)  # who is not its parent can only ask whether a process has ended

    def _read_build_file(self) -> None:
        """Again where CMake has written it anew. A command may still be on its way there."""
        path = self._build / "build.ninja"
        try:
            stamp = path.stat().st_mtime_ns
            if stamp != self._read_at:
                content = _lines_in(path)
                self._known = frozenset(read_outputs(content))
                self._custom = frozenset(read_custom_outputs(content))
                self._askable = not sets_its_own_folder(content)  # else its log cannot be put elsewhere
                self._program, self._read_at = find_program(self._build), stamp
        except OSError:
            if self._command is None:
                raise UsageError(
                    f"{self._build} has no build.ninja",
                    hint="name the folder in which ninja builds; torch calls it build",
                ) from None

    def _attach(self) -> None:
        """Find the ninja of this folder. A new one is a new run, whose total has to be asked."""
        if self._ninja is not None and not is_gone(self._ninja):
            return
        self._ninja = find_ninja(self._build)
        if self._ninja is None:
            return
        try:
            self._program, self._targets = self._ninja.exe(), progress.targets_of(self._ninja.cmdline())
            self._began, self._total, self._asked = self._ninja.create_time(), None, False
            self._done, self._older = 0, self._seen
            self._meter = Meter(self._ninja)
        except psutil.Error:  # it has ended in the meantime
            self._ninja = None

    # A build that runs

    def _look_at_run(self, log: _Log, console: Console | None) -> Snapshot:
        mine = self._of_this_run(log) if self._ninja else []
        done, total = self._count(log, mine, console)
        speed = progress.pace(mine, time.time() - self._began)
        return Snapshot(
            "running",
            done,
            total,
            None if speed is None else round(speed * 60, 2),
            progress.time_left(done, total, speed),
            self._meter.read() if self._meter else None,
            self._libuv(log.outputs),
            failures=console.failures if console else (),
        )

    def _count(self, log: _Log, mine: Sequence[Output], console: Console | None) -> tuple[int, int | None]:
        """What is printed may come later than what is logged: the count does not fall when it comes."""
        done = self._count_done(mine)
        if console is None or not console.total:
            return done, self._ask_total(log, mine, done)
        return min(max(done, console.done), console.total), console.total

    def _of_this_run(self, log: _Log) -> list[Output]:
        mine = progress.of_this_run(log.outputs, self._began, log.written)
        return [output for output in mine if output not in self._older]

    def _count_done(self, mine: Sequence[Output]) -> int:
        """Two runs in two seconds look like one, until the log tells them apart; the count stays then."""
        self._done = max(self._done, progress.count_steps(mine))
        return self._done

    def _ask_total(self, log: _Log, mine: Sequence[Output], done: int) -> int | None:
        """Once in a run. A dry run also counts the steps that make no file and that this run has done."""
        if self._ninja is not None and not self._asked:
            left = self._ask(log.content)
            self._total = None if left is None else done + left.count - self._always(mine)
            self._asked = True
        return None if self._total is None else max(done, self._total)

    # A build that does not

    def _look_at_rest(self, log: _Log, console: Console | None) -> Snapshot:
        left = self._ask(log.content)
        count = None if left is None else max(0, left.count - self._always(log.outputs))
        exit_code = self._command.poll() if self._command else None
        state = progress.state_of(console, count, exit_code, begun=bool(log.outputs))
        done, total = self._count_at_rest(log, console, count)
        return Snapshot(
            state,
            done,
            total,
            libuv=self._libuv(log.outputs),
            exit_code=exit_code,
            failures=console.failures if console else (),
            next_steps=left.first if left and count and state != "complete" else (),
        )

    def _count_at_rest(self, log: _Log, console: Console | None, left: int | None) -> tuple[int, int | None]:
        """Of the run that was watched; else of the whole, which ninja would do if nothing were done."""
        if console is not None and console.total:
            return console.done, console.total
        if self._total is not None:
            done = self._count_done(self._of_this_run(log))
            return done, done if left == 0 else max(done, self._total)
        whole = self._ask(b"")
        if whole is None or left is None:
            return 0, None
        total = max(left, whole.count)
        return total - left, total

    def _always(self, outputs: Sequence[Output]) -> int:
        return progress.never_there(outputs, self._custom, self._exists)

    def _exists(self, path: str) -> bool:
        return (self._build / path).exists()

    def _libuv(self, outputs: Sequence[Output]) -> progress.Libuv | None:
        made = (output.path for output in outputs if progress.is_of_libuv(output.path))
        return progress.libuv_of(self._known, frozenset(filter(self._exists, made)))

    def _ask(self, log: bytes) -> Left | None:
        if self._program is None or self._targets is None or not self._askable:
            return None
        return ask(self._program, self._build, log, self._targets)


def _read_log(path: Path) -> _Log:
    """Nothing, if it is not there yet."""
    try:
        content = path.read_bytes()
        written = path.stat().st_mtime  # after it: too late does not hurt, too early by a long step would
        outputs = parse_log(content.decode("utf-8", "replace")) if content else []
    except FileNotFoundError:
        return _Log()
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror}") from None
    except UnreadableError as error:
        raise UnreadableError(f"cannot read {path}: {error.message}") from None
    return _Log(content, written, tuple(outputs))


def _lines_in(path: Path) -> list[str]:
    """Of a build file, those that name outputs or say where the log is to be."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        return [line for line in lines if line.startswith(("build ", "builddir"))]


def _read_console(path: Path) -> Console:
    try:
        return parse_console(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
