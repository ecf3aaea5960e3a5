"""The results of a run: every round, with medians and ratios. All of it goes through JSON.

A record is one load with several targets, which took turns. A target's ratio to another is taken within each
round: a machine that is noisy for a while is noisy to both.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from rallypoint import codec
from rallypoint.errors import RallypointError, UsageError

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
    """Operations per second, or seconds for all of them, as the record's unit says."""
    cpu: float | None = None
    """CPU time of the server for one operation, in seconds."""
    server_share: float | None = None
    """How much of a core the server took."""
    load_share: float | None = None
    """How much of a core the busiest process of the load took."""
    p50: float | None = None
    """Seconds that the median operation took; `p99`: than which one in a hundred took longer."""
    p99: float | None = None
    memory: float | None = None
    """By how many bytes the server grew for one connection."""
    extras: dict[str, float] = field(default_factory=dict)
    """Further figures, which only some loads have."""

    def get(self, name: str) -> float | None:
        """One figure by its name, those among the extras included."""
        figure = self.extras[name] if name in self.extras else getattr(self, name, None)
        return None if figure is None else float(figure)


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    lower: float
    median: float
    upper: float


def spread(values: Sequence[float]) -> Spread:
    """The quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(lower, median, upper)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies; they are in order, and at least one."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Entry:
    """A target's part in a record: a sample for each round, and what went wrong, if anything did."""

    target: str
    samples: list[Sample] = field(default_factory=list)
    fault: str = ""

    def figures(self, name: str) -> list[float]:
        """One figure of every round that has it."""
        return [figure for sample in self.samples if (figure := sample.get(name)) is not None]

    def spread(self) -> Spread | None:
        """The spread of the main figure over all rounds; None where it was not measured."""
        figures = self.figures("value")
        return spread(figures) if figures else None

    def figure(self, name: str) -> float | None:
        """The median of one figure over all rounds; None where it was not measured.

        Of memory, the most: later rounds find memory that is already there.
        """
        figures = self.figures(name)
        if name == "memory":
            return max(figures, default=None)
        return spread(figures).median if figures else None

    @property
    def is_held_back(self) -> bool:
        """Whether the load took a whole core and the server did not: then the load was too slow."""
        load, server = self.figure("load_share"), self.figure("server_share")
        return load is not None and server is not None and load >= BOTTLENECK > server


@dataclass
class Record:
    """One load, and what each target made of it."""

    command: str
    """The subcommand of `rallypoint bench` that measures it."""
    name: str
    load: str
    """The load in words."""
    operation: str
    """One operation, in words."""
    unit: Unit
    ranks: int = 0
    """How many ranks or clients there were, where that is what the record is about; else 0."""
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def baseline(self) -> Entry | None:
        """The target that the others are compared with."""
        measured = {name: entry for name, entry in self.entries.items() if entry.samples}
        for name in BASELINES:
            if name in measured:
                return measured[name]
        return next(iter(measured.values()), None)

    def ratios(self, entry: Entry, other: Entry) -> list[float]:
        """How many times better one is than the other, in each round that both finished."""
        rounds = zip(entry.samples, other.samples, strict=False)
        pairs = [(mine.value, theirs.value) for mine, theirs in rounds if mine.value and theirs.value]
        return [mine / theirs if self.unit == "rate" else theirs / mine for mine, theirs in pairs]

    def ratio(self, entry: Entry, other: Entry) -> Spread | None:
        """The spread of these ratios."""
        ratios = self.ratios(entry, other)
        return spread(ratios) if ratios else None


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

    def record(self, name: str, ranks: int = 0) -> Record | None:
        """The record of that name, and that size if it has one."""
        return next((each for each in self.records if each.name == name and each.ranks == ranks), None)

    def sizes(self, name: str) -> list[Record]:
        """The records of that name, smallest first."""
        return sorted((each for each in self.records if each.name == name), key=lambda each: each.ranks)

    def faults(self) -> list[str]:
        """All faults, a line each."""
        return [
            f"{title(record)}, {entry.target}: {entry.fault}"
            for record in self.records
            for entry in record.entries.values()
            if entry.fault
        ]


def title(record: Record) -> str:
    """A record's name, and its size if it has one."""
    return f"{record.name}, {record.ranks:,} ranks" if record.ranks else record.name


def to_json(results: Results) -> str:
    """The results as a document: besides every round, what follows from them."""
    document = {"format": FORMAT, **codec.to_json(results)}
    for record, written in zip(results.records, document["records"], strict=True):
        for entry in record.entries.values():
            written["entries"][entry.target]["summary"] = _summary(record, entry)
    return json.dumps(document, indent=1) + "\n"


def _summary(record: Record, entry: Entry) -> dict[str, Any]:
    baseline = record.baseline
    ratio = record.ratio(entry, baseline) if baseline else None
    return {
        "value": codec.to_json(entry.spread()),
        "against": baseline.target if baseline else None,
        "ratio": codec.to_json(ratio),
    }


def from_json(text: str, source: str) -> Results:
    """The results in a document; UsageError, which names `source`, if it is no result file."""
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError("it is of another format")
        return codec.from_json(Results, document)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{source} is no result of this version's `rallypoint bench`: {error}",
            hint="give a file that `rallypoint bench … --json FILE` wrote",
        ) from error


def read(path: Path) -> Results:
    """The results in a file; UsageError if it cannot be read or is no result file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    return from_json(text, str(path))


def merge_targets(records: Iterable[Record]) -> list[str]:
    """All targets that were measured, in the order of their first appearance."""
    return list(dict.fromkeys(name for record in records for name in record.entries))


def costs_per_rank(results: Results, name: str, target: str, figure: str = "value") -> dict[int, float]:
    """A figure of a target per rank, by the sizes at which the record has it.

    CPU time and memory are measured per operation and connection, which is per rank already.
    """
    costs = {}
    for record in results.sizes(name):
        found = record.entries[target].figure(figure) if target in record.entries else None
        if found:
            costs[record.ranks] = found / record.ranks if figure == "value" else found
    return costs


def exponent(costs: dict[int, float]) -> float:
    """How the total of costs per rank grows with the ranks: 1 is linear, 2 is quadratic.

    It is the slope of a straight line through the logarithms of at least two sizes.
    """
    sizes = [math.log(size) for size in costs]
    totals = [math.log(size * cost) for size, cost in costs.items()]
    return statistics.linear_regression(sizes, totals).slope
