"""`python -m benchmarks`: the stores of this machine under the loads of a job, each against its peers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from benchmarks import figures, page, planning, tables
from benchmarks.results import read
from benchmarks.targets import BY_NAME, TARGETS, USUAL, redis_version
from rallypoint.bench.results import Results, Sheet
from rallypoint.cli.bench import make_plan, measure, new_results, options, print_list, print_sheet
from rallypoint.cli.command import JSON, Argument, Command, Group, command
from rallypoint.cli.signals import exit_code
from rallypoint.errors import RallypointError, UsageError
from rallypoint.watch import plots

_HELP: Final = {
    "init": "How long ranks take to come up: simulated ones, and real clients of torch.",
    "barrier": "How long ranks take to pass the barrier of init_process_group.",
    "ops": "GET, SET, ADD and CHECK: as many as a server can do, and one at a time.",
    "accept": "New clients: beside busy ones, and very many at the same moment.",
    "bulk": "One request with a hundred thousand keys.",
    "wakeup": "Waits: that end for all ranks at once, and that are given up.",
    "restart": "How long a job takes to be up again, with a store made anew.",
}
_PLOT: Final = Argument(
    "--plot", type=Path, metavar="FILE", help="Draw what was measured, as .svg, .png or .pdf."
)


def _command(commands: tuple[str, ...], help: str) -> Command:
    """The command that measures these; they differ in nothing else."""

    def run(
        ranks: str, targets: str, repeat: int, json_file: Path | None, plot: Path | None, quick: bool
    ) -> int:
        if plot:
            plots.check_plot(plot)
        table, notes = planning.make_table(commands, targets.split(","), quick)
        plan = make_plan(table, TARGETS, targets=targets, ranks=ranks, repeat=repeat, quick=quick)
        plan.notes += notes
        results = new_results("python -m benchmarks", plan)
        results.machine["processor"] = planning.processor()
        results.versions.update(python=planning.python_build(), redis=redis_version())
        results.limits.update(planning.limits())

        def sheets() -> list[Sheet]:
            return [sheet for each in tables.commands(results) for sheet in tables.sheets(results, each)]

        try:
            return measure(results, plan, json_file, sheets)
        finally:
            if plot and not figures.save(results, plot):
                print(f"nothing was measured that could be drawn in {plot}", file=sys.stderr)

    run.__doc__ = help
    return Command(run, (*options(USUAL, f" Besides: {', '.join(BY_NAME)}."), _PLOT))


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
        _print_comparison(a, b)


def _print_comparison(a: Results, b: Results) -> None:
    """The comparison as a table, and what limits it."""
    found = tables.compare(a, b)
    for name in "ab":
        print(f"{name.upper()}: {found[name]['started']}, {found[name]['command']}")
    facts = [f"{each['name']}: A {each['a']}, B {each['b']}" for each in found["differences"]]
    print_list("A and B did not run under the same conditions:", facts)
    if found["rows"]:
        print_sheet(tables.comparison(found["rows"]))
    print_list("Only in A:", found["only_a"])
    print_list("Only in B:", found["only_b"])


@command(
    Argument("result", type=Path, metavar="RESULT.json", help="A result file."),
    Argument("--output", type=Path, metavar="FILE", required=True, help="Where to write it."),
)
def _write_page(result: Path, output: Path) -> None:
    """Write the results as a page in Markdown, with figures in a folder beside it."""
    page.write_page(read(result), output)


BENCHMARKS: Final = Group(
    "Measure the stores of this machine against each other, in turns; Linux only.",
    {
        **{name: _command((name,), _HELP[name]) for name in planning.COMMANDS},
        "all": _command(planning.COMMANDS, "All of these."),
        "compare": _compare,
        "page": _write_page,
    },
)


def main() -> int:
    """Run the command line; the exit code."""
    try:
        return BENCHMARKS("python -m benchmarks", sys.argv[1:])
    except RallypointError as error:
        print(f"benchmarks: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {error.hint}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt as stop:
        return exit_code(stop)


if __name__ == "__main__":
    sys.exit(main())
