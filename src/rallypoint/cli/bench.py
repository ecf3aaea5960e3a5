"""`rallypoint bench`: the stores of this machine under the loads of a job, each against its peers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from rallypoint.bench import names
from rallypoint.errors import UsageError

app = typer.Typer(
    help="Measure the stores of this machine against each other, in turns; Linux only.",
    no_args_is_help=True,
)

_ALL_TARGETS: Final = ",".join(names.TARGETS)
_MOST_RANKS: Final = 1_000_000

_Ranks = Annotated[
    str, typer.Option("--ranks", metavar="N,N,…", help="Sizes of the simulated jobs, instead of the usual.")
]
_Targets = Annotated[str, typer.Option("--targets", metavar="NAME,…", help=f"Of {', '.join(names.TARGETS)}.")]
_Repeat = Annotated[
    int, typer.Option("--repeat", metavar="N", min=0, help="Rounds of each; 0: as many as suit.")
]
_Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write every round there; -: standard output.")
]
_Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw what was measured, as .png or .svg.")
]
_Quick = Annotated[bool, typer.Option("--quick", help="Fewer ranks, fewer and shorter rounds.")]


def _command(commands: tuple[str, ...]) -> Callable[..., None]:
    """The command that measures these; they differ in nothing else."""

    def measure(
        ranks: _Ranks = "",
        targets: _Targets = _ALL_TARGETS,
        repeat: _Repeat = 0,
        json_file: _Json = None,
        plot: _Plot = None,
        quick: _Quick = False,
    ) -> None:
        # Here, because no other command needs it: it would cost each of them a tenth of a second.
        from rallypoint.bench.planning import Wish
        from rallypoint.cli.measuring import bench

        chosen = tuple(dict.fromkeys(targets.split(",")))
        bench(Wish(commands, _sizes(ranks), chosen, repeat, quick), json_file, plot)

    return measure


_HELP: Final = {
    "init": "How long ranks take to come up: simulated ones, and real clients of torch.",
    "barrier": "How long ranks take to pass the barrier of init_process_group.",
    "ops": "GET, SET and ADD: as many as a server can do, and one at a time.",
    "accept": "New clients: beside busy ones, and very many at the same moment.",
    "bulk": "One request with a hundred thousand keys.",
    "wakeup": "Waits: that end for all ranks at once, and that are given up.",
    "restart": "How long a job takes to be up again, with a store made anew.",
}

for _name in names.COMMANDS:
    app.command(_name, help=_HELP[_name])(_command((_name,)))
app.command("all", help="All of these.")(_command(names.COMMANDS))


@app.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="A result file.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how many times better B is than A, for all that both have measured."""
    from rallypoint.bench import tables
    from rallypoint.bench.results import read

    a, b = read(before), read(after)
    if as_json:
        print(json.dumps(tables.compare(a, b), indent=1))
    else:
        tables.print_comparison(a, b, Console(highlight=False))


@app.command("page")
def write_page(
    result: Annotated[Path, typer.Argument(metavar="RESULT.json", help="A result file.")],
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="Where to write it.")],
) -> None:
    """Write the results as a page in Markdown, with figures in a folder beside it."""
    from rallypoint.bench import page
    from rallypoint.bench.results import read

    page.write_page(read(result), output)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = []
    for word in text.split(",") if text else []:
        if not word.isdecimal() or not 2 <= int(word) <= _MOST_RANKS:
            raise UsageError(
                f"--ranks has {word!r}", hint=f"write numbers from 2 to {_MOST_RANKS:,}, with commas between"
            )
        sizes.append(int(word))
    return tuple(sizes)
