"""`rallypoint bench`: the stores of this machine under the loads of a job, each against its peers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console

from rallypoint.bench import contest, figures, machine, names, page, tables
from rallypoint.bench.contest import Measurement
from rallypoint.bench.planning import BenchPlan, Wish, make_plan
from rallypoint.bench.results import Results, read, title, to_json
from rallypoint.cli.command import JSON, Argument, Command, Group, command, not_negative
from rallypoint.cli.printing import progress_bar
from rallypoint.cli.signals import exit_code, signals_as_interrupts
from rallypoint.errors import RallypointError, UsageError
from rallypoint.watch import plots

_MOST_RANKS: Final = 1_000_000

_OPTIONS: Final = (
    Argument(
        "--ranks", metavar="N,N,…", default="", help="Sizes of the simulated jobs, instead of the usual."
    ),
    Argument(
        "--targets",
        metavar="NAME,…",
        default=",".join(names.TARGETS),
        help=f"Of {', '.join(names.TARGETS)}; by default all of these. Besides: {', '.join(names.BY_NAME)}.",
    ),
    Argument(
        "--repeat", type=not_negative, metavar="N", default=0, help="Rounds of each; 0: as many as suit."
    ),
    Argument(
        "--json",
        dest="json_file",
        type=Path,
        metavar="FILE",
        help="Write every round there; -: standard output.",
    ),
    Argument("--plot", type=Path, metavar="FILE", help="Draw what was measured, as .svg, .png or .pdf."),
    Argument("--quick", action="store_true", help="Fewer ranks, fewer and shorter rounds."),
)

_HELP: Final = {
    "init": "How long ranks take to come up: simulated ones, and real clients of torch.",
    "barrier": "How long ranks take to pass the barrier of init_process_group.",
    "ops": "GET, SET, ADD and CHECK: as many as a server can do, and one at a time.",
    "accept": "New clients: beside busy ones, and very many at the same moment.",
    "bulk": "One request with a hundred thousand keys.",
    "wakeup": "Waits: that end for all ranks at once, and that are given up.",
    "restart": "How long a job takes to be up again, with a store made anew.",
}


def _measuring(commands: tuple[str, ...], help: str) -> Command:
    """The command that measures these; they differ in nothing else."""

    def measure(
        ranks: str, targets: str, repeat: int, json_file: Path | None, plot: Path | None, quick: bool
    ) -> int:
        chosen = tuple(dict.fromkeys(targets.split(",")))
        return _measure(Wish(commands, _sizes(ranks), chosen, repeat, quick), json_file, plot)

    measure.__doc__ = help
    return Command(measure, _OPTIONS)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = []
    for word in text.split(",") if text else []:
        if not word.isdecimal() or not 2 <= int(word) <= _MOST_RANKS:
            raise UsageError(
                f"--ranks has {word!r}", hint=f"write numbers from 2 to {_MOST_RANKS:,}, with commas between"
            )
        sizes.append(int(word))
    return tuple(sizes)


@command(
    Argument("before", type=Path, metavar="A.json", help="A result file."),
    Argument("after", type=Path, metavar="B.json", help="Another one."),
    JSON,
)
def _compare(before: Path, after: Path, as_json: bool) -> None:
    """Show how many times better B is than A, for all that both have measured."""
    a, b = read(before), read(after)
    if as_json:
        print(json.dumps(tables.compare(a, b), indent=1))
    else:
        tables.print_comparison(a, b, Console(highlight=False))


@command(
    Argument("result", type=Path, metavar="RESULT.json", help="A result file."),
    Argument("--output", type=Path, metavar="FILE", required=True, help="Where to write it."),
)
def _write_page(result: Path, output: Path) -> None:
    """Write the results as a page in Markdown, with figures in a folder beside it."""
    page.write_page(read(result), output)


bench: Final = Group(
    "Measure the stores of this machine against each other, in turns; Linux only.",
    {
        **{name: _measuring((name,), _HELP[name]) for name in names.COMMANDS},
        "all": _measuring(names.COMMANDS, "All of these."),
        "compare": _compare,
        "page": _write_page,
    },
)


def _measure(wish: Wish, json_file: Path | None, plot: Path | None) -> int:
    """Measure, then report; whatever is wrong with the options is told before anything is started."""
    machine.check_system()
    if plot:
        plots.check_plot(plot)
        _check_writable(plot)
    if json_file and str(json_file) != "-":
        _check_writable(json_file)
    machine.raise_open_file_limit()
    plan = make_plan(wish)
    results = contest.new_results(describe(wish), plan.notes)
    for note in plan.notes:
        print(f"rallypoint: {note}", file=sys.stderr)
    try:
        with signals_as_interrupts(), _Progress(plan) as progress:
            contest.measure(plan.measurements, results, progress)
    except KeyboardInterrupt as stop:
        print("rallypoint: interrupted; every process of the measurement has been ended", file=sys.stderr)
        return exit_code(stop)
    finally:  # what has been measured is told in any case
        _report(results, json_file, plot)
    return 1 if results.faults() else 0


def describe(wish: Wish) -> str:
    """The command that asks for this; where its results go says nothing about them."""
    words = ["rallypoint bench", wish.commands[0] if len(wish.commands) == 1 else "all"]
    if wish.ranks:
        words.append(f"--ranks {','.join(map(str, wish.ranks))}")
    if tuple(wish.targets) != names.TARGETS:
        words.append(f"--targets {','.join(wish.targets)}")
    if wish.repeat:
        words.append(f"--repeat {wish.repeat}")
    return " ".join([*words, *(["--quick"] if wish.quick else [])])


def _report(results: Results, json_file: Path | None, plot: Path | None) -> None:
    """Print and write the results; a file that cannot be written does not stop the others."""
    failures = []
    if json_file and str(json_file) != "-":
        failures += _write(json_file, lambda path: path.write_text(to_json(results)))
    if json_file and str(json_file) == "-":
        print(to_json(results), end="")
    else:
        tables.print_results(results, Console(highlight=False))
    if plot:
        failures += _write(plot, lambda path: _draw(results, path))
    if failures:
        raise RallypointError("; ".join(failures))


def _write(path: Path, write: Callable[[Path], object]) -> list[str]:
    """Write a file; return the error message, if there is one."""
    try:
        write(path)
    except OSError as error:
        return [f"cannot write {path}: {error.strerror}"]
    return []


def _draw(results: Results, path: Path) -> None:
    if not figures.save(results, path):
        print(f"rallypoint: nothing was measured that could be drawn in {path}", file=sys.stderr)


def _check_writable(path: Path) -> None:
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="name a file in a folder that can be written"
        ) from error


class _Progress:
    """A bar on standard error with what runs now; a line for each measurement where that is no terminal."""

    def __init__(self, plan: BenchPlan) -> None:
        self._bar = progress_bar()
        self._bar.live.refresh_per_second = 2  # some loads run in this process, and are not to be disturbed
        self._total = len(plan.measurements)
        self._task = self._bar.add_task("starting", total=self._total)
        self._begun: list[str] = []
        """The measurements so far; the last is in progress."""

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, measurement: Measurement, target: str, round_number: int) -> None:
        what = title(measurement.record())
        if what not in self._begun:
            self._begun.append(what)
            if self._bar.disable:
                count = f"{len(self._begun)} of {self._total}"
                print(f"rallypoint: {what}: {measurement.load} ({count})", file=sys.stderr, flush=True)
        stage = f"round {round_number} of {measurement.rounds}" if round_number else "starting"
        description = f"{what}: {target}, {stage}"
        self._bar.update(self._task, description=description, completed=len(self._begun) - 1)

    def drop(self, target: str, fault: str) -> None:
        self._bar.console.print(f"rallypoint: {target} failed: {fault}", markup=False, highlight=False)
