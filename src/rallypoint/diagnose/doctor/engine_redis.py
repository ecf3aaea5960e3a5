"""The doctor's questions to Redis: its rights, its version, its file, its memory and its replicas."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from rallypoint.diagnose.doctor.engine_versions import parse_version
from rallypoint.diagnose.findings import Finding, failure, note, ok, unknown, warning
from rallypoint.errors import RallypointError
from rallypoint.store.replica.engines.address import SENTINEL, EngineAddress
from rallypoint.store.replica.log import EngineRefusedError
from rallypoint.text import counted, size

_OLDEST: Final = (6, 2)


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
    if parse_version(facts.version)[:2] < _OLDEST:
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
