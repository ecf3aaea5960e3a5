"""What ninja has left to do, asked of ninja itself: by a dry run, without touching its files.

A ninja that reads a log may also repair or remove it, on a dry run as well. So it is given a copy, through a
build file that includes the real one and says that the log is elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.diagnose.builds.ninja import parse_console
from rallypoint.diagnose.builds.trees import read_cache
from rallypoint.errors import RallypointError

LOG: Final = ".ninja_log"
_DEPENDENCIES: Final = ".ninja_deps"
_SECONDS: Final = 120
_FIRST_STEPS: Final = 5


@dataclass(frozen=True)
class Left:
    """What a dry run says: how many steps are left, and which come first."""

    count: int
    first: tuple[str, ...]


def find_program(build: Path) -> str | None:
    """The ninja that CMake has chosen for a folder: another version could not read its log."""
    try:
        entry = read_cache(build).get("CMAKE_MAKE_PROGRAM")
    except RallypointError:
        entry = None
    return entry.value if entry and entry.found else shutil.which("ninja")


def ask(program: str, build: Path, log: bytes, targets: Sequence[str]) -> Left | None:
    """What is left to do, going by this log; all of it, if that is empty. None if ninja does not say."""
    with tempfile.TemporaryDirectory() as folder:
        if log:
            Path(folder, LOG).write_bytes(log)
            if (build / _DEPENDENCIES).exists():
                shutil.copyfile(build / _DEPENDENCIES, Path(folder, _DEPENDENCIES))
        return _dry_run(program, build, folder, targets)


def _dry_run(program: str, build: Path, folder: str, targets: Sequence[str]) -> Left | None:
    manifest = Path(folder, "shadow.ninja")
    manifest.write_text(f"builddir = {folder.replace('$', '$$')}\ninclude build.ninja\n", encoding="utf-8")
    try:
        done = subprocess.run(
            [program, "-C", str(build), "-f", str(manifest), "-n", *targets],
            env={**os.environ, "NINJA_STATUS": "[%f/%t] "},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0 or "starting over" in done.stdout + done.stderr:  # it could not read the log
        return None
    console = parse_console(done.stdout.splitlines())
    return Left(console.total, console.steps[:_FIRST_STEPS])
