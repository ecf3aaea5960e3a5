"""`rallypoint timeline`: how a job came up, from the events file of its store."""

from __future__ import annotations

import json
from pathlib import Path

from rallypoint.cli.command import JSON, Argument, command
from rallypoint.watch.plots import check_plot
from rallypoint.watch.timeline.drawing import save
from rallypoint.watch.timeline.reading import read_timeline
from rallypoint.watch.timeline.words import as_text


@command(
    Argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="What --events has written; of a job with relays, theirs as well.",
    ),
    Argument("--run", type=int, metavar="N", help="The run, from 1; by default the last in the file."),
    Argument("--plot", type=Path, metavar="FILE", help="Draw it as well: an .svg, .png or .pdf."),
    JSON,
)
def timeline(files: list[Path], run: int | None, plot: Path | None, as_json: bool) -> int:
    """Tell how a job came up: who came last, who waited for it, and for how long.

    Exit 1 if somebody never came, or still waited when the events ended.
    """
    if plot is not None:
        check_plot(plot)
    told = read_timeline(files, run)
    if plot is not None:
        save(told, plot)
    print(json.dumps(told.as_json(), indent=2) if as_json else as_text(told))
    return 0 if told.is_over else 1
