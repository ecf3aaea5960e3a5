"""The log of a store that is written to for long: checkpoints keep it short, and memory does not grow.

An hour of log in seconds: the processes make a checkpoint after every MiB, and not after every 32.
"""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from benchmarks.clients import connect
from engines import (
    EtcdCluster,
    RedisCluster,
    ask,
    await_that,
    etcd_cluster,
    free_ports,
    is_open,
    redis_cluster,
)
from rallypoint.bench.clients import TORCH
from rallypoint.store.replica.engines.address import parse_address
from rallypoint.store.replica.engines.etcd_client import EtcdClient
from rallypoint.store.replica.engines.opening import open_log
from rallypoint.store.replica.log import TrimmedError
from rallypoint.store.wire.encoding import blob, pack_u32, request
from rallypoint.store.wire.opcodes import Op
from survival import FrontEnd, front_end

MIB = 1 << 20
_WITH_MANY_CHECKPOINTS = """
from rallypoint.cli.main import main
from rallypoint.store.replica import leading
from rallypoint.store.replica.engines import etcd
leading.CHECKPOINT_BYTES = 1 << 20
etcd.COMPACT_BYTES = 8 << 20
main()
"""
_CLIENTS = 4
_KEYS = 64
_WRITE_BYTES = 64 * 1024
_CHECKPOINTS = 120


def _values(turn: int) -> dict[bytes, bytes]:
    """What is written in a turn, to the keys of the client whose turn it is."""
    return {
        b"/k/%d/%d" % (turn % _CLIENTS, number): b"%d.%d " % (turn, number) * (_WRITE_BYTES // _KEYS // 8)
        for number in range(_KEYS)
    }


class Writer:
    """Clients that replace the values of their keys again and again."""

    def __init__(self, port: int, stack: ExitStack) -> None:
        self._clients = [stack.enter_context(closing(connect(port, TORCH))) for _ in range(_CLIENTS)]
        self._turns = itertools.count()
        self.last = 0

    def write(self, count: int) -> None:
        """About so many bytes."""
        for _ in range(0, count, _WRITE_BYTES * _CLIENTS):
            for client in self._clients:
                self.last = next(self._turns)
                sets = b"".join(request(Op.SET, *pair) for pair in _values(self.last).items())
                client.sendall(sets + request(Op.PING, tail=pack_u32(self.last)))
            for client in self._clients:
                client.recv(4, socket.MSG_WAITALL)


def _bytes_in(cluster: EtcdCluster | RedisCluster) -> int:
    """What an engine keeps."""
    if isinstance(cluster, RedisCluster):
        return int(ask(cluster.nodes[0], "INFO", "memory")["used_memory"])
    with closing(EtcdClient(parse_address(cluster.url("job")))) as client:
        return client.status().size_in_use


@pytest.fixture(params=["etcd", "redis"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdCluster | RedisCluster]:
    start = etcd_cluster if request.param == "etcd" else redis_cluster
    with start(tmp_path) as running:
        yield running


def _start(url: str, port: int, folder: Path, stack: ExitStack) -> FrontEnd:
    """A process of the store, which makes many checkpoints."""
    server = front_end(url, 0, port, folder / f"serve{port}.log")
    server.command = [sys.executable, "-c", _WITH_MANY_CHECKPOINTS, *server.command[3:]]
    stack.callback(server.kill)
    server.start()
    server.await_ready()
    return server


@pytest.mark.slow
def test_the_log_stays_short_and_memory_does_not_grow(
    cluster: EtcdCluster | RedisCluster, tmp_path: Path
) -> None:
    url = cluster.url("job")
    with ExitStack() as stack:
        log = stack.enter_context(closing(open_log(url)))

        def start(port: int) -> FrontEnd:
            return _start(url, port, tmp_path, stack)

        ports = free_ports(3)
        leader = start(ports[0])
        await_that(lambda: log.read_leadership().address == leader.address, lambda: "nobody leads")
        standby = start(ports[1])
        await_that(lambda: is_open(leader.port), lambda: "it does not listen")
        writer = Writer(leader.port, stack)
        sizes: list[tuple[int, int, int]] = []
        for step in range(6):
            writer.write(_CHECKPOINTS * MIB // 6)
            both = [
                psutil.Process(each.process.pid).memory_info().rss
                for each in (leader, standby)
                if each.process
            ]
            sizes.append((_bytes_in(cluster), both[0], both[1]))
            print(", ".join(f"{size / MIB:.1f}" for size in sizes[-1]), "MiB in engine, leader, standby")
            if step == 2:
                late = start(ports[2])
        assert max(engine for engine, _, _ in sizes) < 24 * MIB
        for name, resident in (
            ("leader", [each[1] for each in sizes]),
            ("standby", [each[2] for each in sizes]),
        ):
            grown = max(resident[3:]) - max(resident[:3])
            assert grown < 8 * MIB, f"{name} has grown by {grown / MIB:.1f} MiB"
        with pytest.raises(TrimmedError):
            log.read(1)
        await_that(
            lambda: any(each.name == late.address and each.sequence for each in log.followers()),
            lambda: "the late one does not stand by",
        )
        leader.kill()
        standby.kill()
        await_that(
            lambda: log.read_leadership().address == late.address, lambda: "the late one does not lead"
        )
        await_that(lambda: is_open(late.port), lambda: "it does not listen")
        with closing(connect(late.port, TORCH)) as client:
            for turn in range(writer.last - _CLIENTS + 1, writer.last + 1):
                for key, value in _values(turn).items():
                    client.sendall(request(Op.GET, key))
                    assert client.recv(len(blob(value)), socket.MSG_WAITALL) == blob(value)
