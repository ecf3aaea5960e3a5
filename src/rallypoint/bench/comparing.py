"""Two runs side by side: `rallypoint bench compare A.json B.json`. Pure but for what prints.

Rounds of two runs are no pairs: they ran at different times. So a ratio is that of the medians, and whether
it means anything is told by the quartiles: where those of A and B overlap, the runs hardly differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console

from rallypoint import text
from rallypoint.bench import words
from rallypoint.bench.results import Record, Results, Spread, Unit, title
from rallypoint.bench.sheets import Sheet
from rallypoint.bench.tables import print_lines, print_sheet

FEWEST_ROUNDS: Final = 3
"""With fewer, the quartiles say nothing."""

_Key = tuple[str, int, str]


@dataclass(frozen=True)
class Row:
    """One target under one load, in both runs."""

    record: str
    ranks: int
    target: str
    unit: Unit
    a: Spread
    b: Spread
    ratio: float
    """Of the medians, B to A: above 1, B is better."""
    spread: str
    """`apart` or `overlap`, as the quartiles of the two are; `too few rounds` to tell."""
    same_load: bool
    """Whether the load was the same in words."""


@dataclass(frozen=True)
class Difference:
    """A fact that is not the same for both."""

    name: str
    a: str
    b: str


def compare(a: Results, b: Results) -> list[Row]:
    """All that both have measured, in the order of A."""
    theirs = dict(_measured(b))
    return [_row(key, record, theirs[key]) for key, record in _measured(a) if key in theirs]


def only_in(a: Results, b: Results) -> list[str]:
    """What A has measured and B has not, a line each."""
    theirs = dict(_measured(b))
    return [f"{title(record)}, {key[2]}" for key, record in _measured(a) if key not in theirs]


def differences(a: Results, b: Results) -> list[Difference]:
    """In what the machines, versions and limits of the two differ."""
    found = []
    for kind in ("machine", "versions", "limits"):
        mine: Mapping[str, str] = getattr(a, kind)
        theirs: Mapping[str, str] = getattr(b, kind)
        found += [
            Difference(name, mine.get(name, "-"), theirs.get(name, "-"))
            for name in dict.fromkeys([*mine, *theirs])
            if mine.get(name) != theirs.get(name)
        ]
    return found


def _measured(results: Results) -> Iterator[tuple[_Key, Record]]:
    for record in results.records:
        for target, entry in record.entries.items():
            if entry.samples:
                yield (record.name, record.ranks, target), record


def _row(key: _Key, mine: Record, theirs: Record) -> Row:
    name, ranks, target = key
    a, b = mine.entries[target].spread(), theirs.entries[target].spread()
    assert a is not None
    assert b is not None
    better, worse = (b, a) if mine.unit == "rate" else (a, b)
    ratio = better.median / worse.median if worse.median else 0.0
    rounds = min(len(record.entries[target].samples) for record in (mine, theirs))
    same_load = (mine.load, mine.unit) == (theirs.load, theirs.unit)
    return Row(name, ranks, target, mine.unit, a, b, ratio, _verdict(a, b, rounds), same_load)


def _verdict(a: Spread, b: Spread, rounds: int) -> str:
    if rounds < FEWEST_ROUNDS:
        return "too few rounds"
    return "overlap" if a.lower <= b.upper and b.lower <= a.upper else "apart"


# What is shown


def to_document(a: Results, b: Results) -> dict[str, Any]:
    """The comparison as it goes into JSON."""
    return {
        "a": {"command": a.command, "started": a.started},
        "b": {"command": b.command, "started": b.started},
        "rows": [asdict(row) for row in compare(a, b)],
        "only_a": only_in(a, b),
        "only_b": only_in(b, a),
        "differences": [asdict(each) for each in differences(a, b)],
    }


def print_comparison(a: Results, b: Results, console: Console) -> None:
    """The comparison as a table, and what limits it."""
    rows = compare(a, b)
    print_lines("", [f"A: {a.started}, {a.command}", f"B: {b.started}, {b.command}"], console)
    facts = [f"{each.name}: A {each.a}, B {each.b}" for each in differences(a, b)]
    print_lines("A and B did not run under the same conditions:", facts, console)
    if rows:
        print_sheet(_sheet(rows), console)
    others = [f"{_name(row)}, {row.target}" for row in rows if not row.same_load]
    print_lines("Not under the same load, so not to be compared:", others, console)
    print_lines("Only in A:", only_in(a, b), console)
    print_lines("Only in B:", only_in(b, a), console)


def _sheet(rows: list[Row]) -> Sheet:
    sections: dict[str, list[list[str]]] = {}
    for row in rows:
        sections.setdefault(_name(row), []).append(_cells(row))
    remark = (
        "The ratio is that of the medians, B to A: above 1, B is better. Apart: the quartiles of A and B do "
        "not overlap. Where they do, noise alone may be the difference."
    )
    columns = ["record", "target", "A", "B", "B to A", "quartiles"]
    return Sheet("B against A: medians, with quartiles", columns, list(sections.values()), 2, [remark])


def _name(row: Row) -> str:
    return f"{row.record}, {row.ranks:,} ranks" if row.ranks else row.record


def _cells(row: Row) -> list[str]:
    a, b = (words.with_quartiles(each, lambda value: words.value(value, row.unit)) for each in (row.a, row.b))
    return [_name(row), row.target, a, b, text.times(row.ratio), row.spread]
