"""The results of a run: every round, with medians and ratios; as tables, and as JSON.

A record is one load with several targets, which took turns. A target's ratio to another is taken within each
round: a machine that is noisy for a while is noisy to both.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rallypoint import codec, text
from rallypoint.errors import RallypointError

FORMAT: Final = 1

Unit = Literal["rate", "time"]

BASELINES: Final = ("torch-libuv", "torch-legacy", "rallypoint-libuv")
"""The others are compared with the first of these that was measured; else with the first target."""

BOTTLENECK: Final = 0.9
"""A process that takes this share of a core may be what the others wait for."""


class BenchError(RallypointError):
    """Makes a measurement worthless: a server died, gave a wrong answer, or gave none in time."""


@dataclass(frozen=True)
class Sample:
    """The result of one round with one target."""

    value: float
    """Operations per second, or seconds, as the record's unit says."""
    cpu: float | None = None
    """CPU time of the server for one operation, in seconds."""
    server_share: float | None = None
    """How much of a core the server took; `load_share`: the busiest process of the load."""
    load_share: float | None = None
    p50: float | None = None
    """Seconds that the median operation took; `p99`: than which one in a hundred took longer."""
    p99: float | None = None
    memory: float | None = None
    """By how many bytes the server grew for one connection."""
    extras: dict[str, float] = field(default_factory=dict)
    """Further figures, which only some loads have."""


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    lower: float
    median: float
    upper: float


def spread(values: Sequence[float]) -> Spread | None:
    """The quartiles of some values; None if there are none."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0]) if values else None
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass
class Entry:
    """A target's part in a record: a sample for each round, and what went wrong, if anything did."""

    target: str
    samples: list[Sample] = field(default_factory=list)
    fault: str = ""

    def spread(self) -> Spread | None:
        return spread([sample.value for sample in self.samples])

    def figure(self, name: str) -> float | None:
        """The median of one figure over all rounds, extras included; None where it was not measured.

        Of memory, the most: later rounds find memory that is already there.
        """
        found = [sample.extras.get(name, getattr(sample, name, None)) for sample in self.samples]
        figures = [each for each in found if each is not None]
        if not figures:
            return None
        return max(figures) if name == "memory" else statistics.median(figures)


@dataclass
class Record:
    """One load, and what each target made of it."""

    command: str
    """The subcommand that measures it."""
    name: str
    load: str
    """The load in words; `operation`: one operation."""
    operation: str
    unit: Unit
    ranks: int = 0
    """How many ranks there were, where that is what the record is about; else 0."""
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.ranks:,} ranks" if self.ranks else self.name

    @property
    def baseline(self) -> Entry | None:
        """The target that the others are compared with."""
        measured = {name: entry for name, entry in self.entries.items() if entry.samples}
        return next((measured[name] for name in (*BASELINES, *measured) if name in measured), None)

    def ratio(self, entry: Entry) -> Spread | None:
        """How many times better than the baseline a target is, in the rounds that both finished."""
        others = self.baseline.samples if self.baseline else []
        pairs = [(mine.value, theirs.value) for mine, theirs in zip(entry.samples, others, strict=False)]
        return spread([a / b if self.unit == "rate" else b / a for a, b in pairs if a and b])


@dataclass
class Results:
    """A whole run."""

    command: str
    """The command line."""
    started: str
    """When, as ISO 8601 in UTC."""
    seconds: float = 0.0
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Measurements that were left out, with reasons, and other remarks for the reader."""
    records: list[Record] = field(default_factory=list)
    interrupted: bool = False

    def of_command(self, command: str) -> list[Record]:
        """The records of a command: those of one name together, by their sizes."""
        records = [record for record in self.records if record.command == command]
        names = list(dict.fromkeys(record.name for record in records))
        return sorted(records, key=lambda record: (names.index(record.name), record.ranks))

    def facts(self) -> list[tuple[str, str]]:
        """The command, its time, the machine, the versions and the limits."""
        took = f"took {text.duration(self.seconds)}{', interrupted' if self.interrupted else ''}"
        conditions = {**self.machine, **self.versions, **self.limits}
        return [("command", self.command), ("started", f"{self.started}, {took}"), *conditions.items()]

    def faults(self) -> list[str]:
        """What went wrong, a line each."""
        return [f"{name}: {entry.fault}" for name, entry in self._entries() if entry.fault]

    def held_back(self) -> list[str]:
        """Where the load took a whole core and the server did not: then the load was too slow."""
        lines = []
        for name, entry in self._entries():
            load, server = entry.figure("load_share") or 0.0, entry.figure("server_share") or 1.0
            if load >= BOTTLENECK > server:
                shares = f"the load took {load:.0%} of a core and the server {server:.0%}"
                lines.append(f"{name}: {shares}, so the server may be able to do more than this")
        return lines

    def _entries(self) -> list[tuple[str, Entry]]:
        pairs = [(record, entry) for record in self.records for entry in record.entries.values()]
        return [(f"{record.title}, {entry.target}", entry) for record, entry in pairs]


def to_json(results: Results) -> str:
    """The results as a document: besides every round, what follows from them."""
    document: dict[str, Any] = {"format": FORMAT, **codec.to_json(results)}
    for record, written in zip(results.records, document["records"], strict=True):
        for name, entry in record.entries.items():
            written["entries"][name]["summary"] = {
                "value": codec.to_json(entry.spread()),
                "against": record.baseline.target if record.baseline else None,
                "ratio": codec.to_json(record.ratio(entry)),
            }
    return json.dumps(document, indent=1) + "\n"


# Tables

NOTHING: Final = "-"
NAMES: Final = ("record", "ranks", "target")
"""The headings of the columns that name a row."""
Say = Callable[[float], str]
LEGEND: Final = """\
Medians over the rounds. A ratio is that of the same round, over all rounds: its median, and its quartiles in
brackets; above 1 is better than the baseline. CPU/op is the server's CPU time for one operation, mem/conn by
how much the server grew for one connection; server and load are how much of a core was taken by the server
and by the busiest process of the load."""


@dataclass(frozen=True)
class Sheet:
    """A table; the first row has the headings."""

    title: str
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str] = ()


def make_sheet(title: str, rows: Sequence[Sequence[str]], remarks: Iterable[str] = ()) -> Sheet:
    """Without columns that have nothing below their heading: not every load measures everything."""
    kept = [column for column in zip(*rows, strict=True) if set(column[1:]) != {NOTHING}]
    return Sheet(title, list(zip(*kept, strict=True)), list(remarks))


def main_sheet(results: Results, command: str, title: str) -> Sheet:
    """The main figures of a command."""
    records = results.of_command(command)
    # The loads of several sizes differ by their number of ranks, which has a column: they are said once.
    loads = dict.fromkeys(
        f"{each.name}: {each.load.removeprefix(f'{each.ranks:,} ')}. One operation: {each.operation}."
        for each in records
    )
    headings = (*NAMES, "median", "p50", "p99", "CPU/op", "mem/conn", "server", "load", "ratio")
    rows = [main_row(record, entry) for record in records for entry in record.entries.values()]
    return make_sheet(title, [headings, *rows], loads)


def main_row(record: Record, entry: Entry) -> list[str]:
    """What a target made of a load, as it stands below those headings."""
    value = figure_text(entry, "value", words_of(record.unit))
    ratio = record.ratio(entry)
    return [
        *names_of(record, entry),
        value if not entry.fault else "fault" if value == NOTHING else f"{value} (fault)",
        *(figure_text(entry, name, text.fine_duration) for name in ("p50", "p99", "cpu")),
        figure_text(entry, "memory", text.size),
        *(figure_text(entry, name, text.share) for name in ("server_share", "load_share")),
        NOTHING if not ratio else "baseline" if entry is record.baseline else _ratio_text(ratio),
    ]


def names_of(record: Record, entry: Entry) -> list[str]:
    return [record.name, f"{record.ranks:,}" if record.ranks else NOTHING, entry.target]


def figure_text(entry: Entry, name: str, in_words: Say) -> str:
    """A figure, which may not have been measured."""
    figure = entry.figure(name)
    return NOTHING if figure is None else in_words(figure)


def words_of(unit: Unit) -> Say:
    """How the main figure of a record is written."""
    return text.rate if unit == "rate" else text.fine_duration


def _ratio_text(ratio: Spread) -> str:
    lower, median, upper = (text.digits(each) for each in (ratio.lower, ratio.median, ratio.upper))
    return f"{median}x" if lower == upper else f"{median}x ({lower} to {upper})"
