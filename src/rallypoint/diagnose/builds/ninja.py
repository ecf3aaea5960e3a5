"""The files of ninja, build.ninja and .ninja_log; its output; and a dry run that tells the steps left to do.

.ninja_log has a line for each output of each step that has ended well, appended when it ends: start and end
in milliseconds since that run of ninja began, a time stamp, the output, a hash of the command. Steps that
failed are not in it; they are only in what ninja prints.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rallypoint.diagnose.builds.libraries import UnreadableError
from rallypoint.diagnose.builds.progress import Console, FailedStep, Output
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
