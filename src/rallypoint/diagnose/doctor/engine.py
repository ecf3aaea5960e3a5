"""The engine that is to keep a store, by asking it: its version, what it keeps and for how long, who leads.

Nothing is written. No finding has a password: an address shows none, and neither do the engines' errors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Final

from rallypoint.diagnose.doctor.engine_etcd import ask_etcd, judge_etcd
from rallypoint.diagnose.doctor.engine_redis import ask_redis, ask_rights, judge_redis, judge_rights
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, failure, note, ok, warning
from rallypoint.errors import RallypointError
from rallypoint.store.replica.core.leader import SILENCE_SECONDS
from rallypoint.store.replica.engines.address import ETCD, parse_address
from rallypoint.store.replica.engines.opening import open_log
from rallypoint.store.replica.log import (
    EngineAwayError,
    Extent,
    Follower,
    Leadership,
    Log,
    marked_error,
)
from rallypoint.text import fine_duration, size

_ROUND_TRIPS: Final = 10
_SLOW_S: Final = 0.05


def check_engine(situation: Situation) -> Iterator[Finding]:
    """Whether the engine can keep a store, and how well."""
    if not situation.engine:
        return
    address = parse_address(situation.engine)
    try:
        with closing(open_log(situation.engine, acks=situation.acks)) as log:
            if address.kind != ETCD and (missing := ask_rights(address, situation.acks)):
                yield judge_rights(missing)
                return
            seconds = _read_time(log)
            yield judge_speed(str(address), seconds)
            if address.kind == ETCD:
                yield from judge_etcd(ask_etcd(address))
            else:
                yield from judge_redis(ask_redis(address), situation.acks)
            yield from judge_log(_ask_log(log))
    except RallypointError as error:
        is_away = isinstance(error, EngineAwayError)
        hint = "is it up? look for a firewall, another port, or TLS on one side only" if is_away else ""
        yield failure("engine", error.message, error.hint or hint)


def _read_time(log: Log) -> float:
    """Seconds that a read takes; the median of several. On etcd, most of the nodes take part in it."""
    times = []
    for _ in range(_ROUND_TRIPS):
        begun = time.perf_counter()
        log.read_leadership()
        times.append(time.perf_counter() - begun)
    return median(times)


def judge_speed(name: str, seconds: float) -> Finding:
    found = f"{name} answers in {fine_duration(seconds)}"
    if seconds > _SLOW_S:
        hint = "each change of the store takes longer than this: is it far away, or its machine busy?"
        return warning("engine", f"{found}: slow", hint)
    return ok("engine", found)


# The log ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogFacts:
    """What is there of the store."""

    leadership: Leadership
    is_alive: bool
    """Whether the leader gave a sign of life while it was watched."""
    followers: Sequence[Follower]
    extent: Extent


def _ask_log(log: Log) -> LogFacts:
    leadership, is_alive = watch_leader(log)
    return LogFacts(leadership, is_alive, log.followers(), log.measure())


def watch_leader(log: Log) -> tuple[Leadership, bool]:
    """Who leads, and whether it has given a sign of life meanwhile."""
    first = log.read_leadership()
    if first.address:
        time.sleep(SILENCE_SECONDS)
    last = log.read_leadership()
    return last, last != first


def judge_log(facts: LogFacts) -> Iterator[Finding]:
    leader, term = facts.leadership.address, facts.leadership.term
    others = [each.name for each in facts.followers if each.name != leader]
    standing = f"{', '.join(others)} {'stands' if len(others) == 1 else 'stand'} by" if others else ""
    serve = "run `rallypoint serve --engine` on a second machine"
    if facts.leadership.lost:
        error = marked_error("the log of this job", facts.leadership.lost)
        yield failure("engine", error.message, error.hint)
    elif not leader:
        yield note("engine", f"nobody leads this job{f'; {standing}' if others else ' yet'}")
    elif not facts.is_alive:
        found = f"{leader} leads in term {term}, and has given no sign for {SILENCE_SECONDS:g} s"
        yield warning("engine", f"{found}; {standing or 'nobody stands by'}", "" if others else serve)
    elif not others:
        yield warning("engine", f"{leader} leads in term {term}, and nobody stands by", serve)
    else:
        yield ok("engine", f"{leader} leads in term {term}; {standing}")
    if facts.extent.checkpoint:
        sequence, length = facts.extent.checkpoint, size(facts.extent.checkpoint_bytes)
        yield ok("engine", f"the last checkpoint, of record {sequence:,}, takes {length}")
