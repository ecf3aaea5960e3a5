"""The picture of a store for the browser: one JSON object, made so that little of it changes with time.

Moments (`since`) are by the store's own clock, and `time` is the time of that clock: the page counts the
seconds between them itself. Ranks are listed machine by machine, as ranges and runs of letters: so 16,384
ranks take some hundred kilobytes, and a rank that changes its state takes some ten bytes. Lists that a job
can make long are cut, and the picture has their whole length.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any, Final

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
from rallypoint.store.rollcall.snapshot import Operation, Relay, Snapshot
from rallypoint.text import runs_of
from rallypoint.watch.web import activity
from rallypoint.watch.web.activity import JobReport, ReportedRank

Json = dict[str, Any]

SINCE: Final = "since"
"""The name of all moments in a picture."""

_SAME_SECONDS: Final = 1.0


def settle(before: Json, after: Json) -> Json:
    """A picture whose moments are those of the one before, where they differ by less than a second.

    A store says how many seconds ago something began, and answers a little sooner or later each time. Without
    this, all moments would change by some milliseconds in every picture.
    """
    settled: Json = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            settled[name] = settle(old, value)
        elif name == SINCE and isinstance(old, float) and abs(value - old) < _SAME_SECONDS:
            settled[name] = old
        else:
            settled[name] = value
    return settled


def difference(before: Json, after: Json) -> Json:
    """The patch that makes one picture of another."""
    patch: Json = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := difference(old, value):
                patch[name] = inner
        elif name not in before or value != old or type(value) is not type(old):
            patch[name] = value
    return patch


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

PROBLEM: Final = "problem"
"""The name of the error of a store that does not answer; other pictures lack it."""


def picture(snapshot: Snapshot, roll: Roll, report: JobReport) -> Json:
    """The picture of a snapshot, of the roll that was judged from it, and of what launchers report."""
    now = snapshot.time
    slowest = sorted(roll.gatherings, key=lambda each: -each.seconds)
    return {
        "time": round(now, 3),
        "store": _store(snapshot),
        "replication": _replication(snapshot),
        "stall": snapshot.stall.strip()[:MOST_STALL],
        "idle": {} if roll.missing or roll.unseen else activity.idle(report, now),
        "missing": missing_text(roll),
        "unseen": unseen_text(roll),
        "counts": _counts(roll),
        "remarks": list(roll.remarks),
        "machines": _machines(roll),
        "work": activity.groups(report, now),
        "steps": activity.steps(report, now),
        "waits": {each.key: _wait(each, now) for each in roll.awaited[:MOST_WAITS]},
        "barriers": {each.key: _barrier(each, now) for each in slowest[:MOST_BARRIERS]},
        "meetings": {each.job: _meeting(each) for each in roll.meetings[:MOST_MEETINGS]},
        "relays": dict(_relays(snapshot)),
        "operations": {each.name: _operation(each) for each in snapshot.operations},
        "history": {
            f"{each.time:.3f}": [each.operations, each.p99, each.clients, each.waiting]
            for each in snapshot.history
        },
        "errors": dict(_errors(snapshot)),
    }


def troubled(before: Json, message: str, hint: str, time: float) -> Json:
    """The last picture of a store that does not answer any more, with the error."""
    since = before.get(PROBLEM, {}).get(SINCE, time)
    return {**before, PROBLEM: {"message": message, "hint": hint, SINCE: since}}


def details(standing: Standing, snapshot: Snapshot, report: ReportedRank | None) -> Json:
    """All that is known of one rank, and what its launcher reports of it."""
    known = {name: value for name, value in asdict(standing).items() if not name.endswith("seconds")}
    return {
        **known,
        "state": standing.state.value,
        "source": standing.source.value,
        "time": round(snapshot.time, 3),
        **_since(snapshot.time, standing.seconds),
        **_since(snapshot.time, standing.wait_seconds, "wait_since"),
        **({"doing": activity.doing(report, snapshot.time)} if report is not None else {}),
    }


def _since(now: float, seconds: float, name: str = SINCE) -> Json:
    """The moment `seconds` ago; empty if that is negative, which means: not known."""
    return {name: round(now - seconds, 1)} if seconds >= 0 else {}


def _store(snapshot: Snapshot) -> Json:
    return {
        "kind": snapshot.kind,
        "version": snapshot.version,
        "host": snapshot.host,
        "pid": snapshot.pid,
        "backend": snapshot.backend,
        **_since(snapshot.time, snapshot.seconds),
        "stalled": _since(snapshot.time, snapshot.stalled_seconds or -1.0),
        "connections": connections(snapshot),
        "accepted": snapshot.accepted,
        "received": snapshot.received,
        "sent": snapshot.sent,
        "keys": snapshot.key_count,
        "queues": snapshot.queue_count,
        "bytes": snapshot.stored_bytes,
        "errors": snapshot.error_count,
        "relays": len(snapshot.relays),
        "workers": len(snapshot.own_workers),
        "operations": sum(each.count for each in snapshot.operations),
        "per_second": round(sum(each.per_second for each in snapshot.operations), 1),
    }


def _replication(snapshot: Snapshot) -> Json:
    """Of a store that an engine keeps; empty for others."""
    kept = snapshot.replication
    if kept is None:
        return {}
    return {
        "engine": kept.engine,
        "term": kept.term,
        "leader": kept.leader,
        "standbys": {each.address: each.lag for each in kept.standbys[:MOST_NAMED]},
        "commit_p50": kept.commit_p50,
        "commit_p99": kept.commit_p99,
        "log": kept.log_bytes,
        "checkpoint": kept.checkpoint_bytes,
        "away": _since(snapshot.time, kept.away_seconds),
        "error": kept.error,
    }


def _counts(roll: Roll) -> Json:
    states = dict.fromkeys((state.value for state in RankState), 0)
    for each in roll.ranks:
        states[each.state.value] += 1
    return {
        **states,
        "expected": roll.expected,
        "present": roll.joined,
        "unknown": roll.unknown,
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
        "ranks": _some(each.ranks),
        "count": len(each.ranks),
        "others": each.others,
        "barrier": each.is_barrier,
        "owed_by": each.owed_by,
        **_since(now, each.seconds),
    }


def _barrier(each: Gathering, now: float) -> Json:
    missing = {} if each.missing is None else {"missing": _some(each.missing)}
    return {
        "size": each.size,
        "arrived": each.arrived,
        "ranks": _some(each.ranks),
        **missing,
        **_since(now, each.seconds),
    }


def _meeting(each: JobRound) -> Json:
    return {
        "round": each.round,
        "expected": each.expected,
        "joined": len(each.joined),
        **{name: _named(getattr(each, name)) for name in ("waiting", "spares", "lost", "sick")},
        "told": list(each.told[:MOST_NAMED]),
        "closed": each.closed,
    }


def _named(hosts: tuple[str, ...]) -> list[str]:
    more = len(hosts) - MOST_NAMED
    return [*hosts[:MOST_NAMED], *([f"{more:,} more"] if more > 0 else [])]


def _relays(snapshot: Snapshot) -> Iterator[tuple[str, Json]]:
    """Relays of all levels, each named by a path of ids. Lost ones come first, in case the list is cut."""
    found = sorted(_walk(snapshot, ""), key=lambda pair: pair[1].present)
    for path, each in found[:MOST_RELAYS]:
        yield path, _relay(each, snapshot.time)


def _walk(snapshot: Snapshot, path: str) -> Iterator[tuple[str, Relay]]:
    for each in snapshot.relays:
        name = f"{path}{each.id}"
        yield name, each
        if each.part is not None:
            yield from _walk(each.part, f"{name}/")


def parts(snapshot: Snapshot) -> Iterator[tuple[str, Snapshot]]:
    """The snapshots of relays of all levels, each named by a path of ids."""
    return ((path, each.part) for path, each in _walk(snapshot, "") if each.part is not None)


def connections(snapshot: Snapshot) -> int:
    """The number of clients, those of relays of all levels included, tools excluded."""
    everybody = (each for part in (snapshot, *(part for _, part in parts(snapshot))) for each in part.clients)
    return sum(each.who.role is not Role.TOOL for each in everybody)


def _relay(each: Relay, now: float) -> Json:
    told: Json = {"peer": each.peer, "present": each.present, **_since(now, each.seconds)}
    if each.part is not None:
        told |= {"host": each.part.host, "clients": len(each.part.clients), "errors": each.part.error_count}
        if not is_heard(each):
            told["heard"] = _since(now, each.part_seconds)
    return told


def _operation(each: Operation) -> Json:
    return {"count": each.count, "per_second": round(each.per_second, 1)}


def _errors(snapshot: Snapshot) -> list[tuple[str, Json]]:
    """The last errors of the server and its relays. The page knows an error again by its number."""
    found: list[tuple[str, Json]] = []
    for path, part in [("", snapshot), *parts(snapshot)]:
        first = max(part.error_count - len(part.errors), 0)
        for number, each in enumerate(part.errors, first + 1):
            at = {"at": part.host} if path else {}
            told = {"peer": each.peer, "reason": each.reason, SINCE: round(each.time, 1), **at}
            found.append((f"{path}:{number}", told))
    return sorted(found, key=lambda pair: pair[1][SINCE])[-MOST_ERRORS:]
