"""`rallypoint torch watch`: how far a ninja build is. Files are read, ninja is asked, nothing is changed.

Only ninja knows how many steps are left: it depends on times, headers, and on whether a command has changed.
So a dry run is asked. As even that may repair or remove the log that it reads, it is given a copy, through a
build file that includes the real one. Which step has failed is only in what ninja prints.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from rallypoint.diagnose.builds.packages import UnreadableError, defines_macro, is_found, opened, read_cache
from rallypoint.errors import RallypointError, UsageError

_LOG: Final = ".ninja_log"
_DEPENDENCIES: Final = ".ninja_deps"
_STEP_PREFIX: Final = "step: "
_DRY_RUN_SECONDS: Final = 120
_NEXT_STEPS: Final = 5
_LAST_LINES: Final = 40

_HEADER: Final = re.compile(r"# ninja log v[567]\b")
_LOGGED: Final = re.compile(r"^-?\d+\t-?\d+\t-?\d+\t([^\t\n]+)\t[^\t\n]*\n", re.MULTILINE | re.ASCII)
_STEP: Final = re.compile(r"^build ((?:\$.|[^$\s:|])+)(?!.*: phony\b)(.*: CUSTOM_COMMAND\b)?")
_FAILED: Final = re.compile(r"^\s*(?:FAILED: |ninja: (?:fatal|error))")
_NINJA: Final = re.compile(r"(?:ninja|ninja-build|samu)(?:\.exe)?", re.IGNORECASE)


@dataclass(frozen=True)
class BuildProgress:
    """A build at one moment."""

    state: str
    """running, complete, failed, not begun, or stopped: ended too early, for an unknown reason."""
    done: int
    total: int | None
    """Steps of the whole build; None if ninja could not be asked."""
    libuv: str
    """How far torch's libuv server is; empty if it is no build of torch."""
    next_steps: tuple[str, ...]
    """The first steps that are left to do."""
    last_lines: tuple[str, ...]
    """Of what ninja has printed, from the last failure on."""


def read_progress(build: Path, output: Path | None = None) -> BuildProgress:
    """A build folder now; `output` is a file with what ninja prints.

    `UsageError` if nothing is built there, `UnreadableError` if its log is damaged.
    """
    build = build.resolve()
    steps = _read_steps(build)
    running = _is_running(build)  # before the log: if ninja ends in between, the next look sees all steps
    log = _read_log(build)
    logged = set(_LOGGED.findall(log.decode("utf-8", "replace")))
    made = {path for path in logged if (build / path).exists()}
    whole, left = _ask_what_is_left(build, b""), _ask_what_is_left(build, log)
    # ninja runs custom steps that make no file each time: once they have run, they do not count as left.
    again = sum(steps.get(path, False) for path in logged - made)
    remaining = max(0, len(left) - again) if left is not None else 0
    total = None if whole is None or left is None else max(len(whole), remaining)
    lines = _last_lines(output) if output else ()
    if running:
        state = "running"
    elif total is not None and not remaining:
        state = "complete"
    elif any(map(_FAILED.match, lines)):
        state = "failed"
    else:
        state = "stopped" if log else "not begun"
    following = tuple(left or ())[:_NEXT_STEPS] if remaining else ()
    done = 0 if total is None else total - remaining
    return BuildProgress(state, done, total, _libuv(build, steps, made), following, lines)


def _read_steps(build: Path) -> dict[str, bool]:
    """The first output of each step that runs a command, and whether it is a custom one, by CMake's rule."""
    try:
        with (build / "build.ninja").open(encoding="utf-8", errors="replace") as lines:
            steps = [step for line in lines if (step := _STEP.match(line))]
    except OSError:
        hint = "name the folder in which ninja builds; torch calls it build"
        raise UsageError(f"{build} has no build.ninja", hint=hint) from None
    return {re.sub(r"\$(.)", r"\1", step[1]): bool(step[2]) for step in steps}


def _libuv(build: Path, steps: Iterable[str], made: Collection[str]) -> str:
    server = [path for path in steps if "TCPStoreLibUvBackend.cpp." in path]
    if not server:
        return ""
    if not defines_macro(build):
        return "the libuv server is not in this build"
    return f"the libuv server is {'compiled' if server[0] in made else 'not compiled yet'}"


def _read_log(build: Path) -> bytes:
    """Empty if there is none yet."""
    path = build / _LOG
    if not path.exists():
        return b""
    with opened(path) as file:
        content = file.read()
        if content and not _HEADER.match(content[:100].decode("utf-8", "replace")):
            raise UnreadableError("its first line is not `# ninja log v5`, v6 or v7")
    return content


def _last_lines(output: Path) -> tuple[str, ...]:
    """From the last failure on; else the end."""
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {output}: {error.strerror}") from None
    failed = max((n for n, line in enumerate(lines) if _FAILED.match(line)), default=-_LAST_LINES)
    return tuple(lines[failed:][:_LAST_LINES])


def _is_running(build: Path) -> bool:
    """Whether a ninja works in the folder: with -C, it has gone there."""
    for process in psutil.process_iter(["name"]):
        if not _NINJA.fullmatch(process.info["name"] or ""):
            continue
        try:
            ended = process.status() == psutil.STATUS_ZOMBIE
            if not ended and os.path.realpath(process.cwd()) == str(build):
                return True
        except (psutil.Error, OSError):  # it has ended, or is somebody else's
            continue
    return False


def _ask_what_is_left(build: Path, log: bytes) -> list[str] | None:
    """The steps of a dry run by this log; all, if that is empty. None if ninja does not say."""
    try:  # the ninja that CMake has chosen: another version could not read its log
        program = read_cache(build).get("CMAKE_MAKE_PROGRAM", "")
    except RallypointError:
        program = ""
    with tempfile.TemporaryDirectory() as name:
        folder, manifest = Path(name), Path(name, "shadow.ninja")
        if log:
            (folder / _LOG).write_bytes(log)
            if (build / _DEPENDENCIES).exists():
                shutil.copyfile(build / _DEPENDENCIES, folder / _DEPENDENCIES)
        manifest.write_text(f"include build.ninja\nbuilddir = {name.replace('$', '$$')}\n", encoding="utf-8")
        command = [program if is_found(program) else "ninja", "-C", str(build), "-f", str(manifest), "-n"]
        environ = {**os.environ, "NINJA_STATUS": _STEP_PREFIX}
        try:
            done = subprocess.run(command, env=environ, capture_output=True, timeout=_DRY_RUN_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return None
    printed = (done.stdout + done.stderr).decode("utf-8", "replace")
    if done.returncode != 0 or "starting over" in printed:  # it could not read the log
        return None
    return [step.partition("\n")[0] for step in printed.split(_STEP_PREFIX)[1:]]
