"""What ranks do, as part of the picture: who is where, how fast each steps, all that is told of one. Pure.

As elsewhere in the picture, moments are sent and no ages, figures are rounded, and lists are cut. Names of
functions and files come from elsewhere: all go through `shown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from rallypoint.launch.stacks.activity import ProcessFacts
from rallypoint.launch.stacks.folding import fold, is_library
from rallypoint.launch.stacks.frames import Frame
from rallypoint.launch.stacks.grouping import Group
from rallypoint.launch.stacks.words import (
    STILL_SECONDS,
    chain_text,
    facts_text,
    group_lines,
    standstill,
    who_text,
)
from rallypoint.text import LONGEST_SENTENCE, shown
from rallypoint.watch.web.told import RankTold, Told

Json = dict[str, Any]

MOST_GROUPS: Final = 50
MOST_SLOW: Final = 20
"""How many ranks are named with their rate, the slowest first."""
MOST_THREADS: Final = 16
"""Of one rank, with their stacks."""


def work(told: Told, now: float) -> Json:
    """The groups of ranks that do the same, the odd ones first and what most do at the end."""
    odd, main = told.work.odd, told.work.main
    named = [*odd[: MOST_GROUPS - 1], *([main] if main is not None else [])]
    groups: Json = {}
    for place, each in enumerate(named):
        # The page knows a group again by its first rank, so that one that is read there stays in its place.
        groups[str(each.ranks[0])] = {"place": place, "main": each is main, **_group(each, told, now)}
    return {
        "size": told.work.size,
        "count": len(told.work.groups),
        "groups": groups,
    }


def idle(told: Told, now: float) -> Json:
    """Since when the job has made no progress, and who holds it up; empty while it makes some."""
    why = standstill(told.work)
    seconds = min((each.seconds for each in told.ranks.values()), default=0.0)
    return {"since": _moment(now, told.work.idle_seconds + seconds), "why": why} if why else {}


def _group(group: Group, told: Told, now: float) -> Json:
    example = group.example
    first, last = group.steps
    found: Json = {
        "who": who_text(group),
        "count": len(group.members),
        "rank": example.rank,
        "where": chain_text(group.doing),
        "waits": group.doing.waits,
        "steps": [first, last] if first >= 0 else [],
        "system": "",
        "family": [],
    }
    if group.ended:
        return {**found, "ended": shown(group.ended)}
    found["system"] = facts_text(example.facts)
    found["family"] = list(group_lines(group))[1:]
    if group.still_seconds >= STILL_SECONDS:
        ages = (each.still_seconds + told.ranks[each.rank].seconds for each in group.members)
        found["since"] = _moment(now, min(ages))
    if example.silent_seconds >= 0:
        found["silent"] = {"since": _moment(now, example.silent_seconds + told.ranks[example.rank].seconds)}
    return found


def steps(told: Told, now: float) -> Json:
    """The ranks that make the fewest steps in a second, of those that call `rallypoint.step`."""
    rates = {
        rank: _rough(each.activity.steps_per_second)
        for rank, each in told.ranks.items()
        if each.activity.step >= 0 and each.activity.steps_per_second >= 0 and not each.activity.ended
    }
    slowest = sorted(rates, key=lambda rank: (rates[rank], rank))[:MOST_SLOW]
    return {
        "count": len(rates),
        "median": _rough(median(rates.values())) if rates else 0.0,
        "ranks": {str(rank): {"rate": rates[rank], **_step(told.ranks[rank], now)} for rank in slowest},
    }


def _step(each: RankTold, now: float) -> Json:
    since = {"since": _moment(now, each.activity.step_seconds + each.seconds)}
    return {
        "host": shown(each.host),
        "step": each.activity.step,
        **(since if each.activity.step_seconds >= 0 else {}),
    }


def _rough(rate: float) -> float:
    """Two digits: ranks that are equally fast are equal, though each was measured by itself."""
    return float(f"{rate:.2g}")


def doing(each: RankTold, now: float) -> Json:
    """All that is told of one rank."""
    activity, facts = each.activity, each.activity.facts
    ages = {
        "told_since": 0.0,
        "still_since": activity.still_seconds if activity.still_seconds >= STILL_SECONDS else -1.0,
        "silent_since": activity.silent_seconds,
        "step_since": activity.step_seconds,
    }
    return {
        "host": shown(each.host),
        "pid": activity.pid,
        "where": chain_text(fold(activity.stack)) if activity.stack else "",
        "ended": shown(activity.ended),
        **_facts(facts),
        "memory": facts.memory,
        "swapped": facts.swapped,
        "cores": facts.cores,
        "gpu": shown(facts.gpu),
        "step": activity.step,
        "rate": activity.steps_per_second,
        "stack": _frames(activity.stack),
        "threads": [_thread(stack) for stack in activity.threads[:MOST_THREADS]],
        "more_threads": max(len(activity.threads) - MOST_THREADS, 0),
        "children": [
            {"pid": child.pid, **_facts(child.facts), **_thread(child.stack)} for child in activity.children
        ],
        **{name: _moment(now, age + each.seconds) for name, age in ages.items() if age >= 0},
    }


def _thread(stack: Sequence[Frame]) -> Json:
    return {"where": chain_text(fold(stack)) if stack else "", "stack": _frames(stack)}


def _facts(facts: ProcessFacts) -> Json:
    return {"state": shown(facts.state), "call": shown(facts.call, LONGEST_SENTENCE)}


def _frames(stack: Sequence[Frame]) -> list[Json]:
    """Frames, the innermost first, and which of them are the user's own code."""
    return [
        {
            "function": shown(each.function, LONGEST_SENTENCE),
            "at": f"{shown(each.file, LONGEST_SENTENCE) or '?'}:{each.line or '?'}",
            "own": not is_library(each),
        }
        for each in stack
    ]


def _moment(now: float, seconds: float) -> float:
    return round(now - seconds, 1)
