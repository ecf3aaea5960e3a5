"""The engine that is to keep a store, by asking it: its version, what it keeps and for how long, who leads.

Nothing is written. No finding has a password: an address shows none, and neither do the engines' errors.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final
from urllib.parse import quote

from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, failure, note, ok, unknown, warning
from rallypoint.errors import RallypointError
from rallypoint.store.replica.core.leader import SILENCE_SECONDS
from rallypoint.store.replica.engines.address import ETCD, SENTINEL, EngineAddress, parse_address
from rallypoint.store.replica.engines.opening import open_log
from rallypoint.store.replica.log import (
    EngineAwayError,
    EngineRefusedError,
    Extent,
    Follower,
    Leadership,
    Log,
    marked_error,
)
from rallypoint.text import counted, fine_duration, size

Version = tuple[int, ...]


def parse_version(text: str) -> Version:
    """The numbers of a version; none if there are none."""
    return tuple(int(each) for each in re.findall(r"\d+", text.partition("-")[0])[:3])


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


# etcd -------------------------------------------------------------------------------------------------------

_COMPACTION: Final = "start etcd with --auto-compaction-mode=periodic --auto-compaction-retention=5m"
_DEFAULT_QUOTA: Final = 2 << 30
_FULL: Final = 0.8
_MANY_REVISIONS: Final = 5_000
"""A leader makes so many in half an hour, just by saying that it is alive."""
_INCONSISTENT: Final = ((3, 5, 0), (3, 5, 2))
_OLDEST_ETCD: Final = (3, 4)


@dataclass(frozen=True)
class EtcdFacts:
    """What the nodes of a cluster say."""

    members: int
    """Of the cluster, also those that the URL does not name."""
    silent: Mapping[str, str]
    """The nodes of the URL that do not answer, and why."""
    versions: Sequence[str]
    """Of the nodes that answer, as the next ones."""
    has_leader: bool
    size: int
    """In bytes, the largest."""
    quota: int
    """0: they do not say."""
    alarms: Sequence[str]
    revision: int
    """Of the last change."""
    is_compacted: bool | None
    """Whether the first revision is forgotten; None: this user may not ask."""


def ask_etcd(address: EngineAddress) -> EtcdFacts:
    from rallypoint.store.replica.engines.etcd_client import EtcdClient  # late: it needs a package

    statuses, silent = [], {}
    for host in address.hosts:
        alone = replace(address, hosts=(host,))
        with closing(EtcdClient(alone)) as client:
            try:
                statuses.append(client.status())
            except RallypointError as error:
                silent[alone.places] = error.message.removeprefix(f"{alone}: ")
    key = f"/rallypoint/{quote(address.job, safe='')}/leader".encode()
    with closing(EtcdClient(address)) as client:
        return EtcdFacts(
            members=client.count_members(),
            silent=silent,
            versions=[each.version for each in statuses],
            has_leader=any(each.leader for each in statuses),
            size=max((each.size for each in statuses), default=0),
            quota=min((each.quota for each in statuses), default=0),
            alarms=[error for each in statuses for error in each.errors],
            revision=max((each.revision for each in statuses), default=0),
            is_compacted=_or_none(lambda: client.is_compacted(key, 1)),
        )


def _or_none(ask: Callable[[], bool]) -> bool | None:
    try:
        return ask()
    except RallypointError:
        return None


def judge_etcd(facts: EtcdFacts) -> Iterator[Finding]:
    for place, why in facts.silent.items():
        yield warning("engine", f"the node {place} does not answer: {why}", "start it, or mend its URL")
    versions = sorted({parse_version(each) for each in facts.versions})
    shown = ", ".join(sorted(set(facts.versions)))
    if any(_INCONSISTENT[0] <= each[:3] <= _INCONSISTENT[1] for each in versions):
        hint = "update it: 3.5.3 mends that (etcd issue 13766)"
        yield warning("engine", f"etcd {shown}: 3.5.0 to 3.5.2 may become inconsistent after a crash", hint)
    elif versions and versions[0][:2] < _OLDEST_ETCD:
        yield warning(
            "engine", f"etcd {shown} has not been tried with Rallypoint", "update it to 3.4 or later"
        )
    else:
        yield ok("engine", f"etcd {shown}")
    yield _judge_members(facts)
    yield from _judge_space(facts)
    yield _judge_history(facts)


def _judge_members(facts: EtcdFacts) -> Finding:
    members = counted(facts.members, "member")
    if not facts.has_leader:
        hint = "more than half of its members have to be up, and reach each other"
        return failure("engine", f"{members}, and none of them leads: it takes no writes", hint)
    if facts.members == 1:
        return warning(
            "engine", f"{members}: when its machine dies, the store does", "run etcd on three machines"
        )
    if facts.members % 2 == 0:
        return note("engine", f"{members}, with a leader: one more would let one more of them fail")
    return ok("engine", f"{members}, with a leader")


def _judge_space(facts: EtcdFacts) -> Iterator[Finding]:
    for alarm in facts.alarms:
        hint = f"etcdctl compact, defrag, then alarm disarm; {_COMPACTION}" if "NOSPACE" in alarm else ""
        yield failure("engine", f"an alarm of etcd: {alarm.strip()}", hint or "see etcd's log, and its guide")
    quota = facts.quota or _DEFAULT_QUOTA
    of = f"{size(quota)}{'' if facts.quota else ', if its quota is the default'}"
    found = f"its database takes {size(facts.size)} of {of}"
    if facts.size > _FULL * quota:
        yield warning("engine", found, f"etcdctl defrag gives back what is free in it; {_COMPACTION}")
    else:
        yield ok("engine", found)


def _judge_history(facts: EtcdFacts) -> Finding:
    count = f"{facts.revision:,} revisions"
    if facts.is_compacted is None:
        return unknown(
            "engine", f"whether its history is compacted: this user may not ask; {count}", _COMPACTION
        )
    if facts.is_compacted:
        return ok("engine", f"its history is compacted, or was once; {count}")
    if facts.revision < _MANY_REVISIONS:
        found = f"its history has not been compacted yet: with {count}, that says nothing"
        return note("engine", found, f"it has to be, or it fills up: {_COMPACTION}")
    return warning(
        "engine", f"its history is not compacted: all {count} are kept, and fill it up", _COMPACTION
    )


# Redis ------------------------------------------------------------------------------------------------------

_OLDEST_REDIS: Final = (6, 2)


@dataclass(frozen=True)
class RedisFacts:
    """What the server says, or the master of several."""

    version: str
    is_watched: bool
    """Whether Sentinels would promote a replica."""
    replicas: int
    """Those that are connected and up to date."""
    has_file: bool
    """`appendonly`."""
    settings: Mapping[str, str] | None
    """As CONFIG GET tells them; None: this user may not ask."""
    most_bytes: int
    """`maxmemory`; 0: there is no limit."""
    policy: str
    """`maxmemory-policy`."""


_SETTINGS: Final = ("appendfsync", "min-replicas-to-write")


def ask_rights(address: EngineAddress, acks: int) -> Sequence[str]:
    from rallypoint.store.replica.engines.redis_client import RedisClient  # late: it needs a package
    from rallypoint.store.replica.engines.redis_scripts import missing_rights

    with closing(RedisClient(address)) as client:
        return missing_rights(client, address.job, acks)


def judge_rights(missing: Sequence[str]) -> Finding:
    hint = "ACL SETUSER gives it more rights; docs/guides/survival.md has all that are needed"
    return failure(
        "engine", f"this user of Redis may not run {', '.join(missing)} on the keys of the job", hint
    )


def ask_redis(address: EngineAddress) -> RedisFacts | None:
    """None: this user may not ask."""
    from rallypoint.store.replica.engines.redis_client import RedisClient  # late: it needs a package

    with closing(RedisClient(address)) as client:
        try:
            (about,) = client.run(("INFO",))
        except EngineRefusedError:
            return None
        try:
            told = client.run(*(("CONFIG GET", name) for name in _SETTINGS))
        except RallypointError:
            told = None
    return _facts(about, told, is_watched=address.kind == SENTINEL)


def _facts(
    about: Mapping[str, Any], told: Sequence[Mapping[str, str]] | None, *, is_watched: bool
) -> RedisFacts:
    replicas = [each for name, each in about.items() if re.fullmatch(r"slave\d+", name)]
    return RedisFacts(
        version=str(about.get("redis_version", "")),
        is_watched=is_watched,
        replicas=sum(isinstance(each, dict) and each.get("state") == "online" for each in replicas),
        has_file=bool(about.get("aof_enabled")),
        settings=None if told is None else {name: each[name] for each in told for name in each},
        most_bytes=int(about.get("maxmemory", 0)),
        policy=str(about.get("maxmemory_policy", "")),
    )


def judge_redis(facts: RedisFacts | None, acks: int) -> Iterator[Finding]:
    if facts is None:
        found = "its version, its file, its memory and its replicas: this user may not ask"
        yield unknown("engine", found, "let it run INFO, or ask as another user")
        return
    if parse_version(facts.version)[:2] < _OLDEST_REDIS:
        yield failure("engine", f"Redis {facts.version} is too old", "6.2 or later is needed")
    else:
        yield ok("engine", f"Redis {facts.version}")
    yield _judge_file(facts)
    yield _judge_memory(facts)
    yield from _judge_replicas(facts, acks)


def _judge_file(facts: RedisFacts) -> Finding:
    if not facts.has_file:
        hint = "set appendonly yes; with replicas, on each of them"
        return warning(
            "engine", "it writes no file of changes: a restart of its process loses the store", hint
        )
    fsync = facts.settings.get("appendfsync", "") if facts.settings is not None else ""
    if not fsync:
        return unknown("engine", "it writes a file of changes; how soon to the disk, this user may not ask")
    if fsync == "always":
        return ok("engine", "it writes each change to the disk (appendfsync always)")
    lost = "a second of changes" if fsync == "everysec" else "half a minute of changes"
    found = f"it writes its file with appendfsync {fsync}: when its machine loses power, {lost} may be lost"
    return (note if fsync == "everysec" else warning)("engine", found, "appendfsync always loses none")


def _judge_memory(facts: RedisFacts) -> Finding:
    policy = f"maxmemory-policy is {facts.policy}"
    if not facts.policy.startswith("allkeys-"):
        limit = f" of {size(facts.most_bytes)}" if facts.most_bytes else ", and there is no limit"
        return ok("engine", f"{policy}{limit}: it does not drop the log")
    hint = "set maxmemory-policy noeviction, or use a Redis that is no cache"
    if facts.most_bytes:
        found = (
            f"{policy}: when {size(facts.most_bytes)} are full, it may drop the log, and the store with it"
        )
        return failure("engine", found, hint)
    return warning("engine", f"{policy}: if it gets a limit (maxmemory), it may drop the log", hint)


def _judge_replicas(facts: RedisFacts, acks: int) -> Iterator[Finding]:
    replicas = counted(facts.replicas, "replica")
    if facts.replicas < acks:
        found = f"{replicas}, where --acks {acks} waits for more: no change will ever count"
        yield failure("engine", found, "start the others, or ask for fewer")
    elif not facts.replicas:
        found = "it has no replica: when its machine dies, the store does"
        yield warning("engine", found, "add replicas and Sentinels; or use etcd")
    elif not acks:
        found = f"{replicas}, and a change counts before one has it: a failover may lose what was answered"
        yield warning("engine", found, "give --acks 1 or more, here and to rallypoint serve")
    elif acks == facts.replicas:
        yield note("engine", f"{replicas}, and each must have a change: while one is down, changes wait")
    else:
        yield ok("engine", f"{replicas}, of which {acks} must have a change before it counts")
    if facts.replicas and not facts.is_watched:
        found = "it has replicas, but the URL names no Sentinels: nobody follows when another one is promoted"
        yield warning("engine", found, "write redis+sentinel://a,b,c/MASTER")
    if facts.replicas and facts.settings and facts.settings.get("min-replicas-to-write") == "0":
        found = "min-replicas-to-write is 0: a master that is cut off goes on taking writes"
        yield note("engine", found, "with --acks they do not count; 1 makes it refuse them")
