"""The picture of a store for the browser: one JSON object, made so that little of it changes with time. Pure.

Moments (`since`) are by the store's own clock, and `time` is the time of that clock: the page counts the
seconds between them itself. Ranks are listed machine by machine, as ranges and runs of letters: so 16,384
ranks take some hundred kilobytes, and a rank that changes its state takes some ten bytes. Lists that a job
can make long are cut, and the picture has their whole length; figures are rounded.

What ranks do comes from the reports of launchers. Their names of functions and files go through `shown`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from statistics import median
from typing import Any, Final, NamedTuple

from rallypoint.frames import Frame, Stack
from rallypoint.launch.stacks import words
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
from rallypoint.store.rollcall.clients import is_heard
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.plan import JobRound
from rallypoint.store.rollcall.roll import (
    Awaited,
    Gathering,
    RankState,
    Roll,
    Standing,
    missing_text,
    unseen_text,
)
from rallypoint.store.rollcall.snapshot import Relay, Snapshot
from rallypoint.text import LONGEST_SENTENCE, runs_of, shown

Json = dict[str, Any]

SINCE: Final = "since"
"""The name of all moments in a picture."""

MOST_WAITS: Final = 50
MOST_BARRIERS: Final = 50
MOST_MEETINGS: Final = 20
MOST_NAMED: Final = 16
"""Of the machines of a round, and of the failures that they have reported."""
MOST_RELAYS: Final = 256
MOST_ERRORS: Final = 50
MOST_RANGES: Final = 64
"""Of the ranks of one wait or barrier."""
MOST_STALL: Final = 10_000
"""Characters of what a launcher says of a job that stands still."""
MOST_GROUPS: Final = 50
MOST_SLOW: Final = 20
"""How many ranks are named with their rate, the slowest first."""
MOST_THREADS: Final = 16
"""Of one rank, with their stacks."""


class ReportedRank(NamedTuple):
    """What one rank does, as its launcher reports."""

    activity: RankActivity
    host: str
    seconds: float
    """Since it was reported."""


@dataclass(frozen=True)
class JobReport:
    """What all ranks do."""

    activity: JobActivity = NO_ACTIVITY
    ranks: Mapping[int, ReportedRank] = field(default_factory=dict)


class ReportReader:
    """Reads the reports of launchers. Threads may use it at the same time: each puts all in place at once.

    A launcher reports every ten seconds, and a page reads every second: what has been unpacked is kept.
    """

    def __init__(self) -> None:
        self._unpacked: dict[str, MachineActivity | None] = {}
        self._last: tuple[Snapshot | None, JobReport] = (None, JobReport())

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


def picture(snapshot: Snapshot, roll: Roll, report: JobReport) -> Json:
    """The picture of a snapshot, of the roll that was judged from it, and of what launchers report."""
    now = snapshot.time
    slowest = sorted(roll.gatherings, key=lambda each: -each.seconds)
    return {
        "time": round(now, 3),
        "store": _store(snapshot),
        "replication": _replication(snapshot),
        "stall": snapshot.stall.strip()[:MOST_STALL],
        "idle": {} if roll.missing or roll.unseen else _idle(report, now),
        "missing": missing_text(roll),
        "unseen": unseen_text(roll),
        "counts": _counts(roll),
        "remarks": list(roll.remarks),
        "machines": _machines(roll),
        "work": _work(report, now),
        "steps": _steps(report, now),
        "waits": {each.key: _wait(each, now) for each in roll.awaited[:MOST_WAITS]},
        "barriers": {each.key: _barrier(each, now) for each in slowest[:MOST_BARRIERS]},
        "meetings": {each.job: _meeting(each) for each in roll.meetings[:MOST_MEETINGS]},
        "relays": dict(_relays(snapshot)),
        "operations": {
            each.name: {"count": each.count, "per_second": round(each.per_second, 1)}
            for each in snapshot.operations
        },
        "history": {f"{each.time:.3f}": [each.operations, each.p99] for each in snapshot.history},
        "errors": dict(_errors(snapshot)),
    }


def _of(each: object, *names: str) -> Json:
    return {name: getattr(each, name) for name in names}


def _moment(now: float, seconds: float) -> float:
    return round(now - seconds, 1)


def _since(now: float, seconds: float, name: str = SINCE) -> Json:
    """The moment `seconds` ago; empty if that is negative, which means: not known."""
    return {name: _moment(now, seconds)} if seconds >= 0 else {}


# The store -------------------------------------------------------------------------------------------------


def _store(snapshot: Snapshot) -> Json:
    return {
        **_of(snapshot, "kind", "version", "host", "pid", "backend"),
        **_since(snapshot.time, snapshot.seconds),
        "stalled": _since(snapshot.time, snapshot.stalled_seconds or -1.0),
        "connections": connections(snapshot),
        "keys": snapshot.key_count,
        "queues": snapshot.queue_count,
        "bytes": snapshot.stored_bytes,
        "errors": snapshot.error_count,
        "relays": len(snapshot.relays),
        "workers": len(snapshot.own_workers),
        "per_second": round(sum(each.per_second for each in snapshot.operations), 1),
    }


def _replication(snapshot: Snapshot) -> Json:
    """Of a store that an engine keeps; empty for others."""
    kept = snapshot.replication
    if kept is None:
        return {}
    return {
        **_of(kept, "engine", "term", "leader", "commit_p50", "commit_p99", "error"),
        "standbys": {each.address: each.lag for each in kept.standbys[:MOST_NAMED]},
        "log": kept.log_bytes,
        "checkpoint": kept.checkpoint_bytes,
        "away": _since(snapshot.time, kept.away_seconds),
    }


def _meeting(each: JobRound) -> Json:
    return {
        **_of(each, "round", "expected", "closed"),
        "joined": len(each.joined),
        **{name: _named(getattr(each, name)) for name in ("waiting", "spares", "lost", "sick")},
        "told": list(each.told[:MOST_NAMED]),
    }


def _named(hosts: tuple[str, ...]) -> list[str]:
    more = len(hosts) - MOST_NAMED
    return [*hosts[:MOST_NAMED], *([f"{more:,} more"] if more > 0 else [])]


def _relays(snapshot: Snapshot) -> Iterator[tuple[str, Json]]:
    """Relays of all levels, each named by a path of ids. Lost ones come first, in case the list is cut."""
    now = snapshot.time
    for path, each in sorted(_walk(snapshot), key=lambda pair: pair[1].present)[:MOST_RELAYS]:
        told: Json = {**_of(each, "peer", "present"), **_since(now, each.seconds)}
        if each.part is not None:
            told |= {"host": each.part.host, "clients": len(each.part.clients)}
            if not is_heard(each):
                told["heard"] = _since(now, each.part_seconds)
        yield path, told


def _walk(snapshot: Snapshot, path: str = "") -> Iterator[tuple[str, Relay]]:
    for each in snapshot.relays:
        name = f"{path}{each.id}"
        yield name, each
        if each.part is not None:
            yield from _walk(each.part, f"{name}/")


def _parts(snapshot: Snapshot) -> Iterator[tuple[str, Snapshot]]:
    """The snapshot itself, and those of relays of all levels, each named by a path of ids."""
    yield "", snapshot
    yield from ((path, each.part) for path, each in _walk(snapshot) if each.part is not None)


def connections(snapshot: Snapshot) -> int:
    """The number of clients, those of relays of all levels included, tools excluded."""
    return sum(each.who.role is not Role.TOOL for _, part in _parts(snapshot) for each in part.clients)


def _errors(snapshot: Snapshot) -> list[tuple[str, Json]]:
    """The last errors of the server and its relays. The page knows an error again by its number."""
    found: list[tuple[str, Json]] = []
    for path, part in _parts(snapshot):
        first = max(part.error_count - len(part.errors), 0)
        for number, each in enumerate(part.errors, first + 1):
            at = {"at": part.host} if path else {}
            told = {**_of(each, "peer", "reason"), SINCE: round(each.time, 1), **at}
            found.append((f"{path}:{number}", told))
    return sorted(found, key=lambda pair: pair[1][SINCE])[-MOST_ERRORS:]


# Ranks, and who waits --------------------------------------------------------------------------------------


def _counts(roll: Roll) -> Json:
    states = dict.fromkeys((state.value for state in RankState), 0)
    for each in roll.ranks:
        states[each.state.value] += 1
    return {
        **states,
        **_of(roll, "expected", "unknown"),
        "present": roll.joined,
        "waits": len(roll.awaited),
        "barriers": len(roll.gatherings),
        "meetings": len(roll.meetings),
        "complete": roll.is_complete,
    }


def _machines(roll: Roll) -> Json:
    states = {each.rank: each.state for each in roll.ranks}
    return {
        each.host: {
            "ranks": ",".join(ranges(each.ranks)),
            "states": runs(states[rank] for rank in each.ranks),
        }
        for each in roll.machines
    }


def ranges(ranks: Iterable[int]) -> Iterator[str]:
    """Ranks that follow each other, together: `0-7`, `9`."""
    for first, last in runs_of(ranks):
        yield str(first) if first == last else f"{first}-{last}"


def runs(states: Iterable[RankState]) -> str:
    """The first letters of states, equal ones together: `j6lw` is six joined, one late and one waiting."""
    counted = ((state.value[0], sum(1 for _ in group)) for state, group in groupby(states))
    return "".join(letter if count == 1 else f"{letter}{count}" for letter, count in counted)


def _some(ranks: tuple[int, ...]) -> str:
    """The first ranges of many ranks; … stands for the rest."""
    told = list(ranges(ranks))
    return ",".join(told if len(told) <= MOST_RANGES else [*told[:MOST_RANGES], "…"])


def _wait(each: Awaited, now: float) -> Json:
    return {
        **_of(each, "others", "owed_by"),
        "ranks": _some(each.ranks),
        "count": len(each.ranks),
        "barrier": each.is_barrier,
        **_since(now, each.seconds),
    }


def _barrier(each: Gathering, now: float) -> Json:
    missing = {} if each.missing is None else {"missing": _some(each.missing)}
    return {**_of(each, "size", "arrived"), **missing, **_since(now, each.seconds)}


def details(standing: Standing, snapshot: Snapshot, report: ReportedRank | None) -> Json:
    """All that is known of one rank, and what its launcher reports of it."""
    known = {name: value for name, value in asdict(standing).items() if not name.endswith("seconds")}
    return {
        **known,
        "state": standing.state.value,
        "source": standing.source.value,
        **_since(snapshot.time, standing.seconds),
        **_since(snapshot.time, standing.wait_seconds, "wait_since"),
        **({"doing": _doing(report, snapshot.time)} if report is not None else {}),
    }


# What ranks do ---------------------------------------------------------------------------------------------


def _idle(report: JobReport, now: float) -> Json:
    """Since when the job has made no progress, and who holds it up; empty while it makes some."""
    why = words.standstill(report.activity)
    seconds = min((each.seconds for each in report.ranks.values()), default=0.0)
    return {SINCE: _moment(now, report.activity.idle_seconds + seconds), "why": why} if why else {}


def _work(report: JobReport, now: float) -> Json:
    """The groups of ranks that do the same, the odd ones first and what most do at the end."""
    job = report.activity
    named = [*job.odd[: MOST_GROUPS - 1], *([job.main] if job.main is not None else [])]
    return {
        "size": len(job.members),
        "count": len(job.groups),
        # The page knows a group again by its first rank, so that one that is read there stays in its place.
        "groups": {
            str(each.ranks[0]): {"place": place, "main": each is job.main, **_group(each, report, now)}
            for place, each in enumerate(named)
        },
    }


def _group(group: Group, report: JobReport, now: float) -> Json:
    example = group.example
    first, last = group.steps
    found: Json = {
        "who": words.who_text(group),
        "count": len(group.members),
        "rank": example.rank,
        "where": words.chain_text(group.doing),
        "waits": group.doing.waits,
        "steps": [first, last] if first >= 0 else [],
        "system": "",
        "family": [],
    }
    if group.ended:
        return {**found, "ended": shown(group.ended)}
    found["system"] = words.facts_text(example.facts)
    found["family"] = list(words.group_lines(group))[1:]
    if group.still_seconds >= words.STILL_SECONDS:
        ages = (each.still_seconds + report.ranks[each.rank].seconds for each in group.members)
        found[SINCE] = _moment(now, min(ages))
    if example.silent_seconds >= 0:
        found["silent"] = _since(now, example.silent_seconds + report.ranks[example.rank].seconds)
    return found


def _steps(report: JobReport, now: float) -> Json:
    """The ranks that make the fewest steps in a second, of those that call `rallypoint.step`."""
    rates = {
        # Two digits: ranks that are equally fast are equal, though each was measured by itself.
        rank: float(f"{each.activity.steps_per_second:.2g}")
        for rank, each in report.ranks.items()
        if each.activity.step >= 0 and each.activity.steps_per_second >= 0 and not each.activity.ended
    }
    slowest = sorted(rates, key=lambda rank: (rates[rank], rank))[:MOST_SLOW]
    return {
        "count": len(rates),
        "median": float(f"{median(rates.values()):.2g}") if rates else 0.0,
        "ranks": {str(rank): {"rate": rates[rank], **_step(report.ranks[rank], now)} for rank in slowest},
    }


def _step(each: ReportedRank, now: float) -> Json:
    seconds = each.activity.step_seconds
    since = _since(now, seconds + each.seconds) if seconds >= 0 else {}
    return {"host": shown(each.host), "step": each.activity.step, **since}


def _doing(each: ReportedRank, now: float) -> Json:
    """All that is reported of one rank."""
    activity, facts = each.activity, each.activity.facts
    ages = {
        "told_since": 0.0,
        "still_since": activity.still_seconds if activity.still_seconds >= words.STILL_SECONDS else -1.0,
        "silent_since": activity.silent_seconds,
        "step_since": activity.step_seconds,
    }
    return {
        **_of(activity, "pid", "step"),
        "host": shown(each.host),
        "ended": shown(activity.ended),
        "rate": activity.steps_per_second,
        **_facts(facts),
        **_of(facts, "memory", "swapped", "cores"),
        "gpu": shown(facts.gpu),
        **_thread(activity.stack),
        "threads": [_thread(stack) for stack in activity.threads[:MOST_THREADS]],
        "more_threads": max(len(activity.threads) - MOST_THREADS, 0),
        "children": [
            {"pid": child.pid, **_facts(child.facts), **_thread(child.stack)} for child in activity.children
        ],
        **{name: _moment(now, age + each.seconds) for name, age in ages.items() if age >= 0},
    }


def _facts(facts: ProcessFacts) -> Json:
    return {"state": shown(facts.state), "call": shown(facts.call, LONGEST_SENTENCE)}


def _thread(stack: Stack) -> Json:
    return {"where": words.chain_text(fold(stack)) if stack else "", "stack": _frames(stack)}


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
