"""Numbers, times, names and ranks in words: every helper of this kind, once. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final
from unicodedata import east_asian_width

_TIMES: Final = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_SIZES: Final = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
_LONGEST_SECONDS: Final = 1e10
LONGEST_NAME: Final = 80
"""Characters of a name from elsewhere that are shown, if nothing else is said."""
LONGEST_SENTENCE: Final = 500
"""Characters of a sentence from elsewhere, such as a reason or a traceback's last line."""
LONGEST_KEY: Final = 1000
"""Characters of a key where keys are listed: such a list is read to find a key again."""
_MOST_RUNS: Final = 8
_WORD: Final = re.compile(r"(?:`[^`]*`|\S)+")
"""A word; a command between backticks is one word."""


# Numbers and times


def digits(figure: float) -> str:
    """About three digits, never an exponent: 1,234 and 12.3 and 1.23 and 0.012."""
    small, large = abs(figure), 99.95
    if small >= large:
        return f"{figure:,.0f}"
    if small >= 9.995:
        return f"{figure:.1f}"
    return f"{figure:.2f}" if small >= 0.1 or not figure else f"{figure:.2g}"


def fine_duration(seconds: float) -> str:
    """`1.23 ms`, `12.3 s`: a measured time, in its own unit. It may be negative, as a difference."""
    for unit, scale in _TIMES:
        if abs(seconds) >= scale:
            return f"{digits(seconds / scale)} {unit}"
    return f"{digits(seconds / 1e-9)} ns" if seconds else "0 s"


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


def counted(number: int, noun: str) -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """`0.4 s`, `41 s`, `3 min 20 s`, `2 h 5 min`."""
    seconds = seconds if seconds < _LONGEST_SECONDS else _LONGEST_SECONDS  # so that NaN is a number as well
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def clock(time: float) -> str:
    """The time of day, in UTC where the time counts from the epoch: `14:36:19`."""
    seconds = int(time) % 86_400
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def joined_by_and(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


# Ranks


def runs_of(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last rank of each run of ranks that follow each other."""
    runs = []
    for _, group in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in group]
        runs.append((members[0], members[-1]))
    return runs


def ranks_text(ranks: Iterable[int], most: int = _MOST_RUNS) -> str:
    """`3`, `3 and 7`, `0 to 5, 7 and 1,024 more`."""
    named = [pair for run in runs_of(ranks) for pair in _named(*run)]
    names = [name for name, _ in named[:most]]
    if len(named) > most:
        names.append(f"{sum(count for _, count in named[most:]):,} more")
    return joined_by_and(names)


def named_ranks(ranks: Sequence[int], most: int = _MOST_RUNS) -> str:
    """`rank 3`, `ranks 3 and 7`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {ranks_text(ranks, most)}"


def _named(first: int, last: int) -> list[tuple[str, int]]:
    """A run in words, and how many ranks each of these words stands for."""
    if last - first < 2:
        return [(str(rank), 1) for rank in range(first, last + 1)]
    return [(f"{first} to {last}", last - first + 1)]


# Text from elsewhere


def printable(text: str) -> str:
    """The text with its control characters written out: a terminal obeys nothing in it."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def printable_lines(text: str) -> str:
    """As `printable`, but lines stay lines: for a text of several, whose parts are printable already."""
    return "\n".join(map(printable, text.split("\n")))


def shown(name: str, most: int = LONGEST_NAME) -> str:
    """A name or a text from elsewhere, printable, in one line, and with its middle left out if it is long.

    Elsewhere is the network, another process, or another user's file. Everything that comes from there goes
    through this function before it is put into a message, a log or a table.
    """
    text = printable(name if len(name) <= most else _ends(name, most))
    return text if len(text) <= most else _ends(text, most)


def _ends(text: str, most: int) -> str:
    half = most // 2
    return f"{text[: half - 2]}...{text[1 - half :]}"


def excerpt(text: str, most: int) -> str:
    """The text, or as many of its first words as fit, and a sign that there are more."""
    if len(text) <= most:
        return text
    cut = text[: most - 2]
    border = cut.rfind(" ") if text[most - 2] != " " else len(cut)
    # A text that has no blank for long (a path, a list of numbers) is cut where it must be.
    return f"{cut[:border] if border > most // 2 else cut} …"


# Lines


def wrapped(
    text: str, width: int, first: str = "", later: str | None = None, *, commands: bool = False
) -> list[str]:
    """The text in lines of at most `width` columns: behind `first`, then behind `later` or blanks.

    With `commands`, a command between backticks stays in one line, which may get longer than `width`.
    """
    room = width - len(first)
    lines: list[str] = []
    for word in _WORD.findall(printable(text)) if commands else printable(text).split():
        for piece in [word] if commands and "`" in word else _pieces(word, room):
            if lines and columns(lines[-1]) + 1 + columns(piece) <= room:
                lines[-1] += f" {piece}"
            else:
                lines.append(piece)
    starts = [first] + [" " * len(first) if later is None else later] * len(lines)
    return [start + line for start, line in zip(starts, lines, strict=False)]


def _pieces(word: str, room: int) -> list[str]:
    """A word that is too long for a line, in parts that are not."""
    if columns(word) <= room:
        return [word]
    size = max(room if word.isascii() else room // 2, 1)
    return [word[begin : begin + size] for begin in range(0, len(word), size)]


def columns(text: str) -> int:
    """The width of a text in a terminal: a Chinese character takes two columns."""
    return len(text) if text.isascii() else sum(1 + (east_asian_width(each) in "WF") for each in text)


def short_path(path: str, most: int) -> str:
    """A path, printable; without its middle if it is wider than `most`: `/home/…/train.py`."""
    path = printable(path)
    if columns(path) <= most:
        return path
    parts = re.findall(r"^[/\\]?[^/\\]*[/\\]?|[^/\\]+[/\\]?", path)
    kept = [parts[0], "…/", *parts[1:]]
    while len(kept) > 3 and columns("".join(kept)) > most:
        del kept[2]
    text = "".join(kept)
    return text if len(parts) > 1 and columns(text) <= most else shown(parts[-1], max(most // 2, 8))
