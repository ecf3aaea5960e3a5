"""The figures of a record in words: with their quartiles, where those differ. Pure."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.bench.results import Spread, Unit
from rallypoint.text import digits, fine_duration, rate


def value(figure: float, unit: Unit) -> str:
    """The main figure of a record."""
    return rate(figure) if unit == "rate" else fine_duration(figure)


def with_quartiles(spread: Spread, say: Callable[[float], str]) -> str:
    """A median with its quartiles behind it; alone if they are the same to the reader."""
    median, lower, upper = say(spread.median), say(spread.lower), say(spread.upper)
    return median if lower == median == upper else f"{median} ({_bare(lower, upper)} to {upper})"


def ratio(spread: Spread) -> str:
    """A ratio with its quartiles: 1.23x (1.10 to 1.31)."""
    median, lower, upper = (digits(each) for each in (spread.median, spread.lower, spread.upper))
    return f"{median}x" if lower == median == upper else f"{median}x ({lower} to {upper})"


def _bare(lower: str, upper: str) -> str:
    """The lower quartile; its unit is left out where the upper one has the same."""
    unit = lower.rpartition(" ")[2]
    return lower.rpartition(" ")[0] if " " in lower and upper.endswith(f" {unit}") else lower
