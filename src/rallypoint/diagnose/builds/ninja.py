"""The files and the output of ninja, how far a build is by them, and a dry run for the steps left to do.

.ninja_log has a line for each output of each step that has ended well, appended when it ends: start and end
in milliseconds since that run of ninja began, a time stamp, the output, a hash of the command. Steps that
failed are not in it; they are only in what ninja prints.

How many steps are left, only ninja knows: it depends on times, on headers, and on whether a command has
changed. So ninja is asked (`ask_what_is_left`), and the total is right for any build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.diagnose.builds.packages import UnreadableError
from rallypoint.diagnose.builds.trees import read_cache
from rallypoint.diagnose.builds.verdicts import is_found
from rallypoint.errors import RallypointError

LOG: Final = ".ninja_log"
_DEPENDENCIES: Final = ".ninja_deps"
_DRY_RUN_SECONDS: Final = 120

_HEADER: Final = re.compile(r"# ninja log v[567]\b")
_LOGGED: Final = re.compile(
    r"^(?P<start>-?\d+)\t(?P<end>-?\d+)\t(?P<stamp>-?\d+)\t(?P<path>[^\t\n]+)\t(?P<command>[^\t\n]*)\n",
    re.MULTILINE | re.ASCII,
)
_OUTPUT: Final = re.compile(r"(?:\$.|[^$\s:|])+")
_STATUS: Final = re.compile(r"^\s*\[(?P<done>\d+)/(?P<total>\d+)[^\]]*\] ?(?P<text>.*)")
_FAILED: Final = re.compile(r"^\s*FAILED: (?:\[code=\d+\] )?(?P<outputs>.*)")
_ENDED: Final = re.compile(r"^\s*ninja: (?:build stopped|fatal|error|no work to do)")
_VALUES: Final = frozenset("Cfjkldtw")
"""Options of ninja that have a value."""

_LIBUV: Final = re.compile(
    r"(?:^|[/\\])(?:third_party[/\\]libuv[/\\]|(?:tensorpipe_uv|uv_a)\.dir[/\\]|lib(?:tensorpipe_uv|uv_a|uv)\.)"
)
_SERVER: Final = "TCPStoreLibUvBackend.cpp."
_TORCH: Final = re.compile(r"(?:^|[/\\])(?:torch_cpu\.dir[/\\]|(?:lib)?torch_cpu\.(?:so|dylib|dll)$)")
"""The outputs by which a build of torch is known."""
_WINDOW_SECONDS: Final = 120.0
"""The pace is that of the last two minutes: in torch, steps of seconds come before steps of minutes."""
_CLOCK_SECONDS: Final = 2.0
"""How exactly the begin of a process is known."""


@dataclass(frozen=True)
class Output:
    """A line of the log: a file that a step has made."""

    start: int
    end: int
    stamp: int
    """Nanoseconds since 1970, when it was made or its step began; 0 for a step that makes no file."""
    path: str
    command: str

    @property
    def step(self) -> tuple[int, int, str]:
        """The same for all outputs of one step."""
        return self.start, self.end, self.command


@dataclass(frozen=True)
class FailedStep:
    """A step that failed: what it was to make, and what it printed, its command first."""

    step: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Console:
    """The output of ninja so far."""

    done: int = 0
    """Steps that have ended well. ninja's own count has those that failed in it."""
    total: int = 0
    steps: tuple[str, ...] = ()
    """The texts of the status lines, in their order."""
    failures: tuple[FailedStep, ...] = ()
    ended: bool = False
    """Whether ninja has said that it ends: where it fails, and where there is nothing to do."""


@dataclass(frozen=True)
class CompilerLoad:
    """Processors and memory that the compilers take."""

    steps: int
    """How many steps run at this moment."""
    cpu_percent: float
    memory_bytes: int


@dataclass(frozen=True)
class Libuv:
    """Whether libuv is built yet, and the server that uses it."""

    done: int
    total: int
    """Files of libuv: objects and libraries."""
    server: bool | None
    """Whether the store's server is compiled; None if the build does not have it."""


@dataclass(frozen=True)
class BuildProgress:
    """A build at one moment."""

    state: str
    """running, complete, failed, not begun, or stopped: ended too early, for an unknown reason."""
    done: int
    total: int | None
    """Of this run; of the whole build, where none is running. None if ninja could not be asked."""
    steps_per_minute: float | None = None
    seconds_left: float | None = None
    load: CompilerLoad | None = None
    libuv: Libuv | None = None
    """None if it is no build of torch."""
    exit_code: int | None = None
    """Of the command that was run here, when it has ended."""
    failures: tuple[FailedStep, ...] = ()
    next_steps: tuple[str, ...] = ()
    """The first steps that are left to do, of a build that has stopped."""


# Reading --------------------------------------------------------------------------------------------------


def parse_log(text: str) -> list[Output]:
    """The outputs in .ninja_log. A last line that is still being written is left out."""
    header, _, rest = text.partition("\n")
    if not _HEADER.match(header):
        raise UnreadableError(
            "no log of ninja that is known: the first line is not `# ninja log v5`, v6 or v7"
        )
    return [
        Output(int(found["start"]), int(found["end"]), int(found["stamp"]), found["path"], found["command"])
        for found in _LOGGED.finditer(rest)
    ]


def read_outputs(lines: Iterable[str]) -> Iterator[str]:
    """The first output of each step that runs a command."""
    for line in lines:
        if line.startswith("build ") and not re.search(r": phony\b", line):
            match = _OUTPUT.match(line, len("build "))
            yield re.sub(r"\$(.)", r"\1", match[0]) if match else ""


def read_custom_outputs(lines: Iterable[str]) -> Iterator[str]:
    """The first output of each custom command, by the name that CMake and Meson give their rule."""
    return read_outputs(line for line in lines if re.search(r": CUSTOM_COMMAND\b", line))


def parse_console(lines: Sequence[str]) -> Console:
    """Status lines and failures. Where several runs follow each other in one text, the last one counts."""
    done, total, ended, inside = 0, 0, False, False
    steps: list[str] = []
    failures: list[tuple[str, list[str]]] = []
    for line in lines:
        if match := _STATUS.match(line):
            if int(match["done"]) < done:  # another run begins
                steps, failures, ended = [], [], False
            done, total, inside = int(match["done"]), int(match["total"]), False
            steps.append(match["text"])
        elif match := _FAILED.match(line):
            failures.append((match["outputs"].strip(), []))
            inside = True
        elif _ENDED.match(line):
            ended, inside = True, False
        elif inside:
            failures[-1][1].append(line)
    found = tuple(FailedStep(step, tuple(text)) for step, text in failures)
    return Console(max(0, done - len(found)), total, tuple(steps), found, ended)


def targets_of(arguments: Sequence[str]) -> list[str] | None:
    """The targets among the arguments of a ninja; None if it reads another file than build.ninja."""
    targets: list[str] = []
    waiting = iter(arguments[1:])
    for argument in waiting:
        if re.match(r"-[a-zA-Z]", argument):
            if argument[1] == "f":
                return None
            if argument[1] in _VALUES and len(argument) == 2:
                next(waiting, None)
        elif not argument.startswith("--"):
            targets.append(argument)
    return targets


# Progress -------------------------------------------------------------------------------------------------


def count_steps(outputs: Iterable[Output]) -> int:
    """A step with several outputs has a line for each."""
    return len({output.step for output in outputs})


def of_this_run(outputs: Sequence[Output], began: float, written: float) -> list[Output]:
    """The outputs of the run that began at `began`; `written` is the time of the log. Seconds since 1970.

    A run appends to the log in the order in which its steps end. Each line says how long after the begin of
    its run the step ended, so its stamp tells when that run began; for the last line, the time of the log
    does. The begin of a process is known to about a second only, so the order counts as well: if a line ends
    later than the next one, it is of another run. The stamp of a step that makes no file may be 0.
    """
    earliest = began - _CLOCK_SECONDS
    if outputs and written - outputs[-1].end / 1e3 < earliest:
        return []
    mine: list[Output] = []
    for output in reversed(outputs):
        too_old = output.stamp > 0 and output.stamp / 1e9 - output.start / 1e3 < earliest
        if too_old or (mine and output.end > mine[-1].end):
            break
        mine.append(output)
    return mine[::-1]


def pace(outputs: Sequence[Output], elapsed: float) -> float | None:
    """Steps per second of the last two minutes of a run; None if there was none."""
    window = min(_WINDOW_SECONDS, elapsed)
    recent = count_steps(output for output in outputs if output.end / 1000 >= elapsed - window)
    return recent / window if recent and window > 0 else None


def libuv_of(known: frozenset[str], is_made: Callable[[str], bool]) -> Libuv | None:
    """By all outputs of a build; None if it is no build of torch."""
    if not any(map(_TORCH.search, known)):
        return None
    files = [path for path in known if _LIBUV.search(path)]
    server = [path for path in known if _SERVER in path]
    return Libuv(sum(map(is_made, files)), len(files), any(map(is_made, server)) if server else None)


def state_of(console: Console, left: int | None, exit_code: int | None, begun: bool) -> str:
    """The state of a build that does not run: by its exit code, its output, or what is left to do."""
    if exit_code is not None:
        return "complete" if exit_code == 0 else "failed"
    if console.failures:
        return "failed"
    if console.total:
        return "complete" if console.done >= console.total and not console.ended else "stopped"
    if left == 0:
        return "complete"
    return "stopped" if begun else "not begun"


# A dry run -------------------------------------------------------------------------------------------------
# A ninja that reads a log may also repair or remove it, on a dry run as well. So it is given a copy, through
# a build file that includes the real one and says that the log is elsewhere.


def find_program(build: Path) -> str | None:
    """The ninja that CMake has chosen for a folder: another version could not read its log."""
    try:
        chosen = read_cache(build).get("CMAKE_MAKE_PROGRAM", "")
    except RallypointError:
        chosen = ""
    return chosen if is_found(chosen) else shutil.which("ninja")


def ask_what_is_left(program: str, build: Path, log: bytes, targets: Sequence[str]) -> Console | None:
    """The output of a dry run by this log; all steps, if that is empty. None if ninja does not say."""
    with tempfile.TemporaryDirectory() as folder:
        if log:
            Path(folder, LOG).write_bytes(log)
            if (build / _DEPENDENCIES).exists():
                shutil.copyfile(build / _DEPENDENCIES, Path(folder, _DEPENDENCIES))
        return _dry_run(program, build, folder, targets)


def _dry_run(program: str, build: Path, folder: str, targets: Sequence[str]) -> Console | None:
    manifest = Path(folder, "shadow.ninja")
    manifest.write_text(f"include build.ninja\nbuilddir = {folder.replace('$', '$$')}\n", encoding="utf-8")
    try:
        done = subprocess.run(
            [program, "-C", str(build), "-f", str(manifest), "-n", *targets],
            env={**os.environ, "NINJA_STATUS": "[%f/%t] "},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DRY_RUN_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0 or "starting over" in done.stdout + done.stderr:  # it could not read the log
        return None
    return parse_console(done.stdout.splitlines())
