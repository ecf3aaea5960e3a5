"""A store on a real engine, from outside: two processes, a relay, a client. See `test_survival` for more."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines import await_that, free_ports, redis_cluster
from processes import relaying
from rallypoint import TCPStore
from rallypoint.errors import ConnectError, RallypointError, StoreTimeoutError
from rallypoint.store.replica.engines.opening import open_log
from rallypoint.store.replica.log import Log
from survival import FrontEnd, front_end


@dataclass
class Site:
    """Two processes of a store, a client behind a relay, and a look at the log from outside."""

    servers: list[FrontEnd]
    store: TCPStore
    log: Log
    files: Path

    def leader(self, *, but: FrontEnd | None = None) -> FrontEnd:
        """Who leads, as soon as somebody does, who is not this one."""

        def found() -> FrontEnd | None:
            leading = [each for each in self.servers if each.address == self.log.read_leadership().address]
            return leading[0] if leading and leading[0] is not but else None

        await_that(lambda: found() is not None, lambda: "nobody leads")
        leader = found()
        assert leader is not None
        return leader


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        url = stack.enter_context(redis_cluster(tmp_path)).url("job")
        servers: list[FrontEnd] = []
        for port in free_ports(2):
            servers.append(front_end(url, 0, port, tmp_path / f"{port}.log"))
            stack.callback(servers[-1].kill)
            servers[-1].start()
        log = open_log(url)
        stack.callback(log.close)
        file = stack.enter_context((tmp_path / "relay.log").open("w+"))
        relay = stack.enter_context(relaying(",".join(each.address for each in servers), file))
        store = stack.enter_context(TCPStore("127.0.0.1", relay.port, timeout=30))
        yield Site(servers, store, log, tmp_path)


def test_the_store_goes_on_whatever_happens_to_its_leader(site: Site) -> None:
    store = site.store
    store.set("kept", "value")
    store.queue_push("queue", "first")
    assert store.add("sum", 1) == 1

    killed = site.leader()
    killed.kill()
    assert store.add("sum", 1) == 2
    assert (store.get("kept"), store.queue_pop("queue")) == (b"value", b"first")
    killed.restart()

    told = site.leader(but=killed)
    told.tell_to_end()  # it hands the lead over, so nobody has to wait for its silence
    assert store.add("sum", 1) == 3
    assert site.leader(but=told) is killed
    told.restart()

    paused = site.leader(but=told)
    paused.pause()
    assert store.add("sum", 1) == 4
    assert site.leader(but=paused) is told
    paused.resume()
    await_that(lambda: "leads no more" in paused.log.read_text(), lambda: "it believes to lead")
    assert store.add("sum", 1) == 5
    assert store.get("kept") == b"value"


def test_each_job_has_a_fresh_store_behind_relays_with_a_name(site: Site) -> None:
    places = ",".join(each.address for each in site.servers)
    site.store.set("address", "of no job")
    with ExitStack() as stack:
        stores = []
        for number, name in enumerate(("run-1", "run-1", "run-2")):
            file = stack.enter_context((site.files / f"named-{number}.log").open("w+"))
            relay = stack.enter_context(relaying(places, file, ["--name", name]))
            stores.append(stack.enter_context(TCPStore("127.0.0.1", relay.port, timeout=30)))
        first, same, second = stores
        assert not first.check(["address"])
        first.set("address", "of the first")
        assert same.get("address") == b"of the first"
        assert not second.check(["address"])
        site.leader().kill()
        assert same.get("address") == b"of the first"
        assert second.add("n", 1) == 1
    assert site.store.get("address") == b"of no job"


def test_nothing_changes_while_the_engine_is_away(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(redis_cluster(tmp_path))
        server = front_end(cluster.url("job"), 0, free_ports(1)[0], tmp_path / "serve.log")
        stack.callback(server.kill)
        server.start()
        await_that(lambda: "leads from now on" in server.log.read_text(), lambda: "it does not lead")
        store = stack.enter_context(TCPStore("127.0.0.1", server.port, timeout=30))
        store.set("k", "before")
        redis = cluster.leader()
        redis.pause()
        with pytest.raises(RallypointError):
            TCPStore("127.0.0.1", server.port, timeout=2.5).set("k", "meanwhile")
        redis.resume()
        store.set("k", "after")
        assert store.get("k") == b"after"


@pytest.mark.slow
def test_who_is_behind_a_relay_waits_for_the_engine_and_hears_what_it_waits_for(tmp_path: Path) -> None:
    """Longer than a session is kept without a connection."""
    with ExitStack() as stack:
        cluster = stack.enter_context(redis_cluster(tmp_path))
        ports = free_ports(2)
        server = front_end(cluster.url("job"), 0, ports[0], tmp_path / "serve.log")
        server.command = [*server.command, "--limit", "session_seconds=3"]
        stack.callback(server.kill)
        server.start()
        file = stack.enter_context((tmp_path / "relay.log").open("w+"))
        relay = stack.enter_context(relaying(f"{server.address},127.0.0.1:{ports[1]}", file))
        patient, other = (
            stack.enter_context(TCPStore("127.0.0.1", relay.port, timeout=60)) for _ in range(2)
        )
        assert patient.add("n", 1) == 1
        other.set_timeout(8.0)
        redis = cluster.leader()
        redis.pause()
        away = rf"the engine of the store, redis at {cluster.nodes[0].address}, job job, has not answered for"
        with ThreadPoolExecutor(1) as pool:
            adding = pool.submit(patient.add, "n", 1)
            with pytest.raises(StoreTimeoutError, match=away):
                other.set("k", "v")
            with pytest.raises(ConnectError, match=away):
                TCPStore("127.0.0.1", server.port, timeout=2)
            redis.resume()
            assert adding.result(30) == 2
        assert "is lost:" not in relay.read_log()
        assert f"{away} " in relay.read_log()
