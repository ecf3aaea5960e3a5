"""`rallypoint timeline`: how a job came up, from the events file of its store."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rallypoint.watch.timeline.timeline import Timeline


def timeline(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="What --events has written; of a job with relays, theirs as well."
        ),
    ],
    run: Annotated[
        int | None, typer.Option(metavar="N", help="The run, from 1; by default the last in the file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it as well: an .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell how a job came up: who came last, who waited for it, and for how long.

    Exit 1 if somebody never came, or still waited when the events ended.
    """
    try:
        told = _tell(files, run, plot)
    except KeyboardInterrupt:
        print("rallypoint: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    _print(told, as_json)
    raise typer.Exit(0 if told.is_over else 1)


def _tell(files: list[Path], run: int | None, plot: Path | None) -> Timeline:
    from rallypoint.plots import check_plot
    from rallypoint.watch.timeline.drawing import save
    from rallypoint.watch.timeline.reading import tell

    if plot is not None:
        check_plot(plot)
    told = tell(files, run)
    if plot is not None:
        save(told, plot)
    return told


def _print(told: Timeline, as_json: bool) -> None:
    from rallypoint.watch.timeline.words import as_text

    text = json.dumps(told.as_json(), indent=2) if as_json else as_text(told)
    # A key may hold what the encoding of a console has no place for.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
