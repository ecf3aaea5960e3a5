"""The tables of a run, as data and as text on a terminal or in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from rich.box import ASCII, SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rallypoint import text
from rallypoint.bench.results import Entry, Record, Results, Spread, Unit

NOTHING: Final = "-"
TITLES: Final = {
    "init": "init: all ranks come up",
    "barrier": "barrier: the barrier of init_process_group",
    "ops": "ops: single operations",
}

Say = Callable[[float], str]
Cell = Callable[[Record, Entry], str]
Columns = Mapping[str, Cell]


def say(figure: float | None, in_words: Say) -> str:
    """A figure in words, also one that was not measured."""
    return NOTHING if figure is None else in_words(figure)


def figure_cell(name: str, in_words: Say) -> Cell:
    """A column of one figure."""
    return lambda _, entry: say(entry.figure(name), in_words)


def words_of(unit: Unit) -> Say:
    """How the main figure of a record is written."""
    return text.rate if unit == "rate" else text.fine_duration


def _value(record: Record, entry: Entry) -> str:
    found = say(entry.figure("value"), words_of(record.unit))
    if not entry.fault:
        return found
    return "fault" if found == NOTHING else f"{found} (fault)"


def _ratio(record: Record, entry: Entry) -> str:
    if record.baseline is None or entry is record.baseline:
        return "baseline" if record.baseline else NOTHING
    found = record.ratio(entry)
    return with_quartiles(found, text.digits, "x") if found else NOTHING


NAMES: Final[Columns] = {
    "record": lambda record, _: record.name,
    "ranks": lambda record, _: f"{record.ranks:,}" if record.ranks else NOTHING,
    "target": lambda _, entry: entry.target,
}
"""The columns that name a row."""

_MAIN: Final[Columns] = {
    **NAMES,
    "median": _value,
    "p50": figure_cell("p50", text.fine_duration),
    "p99": figure_cell("p99", text.fine_duration),
    "CPU/op": figure_cell("cpu", text.fine_duration),
    "mem/conn": figure_cell("memory", text.size),
    "server": figure_cell("server_share", text.share),
    "load": figure_cell("load_share", text.share),
    "ratio": _ratio,
}

LEGEND: Final = (
    "Medians over the rounds. A ratio is that of the same round, over all rounds: its median, and its "
    "quartiles in brackets; above 1 is better than the baseline. CPU/op is the server's CPU time for one "
    "operation, mem/conn by how much the server grew for one connection; server and load are how much of a "
    "core was taken by the server and by the busiest process of the load."
)


@dataclass(frozen=True)
class Sheet:
    """A table: rows in sections. The first `names` columns name a row, the others are figures."""

    title: str
    columns: list[str]
    sections: list[list[list[str]]]
    names: int
    remarks: list[str]


def make_sheet(
    title: str, columns: Iterable[str], sections: Iterable[list[list[str]]], remarks: Iterable[str] = ()
) -> Sheet:
    """Without columns that have nothing in any row: not every load measures everything."""
    headings, rows = list(columns), [section for section in sections if section]
    kept = [n for n in range(len(headings)) if any(row[n] != NOTHING for each in rows for row in each)]
    names = sum(headings[n] in (*NAMES, "per rank") for n in kept)
    cells = [[[row[n] for n in kept] for row in section] for section in rows]
    return Sheet(title, [headings[n] for n in kept], cells, names, list(remarks))


def main_sheet(results: Results, command: str, title: str) -> Sheet:
    """The main figures of a command."""
    records = records_of(results, command)
    # The loads of several sizes differ by their number of ranks, which has a column: they are said once.
    loads = dict.fromkeys(
        f"{each.name}: {each.load.removeprefix(f'{each.ranks:,} ')}. One operation: {each.operation}."
        for each in records
    )
    sections = [
        [[cell(record, entry) for cell in _MAIN.values()] for entry in record.entries.values()]
        for record in records
    ]
    return make_sheet(title, _MAIN, sections, loads)


def records_of(results: Results, command: str) -> list[Record]:
    """The records of a command: those of one name together, by their sizes."""
    names = dict.fromkeys(record.name for record in results.records if record.command == command)
    return [record for name in names for record in results.sizes(name) if record.command == command]


def facts(results: Results) -> list[tuple[str, str]]:
    """The command, its time, the machine, the versions and the limits."""
    stopped = ", interrupted" if results.interrupted else ""
    found = [
        ("command", results.command),
        ("started", f"{results.started}, took {text.duration(results.seconds)}{stopped}"),
        *results.machine.items(),
        *results.versions.items(),
        *results.limits.items(),
    ]
    return [(name, fact) for name, fact in found if fact]


def held_back(results: Results) -> list[str]:
    """The figures that say more about the load than about the server, a line each."""
    return [
        f"{record.title}, {entry.target}: the load took {say(entry.figure('load_share'), text.share)} of a "
        f"core and the server {say(entry.figure('server_share'), text.share)}, so the server may be able to "
        "do more than this"
        for record in results.records
        for entry in record.entries.values()
        if entry.is_held_back
    ]


def with_quartiles(spread: Spread, in_words: Say, mark: str = "") -> str:
    """A median, and a mark behind it, with its quartiles; alone if they are the same to the reader."""
    median, lower, upper = in_words(spread.median), in_words(spread.lower), in_words(spread.upper)
    if lower == median == upper:
        return median + mark
    number, _, unit = lower.rpartition(" ")
    return f"{median}{mark} ({number if number and upper.endswith(f' {unit}') else lower} to {upper})"


# On a terminal, or wherever its output goes: readable without colour


_STYLES: Final = {"fault": "bold red"}
_ENDLESS: Final = 10_000


def print_results(results: Results, sheets: Iterable[Sheet], console: Console) -> None:
    """All of a run: what it ran on, its tables, and what a reader has to know."""
    found = facts(results)
    width = max(len(name) for name, _ in found) + 2
    for name, fact in found:
        print_line(f"{name + ':':<{width}}{fact}", console)
    for sheet in sheets:
        print_sheet(sheet, console)
    if results.records:
        console.print()
        print_line(LEGEND, console)
    print_list("Held back by the load generator:", held_back(results), console)
    print_list("Faults:", results.faults(), console)
    print_list("Notes:", results.notes, console)


def print_sheet(sheet: Sheet, console: Console) -> None:
    """One table under its title, with its remarks below."""
    console.print()
    print_line(sheet.title, console, "bold")
    table = _table(sheet, console)
    if not console.is_terminal:
        # A file and a pipe have no width: the table takes its own, and nothing is cut.
        endless = console.options.update(max_width=_ENDLESS, width=_ENDLESS)
        table.width = Measurement.get(console, endless, table).maximum
    console.print(table, crop=False)
    for remark in sheet.remarks:
        print_line(remark, console)


def _table(sheet: Sheet, console: Console) -> Table:
    box, is_tight = (SIMPLE_HEAD, True) if console.is_terminal else (ASCII, False)
    table = Table(box=box, pad_edge=not is_tight, collapse_padding=is_tight)
    for number, heading in enumerate(sheet.columns):
        justify: Literal["left", "right"] = "left" if number < sheet.names else "right"
        # Where the terminal is too narrow, names of targets stay whole; the others have places to break.
        table.add_column(Text(heading), justify=justify, no_wrap=heading == "target", overflow="fold")
    repeated = sheet.columns.index("target")  # a record is said once for all of its targets
    for section in sheet.sections:
        for above, row in zip([[], *section], section, strict=False):
            is_said = row[:repeated] == above[:repeated]
            cells = ["" if is_said and number < repeated else cell for number, cell in enumerate(row)]
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in cells))
        table.add_section()
    return table


def print_list(heading: str, lines: Iterable[str], console: Console) -> None:
    """Lines under a heading, if there are any."""
    lines = list(lines)
    if lines:
        console.print()
        print_line(heading, console, "bold")
    for line in lines:
        print_line(f"- {line}", console)


def print_line(line: str, console: Console, style: str = "") -> None:
    """A line as it is: brackets in it are no markup, and only a terminal has it broken."""
    console.print(Text(line, style=style), soft_wrap=not console.is_terminal)
