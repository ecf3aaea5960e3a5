"""The logs of a replicated store: each engine keeps to the same contract."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from engines import EtcdCluster, RedisCluster
from log_contract import LogContract, Site
from memory_log import Memory, MemoryLog
from rallypoint.store.replica.engines.opening import open_log
from rallypoint.store.replica.log import EngineAwayError, FencedError, Log, LostRecordsError


class TestMemory(LogContract):
    @pytest.fixture
    def site(self) -> Site:
        memories: dict[str, Memory] = {}
        return Site(lambda job: MemoryLog(memories.setdefault(job, Memory())))

    @pytest.mark.parametrize("carried_out", [False, True])
    def test_an_outcome_that_nobody_knows(self, carried_out: bool) -> None:
        memory = Memory()
        log: Log = MemoryLog(memory)
        seen = log.read_leadership()
        memory.fail_next(carried_out=carried_out)
        with pytest.raises(EngineAwayError):
            log.acquire(seen, "a:1")
        assert (memory.leadership.term == 1) is carried_out
        assert log.acquire(seen, "a:1") == 1
        memory.fail_next(carried_out=carried_out)
        with pytest.raises(EngineAwayError):
            log.append(1, 1, b"one")
        assert (memory.last == 1) is carried_out
        log.append(1, 1, b"one")
        memory.fail_next(carried_out=carried_out)
        assert log.read(1) == [b"one"]
        with pytest.raises(EngineAwayError):
            log.renew(1)
        log.renew(1)

    def test_away_and_back(self) -> None:
        memory = Memory()
        log = MemoryLog(memory)
        memory.is_away = True
        with pytest.raises(EngineAwayError):
            log.read_leadership()
        memory.is_away = False
        assert log.acquire(log.read_leadership(), "a:1") == 1

    def test_a_lost_tail_is_noticed(self) -> None:
        memory = Memory()
        log, standby = MemoryLog(memory), MemoryLog(memory)
        term = log.acquire(log.read_leadership(), "a:1")
        for number in range(1, 6):
            log.append(term, number, b"%d" % number)
        memory.lose(2)
        with pytest.raises(LostRecordsError):
            log.append(term, 6, b"6")
        with pytest.raises(LostRecordsError):
            standby.read(6)
        assert standby.read(1) == [b"1", b"2", b"3"]
        with pytest.raises(FencedError):
            standby.renew(term)


_runs = itertools.count()


class TestEtcd(LogContract):
    @pytest.fixture
    def site(self, etcd: EtcdCluster) -> Iterator[Site]:
        run = next(_runs)
        site = Site(lambda job: open_log(etcd.url(f"{run}-{job}")))
        with site.cleanup:
            yield site


class TestRedis(LogContract):
    @pytest.fixture
    def site(self, redis: RedisCluster) -> Iterator[Site]:
        run = next(_runs)
        site = Site(lambda job: open_log(redis.url(f"{run}-{job}")))
        with site.cleanup:
            yield site
