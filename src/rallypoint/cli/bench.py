"""`rallypoint bench`: the stores of this machine under the loads of a job, ours against torch's.

`benchmarks`, which only a checkout has, measures more loads and targets with the functions of this module.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

import psutil

import rallypoint
from rallypoint.bench.contest import Contest, Kinds, Measurement, Plan, hurried
from rallypoint.bench.loads import MEASUREMENTS
from rallypoint.bench.results import LEGEND, Results, Sheet, main_sheet, to_json
from rallypoint.bench.targets import TARGETS, raise_open_file_limit
from rallypoint.build import in_use
from rallypoint.cli.command import Argument, Command, Group, not_negative
from rallypoint.cli.printing import print_rows
from rallypoint.cli.signals import signals_as_interrupts
from rallypoint.errors import UsageError
from rallypoint.store.machine.system import installed

_MOST_RANKS: Final = 1_000_000
_MORE: Final = " In a checkout, `python -m benchmarks` has redis and relays as well."


def options(targets: Iterable[str], besides: str = "") -> tuple[Argument, ...]:
    """The options of a command that measures these targets."""
    names = list(targets)
    of = f"Of {', '.join(names)}; by default all of these.{besides}"
    repeat = "Rounds of each; 0: as many as suit."
    json = "Write every round there; -: standard output."
    return (
        Argument(
            "--ranks", metavar="N,N,…", default="", help="Sizes of the simulated jobs, instead of the usual."
        ),
        Argument("--targets", metavar="NAME,…", default=",".join(names), help=of),
        Argument("--repeat", type=not_negative, metavar="N", default=0, help=repeat),
        Argument("--json", dest="json_file", type=Path, metavar="FILE", help=json),
        Argument("--quick", action="store_true", help="Fewer ranks, fewer and shorter rounds."),
    )


def make_plan(
    table: Iterable[Measurement], kinds: Kinds, *, targets: str, ranks: str, repeat: int, quick: bool
) -> Plan:
    """What the options ask for; UsageError where they mean nothing here."""
    if sys.platform != "linux":
        hint = "it reads CPU times and memory from /proc"
        raise UsageError(f"rallypoint bench needs Linux, and this is {platform.system()}", hint=hint)
    sizes = list(dict.fromkeys(ranks.split(","))) if ranks else []
    for word in sizes:
        if not word.isdecimal() or not 2 <= int(word) <= _MOST_RANKS:
            hint = f"write numbers from 2 to {_MOST_RANKS:,}, with commas between"
            raise UsageError(f"--ranks has {word!r}", hint=hint)
    names = list(dict.fromkeys(targets.split(",")))
    for name in names:
        if name not in kinds:
            raise UsageError(f"{name!r} is no target", hint=f"there are {', '.join(kinds)}")
    raise_open_file_limit()
    plan = Plan([hurried(each, repeat, quick) for each in table], kinds, names, list(map(int, sizes)))
    if not plan.measurements:
        raise UsageError("there is nothing to measure here", hint="; ".join(plan.notes))
    return plan


def measure(
    results: Results, plan: Plan, json_file: Path | None, sheets: Callable[[], Iterable[Sheet]]
) -> int:
    """Measure, and print tables, or JSON in their place; also what was measured until an interruption."""
    to_stdout = json_file == Path("-")
    if json_file and not to_stdout:
        _write(json_file, "", "a")  # better now than when all has been measured
    for note in plan.notes:
        print(f"rallypoint: {note}", file=sys.stderr)
    begun = time.monotonic()
    try:
        with signals_as_interrupts("the measurement"):
            for number, measurement in enumerate(plan.measurements, 1):
                contest = Contest(measurement, plan.kinds)
                results.records.append(contest.record)
                title, count = contest.record.title, f"{number} of {len(plan.measurements)}"
                print(f"rallypoint: {title}: {measurement.load} ({count})", file=sys.stderr, flush=True)
                contest.run()
    except KeyboardInterrupt:
        results.interrupted = True
        raise
    finally:
        results.seconds = time.monotonic() - begun
        if to_stdout:
            print(to_json(results), end="")
        else:
            print_run(results, sheets())
        if json_file and not to_stdout:
            _write(json_file, to_json(results), "w")
    return 1 if results.faults() else 0


def new_results(program: str, plan: Plan) -> Results:
    """Results with nothing measured yet, but all that is known of the machine."""
    return Results(
        f"{program} {shlex.join(sys.argv[1:])}",
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine={
            "cores": str(len(os.sched_getaffinity(0))),
            "memory": f"{psutil.virtual_memory().total / (1 << 30):.0f} GiB",
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        versions={
            "rallypoint": f"{rallypoint.__version__} ({in_use()})",
            "python": platform.python_version(),
            **{name: installed(name) for name in ("torch", "uvloop")},
        },
        limits={"open files per process": f"{psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0]:,}"},
        notes=plan.notes,
    )


def print_run(results: Results, sheets: Iterable[Sheet]) -> None:
    """Print all of a run: what it ran on, its tables, and what a reader has to know."""
    print_rows(results.facts())
    for sheet in sheets:
        print_sheet(sheet)
    print("", LEGEND, sep="\n")
    print_list("Held back by the load generator:", results.held_back())
    print_list("Faults:", results.faults())
    print_list("Notes:", results.notes)


def print_sheet(sheet: Sheet) -> None:
    print("", sheet.title, "", sep="\n")
    print_rows(sheet.rows)
    print("", *sheet.remarks, sep="\n")


def print_list(heading: str, lines: Sequence[str]) -> None:
    """Print lines under a heading, if there are any."""
    if lines:
        print("", heading, *(f"- {line}" for line in lines), sep="\n")


def _write(path: Path, content: str, mode: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        hint = "name a file in a folder that can be written"
        raise UsageError(f"cannot write {path}: {error.strerror}", hint=hint) from error


def _command(name: str, help: str) -> Command:
    """The command that measures this; they differ in nothing else."""

    def run(ranks: str, targets: str, repeat: int, json_file: Path | None, quick: bool) -> int:
        table = [each for each in MEASUREMENTS if each.command == name]
        plan = make_plan(table, TARGETS, targets=targets, ranks=ranks, repeat=repeat, quick=quick)
        results = new_results("rallypoint", plan)
        return measure(results, plan, json_file, lambda: [main_sheet(results, name, f"{name}: {help}")])

    run.__doc__ = help
    return Command(run, options(TARGETS, _MORE))


bench: Final = Group(
    "Measure the stores of this machine against each other, in turns; Linux only.",
    {
        "init": _command("init", "How long simulated ranks take to come up."),
        "barrier": _command("barrier", "How long ranks take to pass the barrier of init_process_group."),
        "ops": _command("ops", "GET, SET, ADD and CHECK: as many as a server can do, and one at a time."),
    },
)
