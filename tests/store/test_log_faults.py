"""Logs on real engines that are killed, paused and cut off, and who may use them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from engines import (
    MASTER,
    EtcdCluster,
    Node,
    RedisCluster,
    ask,
    asking_for,
    etcd_cluster,
    free_ports,
    make_certificate,
    redis_cluster,
    sentinel,
)
from log_contract import read_all
from rallypoint.store.replica.core.records import FormatError
from rallypoint.store.replica.engines import etcd_messages
from rallypoint.store.replica.engines.address import parse_address
from rallypoint.store.replica.engines.etcd_client import EtcdClient
from rallypoint.store.replica.engines.etcd_messages import Outcome, encode, put, transaction
from rallypoint.store.replica.engines.opening import open_log
from rallypoint.store.replica.log import (
    MOST_BYTES,
    Checkpoint,
    EngineAwayError,
    EngineRefusedError,
    FencedError,
    Follower,
    Leadership,
    Log,
    LostRecordsError,
    TrimmedError,
)

PATIENCE = 20.0
SOON = 2.0
"""How long a server asks until it takes an engine for away."""


@contextmanager
def leading(url: str, acks: int = 0) -> Iterator[tuple[Log, int]]:
    """A log that leads, and its term."""
    with closing(open_log(url, acks=acks)) as log:
        yield log, log.acquire(log.read_leadership(), "a:1")


def append_until_done(log: Log, term: int, sequence: int, data: bytes) -> float:
    """Append a record, again and again while nobody knows; how many seconds it took."""
    begun = time.monotonic()
    while True:
        try:
            log.append(term, sequence, data)
            return time.monotonic() - begun
        except EngineAwayError:
            assert time.monotonic() < begun + PATIENCE


def _tries(seen: Leadership, number: int, log: Log) -> bool:
    """Whether a log acquires the next term, and appends a record of its own."""
    try:
        term = log.acquire(seen, "a:1")
    except FencedError:
        return False
    log.append(term, number, repr(log).encode())
    return True


class LoneNodeContract:
    """What befalls a single node. A class has the fixtures `node` and `url`."""

    @pytest.fixture(autouse=True)
    def patience(self) -> Iterator[None]:
        with asking_for(PATIENCE):
            yield

    def test_paused_killed_and_back(self, node: Node, url: str) -> None:
        with leading(url) as (log, term):
            log.append(term, 1, b"one")
            node.pause()
            begun = time.monotonic()
            with asking_for(SOON), pytest.raises(EngineAwayError):
                log.append(term, 2, b"two")
            assert time.monotonic() - begun < PATIENCE / 2
            node.resume()
            append_until_done(log, term, 2, b"two")
            log.put_checkpoint(term, Checkpoint(1, b"state"))
            node.kill()
            node.start()
            append_until_done(log, term, 3, b"three")
            log.renew(term)
            assert read_all(log) == [b"one", b"two", b"three"]
            assert log.checkpoint() == Checkpoint(1, b"state")

    def test_closing_ends_a_call_under_way(self, node: Node, url: str) -> None:
        log = open_log(url)
        log.read_leadership()
        node.pause()
        ended = threading.Event()

        def look() -> None:
            with pytest.raises(EngineAwayError):
                log.read_leadership()
            ended.set()

        caller = threading.Thread(target=look)
        caller.start()
        log.close()
        try:
            assert ended.wait(PATIENCE)
        finally:
            node.resume()
            caller.join()
        with pytest.raises(EngineAwayError):
            log.read_leadership()

    def test_one_of_several_acquires_a_term(self, node: Node, url: str) -> None:
        """And its record is the only one of its number, in each of many rounds."""
        with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
            logs = [stack.enter_context(closing(open_log(url))) for _ in range(4)]
            for number in range(1, 21):
                seen = logs[0].read_leadership()
                won = list(pool.map(partial(_tries, seen, number), logs))
                assert won.count(True) == 1
                assert logs[won.index(True)].read(number) == [repr(logs[won.index(True)]).encode()]

    def test_many_short_records_are_read_by_few_calls(self, node: Node, url: str) -> None:
        with leading(url) as (log, term), closing(open_log(url)) as other:
            for number in range(1, 201):
                log.append(term, number, b"%d" % number)
            log.append(term, 201, bytes(MOST_BYTES))
            log.renew(term)
            first = other.read(1)
            rest = other.read(1 + len(first))
            assert [*first, *rest] == [*(b"%d" % number for number in range(1, 201)), bytes(MOST_BYTES)]

    @pytest.mark.slow
    def test_a_follower_that_says_nothing_is_forgotten(self, node: Node, url: str) -> None:
        with closing(open_log(url)) as log:
            log.announce(Follower("gone", 1))
            deadline = time.monotonic() + PATIENCE
            while log.followers() != [Follower("here", 2)]:
                assert time.monotonic() < deadline
                log.announce(Follower("here", 2))
                time.sleep(0.2)


class TestEtcdNode(LoneNodeContract):
    @pytest.fixture
    def node(self, etcd: EtcdCluster) -> Node:
        return etcd.nodes[0]

    @pytest.fixture
    def url(self, etcd: EtcdCluster, request: pytest.FixtureRequest) -> str:
        return etcd.url(request.node.name)

    def test_trim_compacts_up_to_the_trim_before_if_a_lot_is_in_use(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = EtcdClient(parse_address(url))
        with leading(url) as (log, term), closing(client):
            for number in range(1, 4):
                log.append(term, number, b"record")
            now = transaction([], [])
            log.trim(term, 1)
            log.trim(term, 2)
            before = client.transact(now).revision
            monkeypatch.setattr("rallypoint.store.replica.engines.etcd.COMPACT_BYTES", 0)
            log.trim(term, 2)
            log.append(term, 4, b"record")
            log.trim(term, 3)
            with pytest.raises(EngineRefusedError, match="compacted"):
                client.compact(before)
            assert log.read(4) == [b"record"]

    def test_a_read_far_behind_looks_at_few_keys_and_trimming_lets_others_write(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """etcd counts all keys of a range, whatever its limit. And a trim is done in steps, each with a
        revision of its own: the cluster writes nothing else during one."""
        counts: list[int] = []

        def read_outcome(data: bytes) -> Outcome:
            outcome = original(data)
            counts.extend(outcome.counts)
            return outcome

        original = etcd_messages.read_outcome
        monkeypatch.setattr(etcd_messages, "read_outcome", read_outcome)
        client = EtcdClient(parse_address(url))
        with leading(url) as (log, term), closing(client):
            _fill(client, url, 5_000)
            assert len(read_all(log)) == 5_000
            assert max(counts) < 2_000
            before = client.transact(transaction([], [])).revision
            log.put_checkpoint(term, Checkpoint(4_990, b"state"))
            log.trim(term, 4_990)
            assert client.transact(transaction([], [])).revision - before >= 5
            for sequence in (1, 3_000, 4_989):
                with pytest.raises(TrimmedError):
                    log.read(sequence)
            assert len(log.read(4_991)) == 10
            log.append(term, 5_001, b"next")

    def test_an_erasure_that_is_carried_out_late_spares_a_new_log(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As by a node that was paused, after another one had answered."""
        requests: list[bytes] = []

        def transact(client: EtcdClient, request: bytes, *, seconds: float = 1.0) -> Outcome:
            requests.append(request)
            return original(client, request, seconds=seconds)

        original = EtcdClient.transact
        client = EtcdClient(parse_address(url))
        with closing(open_log(url)) as log, closing(client):
            log.append(log.acquire(log.read_leadership(), "a:1"), 1, b"old")
            with monkeypatch.context() as patched:
                patched.setattr(EtcdClient, "transact", transact)
                log.erase()
            term = log.acquire(log.read_leadership(), "a:1")
            log.append(term, 1, b"new")
            for request in requests:
                client.transact(request)
            log.append(term, 2, b"new")
            assert read_all(log) == [b"new", b"new"]

    def test_what_cannot_be_read_is_told(self, url: str) -> None:
        client = EtcdClient(parse_address(url))
        with leading(url) as (log, term), closing(client):
            _write(client, url, "checkpoint", b"x")
            _write(client, url, "followers/a", b"\xff")
            for call in (log.checkpoint, log.measure, log.followers, lambda: log.read(1)):
                with pytest.raises(FormatError, match="cannot be read"):
                    call()
            _write(client, url, "leader", b"\xff 1")
            seen = Leadership(0, 0)
            for ask_who in (log.read_leadership, lambda: log.renew(term), lambda: log.acquire(seen, "b:1")):
                with pytest.raises(FormatError, match="who leads cannot be read"):
                    ask_who()


def _write(client: EtcdClient, url: str, name: str, value: bytes) -> None:
    client.transact(transaction([], [put(f"/rallypoint/{parse_address(url).job}/{name}".encode(), value)]))


def _fill(client: EtcdClient, url: str, count: int) -> None:
    """Short records from 1 on, many at once."""
    key = f"/rallypoint/{parse_address(url).job}/log/"
    for start in range(1, count + 1, 125):
        numbers = range(start, min(start + 125, count + 1))
        client.transact(transaction([], [put(f"{key}{each:020}".encode(), bytes(8)) for each in numbers]))


class TestRedisNode(LoneNodeContract):
    @pytest.fixture
    def node(self, redis: RedisCluster) -> Node:
        return redis.nodes[0]

    @pytest.fixture
    def url(self, redis: RedisCluster, request: pytest.FixtureRequest) -> str:
        return redis.url(request.node.name)

    def test_a_checkpoint_whose_parts_are_gone(self, redis: RedisCluster, url: str) -> None:
        with leading(url) as (log, term):
            log.append(term, 1, b"one")
            log.put_checkpoint(term, Checkpoint(1, b"state"))
            key = f"rallypoint:{{{parse_address(url).job}}}:checkpoint"
            assert ask(redis.nodes[0], "HDEL", key, "0") == 1
            with pytest.raises(LostRecordsError, match="parts of the last checkpoint are gone"):
                log.checkpoint()

    def test_what_cannot_be_read_is_told(self, redis: RedisCluster, url: str) -> None:
        prefix = f"rallypoint:{{{parse_address(url).job}}}:"
        with leading(url) as (log, term):
            ask(redis.nodes[0], "HSET", f"{prefix}checkpoint", "name", "x", "parts", "1", "length", "y")
            ask(redis.nodes[0], "HSET", f"{prefix}followers", "a:1", "\u20ac")
            for call in (log.checkpoint, log.measure, log.followers):
                with pytest.raises(FormatError, match="cannot be read"):
                    call()
            ask(redis.nodes[0], "XADD", f"{prefix}log", "1-0", "no", "data")
            ask(redis.nodes[0], "HSET", f"{prefix}leader", "last", "1", "kept", "1")
            with pytest.raises(FormatError, match="a record from 1 on cannot be read"):
                log.read(1)
            ask(redis.nodes[0], "HSET", f"{prefix}leader", "term", "first")
            seen = Leadership(0, 0)
            for ask_who in (log.read_leadership, lambda: log.renew(term), lambda: log.acquire(seen, "b:1")):
                with pytest.raises(FormatError, match="who leads cannot be read"):
                    ask_who()

    def test_asking_who_stands_by_writes_nothing(self, redis: RedisCluster, url: str) -> None:
        key = f"rallypoint:{{{parse_address(url).job}}}:followers"
        ask(redis.nodes[0], "HSET", key, "gone", "7 100")
        with closing(open_log(url)) as log:
            assert log.followers() == []
            assert ask(redis.nodes[0], "HLEN", key) == 1
            log.announce(Follower("here", 2))
            ask(redis.nodes[0], "HSET", key, "odd", "no number")
            log.announce(Follower("here", 2))
            assert log.followers() == [Follower("here", 2)]
            assert ask(redis.nodes[0], "HLEN", key) == 1

    def test_a_record_that_is_not_the_one_that_it_was(self, redis: RedisCluster) -> None:
        """As when a master that was lost had acknowledged it: then another history has begun."""
        url = redis.url("other-history")
        with closing(open_log(url)) as standby, closing(open_log(url)) as leader:
            term = leader.acquire(leader.read_leadership(), "a:1")
            leader.append(term, 1, b"lost")
            assert standby.read(1) == [b"lost"]
            assert ask(redis.nodes[0], "FLUSHALL")
            with closing(open_log(url)) as next_leader:
                assert next_leader.acquire(next_leader.read_leadership(), "b:1") == term
                next_leader.append(term, 1, b"another")
                with pytest.raises(LostRecordsError):
                    standby.read(2)
                next_leader.append(term, 2, b"two")
                with pytest.raises(LostRecordsError):
                    standby.read(2)
                with pytest.raises(FencedError):
                    leader.append(term, 2, b"two")


def test_redis_with_tls_and_a_password(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    key = certificate.with_suffix(".key")
    (port,) = free_ports(1)
    files = (
        "--tls-cert-file",
        str(certificate),
        "--tls-key-file",
        str(key),
        "--tls-ca-cert-file",
        str(certificate),
    )
    place = f"127.0.0.1:{port}/0?ca={certificate}&cert={certificate}&key={key}"
    with redis_cluster(tmp_path, options=("--tls-port", str(port), *files)) as redis:
        ask(redis.nodes[0], "CONFIG SET", "requirepass", "se@cret")
        for wrong in ("", ":guessed@"):
            url = f"rediss://{wrong}{place}"
            with closing(open_log(url)) as log, pytest.raises(EngineRefusedError) as caught:
                log.read_leadership()
            assert "guessed" not in str(caught.value)
            assert "RALLYPOINT_ENGINE_PASSWORD" in caught.value.hint
        with closing(open_log(f"rediss://:se%40cret@{place}")) as log:
            log.append(log.acquire(log.read_leadership(), "a:1"), 1, b"one")
            assert log.read(1) == [b"one"]
            assert "se@cret" not in repr(log) + log.name


def test_sentinels_with_a_password(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("hush\n", encoding="utf-8")
    with redis_cluster(tmp_path) as redis, sentinel(tmp_path, redis.nodes[0], "requirepass hush") as node:
        url = f"redis+sentinel://{node.address}/{MASTER}?job=job"
        with closing(open_log(url)) as log, pytest.raises(EngineRefusedError) as caught:
            log.read_leadership()
        assert "sentinel-password-file" in caught.value.hint
        assert "AuthenticationError" in caught.value.message
        assert "<" not in caught.value.message
        with closing(open_log(f"{url}&sentinel-password-file={password}")) as log:
            assert log.acquire(log.read_leadership(), "a:1") == 1
            assert "hush" not in repr(log) + log.name


def test_etcd_with_tls_and_users(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    # What is not yet in its file when it is killed is done again: tokens would be made anew, too.
    with etcd_cluster(tmp_path, certificate=certificate, options=["--backend-batch-limit=1"]) as etcd:
        _enable_users(etcd.nodes[0].address, certificate)
        for wrong in ("", "root:guessed@"):
            with (
                closing(open_log(etcd.url("job", wrong))) as log,
                pytest.raises(EngineRefusedError) as caught,
            ):
                log.read_leadership()
            assert "guessed" not in str(caught.value)
            assert "RALLYPOINT_ENGINE_PASSWORD" in caught.value.hint
        with leading(etcd.url("job", "root:se%40cret@")) as (log, term):
            log.append(term, 1, b"one")
            etcd.nodes[0].restart()  # tokens are forgotten by that
            append_until_done(log, term, 2, b"two")
            assert read_all(log) == [b"one", b"two"]
            assert "se@cret" not in repr(log) + log.name


def _enable_users(address: str, certificate: Path) -> None:
    """Let only the user `root` in, as `etcdctl auth enable` does."""
    pem, key = certificate.read_bytes(), certificate.with_suffix(".key").read_bytes()
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(pem, key, pem)) as channel:
        for method, request in (
            ("UserAdd", encode((1, b"root"), (2, b"se@cret"))),
            ("RoleAdd", encode((1, b"root"))),
            ("UserGrantRole", encode((1, b"root"), (2, b"root"))),
            ("AuthEnable", b""),
        ):
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
            call = channel.unary_unary(f"/etcdserverpb.Auth/{method}")
            call(request, timeout=PATIENCE)


@pytest.fixture(scope="module")
def three_etcds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd"), 3) as cluster:
        yield cluster


class ClusterContract:
    """What befalls several nodes. A class has the fixture `cluster`."""

    acks = 0

    @pytest.mark.parametrize("fault", ["kill", "pause"])
    def test_appends_go_on_without_the_leader(self, cluster: EtcdCluster | RedisCluster, fault: str) -> None:
        """And nothing is lost or doubled; then the node comes back, another goes.

        A master of Redis that was paused still takes itself for the master when it goes on.
        """
        url = cluster.url(fault)
        with leading(url, self.acks) as (log, term), closing(open_log(url)) as other:
            for number in range(1, 301):
                if number % 100 == 50:
                    leader = cluster.leader()
                    leader.kill() if fault == "kill" else leader.pause()
                append_until_done(log, term, number, b"%d" % number)
                if number % 100 == 0:
                    leader.start() if fault == "kill" else leader.resume()
                    cluster.await_ready()
            log.renew(term)
            assert read_all(other) == [b"%d" % number for number in range(1, 301)]


@pytest.mark.slow
class TestEtcdCluster(ClusterContract):
    @pytest.fixture
    def cluster(self, three_etcds: EtcdCluster) -> EtcdCluster:
        return three_etcds

    def test_without_most_nodes_nothing_is_acknowledged(self, three_etcds: EtcdCluster) -> None:
        etcd = three_etcds
        with leading(etcd.url("few")) as (log, term):
            log.append(term, 1, b"one")
            for node in etcd.nodes[1:]:
                node.kill()
            with pytest.raises(EngineAwayError):
                log.append(term, 2, b"two")
            with pytest.raises(EngineAwayError):
                log.read_leadership()
            for node in etcd.nodes[1:]:
                node.start()
            append_until_done(log, term, 2, b"two")
            assert read_all(log) == [b"one", b"two"]


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path_factory.mktemp("redis"), 2) as cluster:
        yield cluster


@pytest.mark.slow
class TestSentinels(ClusterContract):
    acks = 1

    @pytest.fixture
    def cluster(self, sentinels: RedisCluster) -> RedisCluster:
        return sentinels

    def test_a_master_that_is_being_replaced_takes_nothing_that_counts(self, sentinels: RedisCluster) -> None:
        """For a second it does not know, and still has the other replica, which acknowledges."""
        url = sentinels.url("replaced")
        with closing(open_log(url, acks=1)) as log, closing(open_log(url)) as other:
            term, number = log.acquire(log.read_leadership(), "a:1"), 0
            for _ in range(3):
                old = sentinels.leader()
                log.renew(term)  # as a leader does all the time
                assert ask(sentinels.sentinels[0], "SENTINEL FAILOVER", MASTER)
                until, limit = time.monotonic() + 3.0, time.monotonic() + 60.0  # for a busy machine
                while time.monotonic() < until or (sentinels.leader() is old and time.monotonic() < limit):
                    number += 1
                    append_until_done(log, term, number, b"%d" % number)
                assert sentinels.leader() is not old
                sentinels.await_ready()
            log.renew(term)
            assert read_all(other) == [b"%d" % each for each in range(1, number + 1)]

    def test_what_replicas_do_not_have_does_not_count(self, sentinels: RedisCluster) -> None:
        url = sentinels.url("replicas")
        master = sentinels.leader()
        replicas = [node for node in sentinels.nodes if node is not master]
        with leading(url, 2) as (log, term), closing(open_log(url, acks=2)) as other:
            log.append(term, 1, b"one")
            replicas[0].pause()
            with pytest.raises(EngineAwayError, match="replicas"):
                log.append(term, 2, b"two")
            with pytest.raises(EngineAwayError):
                log.append(term, 2, b"two")  # though nothing is left to write
            with pytest.raises(EngineAwayError):
                log.renew(term)
            assert other.read(1) == [b"one"]
            replicas[0].resume()
            append_until_done(log, term, 2, b"two")
            log.renew(term)
            assert other.read(2) == [b"two"]
            sentinels.await_ready()

    def test_a_replica_that_had_not_all_becomes_the_master(self, sentinels: RedisCluster) -> None:
        """Without acknowledgements, that loses records. Whoever knows them notices."""
        url = sentinels.url("stale")
        master = sentinels.leader()
        replicas = [node for node in sentinels.nodes if node is not master]
        with leading(url) as (log, term), closing(open_log(url)) as other:
            log.append(term, 1, b"one")
            with closing(open_log(sentinels.url("later"), acks=2)) as later:
                later.acquire(
                    later.read_leadership(), "a:1"
                )  # replicas that have this have all that was before
            for node in replicas:
                node.kill()
            log.append(term, 2, b"lost")
            assert other.read(1) == [b"one", b"lost"]
            master.kill()
            for node in replicas:
                node.start()
            with pytest.raises(LostRecordsError):
                append_until_done(log, term, 3, b"three")
            with pytest.raises(LostRecordsError):
                other.read(3)
