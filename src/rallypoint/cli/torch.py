"""`rallypoint torch`: is the libuv server in a build of torch, how to build one with it, how far it is."""

from __future__ import annotations

import json
import os
import sys
from argparse import REMAINDER
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Column

from rallypoint.cli.command import JSON, Argument, Group, command
from rallypoint.cli.findings import print_findings
from rallypoint.cli.printing import progress_bar
from rallypoint.cli.signals import signals_as_interrupts
from rallypoint.diagnose.builds.check import check as look
from rallypoint.diagnose.builds.commands import run_script, running_command
from rallypoint.diagnose.builds.ninja import BuildProgress, Libuv
from rallypoint.diagnose.builds.plan import Platform, Wishes, make_plan, parse_architectures
from rallypoint.diagnose.builds.scripts import write_script
from rallypoint.diagnose.builds.trees import read_facts
from rallypoint.diagnose.builds.verdicts import BuildReport
from rallypoint.diagnose.builds.watch import BuildWatch
from rallypoint.errors import RallypointError, UsageError
from rallypoint.text import duration, printable

_PYTHON: Final = Argument(
    "--python",
    metavar="PYTHON",
    default=sys.executable,
    help="The Python whose torch is meant; by default this one.",
)
_BAR_SECONDS: Final = 1.0
_LINE_SECONDS: Final = 10.0
"""Between two looks, on a terminal and elsewhere."""
_END_LINES: Final = 40


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
        report = look(path, python, os.environ)
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

_PLATFORMS: Final = {"linux": Platform.LINUX, "darwin": Platform.MACOS, "win32": Platform.WINDOWS}
_HERE: Final = _PLATFORMS.get(sys.platform, Platform.LINUX)


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
    Argument(
        "--nccl", action="store_true", default=True, help="With NCCL, where there is CUDA; the default."
    ),
    Argument("--no-nccl", dest="nccl", action="store_false", help="Without NCCL."),
    Argument("--jobs", type=int, metavar="NUMBER", help="How many compilers run at the same time."),
    Argument(
        "--platform",
        choices=[each.value for each in Platform],
        default=_HERE.value,
        help="What the script is for.",
    ),
    _PYTHON,
    Argument("--run", action="store_true", help="Run the script after it was printed."),
)
def _plan(
    tree: Path, cuda_arch: str, nccl: bool, jobs: int | None, platform: str, python: str, run: bool
) -> int:
    """Print the script that builds torch with the libuv server in a source tree, each step with its reason.

    Nothing is run without --run. A tree that was built before needs less than a new one.
    """
    target = Platform(platform)
    if run and target is not _HERE:
        raise UsageError(f"a script for {platform} cannot be run here", hint="leave --run out")
    architectures = parse_architectures(cuda_arch)
    wishes = Wishes(str(tree.absolute()), target, _name_of(python, target), architectures, nccl, jobs)
    with _reading():
        facts = read_facts(tree)
    script = write_script(make_plan(wishes, facts))
    print(script, end="")
    return _run(script) if run else 0


def _name_of(python: str, platform: Platform) -> str:
    """How the script calls Python: it changes folders, and another system has its own."""
    if platform is not _HERE and python == sys.executable:
        return "python"
    return str(Path(python).absolute()) if os.sep in python else python


def _run(script: str) -> int:
    with signals_as_interrupts("the build"):
        code = run_script(script)
    print(f"rallypoint: the script {'is done' if code == 0 else f'ended with {code}'}", file=sys.stderr)
    return 0 if code == 0 else 1


# watch ------------------------------------------------------------------------------------------------------


@command(
    Argument("build_dir", type=Path, metavar="BUILD_DIR", help="The folder in which ninja builds."),
    Argument(
        "command",
        nargs=REMAINDER,
        metavar="-- COMMAND",
        help="Run this build, and watch it; by default one that runs already is watched.",
    ),
    Argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="A file with what the build prints: read, or written where there is a COMMAND.",
    ),
    Argument("--once", action="store_true", help="Say how far it is, and end."),
    Argument("--json", dest="as_json", action="store_true", help="Print JSON, a line for each look."),
)
def _watch(build_dir: Path, command: list[str], log: Path | None, once: bool, as_json: bool) -> int:
    """Show how far a ninja build is: steps, pace, time left, load, libuv, and the step that failed.

    Ends with the build: exit 0 if it is complete, 1 if it failed or stopped before its end.
    """
    if once and command:
        raise UsageError("--once with a COMMAND", hint="leave one of them out")
    with signals_as_interrupts(), running_command(command, log) as (process, written):
        snapshot = _follow(BuildWatch(build_dir, written if process else log, process), once, as_json)
        if snapshot.state in ("failed", "stopped"):
            _print_failure(snapshot, written)
    return 0 if snapshot.state in ("running", "complete") else 1


def _follow(seen: BuildWatch, once: bool, as_json: bool) -> BuildProgress:
    """Look again and again, until the build has ended."""
    lines = as_json or once or not sys.stderr.isatty()
    rest = TextColumn("{task.description}", table_column=Column())  # it may take several lines
    with progress_bar(BarColumn(20), MofNCompleteColumn(), rest, shown=not lines) as bar:
        task = bar.add_task("", total=None)
        while (snapshot := seen.look()).state == "running" and not once:
            if lines:
                _print_line(snapshot, as_json)
            said = "; ".join(_parts(snapshot))
            bar.update(task, completed=snapshot.done, total=snapshot.total, description=said)
            seen.wait(_LINE_SECONDS if lines else _BAR_SECONDS)
    _print_line(snapshot, as_json)
    return snapshot


def _print_line(snapshot: BuildProgress, as_json: bool) -> None:
    print(json.dumps(asdict(snapshot)) if as_json else describe(snapshot))


def describe(snapshot: BuildProgress) -> str:
    """A line about a build."""
    total = "?" if snapshot.total is None else f"{snapshot.total:,}"
    ended = [f"the command {_describe_end(snapshot)}"] if snapshot.exit_code else []
    counts = f"{snapshot.state}: {snapshot.done:,} of {total} steps"
    return "; ".join([counts, *ended, *_parts(snapshot)])


def _describe_end(snapshot: BuildProgress) -> str:
    code = snapshot.exit_code or 0
    return f"ended with {code}" if code >= 0 else f"was ended by signal {-code}"


def _parts(snapshot: BuildProgress) -> Iterator[str]:
    if snapshot.seconds_left is not None:
        yield f"{duration(snapshot.seconds_left)} left"
    if snapshot.steps_per_minute is not None:
        yield f"{snapshot.steps_per_minute:,.0f} a minute"
    if snapshot.load is not None:
        load = snapshot.load
        yield f"{load.steps} at work, {load.cpu_percent:.0f} % CPU, {load.memory_bytes / 2**20:,.0f} MiB"
    if snapshot.libuv is not None:
        yield _describe_libuv(snapshot.libuv)


def _describe_libuv(libuv: Libuv) -> str:
    if libuv.total == 0:
        return "no libuv in this build"
    files = "libuv is built" if libuv.done == libuv.total else f"libuv: {libuv.done} of {libuv.total} files"
    server = {True: "its server too", False: "its server is not", None: "there is no server for it"}
    return f"{files}, {server[libuv.server]}"


def _print_failure(snapshot: BuildProgress, log: Path | None) -> None:
    """The steps that failed with the ends of their output; else the end of the log, or what is known."""
    for failure in snapshot.failures:
        print(f"\nFAILED: {printable(failure.step)}", file=sys.stderr)
        _print_end(failure.lines)
    if snapshot.failures:
        return
    who = "the build" if snapshot.exit_code is None else f"the command {_describe_end(snapshot)}, and"
    if log is not None and (lines := log.read_text(encoding="utf-8", errors="replace").splitlines()):
        print(f"\n{who} names no step that failed; the end of what was printed:", file=sys.stderr)
        _print_end(lines)
        return
    if log is not None:
        print(f"\n{who} has printed nothing", file=sys.stderr)
    if snapshot.next_steps:
        print("\nthe first steps that are left to do:", file=sys.stderr)
        _print_end(snapshot.next_steps)
    elif snapshot.done == snapshot.total:
        print("nothing was left to build", file=sys.stderr)
    if log is None:
        print(
            "\nhint: ninja writes failures to no file; give what it prints with --log, or run it from here: "
            "rallypoint torch watch BUILD_DIR -- COMMAND",
            file=sys.stderr,
        )


def _print_end(lines: Sequence[str]) -> None:
    """The last lines, so written that a terminal obeys nothing in them."""
    for line in lines[-_END_LINES:]:
        print(f"  | {printable(line.expandtabs())}", file=sys.stderr)


torch: Final = Group(
    "Builds of torch: is the libuv server in one, how to build one with it, how far a build is.",
    {"check": _check, "plan": _plan, "watch": _watch},
)
