"""The engine that is to keep a store, by asking it: its version, what it keeps and for how long, who leads.

Nothing is written. No finding has a password: an address shows none, and neither do the engines' errors.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from statistics import median
from typing import Any, Final
from urllib.parse import quote

from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, failure, note, ok, unknown, warning
from rallypoint.errors import RallypointError
from rallypoint.store.replica.core.leader import SILENCE_SECONDS
from rallypoint.store.replica.engines.address import ETCD, SENTINEL, EngineAddress, parse_address
from rallypoint.store.replica.engines.etcd_messages import Status
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
            if address.kind != ETCD and (missing := _missing_rights(address, situation.acks)):
                hint = "ACL SETUSER gives it more rights; docs/guides/survival.md has all that are needed"
                found = f"this user of Redis may not run {', '.join(missing)} on the keys of the job"
                yield failure(found, hint)
                return
            yield judge_speed(str(address), _read_time(log))
            if address.kind == ETCD:
                yield from _examine_etcd(address)
            else:
                yield from _examine_redis(address, situation.acks)
            yield from judge_log(*watch_leader(log), log.followers(), log.measure())
    except RallypointError as error:
        is_away = isinstance(error, EngineAwayError)
        hint = "is it up? look for a firewall, another port, or TLS on one side only" if is_away else ""
        yield failure(error.message, error.hint or hint)


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
    hint = "each change of the store takes longer than this: is it far away, or its machine busy?"
    return warning(f"{found}: slow", hint) if seconds > _SLOW_S else ok(found)


# The log ---------------------------------------------------------------------------------------------------


def watch_leader(log: Log) -> tuple[Leadership, bool]:
    """Who leads, and whether it has given a sign of life meanwhile."""
    first = log.read_leadership()
    if first.address:
        time.sleep(SILENCE_SECONDS)
    last = log.read_leadership()
    return last, last != first


def judge_log(
    leadership: Leadership, is_alive: bool, followers: Sequence[Follower], extent: Extent
) -> Iterator[Finding]:
    """What is there of the store; `is_alive`: the leader gave a sign of life while it was watched."""
    leader, term = leadership.address, leadership.term
    others = [each.name for each in followers if each.name != leader]
    standing = f"{', '.join(others)} {'stands' if len(others) == 1 else 'stand'} by" if others else ""
    serve = "run `rallypoint serve --engine` on a second machine"
    if leadership.lost:
        error = marked_error("the log of this job", leadership.lost)
        yield failure(error.message, error.hint)
    elif not leader:
        yield note(f"nobody leads this job{f'; {standing}' if others else ' yet'}")
    elif not is_alive:
        found = f"{leader} leads in term {term}, and has given no sign for {SILENCE_SECONDS:g} s"
        yield warning(f"{found}; {standing or 'nobody stands by'}", "" if others else serve)
    elif not others:
        yield warning(f"{leader} leads in term {term}, and nobody stands by", serve)
    else:
        yield ok(f"{leader} leads in term {term}; {standing}")
    if extent.checkpoint:
        yield ok(
            f"the last checkpoint, of record {extent.checkpoint:,}, takes {size(extent.checkpoint_bytes)}"
        )


# etcd -------------------------------------------------------------------------------------------------------

_COMPACTION: Final = "start etcd with --auto-compaction-mode=periodic --auto-compaction-retention=5m"
_DEFAULT_QUOTA: Final = 2 << 30
_FULL: Final = 0.8
_MANY_REVISIONS: Final = 5_000
"""A leader makes so many in half an hour, just by saying that it is alive."""
_INCONSISTENT: Final = ((3, 5, 0), (3, 5, 2))
_OLDEST_ETCD: Final = (3, 4)


def _examine_etcd(address: EngineAddress) -> Iterator[Finding]:
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
        members = client.count_members()
        is_compacted: bool | None = None
        with suppress(RallypointError):
            is_compacted = client.is_compacted(key, 1)
    yield from judge_etcd(statuses, silent, members, is_compacted)


def judge_etcd(
    statuses: Sequence[Status], silent: Mapping[str, str], members: int, is_compacted: bool | None
) -> Iterator[Finding]:
    """What the nodes that answer say, and why others do not. Of the `members`, the URL need not name all.

    `is_compacted`: whether the first revision is forgotten; None if this user may not ask.
    """
    for place, why in silent.items():
        yield warning(f"the node {place} does not answer: {why}", "start it, or mend its URL")
    versions = sorted({parse_version(each.version) for each in statuses})
    shown = f"etcd {', '.join(sorted({each.version for each in statuses}))}"
    if any(_INCONSISTENT[0] <= each[:3] <= _INCONSISTENT[1] for each in versions):
        found = f"{shown}: 3.5.0 to 3.5.2 may become inconsistent after a crash"
        yield warning(found, "update it: 3.5.3 mends that (etcd issue 13766)")
    elif versions and versions[0][:2] < _OLDEST_ETCD:
        yield warning(f"{shown} has not been tried with Rallypoint", "update it to 3.4 or later")
    else:
        yield ok(shown)
    yield _judge_members(members, any(each.leader for each in statuses))
    yield from _judge_space(statuses)
    yield _judge_history(max((each.revision for each in statuses), default=0), is_compacted)


def _judge_members(count: int, has_leader: bool) -> Finding:
    members = counted(count, "member")
    if not has_leader:
        hint = "more than half of its members have to be up, and reach each other"
        return failure(f"{members}, and none of them leads: it takes no writes", hint)
    if count == 1:
        return warning(f"{members}: when its machine dies, the store does", "run etcd on three machines")
    if count % 2 == 0:
        return note(f"{members}, with a leader: one more would let one more of them fail")
    return ok(f"{members}, with a leader")


def _judge_space(statuses: Sequence[Status]) -> Iterator[Finding]:
    for alarm in [error for each in statuses for error in each.errors]:
        hint = f"etcdctl compact, defrag, then alarm disarm; {_COMPACTION}" if "NOSPACE" in alarm else ""
        yield failure(f"an alarm of etcd: {alarm.strip()}", hint or "see etcd's log, and its guide")
    told = min((each.quota for each in statuses), default=0)
    used, quota = max((each.size for each in statuses), default=0), told or _DEFAULT_QUOTA
    found = (
        f"its database takes {size(used)} of {size(quota)}{'' if told else ', if its quota is the default'}"
    )
    if used > _FULL * quota:
        yield warning(found, f"etcdctl defrag gives back what is free in it; {_COMPACTION}")
    else:
        yield ok(found)


def _judge_history(revision: int, is_compacted: bool | None) -> Finding:
    count = f"{revision:,} revisions"
    if is_compacted is None:
        return unknown(f"whether its history is compacted: this user may not ask; {count}", _COMPACTION)
    if is_compacted:
        return ok(f"its history is compacted, or was once; {count}")
    if revision < _MANY_REVISIONS:
        found = f"its history has not been compacted yet: with {count}, that says nothing"
        return note(found, f"it has to be, or it fills up: {_COMPACTION}")
    return warning(f"its history is not compacted: all {count} are kept, and fill it up", _COMPACTION)


# Redis ------------------------------------------------------------------------------------------------------

_OLDEST_REDIS: Final = (6, 2)
_SETTINGS: Final = ("appendfsync", "min-replicas-to-write")


def _missing_rights(address: EngineAddress, acks: int) -> Sequence[str]:
    from rallypoint.store.replica.engines.redis_client import (
        RedisClient,  # late: it needs a package
        missing_rights,
    )

    with closing(RedisClient(address)) as client:
        return missing_rights(client, address.job, acks)


def _examine_redis(address: EngineAddress, acks: int) -> Iterator[Finding]:
    from rallypoint.store.replica.engines.redis_client import RedisClient  # late: it needs a package

    settings: dict[str, str] | None = None
    with closing(RedisClient(address)) as client:
        try:
            (info,) = client.run(("INFO",))
        except EngineRefusedError:
            found = "its version, its file, its memory and its replicas: this user may not ask"
            yield unknown(found, "let it run INFO, or ask as another user")
            return
        with suppress(RallypointError):
            answers = client.run(*(("CONFIG GET", name) for name in _SETTINGS))
            settings = {name: each[name] for each in answers for name in each}
    yield from judge_redis(info, settings, acks, has_sentinels=address.kind == SENTINEL)


def judge_redis(
    info: Mapping[str, Any], settings: Mapping[str, str] | None, acks: int, *, has_sentinels: bool
) -> Iterator[Finding]:
    """What INFO and CONFIG GET of a server say, or of the master of several.

    `settings` is None if this user may not ask for them. Sentinels would promote a replica.
    """
    version = str(info.get("redis_version", ""))
    if parse_version(version)[:2] < _OLDEST_REDIS:
        yield failure(f"Redis {version} is too old", "6.2 or later is needed")
    else:
        yield ok(f"Redis {version}")
    yield _judge_file(bool(info.get("aof_enabled")), (settings or {}).get("appendfsync", ""))
    yield _judge_memory(str(info.get("maxmemory_policy", "")), int(info.get("maxmemory", 0)))
    replicas = [each for name, each in info.items() if re.fullmatch(r"slave\d+", name)]
    count = sum(isinstance(each, dict) and each.get("state") == "online" for each in replicas)
    yield _judge_replicas(count, acks)
    if count and not has_sentinels:
        found = "it has replicas, but the URL names no Sentinels: nobody follows when another one is promoted"
        yield warning(found, "write redis+sentinel://a,b,c/MASTER")
    if count and settings and settings.get("min-replicas-to-write") == "0":
        found = "min-replicas-to-write is 0: a master that is cut off goes on taking writes"
        yield note(found, "with --acks they do not count; 1 makes it refuse them")


def _judge_file(has_file: bool, fsync: str) -> Finding:
    if not has_file:
        hint = "set appendonly yes; with replicas, on each of them"
        return warning("it writes no file of changes: a restart of its process loses the store", hint)
    if not fsync:
        return unknown("it writes a file of changes; how soon to the disk, this user may not ask")
    if fsync == "always":
        return ok("it writes each change to the disk (appendfsync always)")
    lost = "a second of changes" if fsync == "everysec" else "half a minute of changes"
    found = f"it writes its file with appendfsync {fsync}: when its machine loses power, {lost} may be lost"
    return (note if fsync == "everysec" else warning)(found, "appendfsync always loses none")


def _judge_memory(policy: str, limit: int) -> Finding:
    found = f"maxmemory-policy is {policy}"
    if not policy.startswith("allkeys-"):
        return ok(
            f"{found}{f' of {size(limit)}' if limit else ', and there is no limit'}: it does not drop the log"
        )
    hint = "set maxmemory-policy noeviction, or use a Redis that is no cache"
    if limit:
        return failure(
            f"{found}: when {size(limit)} are full, it may drop the log, and the store with it", hint
        )
    return warning(f"{found}: if it gets a limit (maxmemory), it may drop the log", hint)


def _judge_replicas(count: int, acks: int) -> Finding:
    replicas = counted(count, "replica")
    if count < acks:
        found = f"{replicas}, where --acks {acks} waits for more: no change will ever count"
        return failure(found, "start the others, or ask for fewer")
    if not count:
        found = "it has no replica: when its machine dies, the store does"
        return warning(found, "add replicas and Sentinels; or use etcd")
    if not acks:
        found = f"{replicas}, and a change counts before one has it: a failover may lose what was answered"
        return warning(found, "give --acks 1 or more, here and to rallypoint serve")
    if acks == count:
        return note(f"{replicas}, and each must have a change: while one is down, changes wait")
    return ok(f"{replicas}, of which {acks} must have a change before it counts")
