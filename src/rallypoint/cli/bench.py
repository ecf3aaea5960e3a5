"""`rallypoint bench`: the stores of this machine under the loads of a job, ours against torch's.

`benchmarks`, which only a checkout has, measures more loads and targets with the functions of this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from rallypoint.bench import contest, tables
from rallypoint.bench.contest import Measurement
from rallypoint.bench.loads import MEASUREMENTS
from rallypoint.bench.planning import BenchPlan, Wish, make_plan
from rallypoint.bench.results import Results, to_json
from rallypoint.bench.tables import Sheet
from rallypoint.bench.targets import TARGETS
from rallypoint.cli.command import Argument, Command, Group, not_negative
from rallypoint.cli.printing import progress_bar
from rallypoint.cli.signals import exit_code, signals_as_interrupts
from rallypoint.errors import RallypointError, UsageError

_MOST_RANKS: Final = 1_000_000
_MORE: Final = " In a checkout, `python -m benchmarks` has redis and relays as well."
_ELSEWHERE: Final = ("accept", "bulk", "wakeup", "restart", "all", "compare", "page")
"""Commands of `python -m benchmarks` that users may look for here."""


def options(targets: Sequence[str], besides: str = "") -> tuple[Argument, ...]:
    """The options of a command that measures these targets."""
    return (
        Argument(
            "--ranks", metavar="N,N,…", default="", help="Sizes of the simulated jobs, instead of the usual."
        ),
        Argument(
            "--targets",
            metavar="NAME,…",
            default=",".join(targets),
            help=f"Of {', '.join(targets)}; by default all of these.{besides}",
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
        Argument("--quick", action="store_true", help="Fewer ranks, fewer and shorter rounds."),
    )


def make_wish(
    commands: Sequence[str], targets: str, known: Sequence[str], ranks: str, repeat: int, quick: bool
) -> Wish:
    """The options as they are meant."""
    sizes = []
    for word in ranks.split(",") if ranks else []:
        if not word.isdecimal() or not 2 <= int(word) <= _MOST_RANKS:
            raise UsageError(
                f"--ranks has {word!r}", hint=f"write numbers from 2 to {_MOST_RANKS:,}, with commas between"
            )
        sizes.append(int(word))
    chosen = tuple(dict.fromkeys(targets.split(",")))
    for name in chosen:
        if name not in known:
            raise UsageError(f"{name!r} is no target", hint=f"there are {', '.join(known)}")
    return Wish(commands, chosen, tuple(sizes), repeat, quick)


def describe(program: str, wish: Wish, targets: Sequence[str]) -> str:
    """The command that asks for this; where its results go says nothing about them."""
    words = [program, wish.commands[0] if len(wish.commands) == 1 else "all"]
    if wish.ranks:
        words.append(f"--ranks {','.join(map(str, wish.ranks))}")
    if wish.targets != tuple(targets):
        words.append(f"--targets {','.join(wish.targets)}")
    if wish.repeat:
        words.append(f"--repeat {wish.repeat}")
    return " ".join([*words, *(["--quick"] if wish.quick else [])])


def measure(plan: BenchPlan, results: Results, report: Callable[[Results], None]) -> int:
    """Measure and report; the exit code."""
    for note in plan.notes:
        print(f"rallypoint: {note}", file=sys.stderr)
    try:
        with signals_as_interrupts(), _Progress(len(plan.measurements)) as progress:
            contest.measure(plan.measurements, plan.kinds, results, progress)
    except KeyboardInterrupt as stop:
        print("rallypoint: interrupted; every process of the measurement has been ended", file=sys.stderr)
        return exit_code(stop)
    finally:  # what has been measured is told in any case
        report(results)
    return 1 if results.faults() else 0


def print_or_write(results: Results, sheets: Sequence[Sheet], json_file: Path | None) -> None:
    """Print the tables, or JSON in their place; a file that cannot be written does not stop the tables."""
    if json_file and str(json_file) == "-":
        print(to_json(results), end="")
        return
    try:
        if json_file:
            json_file.write_text(to_json(results), encoding="utf-8")
    except OSError as error:
        raise RallypointError(f"cannot write {json_file}: {error.strerror}") from error
    finally:
        tables.print_results(results, sheets, Console(highlight=False))


def check_writable(path: Path | None) -> None:
    """UsageError if nothing can be written there."""
    if not path or str(path) == "-":
        return
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="name a file in a folder that can be written"
        ) from error


def _command(name: str, help: str) -> Command:
    """The command that measures this; they differ in nothing else."""

    def run(ranks: str, targets: str, repeat: int, json_file: Path | None, quick: bool) -> int:
        wish = make_wish([name], targets, list(TARGETS), ranks, repeat, quick)
        plan = make_plan(wish, MEASUREMENTS, TARGETS)
        check_writable(json_file)
        results = contest.new_results(describe("rallypoint bench", wish, list(TARGETS)), plan.notes)

        def report(results: Results) -> None:
            print_or_write(results, [tables.main_sheet(results, name, tables.TITLES[name])], json_file)

        return measure(plan, results, report)

    run.__doc__ = help
    return Command(run, options(list(TARGETS), _MORE))


class _Bench(Group):
    """Says where the commands are that are not here."""

    def __call__(self, prog: str, words: Sequence[str]) -> int:
        if words and words[0] in _ELSEWHERE:
            raise UsageError(
                f"{prog} has no command {words[0]}",
                hint=f"in a checkout of Rallypoint, `python -m benchmarks {words[0]}` is this command",
            )
        return super().__call__(prog, words)


bench: Final = _Bench(
    "Measure the stores of this machine against each other, in turns; Linux only.",
    {
        "init": _command("init", "How long simulated ranks take to come up."),
        "barrier": _command("barrier", "How long ranks take to pass the barrier of init_process_group."),
        "ops": _command("ops", "GET, SET, ADD and CHECK: as many as a server can do, and one at a time."),
    },
)


class _Progress:
    """A bar on standard error with what runs now; a line for each measurement where that is no terminal."""

    def __init__(self, total: int) -> None:
        self._bar = progress_bar()
        self._bar.live.refresh_per_second = 2  # some loads run in this process, and are not to be disturbed
        self._total = total
        self._task = self._bar.add_task("starting", total=total)
        self._begun: list[str] = []
        """The measurements so far; the last is in progress."""

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, measurement: Measurement, target: str, round_number: int) -> None:
        what = measurement.record().title
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
