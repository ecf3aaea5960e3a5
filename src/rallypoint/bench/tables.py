"""The tables of a run, and of two runs side by side: first as data, then on a terminal or in a file.

`page` puts the same sheets into the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from rich.box import ASCII, SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rallypoint import text
from rallypoint.bench.results import (
    Entry,
    Record,
    Results,
    Spread,
    Unit,
    costs_per_rank,
    exponent,
    merge_targets,
    title,
)

Say = Callable[[float], str]

NOTHING: Final = "-"
TITLES: Final = {
    "init": "init: all ranks come up",
    "barrier": "barrier: the barrier of init_process_group",
    "ops": "ops: single operations",
    "accept": "accept: new clients, beside busy ones or all at once",
    "bulk": "bulk: many keys in one request",
    "wakeup": "wakeup: many wait, and are woken or give up",
    "restart": "restart: all ranks leave, the store is made anew, and they come back",
}
"""The commands, in the order in which they are shown."""

Cell = Callable[[Record, Entry], str]


def _figure(name: str, say: Say) -> Cell:
    return lambda _, entry: _say(entry.figure(name), say)


def _say(figure: float | None, say: Say) -> str:
    return NOTHING if figure is None else say(figure)


def _unit(unit: Unit) -> Say:
    return text.rate if unit == "rate" else text.fine_duration


def _value(record: Record, entry: Entry) -> str:
    found = entry.figure("value")
    if found is None:
        return "fault" if entry.fault else NOTHING
    return _unit(record.unit)(found) + (" (fault)" if entry.fault else "")


def _ratio(record: Record, entry: Entry) -> str:
    baseline = record.baseline
    if baseline is None or entry is baseline:
        return "baseline" if baseline else NOTHING
    found = record.ratio(entry, baseline)
    return NOTHING if found is None else with_quartiles(found, text.digits, "x")


def _ranks(ranks: int) -> str:
    return f"{ranks:,}" if ranks else NOTHING


_NAMES: Final[dict[str, Cell]] = {
    "record": lambda record, _: record.name,
    "ranks": lambda record, _: _ranks(record.ranks),
    "target": lambda _, entry: entry.target,
}
"""The columns that name a row."""

_MAIN: Final[dict[str, Cell]] = {
    **_NAMES,
    "median": _value,
    "p50": _figure("p50", text.fine_duration),
    "p99": _figure("p99", text.fine_duration),
    "CPU/op": _figure("cpu", text.fine_duration),
    "mem/conn": _figure("memory", text.size),
    "server": _figure("server_share", text.share),
    "load": _figure("load_share", text.share),
    "ratio": _ratio,
}

_FURTHER: Final[dict[str, Cell]] = {
    **_NAMES,
    "messages at the server": _figure("messages", text.count),
    "relays": _figure("relays", text.count),
    "CPU of the relays": _figure("relays_cpu", text.fine_duration),
    "memory of the relays": _figure("relays_bytes", text.size),
    "with the start of all processes": _figure("whole_seconds", text.fine_duration),
    "until the store was new": _figure("renew_seconds", text.fine_duration),
    "CPU of the ranks": _figure("swarm_cpu", text.fine_duration),
    "connects dropped": _figure("dropped", text.count),
    "connections reset": _figure("turned_away", text.count),
}
"""Figures that only some loads have."""

_GROWING: Final[dict[str, tuple[str, Say]]] = {
    "value": ("time", text.fine_duration),
    "cpu": ("CPU", text.fine_duration),
    "memory": ("memory", text.size),
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

    @property
    def rows(self) -> list[list[str]]:
        return [row for section in self.sections for row in section]


def _sheet(
    title: str, columns: Iterable[str], sections: Iterable[list[list[str]]], remarks: Iterable[str] = ()
) -> Sheet:
    """Without columns that have nothing in any row: not every load measures everything."""
    headings, rows = list(columns), [section for section in sections if section]
    kept = [n for n in range(len(headings)) if any(row[n] != NOTHING for each in rows for row in each)]
    names = sum(headings[n] in (*_NAMES, "per rank") for n in kept)
    cells = [[[row[n] for n in kept] for row in section] for section in rows]
    return Sheet(title, [headings[n] for n in kept], cells, names, list(remarks))


# A run as sheets


def commands(results: Results) -> list[str]:
    """The commands that have records."""
    return [name for name in TITLES if any(record.command == name for record in results.records)]


def sheets(results: Results, command: str) -> list[Sheet]:
    """All tables of a command that have anything in them."""
    names = dict.fromkeys(record.name for record in results.records if record.command == command)
    records = [record for name in names for record in results.sizes(name) if record.command == command]
    # The loads of several sizes differ by their number of ranks, which has a column: they are said once.
    loads = dict.fromkeys(
        f"{each.name}: {each.load.removeprefix(f'{each.ranks:,} ')}. One operation: {each.operation}."
        for each in records
    )
    entries = [[(record, entry) for entry in record.entries.values()] for record in records]
    main = [[[cell(*each) for cell in _MAIN.values()] for each in section] for section in entries]
    further = [
        [
            [cell(*each) for cell in _FURTHER.values()]
            for each in section
            if any(sample.extras for sample in each[1].samples)
        ]
        for section in entries
    ]
    found = (
        _sheet(TITLES[command], _MAIN, main, loads),
        _sheet(f"{command}: further figures", _FURTHER, further),
        _growth(results, command, [name for name in names if len(results.sizes(name)) > 1]),
    )
    return [sheet for sheet in found if sheet.rows]


def _growth(results: Results, command: str, names: Sequence[str]) -> Sheet:
    """Costs per rank; a rate is no cost."""
    sizes = sorted({record.ranks for name in names for record in results.sizes(name)})
    columns = ["record", "target", "per rank", *(f"{size:,} ranks" for size in sizes), "exponent"]
    sections = [
        list(_growth_rows(results, name, sizes)) for name in names if results.sizes(name)[0].unit == "time"
    ]
    return _sheet(f"{command}: growth with the ranks; exponent 1 is linear", columns, sections)


def _growth_rows(results: Results, name: str, sizes: Sequence[int]) -> Iterator[list[str]]:
    for target in merge_targets(results.sizes(name)):
        for figure, (heading, say) in _GROWING.items():
            costs = costs_per_rank(results, name, target, figure)
            if len(costs) > 1:
                cells = (_say(costs.get(size), say) for size in sizes)
                yield [name, target, heading, *cells, f"{exponent(costs):.2f}"]


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
        f"{title(record)}, {entry.target}: the load took {_say(entry.figure('load_share'), text.share)} of a "
        f"core and the server {_say(entry.figure('server_share'), text.share)}, so the server may be able to "
        "do more than this"
        for record in results.records
        for entry in record.entries.values()
        if entry.is_held_back
    ]


# Two runs side by side


def compare(a: Results, b: Results) -> dict[str, Any]:
    """How many times better B is than A, for all that both have measured, as it goes into JSON.

    Rounds of two runs are no pairs: they ran at different times. So a ratio is that of the medians.
    """
    mine, theirs = _measured(a), _measured(b)
    return {
        "a": {"command": a.command, "started": a.started},
        "b": {"command": b.command, "started": b.started},
        "rows": [_compared(key, mine[key], theirs[key]) for key in mine if key in theirs],
        "only_a": [_called(*key) for key in mine if key not in theirs],
        "only_b": [_called(*key) for key in theirs if key not in mine],
        "differences": [
            {"name": name, "a": ours.get(name, NOTHING), "b": others.get(name, NOTHING)}
            for ours, others in ((a.machine, b.machine), (a.versions, b.versions), (a.limits, b.limits))
            for name in dict.fromkeys([*ours, *others])
            if ours.get(name) != others.get(name)
        ],
    }


_Key = tuple[str, int, str, str, Unit]


def _measured(results: Results) -> dict[_Key, Spread]:
    """Only the same load is to be compared."""
    return {
        (record.name, record.ranks, target, record.load, record.unit): found
        for record in results.records
        for target, entry in record.entries.items()
        if (found := entry.spread()) is not None
    }


def _called(name: str, ranks: int, target: str, load: str, _: Unit) -> str:
    return f"{name}, {target}: {load}" if ranks == 0 else f"{name}, {ranks:,} ranks, {target}: {load}"


def _compared(key: _Key, a: Spread, b: Spread) -> dict[str, Any]:
    name, ranks, target, _, unit = key
    better, worse = (b, a) if unit == "rate" else (a, b)
    ratio = better.median / worse.median if worse.median else 0.0
    row = {"record": name, "ranks": ranks, "target": target, "unit": unit}
    return {**row, "a": asdict(a), "b": asdict(b), "ratio": ratio}


def _comparison(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    sections: dict[tuple[str, int], list[list[str]]] = {}
    for row in rows:
        both = (with_quartiles(Spread(**row[each]), _unit(row["unit"])) for each in "ab")
        cells = [row["record"], _ranks(row["ranks"]), row["target"], *both, text.times(row["ratio"])]
        sections.setdefault((row["record"], row["ranks"]), []).append(cells)
    remark = (
        "The ratio is that of the medians, B to A: above 1, B is better. Where the quartiles of A and B "
        "overlap, noise alone may be the difference."
    )
    columns = [*_NAMES, "A", "B", "B to A"]
    return _sheet("B against A: medians, with quartiles", columns, sections.values(), [remark])


def with_quartiles(spread: Spread, say: Say, mark: str = "") -> str:
    """A median, and a mark behind it, with its quartiles; alone if they are the same to the reader."""
    median, lower, upper = say(spread.median), say(spread.lower), say(spread.upper)
    if lower == median == upper:
        return median + mark
    number, _, unit = lower.rpartition(" ")
    return f"{median}{mark} ({number if number and upper.endswith(f' {unit}') else lower} to {upper})"


# On a terminal, or wherever its output goes: readable without colour


_STYLES: Final = {"fault": "bold red"}
_ENDLESS: Final = 10_000


def print_results(results: Results, console: Console) -> None:
    """All of a run: what it ran on, its tables, and what a reader has to know."""
    found = facts(results)
    width = max(len(name) for name, _ in found) + 2
    for name, fact in found:
        _print_line(f"{name + ':':<{width}}{fact}", console)
    for command in commands(results):
        for sheet in sheets(results, command):
            _print_sheet(sheet, console)
    if results.records:
        console.print()
        _print_line(LEGEND, console)
    _print_list("Held back by the load generator:", held_back(results), console)
    _print_list("Faults:", results.faults(), console)
    _print_list("Notes:", results.notes, console)


def print_comparison(a: Results, b: Results, console: Console) -> None:
    """The comparison as a table, and what limits it."""
    found = compare(a, b)
    for name in "ab":
        _print_line(f"{name.upper()}: {found[name]['started']}, {found[name]['command']}", console)
    facts = [f"{each['name']}: A {each['a']}, B {each['b']}" for each in found["differences"]]
    _print_list("A and B did not run under the same conditions:", facts, console)
    if found["rows"]:
        _print_sheet(_comparison(found["rows"]), console)
    _print_list("Only in A:", found["only_a"], console)
    _print_list("Only in B:", found["only_b"], console)


def _print_sheet(sheet: Sheet, console: Console) -> None:
    """One table under its title, with its remarks below."""
    console.print()
    _print_line(sheet.title, console, "bold")
    table = _table(sheet, console)
    if not console.is_terminal:
        # A file and a pipe have no width: the table takes its own, and nothing is cut.
        endless = console.options.update(max_width=_ENDLESS, width=_ENDLESS)
        table.width = Measurement.get(console, endless, table).maximum
    console.print(table, crop=False)
    for remark in sheet.remarks:
        _print_line(remark, console)


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


def _print_list(heading: str, lines: Iterable[str], console: Console) -> None:
    """Lines under a heading, if there are any."""
    lines = list(lines)
    if lines:
        console.print()
        _print_line(heading, console, "bold")
    for line in lines:
        _print_line(f"- {line}", console)


def _print_line(line: str, console: Console, style: str = "") -> None:
    """A line as it is: brackets in it are no markup, and only a terminal has it broken."""
    console.print(Text(line, style=style), soft_wrap=not console.is_terminal)
