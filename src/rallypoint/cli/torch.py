"""`rallypoint torch`: is the libuv server in a build of torch, how to build one with it, how far it is."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rallypoint.cli.command import JSON, Argument, Group, command
from rallypoint.cli.findings import print_findings
from rallypoint.diagnose.builds import watch
from rallypoint.diagnose.builds.check import BuildReport, check
from rallypoint.diagnose.builds.packages import is_source
from rallypoint.diagnose.builds.plan import CLONE, parse_architectures, write_plan
from rallypoint.diagnose.builds.watch import BuildProgress
from rallypoint.errors import RallypointError, UsageError
from rallypoint.text import printable

_PYTHON: Final = Argument(
    "--python",
    metavar="PYTHON",
    default=sys.executable,
    help="The Python whose torch is meant; by default this one.",
)
_PAUSE_SECONDS: Final = 10.0


@contextmanager
def _reading() -> Iterator[None]:
    """A failure of the file system is one of the build that is read, and not one of standard output."""
    try:
        yield
    except OSError as error:
        raise RallypointError(f"cannot read {error.filename}: {error.strerror}") from None


# check ------------------------------------------------------------------------------------------------------


@command(
    Argument(
        "path",
        nargs="?",
        type=Path,
        metavar="PATH",
        help="A wheel, an installed torch, a library, a source tree or its build folder; "
        "by default the torch that Python imports here.",
    ),
    _PYTHON,
    JSON,
)
def _check(path: Path | None, python: str, as_json: bool) -> int:
    """Say whether the libuv server is in a torch, for Linux, Windows or macOS, without loading it.

    Exit 0 if it is and nothing contradicts, 1 if it is not or something disagrees.
    """
    with _reading():
        report = check(path, python, os.environ)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(f"{report.kind}: {printable(report.path)}")
        print_findings(report.findings)
        if not report.ok:
            print(f"\nrallypoint: {_verdict(report)}", file=sys.stderr)
    return 0 if report.ok else 1


def _verdict(report: BuildReport) -> str:
    if report.libuv is None:
        return "there is no compiled torch to look into"
    return f"the libuv server is {'in it, but something disagrees' if report.libuv else 'not in it'}"


# plan -------------------------------------------------------------------------------------------------------


@command(
    Argument(
        "tree",
        nargs="?",
        type=Path,
        metavar="TREE",
        default=Path(),
        help="The source tree, by default here; one that is not there yet is cloned.",
    ),
    Argument(
        "--cuda-arch",
        metavar="LIST",
        default="",
        help="The GPUs to build for, as compute capabilities: 9.0,12.0. Without it, for the CPU alone.",
    ),
    Argument("--nccl", action="store_true", default=True, help="With NCCL, where there is CUDA (default)."),
    Argument("--no-nccl", dest="nccl", action="store_false", help="Without NCCL."),
    Argument("--jobs", type=int, metavar="NUMBER", help="How many compilers run at the same time."),
    _PYTHON,
)
def _plan(tree: Path, cuda_arch: str, nccl: bool, jobs: int | None, python: str) -> int:
    """Print the commands that build torch with the libuv server in a source tree, for Linux and macOS.

    They are a script for bash; nothing is run.
    """
    if sys.platform == "win32":
        hint = "jobs come up without it: rallypoint run"
        raise RallypointError("torch's build leaves the libuv server out on Windows", hint=hint)
    if tree.exists() and not is_source(tree):
        hint = f"name one, or a folder that is not there yet; to get one: {CLONE}"
        raise UsageError(f"{tree.absolute()} is no source tree of torch", hint=hint)
    named = str(Path(python).absolute()) if os.sep in python else python  # the script changes folders
    print(write_plan(str(tree.absolute()), named, parse_architectures(cuda_arch), nccl, jobs), end="")
    return 0


# watch ------------------------------------------------------------------------------------------------------


@command(
    Argument("build_dir", type=Path, metavar="BUILD_DIR", help="The folder in which ninja builds."),
    Argument("--log", type=Path, metavar="FILE", help="A file with what the build prints."),
    Argument("--once", action="store_true", help="Say how far it is, and end."),
    Argument("--json", dest="as_json", action="store_true", help="Print JSON, a line for each look."),
)
def _watch(build_dir: Path, log: Path | None, once: bool, as_json: bool) -> int:
    """Show how far a ninja build is: the steps that are done, libuv, and how it failed.

    Ends with the build: exit 0 if it is complete, 1 if it failed or stopped before its end.
    """
    while True:
        progress = watch.read_progress(build_dir, log)
        print(json.dumps(asdict(progress)) if as_json else describe(progress), flush=True)
        if once or progress.state != "running":
            break
        time.sleep(_PAUSE_SECONDS)
    if progress.state in ("failed", "stopped"):
        _print_failure(progress, log)
    return 0 if progress.state in ("running", "complete") else 1


def describe(progress: BuildProgress) -> str:
    """A line about a build."""
    total = "?" if progress.total is None else f"{progress.total:,}"
    return f"{progress.state}: {progress.done:,} of {total} steps" + (
        progress.libuv and f"; {progress.libuv}"
    )


def _print_failure(progress: BuildProgress, log: Path | None) -> None:
    """What ninja has printed, and what is left to do; a terminal obeys nothing in it."""
    for title, lines in (
        ("the end of what was printed", progress.last_lines),
        ("the first steps that are left to do", progress.next_steps),
    ):
        if lines:
            print(f"\n{title}:", file=sys.stderr)
        for line in lines:
            print(f"  | {printable(line.expandtabs())}", file=sys.stderr)
    if log is None:
        hint = "ninja writes failures to no file; keep what it prints (`| tee FILE`), and name that by --log"
        print(f"\nhint: {hint}", file=sys.stderr)


torch: Final = Group(
    "Builds of torch: is the libuv server in one, how to build one with it, how far a build is.",
    {"check": _check, "plan": _plan, "watch": _watch},
)
