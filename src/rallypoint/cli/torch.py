"""`rallypoint torch`: is the libuv server in a build of torch, how to build one with it, how far it is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rallypoint.cli.signals import exit_code, signals_as_interrupts
from rallypoint.diagnose.builds.plan import Platform
from rallypoint.errors import RallypointError, UsageError

if TYPE_CHECKING:
    from rallypoint.diagnose.builds.plan import Wishes
    from rallypoint.diagnose.builds.verdicts import BuildReport

app = typer.Typer(
    name="torch",
    help="Builds of torch: is the libuv server in one, how to build one with it, how far a build is.",
    no_args_is_help=True,
)

_Python = Annotated[
    str,
    typer.Option(
        "--python",
        metavar="PYTHON",
        show_default=False,
        help="The Python whose torch is meant; by default this one.",
    ),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def _reading() -> Iterator[None]:
    """What fails on the file system here is what is looked at, and not what is printed."""
    try:
        yield
    except OSError as error:
        raise RallypointError(f"cannot read {error.filename}: {error.strerror}") from None


@app.command()
def check(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            show_default=False,
            help="A wheel, an installed torch, a library, a source tree or its build folder; "
            "by default the torch that Python imports here.",
        ),
    ] = None,
    python: _Python = sys.executable,
    as_json: _AsJson = False,
) -> None:
    """Say whether the libuv server is in a torch, for Linux, Windows or macOS, without loading it.

    Exit 0 if it is and nothing contradicts, 1 if it is not or something disagrees.
    """
    from rallypoint.diagnose.builds.check import check as look

    with _reading():
        report = look(path, python, os.environ)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        _print_report(report)
    raise typer.Exit(0 if report.ok else 1)


def _print_report(report: BuildReport) -> None:
    from rallypoint.cli.findings import print_findings
    from rallypoint.text import printable

    print(f"{report.kind}: {printable(report.path)}")
    print_findings(report.findings)
    if not report.ok:
        print(f"\nrallypoint: {_verdict(report)}", file=sys.stderr)


def _verdict(report: BuildReport) -> str:
    if report.libuv is None:
        return "there is no compiled torch to look into"
    return f"the libuv server is {'in it, but something disagrees' if report.libuv else 'not in it'}"


_PLATFORMS: Final = {"linux": Platform.LINUX, "darwin": Platform.MACOS, "win32": Platform.WINDOWS}
_HERE: Final = _PLATFORMS.get(sys.platform, Platform.LINUX)

_Tree = Annotated[
    Path,
    typer.Argument(
        metavar="TREE",
        show_default=False,
        help="The source tree, by default here; one that is not there yet is cloned.",
    ),
]
_Architectures = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        show_default=False,
        help="The GPUs to build for, as compute capabilities: 9.0,12.0. Without it, for the CPU alone.",
    ),
]
_Jobs = Annotated[int | None, typer.Option(metavar="NUMBER", help="How many compilers run at the same time.")]


@app.command()
def plan(
    tree: _Tree = Path(),
    cuda_arch: _Architectures = "",
    nccl: Annotated[bool, typer.Option("--nccl/--no-nccl", help="With NCCL, where there is CUDA.")] = True,
    jobs: _Jobs = None,
    platform: Annotated[Platform, typer.Option(help="What the script is for.")] = _HERE,
    python: _Python = sys.executable,
    run: Annotated[bool, typer.Option("--run", help="Run the script after it was printed.")] = False,
) -> None:
    """Print the script that builds torch with the libuv server in a source tree, each step with its reason.

    Nothing is run without --run. A tree that was built before needs less than a new one.
    """
    from rallypoint.diagnose.builds.plan import Wishes, parse_architectures

    if run and platform is not _HERE:
        raise UsageError(f"a script for {platform.value} cannot be run here", hint="leave --run out")
    architectures = parse_architectures(cuda_arch)
    wishes = Wishes(str(tree.absolute()), platform, _name_of(python, platform), architectures, nccl, jobs)
    script = _write_script(tree, wishes)
    print(script, end="")
    if run:
        raise typer.Exit(_run(script))


def _write_script(tree: Path, wishes: Wishes) -> str:
    from rallypoint.diagnose.builds import plan as planning
    from rallypoint.diagnose.builds.scripts import write_script

    with _reading():
        facts = planning.read_facts(tree)
    return write_script(planning.make_plan(wishes, facts))


def _name_of(python: str, platform: Platform) -> str:
    """How the script calls Python: it changes folders, and another system has its own."""
    if platform is not _HERE and python == sys.executable:
        return "python"
    return str(Path(python).absolute()) if os.sep in python else python


def _run(script: str) -> int:
    from rallypoint.diagnose.builds.commands import run_script

    try:
        with signals_as_interrupts():
            code = run_script(script)
    except KeyboardInterrupt as stop:
        print("rallypoint: interrupted; every process of the build has been ended", file=sys.stderr)
        return exit_code(stop)
    print(f"rallypoint: the script {'is done' if code == 0 else f'ended with {code}'}", file=sys.stderr)
    return 0 if code == 0 else 1


@app.command()
def watch(
    build_dir: Annotated[Path, typer.Argument(metavar="BUILD_DIR", help="The folder in which ninja builds.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND",
            show_default=False,
            help="Run this build, and watch it; by default one that runs already is watched.",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with what the build prints: read, or written where there is a COMMAND.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Say how far it is, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each look.")] = False,
) -> None:
    """Show how far a ninja build is: steps, pace, time left, load, libuv, and the step that failed.

    Ends with the build: exit 0 if it is complete, 1 if it failed or stopped before its end.
    """
    from rallypoint.cli.watching import watch_build

    if once and command:
        raise UsageError("--once with a COMMAND", hint="leave one of them out")
    try:
        with signals_as_interrupts():
            snapshot = watch_build(build_dir, command or [], log, once, as_json)
    except KeyboardInterrupt as stop:
        print("rallypoint: interrupted", file=sys.stderr)
        raise typer.Exit(exit_code(stop)) from None
    raise typer.Exit(0 if snapshot.state in ("running", "complete") else 1)
