"""The tables of a full run, and of two runs side by side; `page` puts the same sheets into the docs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console

from benchmarks.results import costs_per_rank, exponent, merge_targets
from rallypoint import text
from rallypoint.bench.results import Results, Spread, Unit
from rallypoint.bench.tables import (
    NAMES,
    NOTHING,
    Columns,
    Say,
    Sheet,
    figure_cell,
    main_sheet,
    make_sheet,
    print_line,
    print_list,
    print_sheet,
    records_of,
    say,
    with_quartiles,
    words_of,
)

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

_FURTHER: Final[Columns] = {
    **NAMES,
    "messages at the server": figure_cell("messages", text.count),
    "relays": figure_cell("relays", text.count),
    "CPU of the relays": figure_cell("relays_cpu", text.fine_duration),
    "memory of the relays": figure_cell("relays_bytes", text.size),
    "with the start of all processes": figure_cell("whole_seconds", text.fine_duration),
    "until the store was new": figure_cell("renew_seconds", text.fine_duration),
    "CPU of the ranks": figure_cell("swarm_cpu", text.fine_duration),
    "connects dropped": figure_cell("dropped", text.count),
    "connections reset": figure_cell("turned_away", text.count),
}
"""Figures that only some loads have."""

_GROWING: Final[dict[str, tuple[str, Say]]] = {
    "value": ("time", text.fine_duration),
    "cpu": ("CPU", text.fine_duration),
    "memory": ("memory", text.size),
}


# A run as sheets


def commands(results: Results) -> list[str]:
    """The commands that have records."""
    return [name for name in TITLES if any(record.command == name for record in results.records)]


def sheets(results: Results, command: str) -> list[Sheet]:
    """All tables of a command that have anything in them."""
    records = records_of(results, command)
    further = [
        [
            [cell(record, entry) for cell in _FURTHER.values()]
            for entry in record.entries.values()
            if any(sample.extras for sample in entry.samples)
        ]
        for record in records
    ]
    names = [name for name in dict.fromkeys(each.name for each in records) if len(results.sizes(name)) > 1]
    found = (
        main_sheet(results, command, TITLES[command]),
        make_sheet(f"{command}: further figures", _FURTHER, further),
        _growth(results, command, names),
    )
    return [sheet for sheet in found if sheet.sections]


def _growth(results: Results, command: str, names: Sequence[str]) -> Sheet:
    """Costs per rank; a rate is no cost."""
    sizes = sorted({record.ranks for name in names for record in results.sizes(name)})
    columns = ["record", "target", "per rank", *(f"{size:,} ranks" for size in sizes), "exponent"]
    sections = [
        list(_growth_rows(results, name, sizes)) for name in names if results.sizes(name)[0].unit == "time"
    ]
    return make_sheet(f"{command}: growth with the ranks; exponent 1 is linear", columns, sections)


def _growth_rows(results: Results, name: str, sizes: Sequence[int]) -> Iterator[list[str]]:
    for target in merge_targets(results.sizes(name)):
        for figure, (heading, in_words) in _GROWING.items():
            costs = costs_per_rank(results, name, target, figure)
            if len(costs) > 1:
                cells = (say(costs.get(size), in_words) for size in sizes)
                yield [name, target, heading, *cells, f"{exponent(costs):.2f}"]


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
        both = (with_quartiles(Spread(**row[each]), words_of(row["unit"])) for each in "ab")
        cells = [
            row["record"],
            f"{row['ranks']:,}" if row["ranks"] else NOTHING,
            row["target"],
            *both,
            text.times(row["ratio"]),
        ]
        sections.setdefault((row["record"], row["ranks"]), []).append(cells)
    remark = (
        "The ratio is that of the medians, B to A: above 1, B is better. Where the quartiles of A and B "
        "overlap, noise alone may be the difference."
    )
    columns = [*NAMES, "A", "B", "B to A"]
    return make_sheet("B against A: medians, with quartiles", columns, sections.values(), [remark])


def print_comparison(a: Results, b: Results, console: Console) -> None:
    """The comparison as a table, and what limits it."""
    found = compare(a, b)
    for name in "ab":
        print_line(f"{name.upper()}: {found[name]['started']}, {found[name]['command']}", console)
    facts = [f"{each['name']}: A {each['a']}, B {each['b']}" for each in found["differences"]]
    print_list("A and B did not run under the same conditions:", facts, console)
    if found["rows"]:
        print_sheet(_comparison(found["rows"]), console)
    print_list("Only in A:", found["only_a"], console)
    print_list("Only in B:", found["only_b"], console)
