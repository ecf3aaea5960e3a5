"""Output that several commands share: rows in columns, the file of settings, and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rallypoint.text import printable

if TYPE_CHECKING:  # rich is for terminals alone: the other callers do not wait for it
    from rich.progress import Progress, ProgressColumn


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; the last column is as wide as it comes."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        print("  ".join([*cells, row[-1]]))


def print_settings_file(path: Path | None, warnings: Sequence[str]) -> None:
    """Say on standard error which file of settings is used, and which are not."""
    for each in warnings:
        print(f"rallypoint: warning: {printable(each)}", file=sys.stderr)
    if path is not None:
        print(f"rallypoint: settings from {printable(str(path))}", file=sys.stderr)


def progress_bar(*columns: ProgressColumn, shown: bool = True) -> Progress:
    """A bar on standard error that goes when it is done; where that is no terminal, nothing is shown.

    Without columns: what is done now, the bar, how many of how many, and the time.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    usual = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *(columns or usual),
        console=Console(stderr=True),
        transient=True,
        disable=not shown or not sys.stderr.isatty(),
        redirect_stdout=False,  # it would turn data into messages on standard error
        redirect_stderr=False,
    )
