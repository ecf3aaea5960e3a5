"""`rallypoint erase` on real engines: it removes a job, and only one that nobody serves."""

from __future__ import annotations

import json
import threading
from contextlib import closing

import pytest

from command_line import invoke
from engines import EtcdCluster, RedisCluster, ask
from rallypoint.store.replica.engines.opening import open_log
from rallypoint.store.replica.log import Checkpoint, Extent, Follower, Leadership


@pytest.fixture(params=["etcd", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    cluster: EtcdCluster | RedisCluster = request.getfixturevalue(request.param)
    return cluster.url(request.node.originalname)


def test_a_job_that_was_killed_is_removed(url: str) -> None:
    with closing(open_log(url)) as log, closing(open_log(f"{url}2")) as other:
        other.acquire(other.read_leadership(), "a:1")
        term = log.acquire(log.read_leadership(), "a:1")
        for number in (1, 2):
            log.append(term, number, b"record")
        log.put_checkpoint(term, Checkpoint(2, b"state"))
        log.mark_lost("record 7 is gone")
        told = invoke("erase", "--engine", url)
        assert (told.exit_code, told.stdout) == (0, f"erased {log.name}: 2 records and a checkpoint of 5 B\n")
        assert (log.read_leadership(), log.measure()) == (Leadership(), Extent())
        again = invoke("erase", "--engine", url)
        assert again.exit_code == 1
        assert "there is nothing of this job" in str(again.exception)
        assert other.read_leadership().term == 1
        log.acquire(log.read_leadership(), "a:1")
        told = invoke("erase", "--json", environ={"RALLYPOINT_ENGINE": url})
        assert json.loads(told.stdout) == {"erased": log.name, "records": 0, "checkpoint_bytes": 0, "term": 1}


def test_a_job_that_somebody_serves_is_left_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.cli.erase._PATIENCE", 0.0)
    stopped = threading.Event()

    def lead() -> None:
        while not stopped.wait(0.1):
            log.renew(term)

    with closing(open_log(url)) as log:
        term = log.acquire(log.read_leadership(), "a:1")
        log.append(term, 1, b"record")
        leader = threading.Thread(target=lead)
        leader.start()
        try:
            refused = invoke("erase", "--engine", url)
        finally:
            stopped.set()
            leader.join()
        assert refused.exit_code == 1
        assert "a:1 leads" in str(refused.exception)
        assert log.read(1) == [b"record"]


def test_what_cannot_be_read_is_removed_too(redis: RedisCluster) -> None:
    key = "rallypoint:{unreadable}:leader"
    assert ask(redis.nodes[0], "HSET", key, "term", "first") == 1
    told = invoke("erase", "--engine", redis.url("unreadable"))
    assert (told.exit_code, told.stdout[:7]) == (0, "erased ")
    assert ask(redis.nodes[0], "EXISTS", key) == 0


def test_a_job_for_which_somebody_stands_by(redis: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.cli.erase._PATIENCE", 0.0)
    url = redis.url("standby")
    with closing(open_log(url)) as log:
        log.announce(Follower("b:1", 0))
        refused = invoke("erase", "--engine", url)
    assert refused.exit_code == 1
    assert "stands by: b:1" in str(refused.exception)


def test_what_is_no_engine() -> None:
    assert invoke("erase").exit_code == 2
    assert invoke("erase", "--engine", "http://x").exit_code == 2
