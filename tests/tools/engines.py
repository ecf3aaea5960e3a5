"""Real engines for tests: etcd and Redis as processes on loopback, one node or three, and what befalls them.

    with etcd_cluster(folder, 3) as etcd:
        log = open_log(etcd.url("job"))
        etcd.leader().pause()

They are ready when the block begins, and always ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from processes import end, pause
from rallypoint.store.replica.engines import etcd_client, redis_client
from rallypoint.store.replica.engines.address import parse_address
from rallypoint.store.replica.engines.etcd_client import EtcdClient
from rallypoint.store.replica.engines.etcd_messages import Status
from rallypoint.store.replica.log import EngineAwayError

PATIENCE = 30.0
"""Seconds after which an engine that should be ready is given up."""


@dataclass
class Node:
    """One process of an engine. It can be started again, with what it keeps on disk."""

    command: Sequence[str]
    port: int
    log: Path
    is_ready: Callable[[Node], bool]
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it; `await_ready` waits for it."""
        with self.log.open("ab") as log:
            # etcd wants to be told that nobody supports it on some machines.
            environ = {**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"}
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environ)

    def await_ready(self) -> None:
        await_that(
            lambda: self.is_ready(self),
            lambda: f"{self.command} is not ready:\n{self.log.read_text()[-3000:]}",
        )

    def kill(self) -> None:
        """As a machine that vanishes, but that others are told: connections are reset."""
        if self.process is not None:
            end(self.process)

    def restart(self) -> None:
        self.kill()
        self.start()
        self.await_ready()

    def pause(self) -> None:
        """It keeps its connections and says nothing."""
        assert self.process is not None
        pause(self.process)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def tell_to_end(self) -> None:
        assert self.process is not None
        self.process.terminate()


def await_that(
    condition: Callable[[], bool], complaint: Callable[[], str], seconds: float = PATIENCE
) -> None:
    """Wait until a condition holds: engines do not tell, so they are asked again and again."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.02)


@contextmanager
def asking_for(seconds: float) -> Iterator[None]:
    """Have the logs of this process ask for so long until an engine counts as away.

    It is 2 s for a server, which asks again all the time. A test that calls a log itself, and has no engine
    go away, waits for the answer: the machine may stand still for longer than that.
    """
    with pytest.MonkeyPatch.context() as patched:
        for client in (etcd_client, redis_client):
            patched.setattr(client, "SECONDS_PER_CALL", seconds)
        yield


@contextmanager
def _running(nodes: Sequence[Node]) -> Iterator[None]:
    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.kill)
            node.start()
        for node in nodes:
            node.await_ready()
        yield


def _require(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def make_certificate(folder: Path) -> Path:
    """A certificate of 127.0.0.1 that is its own authority; its key is beside it."""
    _require("openssl")
    path = folder / "tls.pem"
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-subj", "/CN=engine", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"),
        *("-keyout", str(path.with_suffix(".key")), "-out", str(path)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return path


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now. Somebody may take them before they are used, which is rare."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def is_open(port: int) -> bool:
    """Whether somebody listens at a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# etcd -------------------------------------------------------------------------------------------------------


@dataclass
class EtcdCluster:
    """etcd, with one node or three."""

    nodes: Sequence[Node]
    options: str = ""
    """What a URL needs besides: files for TLS."""

    def url(self, job: str, user: str = "") -> str:
        return f"etcd://{user}{','.join(node.address for node in self.nodes)}/{job}{self.options}"

    def leader(self) -> Node:
        """The node that leads by now."""
        statuses = [(node, self._status_of(node)) for node in self.nodes if node.is_running]
        return next(node for node, status in statuses if status and status.member == status.leader)

    def await_ready(self) -> None:
        """Until all nodes know a leader."""
        for node in self.nodes:
            node.await_ready()

    def knows_leader(self, node: Node) -> bool:
        status = self._status_of(node)
        return status is not None and status.leader != 0

    def _status_of(self, node: Node) -> Status | None:
        """What a node says; None if it does not answer."""
        client = EtcdClient(parse_address(f"etcd://{node.address}/{self.options}"))
        try:
            return client.status()
        except EngineAwayError:
            return None
        finally:
            client.close()


@contextmanager
def etcd_cluster(
    folder: Path, count: int = 1, certificate: Path | None = None, options: Sequence[str] = ()
) -> Iterator[EtcdCluster]:
    """etcd with so many nodes. With a certificate, its clients must have the same one.

    The test is skipped where etcd is not installed.
    """
    _require("etcd")
    nodes: list[Node] = []
    cluster = EtcdCluster(nodes)
    if certificate is not None:
        key = certificate.with_suffix(".key")
        files = (f"--cert-file={certificate}", f"--key-file={key}", f"--trusted-ca-file={certificate}")
        options = (*options, *files, "--client-cert-auth")
        cluster.options = f"?ca={certificate}&cert={certificate}&key={key}"
    ports = free_ports(2 * count)
    peers = ",".join(f"n{number}=http://127.0.0.1:{ports[count + number]}" for number in range(count))
    for number, port in enumerate(ports[:count]):
        client = f"{'https' if certificate else 'http'}://127.0.0.1:{port}"
        peer = f"http://127.0.0.1:{ports[count + number]}"
        command = [
            *("etcd", "--name", f"n{number}", "--data-dir", str(folder / f"n{number}")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", peers, "--initial-cluster-state", "new", "--logger", "zap"),
            *options,
        ]
        nodes.append(Node(command, port, folder / f"n{number}.log", cluster.knows_leader))
    with _running(nodes):
        yield cluster


# Redis ------------------------------------------------------------------------------------------------------

MASTER = "mymaster"
"""The name by which the Sentinels know the master."""


@dataclass
class RedisCluster:
    """A server; or a master with replicas, and Sentinels."""

    nodes: Sequence[Node]
    sentinels: Sequence[Node]

    def url(self, job: str) -> str:
        if not self.sentinels:
            return f"redis://{self.nodes[0].address}/0?job={job}"
        return f"redis+sentinel://{','.join(each.address for each in self.sentinels)}/{MASTER}?job={job}"

    def leader(self) -> Node:
        """The master, as a Sentinel says that answers."""
        if not self.sentinels:
            return self.nodes[0]
        port = next(
            int(answer[1])
            for sentinel in self.sentinels
            if sentinel.is_running and (answer := ask(sentinel, "SENTINEL GET-MASTER-ADDR-BY-NAME", MASTER))
        )
        return next(node for node in self.nodes if node.port == port)

    def await_ready(self) -> None:
        """Until all replicas follow the master, and all Sentinels know them."""
        for node in (*self.nodes, *self.sentinels):
            node.await_ready()

    def is_ready(self, node: Node) -> bool:
        about = ask(node, "INFO", "replication") or {}
        followed = [
            value for key, value in about.items() if key.startswith("slave") and "online" in str(value)
        ]
        is_master = about.get("role") == "master" and len(followed) == len(self.nodes) - 1
        return is_master or about.get("master_link_status") == "up"

    def is_sentinel_ready(self, node: Node) -> bool:
        about = ask(node, "SENTINEL MASTER", MASTER) or {}
        known = about.get("num-slaves"), about.get("num-other-sentinels")
        return known == (len(self.nodes) - 1, len(self.sentinels) - 1) and about.get("flags") == "master"


def ask(node: Node, *command: str) -> Any:
    """What a server or a Sentinel answers; None if it does not."""
    client: Any = redis.Redis("127.0.0.1", node.port, socket_timeout=1, socket_connect_timeout=1, protocol=2)
    try:
        return client.execute_command(*command)
    except redis.RedisError:
        return None
    finally:
        client.close()


@contextmanager
def redis_cluster(folder: Path, replicas: int = 0, options: Sequence[str] = ()) -> Iterator[RedisCluster]:
    """A server that writes all to its file. With replicas: these, and three Sentinels.

    The test is skipped where a program is not installed.
    """
    _require("redis-server")
    count = 1 + replicas
    ports = free_ports(count + 3)
    nodes: list[Node] = []
    sentinels: list[Node] = []
    cluster = RedisCluster(nodes, sentinels)
    for number, port in enumerate(ports[:count]):
        (home := folder / f"n{number}").mkdir()
        # In a file, where Sentinels write down who is the master: else one that was comes back as a replica.
        (file := folder / f"n{number}.conf").write_text(f"replicaof 127.0.0.1 {ports[0]}\n" if number else "")
        command = [
            *("redis-server", str(file), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(home)),
            *("--appendonly", "yes", "--save", "", "--repl-diskless-sync-delay", "0", *options),
        ]
        nodes.append(Node(command, port, folder / f"n{number}.log", cluster.is_ready))
    with _running(nodes), ExitStack() as stack:
        if replicas:
            sentinels += [
                _make_sentinel(folder, port, nodes[0], cluster.is_sentinel_ready) for port in ports[count:]
            ]
            stack.enter_context(_running(sentinels))
        yield cluster


@contextmanager
def sentinel(folder: Path, master: Node, options: str = "") -> Iterator[Node]:
    """One Sentinel that watches a server, with more lines for its file."""
    (port,) = free_ports(1)
    node = _make_sentinel(folder, port, master, lambda node: is_open(node.port), options)
    with _running([node]):
        yield node


def _make_sentinel(
    folder: Path, port: int, master: Node, is_ready: Callable[[Node], bool], options: str = ""
) -> Node:
    _require("redis-sentinel")
    file = folder / f"sentinel{port}.conf"
    text = _SENTINEL.format(port=port, folder=folder, master=MASTER, master_port=master.port)
    file.write_text(f"{text}{options}\n")
    return Node(["redis-sentinel", str(file)], port, file.with_suffix(".log"), is_ready)


_SENTINEL = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor {master} 127.0.0.1 {master_port} 2
sentinel down-after-milliseconds {master} 1000
sentinel failover-timeout {master} 5000
"""
