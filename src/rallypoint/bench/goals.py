"""What the project has set itself, as data, and how a run measures up to it. Pure.

A goal is met by the median over the rounds. One that a run has not measured is neither met nor missed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from rallypoint import text
from rallypoint.bench import words
from rallypoint.bench.growth import growth
from rallypoint.bench.names import RELAY
from rallypoint.bench.results import Entry, Record, Results, Spread, spread

OURS: Final = "rallypoint-libuv"
TORCH: Final = "torch-libuv"
BACKENDS: Final = (OURS, "rallypoint-legacy", RELAY)

COMPARED_RANKS: Final = 16_384
MOST_RANKS: Final = 98_304

AGAINST_TORCH: Final[tuple[tuple[str, int, float], ...]] = (
    ("get", 0, 0.85),
    ("get-pipelined", 0, 3),
    ("accept", 0, 10),
    ("accept-pipelined", 0, 10),
    ("multi-get", 0, 20),
    ("multi-set", 0, 20),
    ("cancel", 0, 50),
    ("connect-storm", 0, 1.5),
    ("init", COMPARED_RANKS, 1.0),
    ("barrier", COMPARED_RANKS, 1.0),
)
"""A record, its size, and how many times better than torch's libuv server ours is to be.

Size 0 is for records that are not about a size: of several, the largest counts.
"""

RELAY_BARRIERS: Final = ("barrier", "barrier-trickle")
RELAY_SAVES: Final[tuple[tuple[str, str, float], ...]] = (
    ("cpu", "CPU time of the server", 5),
    ("messages", "messages at the server", 6),
)
"""A figure, in words, and by how many times relays are to lessen it."""

ONE_OPERATION: Final = ("one-get", "one-set", "one-add")
RELAY_ADDS_S: Final = 150e-6
WHOLE_S: Final = 60.0
EXPONENT: Final = 1.1


@dataclass(frozen=True)
class Verdict:
    """A goal, and what became of it."""

    goal: str
    wanted: str
    measured: str
    met: bool | None
    """None where it was not measured."""

    @property
    def word(self) -> str:
        return {True: "met", False: "not met", None: "not measured"}[self.met]


def verdicts(results: Results) -> list[Verdict]:
    """All goals, in the order of this module."""
    return [
        *(_against_torch(results, *goal) for goal in AGAINST_TORCH),
        *(_relay_saves(results, name, *saving) for name in RELAY_BARRIERS for saving in RELAY_SAVES),
        *(_relay_adds(results, name) for name in ONE_OPERATION),
        _comes_up(results),
        *(_grows(results, name, target) for name in ("init", "barrier") for target in BACKENDS),
    ]


def _against_torch(results: Results, name: str, ranks: int, wanted: float) -> Verdict:
    goal = f"{_where(name, ranks)}: {OURS} against {TORCH}"
    return _judge_ratio(goal, wanted, _find(results, name, ranks), OURS, TORCH, "value")


def _relay_saves(results: Results, name: str, figure: str, what: str, wanted: float) -> Verdict:
    goal = f"{_where(name, COMPARED_RANKS)}: {what}, {RELAY} against {OURS}"
    return _judge_ratio(goal, wanted, _find(results, name, COMPARED_RANKS), RELAY, OURS, figure)


def _judge_ratio(goal: str, wanted: float, record: Record | None, one: str, other: str, name: str) -> Verdict:
    judge = partial(_at_least, goal, wanted)
    pair = _pair(record, one, other)
    if record is None or pair is None:
        return judge(None)
    found = record.ratio(*pair, name)
    held_back = name == "value" and pair[0].is_held_back
    return judge(found, "; the load generator held it back" if held_back else "")


def _at_least(goal: str, wanted: float, found: Spread | None, remark: str = "") -> Verdict:
    """Of a ratio: the more, the better."""
    least = f"at least {wanted:g}x"
    if found is None:
        return Verdict(goal, least, "-", None)
    return Verdict(goal, least, words.ratio(found) + remark, found.median >= wanted)


def _at_most(goal: str, wanted: str, limit: float, found: Spread | None) -> Verdict:
    """Of a time: the less, the better."""
    if found is None:
        return Verdict(goal, wanted, "-", None)
    return Verdict(goal, wanted, words.with_quartiles(found, text.fine_duration), found.median <= limit)


def _relay_adds(results: Results, name: str) -> Verdict:
    """By how much longer one operation takes through a relay, in each round that both finished."""
    goal = f"{name}: what {RELAY} adds to {OURS}, at the median operation"
    pair = _pair(_find(results, name, 0), RELAY, OURS)
    rounds = zip(pair[0].samples, pair[1].samples, strict=False) if pair else ()
    added = [
        through.p50 - direct.p50
        for through, direct in rounds
        if through.p50 is not None and direct.p50 is not None
    ]
    return _at_most(
        goal, f"at most {RELAY_ADDS_S * 1e6:.0f} us", RELAY_ADDS_S, spread(added) if added else None
    )


def _comes_up(results: Results) -> Verdict:
    """The largest job from nothing: that its processes start is part of the time."""
    goal = f"{_where('init', MOST_RANKS)}: all of it, with the start of all processes"
    most = f"at most {WHOLE_S:.0f} s"
    record = results.record("init", MOST_RANKS)
    for target in (OURS, RELAY):
        entry = record.entries.get(target) if record else None
        found = entry.spread("whole_seconds") if entry else None
        if found is not None:
            return _at_most(f"{goal}, {target}", most, WHOLE_S, found)
    return _at_most(goal, most, WHOLE_S, None)


def _grows(results: Results, name: str, target: str) -> Verdict:
    goal, most = f"{name}: exponent of the time over the ranks, {target}", f"at most {EXPONENT:g}"
    found = growth(results, name, target)
    if found is None:
        return Verdict(goal, most, "-", None)
    measured = f"{found.exponent:.2f} from {found.sizes[0]:,} to {found.sizes[-1]:,} ranks"
    return Verdict(goal, most, measured, found.exponent <= EXPONENT)


def _find(results: Results, name: str, ranks: int) -> Record | None:
    if ranks:
        return results.record(name, ranks)
    return next(reversed(results.sizes(name)), None)


def _pair(record: Record | None, one: str, other: str) -> tuple[Entry, Entry] | None:
    entries = record.entries if record else {}
    return (entries[one], entries[other]) if one in entries and other in entries else None


def _where(name: str, ranks: int) -> str:
    return f"{name} at {ranks:,} ranks" if ranks else name
