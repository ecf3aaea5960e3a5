"""How a cost grows with the number of ranks: per rank at each size, and the exponent that fits. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rallypoint.bench.results import Results


@dataclass(frozen=True)
class Growth:
    """A cost at several sizes."""

    sizes: list[int]
    totals: list[float]
    """The whole cost at each size."""

    @property
    def per_rank(self) -> list[float]:
        return [total / size for size, total in zip(self.sizes, self.totals, strict=True)]

    @property
    def exponent(self) -> float:
        """The slope of a straight line through the logarithms: 1 is linear, 2 is quadratic."""
        logs = [
            (math.log(size), math.log(total)) for size, total in zip(self.sizes, self.totals, strict=True)
        ]
        mean_x = sum(x for x, _ in logs) / len(logs)
        mean_y = sum(y for _, y in logs) / len(logs)
        above = sum((x - mean_x) * (y - mean_y) for x, y in logs)
        return above / sum((x - mean_x) ** 2 for x, _ in logs)


def growth(results: Results, name: str, target: str, figure: str = "value") -> Growth | None:
    """How a figure of a target grows over the sizes of a record; None if fewer than two have it.

    CPU time and memory are measured per operation and connection, so their totals are that times the size.
    """
    sizes, totals = [], []
    for record in results.sizes(name):
        entry = record.entries.get(target)
        found = None if entry is None else entry.memory() if figure == "memory" else entry.median(figure)
        if found is not None and found > 0:
            sizes.append(record.ranks)
            totals.append(found * record.ranks if figure in ("cpu", "memory") else found)
    return Growth(sizes, totals) if len(sizes) > 1 else None
