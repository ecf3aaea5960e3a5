"""torch's own C++ TCPStore as the client of both backends: every operation, with torch's results.

An older torch has not all of them: `tests/on_windows.py` runs this with several. The argument `use_libuv`
concerns servers alone, but no wheel for Windows makes even a client with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from processes import Server
from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.question import Question
from raw import await_log, until

Connect = Callable[[], dist.TCPStore]

USE_LIBUV = sys.platform != "win32"


def needs(*operations: str) -> pytest.MarkDecorator:
    """A test of operations that not every torch has; a client that is made without libuv refuses queues."""
    refused = () if USE_LIBUV else ("queue_push",)
    missing = [name for name in operations if name in refused or not hasattr(dist.TCPStore, name)]
    return pytest.mark.skipif(bool(missing), reason=f"torch's client has no {' and no '.join(missing)} here")


@pytest.fixture
def connect(any_server: Server) -> Connect:
    """Makes torch clients of the server."""
    return lambda: dist.TCPStore(
        any_server.host,
        any_server.port,
        is_master=False,
        timeout=timedelta(seconds=20),
        wait_for_workers=False,
        use_libuv=USE_LIBUV,
    )


@pytest.fixture
def store(connect: Connect) -> dist.TCPStore:
    return connect()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def test_values_and_keys(store: dist.TCPStore) -> None:
    largest = b"\x00\xff" * (4 << 20)  # that torch allows
    for value in (b"value", b"", largest):
        store.set("key", value)
        assert store.get("key") == value
    assert (store.add("n", 5), store.add("n", -7)) == (5, -2)
    assert store.get("n") == b"-2"
    assert store.num_keys() == 2
    assert store.delete_key("key")
    assert not store.delete_key("key")
    assert store.num_keys() == 1
    for part in ("po", "ta", "to"):
        store.append("k", part)
    assert store.get("k") == b"potato"
    keys = [f"key{number}" for number in range(1000)]
    store.multi_set(keys, [f"value{number}" for number in range(1000)])
    assert store.multi_get(keys) == [f"value{number}".encode() for number in range(1000)]


def test_get_waits_for_a_set(connect: Connect, pool: ThreadPoolExecutor) -> None:
    waiting = pool.submit(connect().get, "late")
    connect().set("late", "here")
    assert waiting.result(20) == b"here"


def test_add_to_what_is_no_number_ends_the_connection(connect: Connect, any_server: Server) -> None:
    store = connect()
    store.set("text", "abc")
    with pytest.raises(dist.DistNetworkError):
        store.add("text", 1)
    await_log(any_server, "is no number")
    assert connect().get("text") == b"abc"


def test_compare_set(store: dist.TCPStore) -> None:
    assert store.compare_set("k", "expected", "desired") == b"expected"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "other", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"


def test_wait_and_check(connect: Connect, pool: ThreadPoolExecutor) -> None:
    store = connect()
    assert store.check([])
    assert not store.check(["a", "b"])
    waiting = pool.submit(connect().wait, ["a", "b"], timedelta(seconds=20))
    store.set("a", "1")
    store.set("b", "2")
    waiting.result(20)
    assert store.check(["a", "b"])


def test_a_wait_that_times_out_leaves_the_client_usable(store: dist.TCPStore) -> None:
    for _ in range(3):
        with pytest.raises(dist.DistStoreError, match=r"(?i)\btimeout"):  # 2.4: Socket Timeout
            store.wait(["never"], timedelta(milliseconds=50))
    store.set("k", "v")
    assert store.get("k") == b"v"


@needs("list_keys", "queue_push")
def test_keys_are_listed_and_a_queue_is_none(store: dist.TCPStore) -> None:
    store.set("a", "1")
    store.set("b", "2")
    store.queue_push("no key", "3")
    assert store.num_keys() == 2
    assert sorted(store.list_keys()) == ["a", "b"]


def _waiting_at(server: Server) -> int:
    clients = fetch_snapshot(server.host, server.port, Question(), Deadline(20.0)).clients
    return sum(bool(client.waits) for client in clients)


@needs("queue_push")
def test_queues(connect: Connect, pool: ThreadPoolExecutor, any_server: Server) -> None:
    store = connect()
    assert store.queue_len("q") == 0
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", False)
    store.queue_push("q", "1")
    store.queue_push("q", "2")
    assert store.queue_len("q") == 2
    assert store.check(["q"])
    assert [store.queue_pop("q"), store.queue_pop("q")] == [b"1", b"2"]
    waiting = [pool.submit(connect().queue_pop, "q") for _ in range(8)]
    # torch's client waits, then pops: one that waits only now could take what another one was woken for.
    until(lambda: _waiting_at(any_server) == 8, "all wait")
    for number in range(8):
        store.queue_push("q", str(number))
    assert sorted(pop.result(20) for pop in waiting) == [str(number).encode() for number in range(8)]


@needs("barrier")
def test_a_barrier_can_be_used_again_and_forgets_who_timed_out(
    connect: Connect, pool: ThreadPoolExecutor
) -> None:
    impatient, patient = connect(), connect()
    for _ in range(3):
        with pytest.raises(dist.DistStoreError):
            impatient.barrier("b", 2, timedelta(milliseconds=50))
        waiting = pool.submit(patient.barrier, "b", 2, timedelta(seconds=20))
        impatient.barrier("b", 2, timedelta(seconds=20))
        waiting.result(20)


def test_prefix_store_and_extended_api(store: dist.TCPStore) -> None:
    assert store.has_extended_api()
    store.set("k", "v")
    prefixed = dist.PrefixStore("p", store)
    prefixed.set("k", "w")
    assert store.get("k") == b"v"
    assert store.get("p/k") == b"w"


@needs("clone", "list_keys")
def test_clone_and_the_keys_of_a_prefix(store: dist.TCPStore) -> None:
    store.clone().set("k", "v")
    store.set("p/k", "w")
    assert dist.PrefixStore("p", store).list_keys() == ["k"]


def test_the_master_and_its_workers_come_together(any_server: Server, pool: ThreadPoolExecutor) -> None:
    """`init/` counts the workers, and is listed nowhere."""

    def join() -> dist.TCPStore:
        return dist.TCPStore(
            any_server.host, any_server.port, 3, False, timedelta(seconds=20), use_libuv=USE_LIBUV
        )

    workers = [run.result(20) for run in [pool.submit(join) for _ in range(3)]]
    assert workers[0].num_keys() == 1
    if hasattr(workers[0], "list_keys"):
        assert workers[0].list_keys() == []


def test_a_client_made_without_libuv(any_server: Server) -> None:
    store = dist.TCPStore(
        any_server.host, any_server.port, is_master=False, wait_for_workers=False, use_libuv=False
    )
    store.set("k", "v")
    assert store.get("k") == b"v"
