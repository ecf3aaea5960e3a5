"""What ranks do, as part of the picture: who is where, how fast each steps; from launchers' reports. Pure.

A launcher reports every ten seconds, and a page reads every second: what has been unpacked is kept for the
next time. As elsewhere in the picture, moments are sent and no ages, figures are rounded, and lists are cut.
Names of functions and files come from elsewhere: all go through `shown`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, NamedTuple

from rallypoint.frames import Frame
from rallypoint.launch.stacks.activity import MachineActivity, ProcessFacts, RankActivity, unpack
from rallypoint.launch.stacks.frames import fold, is_library
from rallypoint.launch.stacks.progress import (
    NO_ACTIVITY,
    Group,
    JobActivity,
    awaited_keys,
    put_together,
    recent_reporters,
)
from rallypoint.launch.stacks.words import (
    STILL_SECONDS,
    chain_text,
    facts_text,
    group_lines,
    standstill,
    who_text,
)
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.text import LONGEST_SENTENCE, shown


class ReportedRank(NamedTuple):
    """What one rank does, as its launcher reports."""

    activity: RankActivity
    host: str
    seconds: float
    """Since it was reported."""


@dataclass(frozen=True)
class JobReport:
    """What all ranks do."""

    activity: JobActivity
    ranks: Mapping[int, ReportedRank] = field(default_factory=dict)


NO_REPORT: Final = JobReport(NO_ACTIVITY)


class ReportReader:
    """Reads the reports of launchers. Threads may use it at the same time: each puts all in place at once."""

    def __init__(self) -> None:
        self._unpacked: dict[str, MachineActivity | None] = {}
        self._last: tuple[Snapshot | None, JobReport] = (None, NO_REPORT)

    def read(self, snapshot: Snapshot) -> JobReport:
        """The reports in a snapshot; the one that was read last is not read again."""
        seen, report = self._last
        if seen is not snapshot:
            report = self._read(snapshot)
            self._last = (snapshot, report)
        return report

    def _read(self, snapshot: Snapshot) -> JobReport:
        before, unpacked = self._unpacked, dict[str, MachineActivity | None]()
        ranks: dict[int, ReportedRank] = {}
        for client in recent_reporters(snapshot):
            text = client.told
            machine = unpacked[text] = before[text] if text in before else unpack(text)
            if machine is not None:
                for each in machine.ranks:
                    ranks[each.rank] = ReportedRank(each, machine.host, client.told_seconds)
        self._unpacked = unpacked
        machines = (each for each in unpacked.values() if each is not None)
        return JobReport(put_together(machines, awaited_keys(snapshot)), ranks)


Json = dict[str, Any]

MOST_GROUPS: Final = 50
MOST_SLOW: Final = 20
"""How many ranks are named with their rate, the slowest first."""
MOST_THREADS: Final = 16
"""Of one rank, with their stacks."""


def groups(report: JobReport, now: float) -> Json:
    """The groups of ranks that do the same, the odd ones first and what most do at the end."""
    odd, main = report.activity.odd, report.activity.main
    named = [*odd[: MOST_GROUPS - 1], *([main] if main is not None else [])]
    named_groups: Json = {}
    for place, each in enumerate(named):
        # The page knows a group again by its first rank, so that one that is read there stays in its place.
        named_groups[str(each.ranks[0])] = {"place": place, "main": each is main, **_group(each, report, now)}
    return {
        "size": len(report.activity.members),
        "count": len(report.activity.groups),
        "groups": named_groups,
    }


def idle(report: JobReport, now: float) -> Json:
    """Since when the job has made no progress, and who holds it up; empty while it makes some."""
    why = standstill(report.activity)
    seconds = min((each.seconds for each in report.ranks.values()), default=0.0)
    return {"since": _moment(now, report.activity.idle_seconds + seconds), "why": why} if why else {}


def _group(group: Group, report: JobReport, now: float) -> Json:
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
        ages = (each.still_seconds + report.ranks[each.rank].seconds for each in group.members)
        found["since"] = _moment(now, min(ages))
    if example.silent_seconds >= 0:
        found["silent"] = {"since": _moment(now, example.silent_seconds + report.ranks[example.rank].seconds)}
    return found


def steps(report: JobReport, now: float) -> Json:
    """The ranks that make the fewest steps in a second, of those that call `rallypoint.step`."""
    rates = {
        rank: _rough(each.activity.steps_per_second)
        for rank, each in report.ranks.items()
        if each.activity.step >= 0 and each.activity.steps_per_second >= 0 and not each.activity.ended
    }
    slowest = sorted(rates, key=lambda rank: (rates[rank], rank))[:MOST_SLOW]
    return {
        "count": len(rates),
        "median": _rough(median(rates.values())) if rates else 0.0,
        "ranks": {str(rank): {"rate": rates[rank], **_step(report.ranks[rank], now)} for rank in slowest},
    }


def _step(each: ReportedRank, now: float) -> Json:
    since = {"since": _moment(now, each.activity.step_seconds + each.seconds)}
    return {
        "host": shown(each.host),
        "step": each.activity.step,
        **(since if each.activity.step_seconds >= 0 else {}),
    }


def _rough(rate: float) -> float:
    """Two digits: ranks that are equally fast are equal, though each was measured by itself."""
    return float(f"{rate:.2g}")


def doing(each: ReportedRank, now: float) -> Json:
    """All that is reported of one rank."""
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
