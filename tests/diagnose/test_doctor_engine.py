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
from rallypoint.diagnose.doctor.engine import judge_etcd, judge_log, judge_redis, judge_speed
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, State
from rallypoint.store.replica.engines.etcd_messages import Status
from rallypoint.store.replica.engines.opening import open_log
from rallypoint.store.replica.engines.redis_client import COMMANDS
from rallypoint.store.replica.log import Checkpoint, Extent, Follower, Leadership

F, W, N, U, OK = State.FAILURE, State.WARNING, State.NOTE, State.UNKNOWN, State.OK

MIB = 1 << 20
NODE = Status("3.4.23", 5 * MIB, MIB, 0, 7, 7, 100_000, [])
INFO = {
    "redis_version": "7.0.15",
    "aof_enabled": 1,
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
    "slave0": {"state": "online"},
    "slave1": {"state": "online"},
    "slave2": {"state": "wait_bgsave"},
}
ALWAYS = {"appendfsync": "always", "min-replicas-to-write": "1"}


def etcd(
    *changes: dict[str, Any], silent: str = "", members: int = 3, is_compacted: bool | None = True
) -> list[tuple[State, str]]:
    """What is wrong with a cluster of three nodes, of which the first ones differ in this."""
    nodes = [replace(NODE, **change) for change in changes] + [NODE] * (3 - len(changes))
    return worst_of(judge_etcd(nodes, {silent: "no answer"} if silent else {}, members, is_compacted))


def redis(
    acks: int = 1, settings: dict[str, str] | None = ALWAYS, has_sentinels: bool = True, **changes: Any
) -> list[tuple[State, str]]:
    return worst_of(judge_redis({**INFO, **changes}, settings, acks, has_sentinels=has_sentinels))


def worst_of(findings: Iterable[Finding]) -> list[tuple[State, str]]:
    """All but the good ones."""
    return [(each.state, each.found) for each in findings if each.state is not OK]


def test_nothing_is_wrong_with_good_engines() -> None:
    assert etcd() == redis() == []
    assert etcd({"version": "3.5.3"}, {"version": "3.6.0-rc.1"}) == []
    assert etcd(*[{"size": 1900 * MIB, "quota": 8 << 30}] * 3) == [], "a larger quota has more room"
    assert judge_speed("x", 0.001).state is OK
    assert judge_speed("x", 0.2).state is W


def test_what_is_wrong_with_an_engine() -> None:
    alone: dict[str, Any] = {"slave0": {}, "slave1": {}}
    for told, state, words in (
        (etcd({"version": "3.5.2"}, {"version": "3.5.3"}), W, "3.5.0 to 3.5.2"),
        (etcd({"version": "3.3.1"}), W, "not been tried"),
        (etcd(members=1), W, "1 member: when its machine dies"),
        (etcd(members=4), N, "one more would let"),
        (etcd(silent="a:1"), W, "a:1 does not answer"),
        (etcd(*[{"leader": 0}] * 3), F, "none of them leads"),
        (etcd({"errors": ["memberID:7 alarm:NOSPACE "]}), F, "alarm:NOSPACE"),
        (etcd({"size": 1900 * MIB}), W, "if its quota is the default"),
        (etcd(is_compacted=False), W, "is not compacted: all 100,000 revisions"),
        (etcd(*[{"revision": 10}] * 3, is_compacted=False), N, "says nothing"),
        (etcd(is_compacted=None), U, "may not ask"),
        (redis(redis_version="6.0.16"), F, "too old"),
        (redis(aof_enabled=0), W, "writes no file"),
        (redis(settings={"appendfsync": "everysec"}), N, "a second of changes"),
        (redis(settings={"appendfsync": "no"}), W, "half a minute"),
        (redis(settings=None), U, "may not ask"),
        (redis(maxmemory_policy="allkeys-lru", maxmemory=1 << 30), F, "drop the log"),
        (redis(maxmemory_policy="allkeys-lfu"), W, "if it gets a limit"),
        (redis(acks=3), F, "2 replicas, where --acks 3"),
        (redis(acks=0), W, "a failover may lose"),
        (redis(acks=2), N, "while one is down"),
        (redis(acks=0, **alone), W, "no replica"),
        (redis(has_sentinels=False), W, "names no Sentinels"),
        (redis(settings={**ALWAYS, "min-replicas-to-write": "0"}), N, "min-replicas"),
    ):
        ((found, text),) = told
        assert (found, words in text) == (state, True), (words, text)


def test_who_leads() -> None:
    extent, both = Extent(1, 4, 2), [Follower("a:1", 5), Follower("b:1", 5)]

    def told(leader: str, lost: str = "", is_alive: bool = True, others: int = 2) -> tuple[State, str]:
        first, *more = judge_log(Leadership(3, 9, leader, lost), is_alive, both[:others], extent)
        assert [each.found for each in more] == ["the last checkpoint, of record 4, takes 2 B"]
        assert ("rallypoint erase" in first.hint) == bool(lost)
        return first.state, first.found

    assert told("a:1") == (OK, "a:1 leads in term 3; b:1 stands by")
    assert told("a:1", others=1) == (W, "a:1 leads in term 3, and nobody stands by")
    assert told("a:1", is_alive=False)[0] is W
    assert told("") == (N, "nobody leads this job; a:1, b:1 stand by")
    state, found = told("a:1", "record 7 is gone")
    assert (state, "record 7 is gone" in found) == (F, True)


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
