"""A run of `rallypoint bench`: its progress on standard error, and then what was measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from rallypoint import plots
from rallypoint.bench import figures, machine, names, running, tables
from rallypoint.bench.pace import Pace
from rallypoint.bench.planning import Plan, Wish, make_plan
from rallypoint.bench.results import Results, title, to_json
from rallypoint.bench.session import Measurement
from rallypoint.cli.signals import exit_code, signals_as_interrupts
from rallypoint.errors import RallypointError, UsageError


def bench(wish: Wish, json: Path | None, plot: Path | None) -> None:
    """Measure, then report; whatever is wrong with the options is told before anything is started."""
    machine.check_system()
    if plot:
        plots.check_plot(plot)
        _check_writable(plot)
    if json and str(json) != "-":
        _check_writable(json)
    machine.raise_open_file_limit()
    plan = make_plan(wish)
    results = running.new_results(describe(wish), plan)
    for note in plan.notes:
        print(f"rallypoint: {note}", file=sys.stderr)
    try:
        with signals_as_interrupts(), _Progress(plan) as progress:
            running.measure(plan, results, progress)
    except KeyboardInterrupt as stop:
        print("rallypoint: interrupted; every process of the measurement has been ended", file=sys.stderr)
        raise typer.Exit(exit_code(stop)) from None
    finally:  # what has been measured is told in any case
        _report(results, json, plot)
    raise typer.Exit(1 if results.faults() else 0)


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


def _report(results: Results, json: Path | None, plot: Path | None) -> None:
    """What was measured, as it was asked for; a file that cannot be written takes nothing else along."""
    failures = []
    if json and str(json) != "-":
        failures += _write(json, lambda path: path.write_text(to_json(results)))
    if json and str(json) == "-":
        print(to_json(results), end="")
    else:
        tables.print_results(results, Console(highlight=False))
    if plot:
        failures += _write(plot, lambda path: _draw(results, path))
    if failures:
        raise RallypointError("; ".join(failures))


def _write(path: Path, write: Callable[[Path], object]) -> list[str]:
    """What went wrong, if anything did."""
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
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="name a file in a folder that can be written"
        ) from error


class _Remaining(ProgressColumn):
    """How long it will take from here on."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        minutes, seconds = divmod(round(self._pace.remaining()), 60)
        return Text(f"{minutes}:{seconds:02d} left" if not task.finished else "")


class _Progress:
    """A bar on standard error with what runs now; a line for each measurement where that is no terminal."""

    def __init__(self, plan: Plan) -> None:
        self._pace = Pace(
            (title(each.record()), target, each.rounds, each.seconds)
            for each in plan.measurements
            for target in each.targets
        )
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            *(TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn()),
            _Remaining(self._pace),
            console=self._console,
            transient=True,
            refresh_per_second=2,  # some loads run in this process, and are not to be disturbed
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=self._pace.total)
        self._step = ("", "", True)
        self._begun = 0.0
        self._said = ""

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, measurement: Measurement, target: str, round_number: int) -> None:
        what = title(measurement.record())
        self._step, self._begun = (what, target, round_number == 0), time.monotonic()
        stage = f"round {round_number} of {measurement.rounds}" if round_number else "starting"
        self._bar.update(self._task, description=f"{what}: {target}, {stage}")
        if not self._console.is_terminal and what != self._said:
            self._said = what
            left = round(self._pace.remaining())
            print(f"rallypoint: {what}: {measurement.load}; about {left} s left", file=sys.stderr, flush=True)

    def end(self) -> None:
        self._pace.took(self._step, time.monotonic() - self._begun)
        self._bar.update(self._task, completed=self._pace.done)

    def drop(self, measurement: Measurement, target: str, fault: str) -> None:
        self._pace.drop(title(measurement.record()), target)
        self._console.print(f"rallypoint: {target} failed: {fault}", markup=False)
