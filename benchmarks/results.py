"""Result files read again; and how costs grow with the ranks."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

from rallypoint import codec
from rallypoint.bench.results import FORMAT, Record, Results
from rallypoint.errors import UsageError


def from_json(text: str, source: str) -> Results:
    """The results in a document; UsageError, which names `source`, if it is no result file."""
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError("it is of another format")
        return codec.from_json(Results, document)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{source} is no result of this version's benchmarks: {error}",
            hint="give a file that `python -m benchmarks … --json FILE` wrote",
        ) from error


def read(path: Path) -> Results:
    """The results in a file; UsageError if it cannot be read or is no result file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    return from_json(text, str(path))


def sizes(results: Results, name: str) -> list[Record]:
    """The records of that name, smallest first."""
    return sorted((each for each in results.records if each.name == name), key=lambda each: each.ranks)


def merge_targets(records: Iterable[Record]) -> list[str]:
    """All targets that were measured, in the order of their first appearance."""
    return list(dict.fromkeys(name for record in records for name in record.entries))


def costs_per_rank(results: Results, name: str, target: str, figure: str = "value") -> dict[int, float]:
    """A figure of a target per rank, by the sizes at which the record has it.

    CPU time and memory are measured per operation and connection, which is per rank already.
    """
    costs = {}
    for record in sizes(results, name):
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


def record_of(results: Results, name: str) -> Record | None:
    """The record of that name, of those without ranks."""
    return next((each for each in results.records if each.name == name and each.ranks == 0), None)
