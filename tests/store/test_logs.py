"""The logs of a replicated store: each engine keeps to the same contract."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from engines import EtcdCluster, RedisCluster
from log_contract import LogContract, Site
from memory_log import Memory, MemoryLog
from rallypoint.store.replica.engines.opening import open_log


class TestMemory(LogContract):
    @pytest.fixture
    def site(self) -> Site:
        memories: dict[str, Memory] = {}
        return Site(lambda job: MemoryLog(memories.setdefault(job, Memory())))


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
