"""What every store must do, whatever it is made of: one suite for all of them.

`StoreContract` is inherited by a test class whose module provides the fixture `site`: a place where any
number of stores can be opened onto the same data, empty at first. A site names the traits that it
lacks, for servers that are not ours; tests that need one of those are skipped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeVar

import pytest

from rallypoint.client.base import Store
from rallypoint.errors import QueueEmptyError, RallypointError, StoreTimeoutError, UsageError

PATIENCE: Final = 20.0
"""Seconds after which something that should come is given up."""

SHORT: Final = 0.05
"""Seconds to wait for what does not come."""

# Traits, which all of our own stores have.
BARRIERS: Final = "barriers"
BARRIER_REUSE: Final = "barriers whose key can be used again"
BARRIER_UNCOUNTS: Final = "barriers that do not count who has timed out"
QUEUES: Final = "queues"
LISTING: Final = "list_keys"
EVERY_WRITE_WAKES: Final = "a wake-up by whatever creates the key"
CHECKED_ADD: Final = "an error for an ADD to what is no number, and nothing else"

_Result = TypeVar("_Result")


@dataclass
class Site:
    """Where stores are opened: `connect` opens one more onto the same data; `cleanup` closes them."""

    connect: Callable[[], Store]
    lacks: Set[str] = frozenset()
    cleanup: ExitStack = field(default_factory=ExitStack)

    def require(self, *traits: str) -> None:
        missing = self.lacks & set(traits)
        if missing:
            pytest.skip(f"this store has no {', '.join(sorted(missing))}")

    def open(self) -> Store:
        store = self.connect()
        self.cleanup.callback(store.close)
        store.set_timeout(PATIENCE)
        return store


def together(*jobs: Callable[[], _Result]) -> list[_Result]:
    """Run jobs at the same time, each in a thread of its own, and return their results."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(job) for job in jobs]
        return [future.result(PATIENCE * 2) for future in futures]


def times_out(call: Callable[[], object]) -> StoreTimeoutError:
    """The error of a call that gives up by its own time-out, and not by that of its store."""
    begun = time.monotonic()
    with pytest.raises(StoreTimeoutError) as caught:
        call()
    assert isinstance(caught.value, TimeoutError)
    assert time.monotonic() - begun < PATIENCE
    return caught.value


class StoreContract:
    """The suite."""

    @pytest.fixture
    def store(self, site: Site) -> Store:
        return site.open()

    # Values

    def test_get_returns_what_was_set_last(self, site: Site, store: Store) -> None:
        twin = site.open()
        for value in ("text", "ünïcode ☃", "", b"", bytes(range(256)), b"\x00\xff" * (1 << 19), "short"):
            store.set("key", value)
            assert twin.get("key") == (value.encode() if isinstance(value, str) else value)

    def test_any_text_is_a_key(self, store: Store) -> None:
        for key in ("", "a/b//c", "ключ", "🔑 with spaces\n", "k" * 4000):
            store.set(key, "value")
            assert store.get(key) == b"value"
            assert store.check([key])
            assert store.add(key + "'", 1) == 1
            assert store.delete_key(key)

    def test_append_creates_and_extends(self, site: Site, store: Store) -> None:
        store.append("key", "one ")
        site.open().append("key", b"two")
        store.append("key", "")
        value = store.get("key")
        store.append("key", " three")
        assert value == b"one two", "a value does not change after it was read"
        assert store.get("key") == b"one two three"

    def test_add_counts(self, store: Store) -> None:
        assert store.add("n", 5) == 5
        assert store.add("n", -7) == -2
        assert store.add("n", 0) == -2
        assert store.get("n") == b"-2"
        store.set("n", "40")
        assert store.add("n", 2) == 42

    def test_add_from_many_threads_loses_nothing(self, site: Site, store: Store) -> None:
        twin = site.open()

        def count(each: Store) -> None:
            for _ in range(100):
                each.add("n", 1)

        together(*[lambda each=each: count(each) for each in [store, twin] * 4])
        assert store.add("n", 0) == 800

    def test_add_to_what_is_no_number(self, site: Site, store: Store) -> None:
        site.require(CHECKED_ADD)
        store.set("key", "seven")
        with pytest.raises(RallypointError):
            store.add("key", 1)
        assert store.get("key") == b"seven"
        assert site.open().get("key") == b"seven"

    def test_compare_set(self, store: Store) -> None:
        assert store.compare_set("key", "expected", "desired") == b"expected"
        assert not store.check(["key"])
        assert store.compare_set("key", "", "old") == b"old"
        assert store.compare_set("key", "else", "new") == b"old"
        assert store.compare_set("key", "", "new") == b"old"
        assert store.get("key") == b"old"
        assert store.compare_set("key", b"old", b"new") == b"new"
        assert store.get("key") == b"new"

    def test_one_of_many_wins_a_compare_set(self, site: Site, store: Store) -> None:
        stores = [store, site.open()] * 4
        jobs = [lambda i=i, each=each: each.compare_set("key", "", str(i)) for i, each in enumerate(stores)]
        assert set(together(*jobs)) == {store.get("key")}

    def test_what_is_added_and_looked_at_together(self, site: Site, store: Store) -> None:
        assert store.add_and_look("count", 2, "lines") == (2, b"")
        assert store.add_and_look("count", 1, "lines", after=("lines", "one ")) == (3, b"one ")
        assert site.open().add_and_look("count", 0, "lines", after=("lines", b"two")) == (3, b"one two")
        assert store.get("lines") == b"one two"

    def test_the_extended_api(self, site: Site, store: Store) -> None:
        assert store.has_extended_api()
        store.multi_set(["a", "b", "c"], ["1", b"\x00", ""])
        assert site.open().multi_get(["c", "a", "b", "a"]) == [b"", b"1", b"\x00", b"1"]
        store.multi_set([], [])
        assert store.multi_get([]) == []
        with pytest.raises(UsageError):
            store.multi_set(["d", "e"], ["1"])
        assert not store.check(["d"])

    def test_delete_key(self, site: Site, store: Store) -> None:
        store.set("key", "value")
        twin = site.open()
        assert twin.delete_key("key")
        assert not store.delete_key("key")
        assert not store.check(["key"])
        assert store.add("key", 1) == 1

    def test_num_keys(self, store: Store) -> None:
        before = store.num_keys()
        store.multi_set(["a", "b"], ["1", "2"])
        store.set("a", "3")
        store.add("n", 1)
        assert store.num_keys() == before + 3
        store.delete_key("b")
        assert store.num_keys() == before + 2

    def test_list_keys(self, site: Site, store: Store) -> None:
        site.require(LISTING)
        assert store.list_keys() == []
        store.multi_set(["a", "ключ", "a/b"], ["1", "2", "3"])
        store.delete_key("a")
        assert sorted(site.open().list_keys()) == ["a/b", "ключ"]

    # Waiting

    def test_check(self, store: Store) -> None:
        store.set("a", "")
        store.add("b", 0)
        assert store.check(["a"])
        assert store.check(["a", "b", "a"])
        assert store.check([])
        assert not store.check(["a", "c"])

    def test_a_get_waits_for_a_set_and_holds_up_no_other_thread(self, site: Site, store: Store) -> None:
        setter = site.open()
        about_to_get = threading.Event()

        def get() -> bytes:
            about_to_get.set()
            return store.get("late")

        def work() -> bytes:
            """Through the very store in which the other thread waits."""
            assert about_to_get.wait(PATIENCE)
            times_out(lambda: store.wait(["never"], SHORT))
            for number in range(20):
                store.set(f"key {number}", "value")
            assert store.add("n", 1) == 1
            setter.set("late", "at last")
            return b"done"

        assert together(get, work) == [b"at last", b"done"]

    def test_wait_waits_for_all(self, site: Site, store: Store) -> None:
        site.require(EVERY_WRITE_WAKES)
        setter = site.open()
        keys = ["a", "b", "c", "d", "e"]
        store.set("a", "")

        def put() -> list[bytes]:
            setter.multi_set(["b"], [""])
            setter.append("c", "")
            setter.add("d", 1)
            setter.compare_set("e", "", "value")
            return []

        def wait() -> list[bytes]:
            store.wait(keys)
            return []

        assert together(wait, lambda: store.multi_get(keys), put)[1] == [b"", b"", b"", b"1", b"value"]

    def test_a_wait_that_times_out_names_what_is_missing(self, store: Store) -> None:
        store.set("there", "")
        error = times_out(lambda: store.wait(["missing 1", "there", "missing 2"], timedelta(seconds=SHORT)))
        assert [key.rpartition("/")[2] for key in error.keys] == ["missing 1", "missing 2"]
        assert f"waited {SHORT} s" in error.message
        assert "2 of 3 keys are missing: " in error.message
        assert "missing 2" in error.message
        assert error.hint
        assert store.check(["there"])

    def test_a_get_that_times_out_names_its_key(self, store: Store) -> None:
        store.set_timeout(SHORT)
        error = times_out(lambda: store.get("missing"))
        assert [key.rpartition("/")[2] for key in error.keys] == ["missing"]
        error = times_out(lambda: store.multi_get(["missing", "missed"]))
        assert [key.rpartition("/")[2] for key in error.keys] == ["missing", "missed"]

    # Barriers

    def test_barrier_releases_all_at_once(self, site: Site, store: Store) -> None:
        site.require(BARRIERS)
        stores = [store, *(site.open() for _ in range(4)), store, store, store]

        def pass_through(each: Store) -> int:
            each.add("arrived", 1)
            each.barrier("barrier", 8, PATIENCE)
            return each.add("arrived", 0)

        assert together(*[lambda each=each: pass_through(each) for each in stores]) == [8] * 8
        store.barrier("barrier of one", 1, PATIENCE)

    def test_a_barrier_synchronises_again(self, site: Site, store: Store) -> None:
        site.require(BARRIERS, BARRIER_REUSE)
        stores = [store, site.open(), store]

        def rounds(each: Store) -> list[int]:
            seen = []
            for number in range(10):
                each.add(f"arrived {number}", 1)
                each.barrier("barrier", 3, PATIENCE)
                seen.append(each.add(f"arrived {number}", 0))
            return seen

        assert together(*[lambda each=each: rounds(each) for each in stores]) == [[3] * 10] * 3

    def test_who_times_out_at_a_barrier_is_not_counted(self, site: Site, store: Store) -> None:
        site.require(BARRIERS, BARRIER_UNCOUNTS)
        twin = site.open()
        error = times_out(lambda: store.barrier("barrier", 2, SHORT))
        assert "barrier" in str(error)
        assert error.hint
        times_out(lambda: twin.barrier("barrier", 2, SHORT))
        together(*[lambda each=each: each.barrier("barrier", 2, PATIENCE) for each in [store, twin]])
        times_out(lambda: store.barrier("barrier", 2, SHORT))

    # Queues

    def test_a_queue_keeps_its_order(self, site: Site, store: Store) -> None:
        site.require(QUEUES)
        twin = site.open()
        for value in [b"1", b"", b"\xff3"]:
            twin.queue_push("queue", value)
        assert store.queue_len("queue") == 3
        assert [store.queue_pop("queue") for _ in range(3)] == [b"1", b"", b"\xff3"]
        assert store.queue_len("queue") == 0

    def test_an_empty_queue(self, site: Site, store: Store) -> None:
        site.require(QUEUES)
        assert store.queue_len("queue") == 0
        with pytest.raises(QueueEmptyError):
            store.queue_pop("queue", block=False)
        store.queue_push("queue", "value")
        assert store.queue_pop("queue", block=False) == b"value"
        store.set_timeout(SHORT)
        assert "queue" in str(times_out(lambda: store.queue_pop("queue")))

    def test_a_queue_is_there_while_it_holds_something(self, site: Site, store: Store) -> None:
        site.require(QUEUES)
        assert not store.check(["queue"])
        store.queue_push("queue", "")
        assert store.check(["queue"])
        store.wait(["queue"], PATIENCE)
        assert not store.delete_key("queue")
        store.queue_pop("queue")
        assert not store.check(["queue"])

    def test_each_push_wakes_one_pop(self, site: Site, store: Store) -> None:
        site.require(QUEUES)
        twin, pusher = site.open(), site.open()
        popping = threading.Barrier(3)

        def pop(each: Store) -> bytes:
            popping.wait(PATIENCE)
            return each.queue_pop("queue")

        def push() -> bytes:
            popping.wait(PATIENCE)
            times_out(lambda: pusher.wait(["never"], SHORT))
            pusher.queue_push("queue", "1")
            pusher.queue_push("queue", "2")
            return b""

        assert sorted(together(lambda: pop(store), lambda: pop(twin), push)) == [b"", b"1", b"2"]
        assert store.queue_len("queue") == 0

    # The store itself

    def test_timeout(self, store: Store) -> None:
        store.set_timeout(timedelta(minutes=1.5))
        assert store.timeout == timedelta(seconds=90)
        store.set_timeout(2)
        assert store.timeout == timedelta(seconds=2)
        for timeout in (0, float("nan")):
            with pytest.raises(UsageError, match="must be positive"):
                store.set_timeout(timeout)
        with pytest.raises(UsageError):
            store.wait(["key"], -1)

    def test_a_clone_shares_the_data_and_outlives_its_original(self, site: Site) -> None:
        keeper = site.open()  # whoever hosts the data
        store = site.open()
        store.set("key", "value")
        with store.clone() as twin:
            assert twin.timeout == store.timeout
            assert twin.get("key") == b"value"
            store.close()
            twin.set("key", "new")
        assert keeper.get("key") == b"new"

    def test_a_closed_store_says_so(self, site: Site) -> None:
        keeper = site.open()
        with site.open() as store:
            store.set("key", "value")
        store.close()
        with pytest.raises(RallypointError, match="closed"):
            store.set("key", "other")
        with pytest.raises(RallypointError, match="closed"):
            store.get("key")
        assert keeper.get("key") == b"value"
