"""The tables of a full run, and of two runs side by side; `page` puts the same sheets into the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from benchmarks.results import costs_per_rank, exponent, merge_targets, sizes
from rallypoint import text
from rallypoint.bench.results import (
    NAMES,
    NOTHING,
    Record,
    Results,
    Say,
    Sheet,
    Spread,
    Unit,
    figure_text,
    main_sheet,
    make_sheet,
    names_of,
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

_FURTHER: Final[dict[str, tuple[str, Say]]] = {
    "messages": ("messages at the server", text.count),
    "relays": ("relays", text.count),
    "relays_cpu": ("CPU of the relays", text.fine_duration),
    "relays_bytes": ("memory of the relays", text.size),
    "whole_seconds": ("with the start of all processes", text.fine_duration),
    "renew_seconds": ("until the store was new", text.fine_duration),
    "swarm_cpu": ("CPU of the ranks", text.fine_duration),
    "dropped": ("connects dropped", text.count),
    "turned_away": ("connections reset", text.count),
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
    return [name for name in TITLES if results.of_command(name)]


def sheets(results: Results, command: str) -> list[Sheet]:
    """All tables of a command that have anything in them."""
    records = results.of_command(command)
    further = [
        [*names_of(record, entry), *(figure_text(entry, name, each[1]) for name, each in _FURTHER.items())]
        for record in records
        for entry in record.entries.values()
        if any(sample.extras for sample in entry.samples)
    ]
    headings = [*NAMES, *(heading for heading, _ in _FURTHER.values())]
    found = (
        main_sheet(results, command, TITLES[command]),
        make_sheet(f"{command}: further figures", [headings, *further]),
        make_sheet(f"{command}: growth with the ranks; exponent 1 is linear", _growth(results, records)),
    )
    return [sheet for sheet in found if len(sheet.rows) > 1]


def _growth(results: Results, records: Sequence[Record]) -> list[list[str]]:
    """Costs per rank, of what was measured at several sizes; a rate is no cost."""
    names = dict.fromkeys(each.name for each in records if each.unit == "time")
    by_name = {name: found for name in names if len(found := sizes(results, name)) > 1}
    ranks = sorted({record.ranks for found in by_name.values() for record in found})
    rows = [["record", "target", "per rank", *(f"{size:,} ranks" for size in ranks), "exponent"]]
    for name, found in by_name.items():
        for target in merge_targets(found):
            for figure, (heading, in_words) in _GROWING.items():
                costs = costs_per_rank(results, name, target, figure)
                if len(costs) > 1:
                    cells = (in_words(costs[size]) if size in costs else NOTHING for size in ranks)
                    rows.append([name, target, heading, *cells, f"{exponent(costs):.2f}"])
    return rows


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


def comparison(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """The rows of a comparison as a table."""
    cells = [
        [
            row["record"],
            f"{row['ranks']:,}" if row["ranks"] else NOTHING,
            row["target"],
            *(with_quartiles(Spread(**row[each]), words_of(row["unit"])) for each in "ab"),
            text.times(row["ratio"]),
        ]
        for row in rows
    ]
    remark = (
        "The ratio is that of the medians, B to A: above 1, B is better. Where the quartiles of A and B "
        "overlap, noise alone may be the difference."
    )
    return make_sheet(
        "B against A: medians, with quartiles", [[*NAMES, "A", "B", "B to A"], *cells], [remark]
    )


def with_quartiles(spread: Spread, in_words: Say) -> str:
    """A median with its quartiles; alone if they are the same to the reader."""
    median, lower, upper = in_words(spread.median), in_words(spread.lower), in_words(spread.upper)
    if lower == median == upper:
        return median
    number, _, unit = lower.rpartition(" ")
    return f"{median} ({number if number and upper.endswith(f' {unit}') else lower} to {upper})"
