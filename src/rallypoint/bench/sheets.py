"""The tables of a run as data: what is in them, whoever shows them. Pure.

`tables` shows them on a terminal, `page` in the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from rallypoint import text
from rallypoint.bench import words
from rallypoint.bench.growth import Growth, growth
from rallypoint.bench.results import Entry, Record, Results, merge_targets, title

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

NAMES: Final = ("record", "ranks", "target")
"""The columns that say whose figures the others are."""
_FIGURES: Final[tuple[tuple[str, str, Callable[[float], str]], ...]] = (
    ("p50", "p50", text.fine_duration),
    ("p99", "p99", text.fine_duration),
    ("CPU/op", "cpu", text.fine_duration),
    ("mem/conn", "memory", text.size),
    ("server", "server_share", text.share),
    ("load", "load_share", text.share),
)
_EXTRAS: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
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
_GROWING: Final[tuple[tuple[str, str, Callable[[float], str]], ...]] = (
    ("value", "time", text.fine_duration),
    ("cpu", "CPU", text.fine_duration),
    ("memory", "memory", text.size),
)

LEGEND: Final = (
    "Medians over the rounds. A ratio is that of the same round, over all rounds: its median, and its "
    "quartiles in brackets; above 1 is better than the baseline. CPU/op is the server's CPU time for one "
    "operation, mem/conn by how much the server grew for one connection; server and load are how much of a "
    "core was taken by the server and by the busiest process of the load."
)


@dataclass
class Sheet:
    """A table: rows in sections, whose first `names` columns are names and whose others are figures."""

    title: str
    columns: list[str]
    sections: list[list[list[str]]] = field(default_factory=list)
    names: int = len(NAMES)
    remarks: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[list[str]]:
        return [row for section in self.sections for row in section]


def commands(results: Results) -> list[str]:
    """The commands whose records there are, known ones first."""
    found = dict.fromkeys(record.command for record in results.records)
    return [name for name in TITLES if name in found] + [name for name in found if name not in TITLES]


def records_of(results: Results, command: str) -> list[Record]:
    """The records of a command: by name in the order of measuring, each smallest first."""
    names = dict.fromkeys(record.name for record in results.records if record.command == command)
    return [record for name in names for record in results.sizes(name) if record.command == command]


def sheets(results: Results, command: str) -> list[Sheet]:
    """All tables of a command that have anything in them."""
    records = records_of(results, command)
    found = (_main(command, records), _besides(command, records), _growth(results, command, records))
    return [_without_empty_columns(sheet) for sheet in found if sheet.sections]


def facts(results: Results) -> list[tuple[str, str]]:
    """What the figures were measured on, when, and by which command."""
    stopped = ", interrupted" if results.interrupted else ""
    return [
        ("command", results.command),
        ("started", f"{results.started}, took {text.duration(results.seconds)}{stopped}"),
        *results.machine.items(),
        *results.versions.items(),
        *results.limits.items(),
    ]


def held_back(results: Results) -> list[str]:
    """Which figures say more about the load than about the server, a line each."""
    return [
        f"{title(record)}, {entry.target}: the load took {_share(entry, 'load_share')} of a core and the "
        f"server {_share(entry, 'server_share')}, so the server may be able to do more than this"
        for record in results.records
        for entry in record.entries.values()
        if entry.is_held_back
    ]


def _share(entry: Entry, name: str) -> str:
    return text.share(entry.median(name) or 0.0)


# The figures of each record


def _main(command: str, records: Sequence[Record]) -> Sheet:
    columns = [*NAMES, "median", *(heading for heading, _, _ in _FIGURES), "ratio"]
    sheet = Sheet(TITLES.get(command, command), columns, remarks=_loads(records))
    sheet.sections = [section for record in records if (section := list(_main_rows(record)))]
    return sheet


def _main_rows(record: Record) -> Iterator[list[str]]:
    for entry in record.entries.values():
        figures = (_say(_figure(entry, name), say) for _, name, say in _FIGURES)
        yield [*_names(record, entry), _value(record, entry), *figures, _ratio(record, entry)]


def _names(record: Record, entry: Entry) -> list[str]:
    return [record.name, f"{record.ranks:,}" if record.ranks else NOTHING, entry.target]


def _value(record: Record, entry: Entry) -> str:
    found = entry.median()
    if found is None:
        return "fault" if entry.fault else NOTHING
    return words.value(found, record.unit) + (" (fault)" if entry.fault else "")


def _ratio(record: Record, entry: Entry) -> str:
    baseline = record.baseline
    if baseline is None or entry is baseline:
        return "baseline" if baseline else NOTHING
    found = record.ratio(entry, baseline)
    return words.ratio(found) if found else NOTHING


def _figure(entry: Entry, name: str) -> float | None:
    return entry.memory() if name == "memory" else entry.median(name)


def _say(figure: float | None, say: Callable[[float], str]) -> str:
    return NOTHING if figure is None else say(figure)


def _loads(records: Iterable[Record]) -> list[str]:
    """The loads in words; those of many sizes differ by their number of ranks, which has a column."""
    said = dict.fromkeys(
        (each.name, each.load.removeprefix(f"{each.ranks:,} "), each.operation) for each in records
    )
    return [f"{name}: {load}. One operation: {operation}." for name, load, operation in said]


# What only some records have


def _besides(command: str, records: Sequence[Record]) -> Sheet:
    names = [name for name in _extras_of(records) if name in _EXTRAS]
    names += [name for name in _extras_of(records) if name not in _EXTRAS]
    kinds = [(name, *_EXTRAS.get(name, (name, text.digits))) for name in names]
    sheet = Sheet(f"{command}: further figures", [*NAMES, *(heading for _, heading, _ in kinds)])
    for record in records:
        entries = [entry for entry in record.entries.values() if _extras_of_entry(entry)]
        rows = [
            [*_names(record, entry), *(_say(entry.median(name), say) for name, _, say in kinds)]
            for entry in entries
        ]
        sheet.sections += [rows] if rows else []
    return sheet


def _extras_of(records: Iterable[Record]) -> list[str]:
    found = (_extras_of_entry(entry) for record in records for entry in record.entries.values())
    return list(dict.fromkeys(name for names in found for name in names))


def _extras_of_entry(entry: Entry) -> list[str]:
    return list(dict.fromkeys(name for sample in entry.samples for name in sample.extras))


# How costs grow


def _growth(results: Results, command: str, records: Sequence[Record]) -> Sheet:
    sizes = sorted({record.ranks for record in records if record.ranks and _has_sizes(results, record)})
    columns = ["record", "target", "per rank", *(f"{size:,} ranks" for size in sizes), "exponent"]
    sheet = Sheet(f"{command}: growth with the ranks; exponent 1 is linear", columns)
    for name in dict.fromkeys(record.name for record in records):
        sheet.sections += [rows] if (rows := list(_growth_rows(results, name, sizes))) else []
    return sheet


def _has_sizes(results: Results, record: Record) -> bool:
    return len(results.sizes(record.name)) > 1


def _growth_rows(results: Results, name: str, sizes: Sequence[int]) -> Iterator[list[str]]:
    records = results.sizes(name)
    for target in merge_targets(records):
        for figure, heading, say in _GROWING:
            if figure == "value" and records[0].unit != "time":
                continue  # a rate is no cost
            found = growth(results, name, target, figure)
            if found is not None:
                yield [name, target, heading, *_per_rank(found, sizes, say), f"{found.exponent:.2f}"]


def _per_rank(found: Growth, sizes: Iterable[int], say: Callable[[float], str]) -> list[str]:
    costs = dict(zip(found.sizes, found.per_rank, strict=True))
    return [_say(costs.get(size), say) for size in sizes]


def _without_empty_columns(sheet: Sheet) -> Sheet:
    """Without the columns in which no row has anything: not every load measures everything."""
    rows = sheet.rows
    kept = [number for number in range(len(sheet.columns)) if any(row[number] != NOTHING for row in rows)]
    sheet.names = sum(number < sheet.names for number in kept)
    sheet.columns = [sheet.columns[number] for number in kept]
    sheet.sections = [[[row[number] for number in kept] for row in rows] for rows in sheet.sections]
    return sheet
