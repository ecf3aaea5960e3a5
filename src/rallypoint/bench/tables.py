"""Results on a terminal, or wherever its output goes: tables at their full width, readable without colour."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from rich.box import ASCII, SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rallypoint.bench import sheets
from rallypoint.bench.goals import verdicts
from rallypoint.bench.results import Results
from rallypoint.bench.sheets import Sheet

_STYLES: Final = {"met": "green", "not met": "bold red", "fault": "bold red", "apart": "bold"}
_ENDLESS: Final = 10_000


def print_results(results: Results, console: Console) -> None:
    """All of a run: what it ran on, its tables, the goals that it measured, and what a reader has to know."""
    print_facts(results, console)
    for command in sheets.commands(results):
        for sheet in sheets.sheets(results, command):
            print_sheet(sheet, console)
    if results.records:
        console.print()
        _print_line(sheets.LEGEND, console)
    print_verdicts(results, console)
    print_lines("Held back by the load generator:", sheets.held_back(results), console)
    print_lines("Faults:", results.faults(), console)
    print_lines("Notes:", results.notes, console)


def print_facts(results: Results, console: Console) -> None:
    """What the figures were measured on, a line each."""
    found = [(name, fact) for name, fact in sheets.facts(results) if fact]
    width = max((len(name) for name, _ in found), default=0) + 2
    for name, fact in found:
        _print_line(f"{name + ':':<{width}}{fact}", console)


def print_verdicts(results: Results, console: Console) -> None:
    """The goals that were measured, and how many were not."""
    found = verdicts(results)
    rows = [[each.word, each.goal, each.wanted, each.measured] for each in found if each.met is not None]
    if not rows:
        return
    print_sheet(Sheet("goals", ["verdict", "goal", "wanted", "measured"], [rows], names=4), console)
    if len(rows) < len(found):
        _print_line(f"{len(found) - len(rows)} more goals are about what this run has not measured.", console)


def print_sheet(sheet: Sheet, console: Console) -> None:
    """One table under its title, with its remarks below."""
    console.print()
    _print_line(sheet.title, console, "bold")
    table = table_of(sheet, console)
    if not console.is_terminal:
        # A file and a pipe have no width: the table takes its own, and nothing is cut.
        endless = console.options.update(max_width=_ENDLESS, width=_ENDLESS)
        table.width = Measurement.get(console, endless, table).maximum
    console.print(table, crop=False)
    for remark in sheet.remarks:
        _print_line(remark, console)


def table_of(sheet: Sheet, console: Console) -> Table:
    """The sheet as a table that suits the console."""
    box, is_tight = (SIMPLE_HEAD, True) if console.is_terminal else (ASCII, False)
    table = Table(box=box, pad_edge=not is_tight, collapse_padding=is_tight)
    for number, heading in enumerate(sheet.columns):
        justify: Literal["left", "right"] = "left" if number < sheet.names else "right"
        # Where the terminal is too narrow, names of targets stay whole; the others have places to break.
        table.add_column(Text(heading), justify=justify, no_wrap=heading == "target", overflow="fold")
    for section in sheet.sections:
        for above, row in zip([[], *section], section, strict=False):
            table.add_row(*map(_cell, _without_repeats(sheet, row, above)))
        table.add_section()
    return table


def _without_repeats(sheet: Sheet, row: list[str], above: list[str]) -> list[str]:
    """A record is said once for all of its targets."""
    names = sheet.columns.index("target") if "target" in sheet.columns else 0
    return ["" for _ in row[:names]] + row[names:] if row[:names] == above[:names] else row


def _cell(text: str) -> Text:
    return Text(text, style=_STYLES.get(text, ""))


def print_lines(heading: str, lines: Iterable[str], console: Console) -> None:
    """Lines under a heading, if there are any."""
    lines = list(lines)
    if lines and heading:
        console.print()
        _print_line(heading, console, "bold")
    for line in lines:
        _print_line(f"- {line}" if heading else line, console)


def _print_line(line: str, console: Console, style: str = "") -> None:
    """A line as it is: brackets in it are no markup, and only a terminal has it broken."""
    console.print(Text(line, style=style), soft_wrap=not console.is_terminal)
