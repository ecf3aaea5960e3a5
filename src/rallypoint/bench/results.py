"""The results of a run: every round, with medians and ratios; and as JSON.

A record is one load with several targets, which took turns. A target's ratio to another is taken within each
round: a machine that is noisy for a while is noisy to both.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rallypoint import codec
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


def spread(values: Sequence[float]) -> Spread | None:
    """The quartiles of some values; None if there are none."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0]) if values else None
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies; they are in order, and at least one."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Entry:
    """A target's part in a record: a sample for each round, and what went wrong, if anything did."""

    target: str
    samples: list[Sample] = field(default_factory=list)
    fault: str = ""

    def spread(self, name: str = "value") -> Spread | None:
        """The spread of one figure over all rounds; None where it was not measured."""
        return spread([figure for sample in self.samples if (figure := sample.get(name)) is not None])

    def figure(self, name: str) -> float | None:
        """The median of one figure over all rounds; None where it was not measured.

        Of memory, the most: later rounds find memory that is already there.
        """
        if name == "memory":
            return max((each.memory for each in self.samples if each.memory is not None), default=None)
        found = self.spread(name)
        return found.median if found else None

    @property
    def is_held_back(self) -> bool:
        """Whether the load took a whole core and the server did not: then the load was too slow."""
        load, server = self.figure("load_share"), self.figure("server_share")
        return load is not None and server is not None and load >= BOTTLENECK > server


@dataclass
class Record:
    """One load, and what each target made of it."""

    command: str
    """The subcommand that measures it."""
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
    def title(self) -> str:
        """The name, and the size if it has one."""
        return f"{self.name}, {self.ranks:,} ranks" if self.ranks else self.name

    @property
    def baseline(self) -> Entry | None:
        """The target that the others are compared with."""
        measured = {name: entry for name, entry in self.entries.items() if entry.samples}
        name = next((name for name in (*BASELINES, *measured) if name in measured), "")
        return measured.get(name)

    def ratio(self, entry: Entry) -> Spread | None:
        """How many times better than the baseline a target is, in the rounds that both finished."""
        others = self.baseline.samples if self.baseline else []
        pairs = [(mine.value, theirs.value) for mine, theirs in zip(entry.samples, others, strict=False)]
        ratios = [a / b if self.unit == "rate" else b / a for a, b in pairs if a and b]
        return spread(ratios)


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

    def sizes(self, name: str) -> list[Record]:
        """The records of that name, smallest first."""
        return sorted((each for each in self.records if each.name == name), key=lambda each: each.ranks)

    def faults(self) -> list[str]:
        """All faults, a line each."""
        entries = [(record, entry) for record in self.records for entry in record.entries.values()]
        return [f"{record.title}, {entry.target}: {entry.fault}" for record, entry in entries if entry.fault]


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
