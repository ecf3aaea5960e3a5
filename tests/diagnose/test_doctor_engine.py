"""What the doctor finds at the engine of a store: real ones, and what is made of their answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_line import invoke
from engines import ask, etcd_cluster, free_ports, make_certificate, redis_cluster
from rallypoint.cli import doctor as examining
from rallypoint.diagnose.doctor import engine
from rallypoint.diagnose.doctor.checks import CHECKS
from rallypoint.diagnose.doctor.engine import (
    EtcdFacts,
    LogFacts,
    RedisFacts,
    judge_etcd,
    judge_log,
    judge_redis,
    judge_speed,
)
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, State
from rallypoint.store.replica.engines.opening import open_log
from rallypoint.store.replica.engines.redis_scripts import COMMANDS
from rallypoint.store.replica.log import Checkpoint, Extent, Follower, Leadership

F, W, N, U, OK = State.FAILURE, State.WARNING, State.NOTE, State.UNKNOWN, State.OK

ETCD = EtcdFacts(
    members=3,
    silent={},
    versions=["3.4.23", "3.4.23", "3.4.23"],
    has_leader=True,
    size=5 << 20,
    quota=0,
    alarms=[],
    revision=100_000,
    is_compacted=True,
)
REDIS = RedisFacts(
    version="7.0.15",
    is_watched=True,
    replicas=2,
    has_file=True,
    settings={"appendfsync": "always", "min-replicas-to-write": "1"},
    most_bytes=0,
    policy="noeviction",
)


def worst_of(findings: Iterable[Finding]) -> list[tuple[State, str]]:
    """All but the good ones."""
    return [(each.state, each.found) for each in findings if each.state is not OK]


def test_nothing_is_wrong_with_good_engines() -> None:
    assert not worst_of(judge_etcd(ETCD))
    assert not worst_of(judge_redis(REDIS, 1))
    assert judge_speed("x", 0.001).state is OK
    assert judge_speed("x", 0.2).state is W


@pytest.mark.parametrize(
    ("change", "state", "words"),
    [
        ({"versions": ["3.5.2", "3.5.3"]}, W, "3.5.0 to 3.5.2"),
        ({"versions": ["3.3.1"]}, W, "not been tried"),
        ({"members": 1}, W, "1 member: when its machine dies"),
        ({"members": 4}, N, "one more would let"),
        ({"has_leader": False}, F, "none of them leads"),
        ({"silent": {"a:1": "no answer"}}, W, "a:1 does not answer"),
        ({"alarms": ["memberID:7 alarm:NOSPACE "]}, F, "alarm:NOSPACE"),
        ({"size": 1900 << 20}, W, "if its quota is the default"),
        ({"is_compacted": False}, W, "is not compacted: all 100,000 revisions"),
        ({"is_compacted": False, "revision": 10}, N, "says nothing"),
        ({"is_compacted": None}, U, "may not ask"),
    ],
)
def test_what_is_wrong_with_an_etcd(change: dict[str, Any], state: State, words: str) -> None:
    ((found, text),) = worst_of(judge_etcd(replace(ETCD, **change)))
    assert (found, words in text) == (state, True), text


def test_a_larger_quota_has_more_room() -> None:
    assert not worst_of(judge_etcd(replace(ETCD, size=1900 << 20, quota=8 << 30)))
    assert not worst_of(judge_etcd(replace(ETCD, versions=["3.5.3", "3.6.0-rc.1"])))


@pytest.mark.parametrize(
    ("change", "acks", "state", "words"),
    [
        ({"version": "6.0.16"}, 1, F, "too old"),
        ({"has_file": False}, 1, W, "writes no file"),
        ({"settings": {"appendfsync": "everysec"}}, 1, N, "a second of changes"),
        ({"settings": {"appendfsync": "no"}}, 1, W, "half a minute"),
        ({"settings": None}, 1, U, "may not ask"),
        ({"policy": "allkeys-lru", "most_bytes": 1 << 30}, 1, F, "drop the log"),
        ({"policy": "allkeys-lfu"}, 1, W, "if it gets a limit"),
        ({}, 3, F, "2 replicas, where --acks 3"),
        ({}, 0, W, "a failover may lose"),
        ({}, 2, N, "while one is down"),
        ({"replicas": 0}, 0, W, "no replica"),
        ({"is_watched": False}, 1, W, "names no Sentinels"),
        ({"settings": {"appendfsync": "always", "min-replicas-to-write": "0"}}, 1, N, "min-replicas"),
    ],
)
def test_what_is_wrong_with_a_redis(change: dict[str, Any], acks: int, state: State, words: str) -> None:
    ((found, text),) = worst_of(judge_redis(replace(REDIS, **change), acks))
    assert (found, words in text) == (state, True), text


LED = LogFacts(Leadership(3, 9, "a:1"), True, [Follower("a:1", 5), Follower("b:1", 5)], Extent(1, 4, 2))


def test_who_leads() -> None:
    assert [each.found for each in judge_log(LED)] == [
        "a:1 leads in term 3; b:1 stands by",
        "the last checkpoint, of record 4, takes 2 B",
    ]
    assert worst_of(judge_log(replace(LED, followers=[])))[0] == (
        *(W, "a:1 leads in term 3, and nobody stands by"),
    )
    assert worst_of(judge_log(replace(LED, is_alive=False)))[0][0] is W
    assert worst_of(judge_log(replace(LED, leadership=Leadership(3, 9, ""))))[0][0] is N
    (marked, *_) = judge_log(replace(LED, leadership=Leadership(3, 9, "a:1", "record 7 is gone")))
    assert (marked.state, "record 7 is gone" in marked.found) == (F, True)
    assert "rallypoint erase" in marked.hint


# Real engines


def examine(url: str, acks: int = 0) -> list[Finding]:
    return list(engine.check_engine(Situation({}, None, Path(), url, acks)))


def test_a_real_etcd(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path, certificate=make_certificate(tmp_path)) as etcd:
        found = examine(etcd.url("job"))
        states = [(each.state, each.found) for each in found]
        assert (OK, "etcd 3.") in [(state, text[:7]) for state, text in states]
        assert (W, "1 member: when its machine dies, the store does") in states
        assert (N, "nobody leads this job yet") in states
        assert any(state is N and "has not been compacted yet" in text for state, text in states)
        assert not [text for state, text in states if state in (F, U)]
        with _led(etcd.url("job")):
            told = [each.found for each in examine(etcd.url("job"))]
        assert "node-a:1 leads in term 1, and has given no sign for 1.3 s; nobody stands by" in told
        etcd.nodes[0].kill()
        (gone,) = examine(etcd.url("job"))
        assert (gone.state, "no answer" in gone.found) == (F, True)


class _led:  # noqa: N801
    """Somebody has taken the lead, and is gone."""

    def __init__(self, url: str) -> None:
        self._log = open_log(url)

    def __enter__(self) -> None:
        self._log.acquire(self._log.read_leadership(), "node-a:1")

    def __exit__(self, *_: object) -> None:
        self._log.close()


def test_a_user_of_redis_with_few_rights(tmp_path: Path) -> None:
    """The guide names all that are needed. A user that has them can do all that a log does."""
    guide = (Path(__file__).parents[2] / "docs/guides/survival.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"ACL SETUSER .*\n(?:.*\\\n)*.*", guide)
    given = [each[1:].upper() for each in line.split() if each.startswith("+")]
    assert sorted(given) == sorted([*COMMANDS, "INFO", "SELECT"])
    with redis_cluster(tmp_path) as redis:

        def examine_with(*names: str) -> list[Finding]:
            rights = [f"+{name.lower()}" for name in names]
            ask(redis.nodes[0], "ACL SETUSER", "me", "reset", "on", ">hush", "~rallypoint:{job}:*", *rights)
            return examine(url)

        url = redis.url("job").replace("//", "//me:hush@")
        for name in ("XTRIM", "MULTI", "HMGET"):
            (found,) = examine_with(*(each for each in given if each != name))
            assert (found.state, name in found.found) == (F, True), found
        assert ask(redis.nodes[0], "DBSIZE") == 0
        states = [(each.state, each.found) for each in examine_with(*(set(given) - {"INFO"}))]
        assert any(state is U and "may not ask" in text for state, text in states)
        assert not [text for state, text in states if state is F]
        assert not [each for each in examine_with(*given) if each.state is F]
        with closing(open_log(url)) as log:
            term = log.acquire(log.read_leadership(), "a:1")
            for number in (1, 2, 3):
                log.append(term, number, b"record")
            log.renew(term)
            log.put_checkpoint(term, Checkpoint(2, b"state"))
            log.put_checkpoint(term, Checkpoint(3, b"state"))
            log.trim(term, 2)
            assert (log.read(3), log.checkpoint()) == ([b"record"], Checkpoint(3, b"state"))
            log.announce(Follower("b:1", 3))
            assert log.followers() == [Follower("b:1", 3)]
            log.release(term)
            log.mark_lost("why")
            log.erase()
            assert log.measure() == Extent()


def test_a_real_redis(tmp_path: Path) -> None:
    limits = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]
    with redis_cluster(tmp_path, options=limits) as redis:
        states = [(each.state, each.found) for each in examine(redis.url("job"))]
        assert any(state is OK and text.startswith("Redis ") for state, text in states)
        assert any(state is N and "appendfsync everysec" in text for state, text in states)
        assert any(state is F and "maxmemory-policy is allkeys-lru" in text for state, text in states)
        assert (W, "it has no replica: when its machine dies, the store does") in states
        ask(redis.nodes[0], "CONFIG SET", "requirepass", "hush")
        url = redis.url("job").replace("//", "//:wrong-hush@")
        (refused,) = examine(url)
        assert (refused.state, "it refuses" in refused.found) == (F, True)
        assert "hush" not in f"{refused}"


@pytest.mark.slow
def test_a_real_redis_with_replicas(tmp_path: Path) -> None:
    with redis_cluster(tmp_path, replicas=2) as redis:
        told = [(each.state, each.found) for each in examine(redis.url("job"), acks=1)]
        assert (OK, "2 replicas, of which 1 must have a change before it counts") in told
        assert any(state is F for state, _ in [(each.state, each) for each in examine(redis.url("x"), 3)])


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options, its exit code, and no password in what it prints."""
    monkeypatch.setattr(examining, "CHECKS", [each for each in CHECKS if each.name == "engine"])
    url = f"redis://me:hush@127.0.0.1:{free_ports(1)[0]}/0?job=x"
    told = invoke("doctor", "--engine", url, "--acks", "1", "--json")
    assert told.exit_code == 1
    (found,) = json.loads(told.stdout)["findings"]
    assert (found["name"], found["state"]) == ("engine", "failure")
    wrong = invoke("doctor", "--engine", "redis://me:hush@a,b/0")
    assert wrong.exit_code == 2
    assert "several servers" in str(wrong.exception)
    assert "hush" not in f"{told}{wrong}"
    assert invoke("doctor", "--json").exit_code == 0
