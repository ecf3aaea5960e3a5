"""Figures in words: with the unit that suits them, and as many digits as mean something. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rallypoint.bench.results import Spread, Unit

_TIMES: Final = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_SIZES: Final = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def digits(figure: float) -> str:
    """About three digits, never an exponent: 1,234 and 12.3 and 1.23 and 0.012."""
    small, large = abs(figure), 99.95
    if small >= large:
        return f"{figure:,.0f}"
    if small >= 9.995:
        return f"{figure:.1f}"
    return f"{figure:.2f}" if small >= 0.1 or not figure else f"{figure:.2g}"


def duration(seconds: float) -> str:
    """A time, which may be negative where it is a difference."""
    for unit, scale in _TIMES:
        if abs(seconds) >= scale:
            return f"{digits(seconds / scale)} {unit}"
    return f"{digits(seconds / 1e-9)} ns" if seconds else "0 s"


def long_duration(seconds: float) -> str:
    """A time that people wait for: in minutes and hours once it takes them."""
    if seconds < 60:
        return duration(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def rate(per_second: float) -> str:
    """Operations per second."""
    return f"{per_second:,.0f}/s" if per_second >= 10 else f"{digits(per_second)}/s"


def size(count: float) -> str:
    """A number of bytes."""
    for unit, scale in _SIZES:
        if abs(count) >= scale:
            return f"{digits(count / scale)} {unit}"
    return f"{count:,.0f} B"


def count(number: float) -> str:
    """A number of things."""
    return f"{number:,.0f}"


def share(part: float) -> str:
    """A part of a core."""
    return f"{part:.0%}"


def times(ratio: float) -> str:
    """A ratio."""
    return f"{digits(ratio)}x"


def value(figure: float, unit: Unit) -> str:
    """The main figure of a record."""
    return rate(figure) if unit == "rate" else duration(figure)


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
