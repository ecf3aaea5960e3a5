"""The contract suite over each kind of store, and what is particular to those that need no server.

To put another kind under the contract, add a factory to the list.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from processes import torch_serving
from rallypoint.client.base import PrefixStore, Store
from rallypoint.client.file import FileStore
from rallypoint.client.local import HashStore
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import ProtocolError, RallypointError, StoreTimeoutError, UsageError
from rallypoint.store.relay.hosting import host_store
from rallypoint.store.server.process.binding import ANY_PORT
from raw import empty
from store_contract import (
    BARRIER_REUSE,
    BARRIER_UNCOUNTS,
    BARRIERS,
    CHECKED_ADD,
    EVERY_WRITE_WAKES,
    LISTING,
    PATIENCE,
    QUEUES,
    SHORT,
    Site,
    StoreContract,
    times_out,
    together,
)
from threads import serving_in_a_thread

pytestmark = pytest.mark.windows


class Surroundings(NamedTuple):
    """What a store is built in: a folder of its own, a stack of what is closed at the end, and servers."""

    folder: Path
    cleanup: ExitStack
    masters: Mapping[str, TCPStore]


Build = Callable[[Surroundings], Callable[[], Store]]
"""Prepares a place for stores, and says how to open one there."""


class Factory(NamedTuple):
    """A kind of store."""

    name: str
    build: Build
    lacks: Set[str] = frozenset()


def _hash(around: Surroundings) -> Callable[[], Store]:
    return around.cleanup.enter_context(HashStore()).clone


def _file(around: Surroundings) -> Callable[[], Store]:
    path = around.folder / "store"
    around.cleanup.enter_context(FileStore(path))  # for those tests whose stores are all closed at a time
    return lambda: FileStore(path)


def _prefixed(build: Build) -> Factory:
    def build_prefixed(around: Surroundings) -> Callable[[], Store]:
        connect = build(around)
        around.cleanup.enter_context(connect()).set("in/front", "must not show")
        return lambda: PrefixStore("in", PrefixStore("side", around.cleanup.enter_context(connect())))

    return Factory(f"prefix over {build.__name__.strip('_')}", build_prefixed)


def _tcp(backend: str) -> Factory:
    def build(around: Surroundings) -> Callable[[], Store]:
        master = around.masters[backend]
        around.cleanup.callback(_empty, master)
        return lambda: TCPStore("127.0.0.1", master.port)

    return Factory(f"tcp on {backend}", build)


def _empty(master: TCPStore) -> None:
    """Leave a server that serves all tests as the next one wants to find it."""
    while master.queue_len("queue"):
        master.queue_pop("queue")
    empty(master.port)


def _relayed(relays: int) -> Factory:
    """Our client of a relay."""

    def build(around: Surroundings) -> Callable[[], Store]:
        port = around.cleanup.enter_context(serving_in_a_thread(relays))
        return lambda: TCPStore("127.0.0.1", port)

    return Factory(f"tcp through relays, {relays} deep", build)


def _torch(backend: str, lacks: set[str]) -> Factory:
    """Our client of torch's own servers."""

    def build(around: Surroundings) -> Callable[[], Store]:
        port = around.cleanup.enter_context(torch_serving(use_libuv=backend == "libuv"))
        return lambda: TCPStore("127.0.0.1", port)

    return Factory(f"tcp on torch's {backend}", build, lacks)


# What torch's servers do otherwise; see docs/concepts/deviations.md.
_TORCH_LACKS: Final = {BARRIER_REUSE, BARRIER_UNCOUNTS, CHECKED_ADD}

LOCAL: Final = [Factory("hash", _hash), Factory("file", _file)]
ALL: Final = [
    *LOCAL,
    _prefixed(_hash),
    _prefixed(_file),
    _tcp("libuv"),
    _tcp("legacy"),
    *([] if sys.platform == "win32" else [_tcp("workers")]),
    _relayed(1),
    _relayed(2),
    _torch("libuv", _TORCH_LACKS),
    _torch("legacy", _TORCH_LACKS | {BARRIERS, EVERY_WRITE_WAKES, LISTING, QUEUES}),
]


@pytest.fixture(scope="module")
def masters() -> Iterator[dict[str, TCPStore]]:
    """A server process on each backend, for all tests: each empties it when it is over."""
    with (
        TCPStore("127.0.0.1", 0, is_master=True, use_libuv=True) as libuv,
        TCPStore("127.0.0.1", 0, is_master=True, use_libuv=False) as legacy,
    ):
        stores = {"libuv": libuv, "legacy": legacy}
        if sys.platform == "win32":  # there are none
            yield stores
            return
        server = host_store("127.0.0.1", ANY_PORT, workers=2)
        with TCPStore("127.0.0.1", server.port) as workers:
            yield {**stores, "workers": workers}
        server.release()


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path, masters: dict[str, TCPStore]) -> Iterator[Site]:
    factory: Factory = request.param
    with ExitStack() as cleanup:
        yield Site(factory.build(Surroundings(tmp_path, cleanup, masters)), factory.lacks, cleanup)


def on_each(factories: list[Factory]) -> pytest.MarkDecorator:
    """At a site of each kind."""
    return pytest.mark.parametrize("site", factories, indirect=True, ids=lambda factory: factory.name)


@on_each(ALL)
class TestStores(StoreContract):
    pass


# What holds of the stores whose engine is in this process


@on_each(LOCAL)
def test_add_to_what_is_no_number_is_the_callers_error(site: Site) -> None:
    store = site.open()
    store.set("key", "seven")
    with pytest.raises(ProtocolError, match="no number"):
        store.add("key", 1)
    with pytest.raises(UsageError, match="64 bits"):
        store.add("n", 1 << 63)
    assert store.add("n", (1 << 63) - 1) == (1 << 63) - 1
    with pytest.raises(ProtocolError, match="64 bits"):
        store.add("n", 1)
    assert site.open().get("n") == b"9223372036854775807"


@on_each(LOCAL)
def test_closing_a_store_ends_the_waits_in_it(site: Site) -> None:
    store, other = site.open(), site.open()
    arrived = threading.Event()

    def wait() -> None:
        arrived.set()
        with pytest.raises(RallypointError, match="closed"):
            store.barrier("barrier", 2)

    def close() -> None:
        assert arrived.wait(PATIENCE)
        times_out(lambda: other.wait(["never"], SHORT))
        store.close()

    together(wait, close)
    with pytest.raises(StoreTimeoutError):
        other.barrier("barrier", 2, SHORT)


@on_each(LOCAL)
def test_many_missing_keys_are_counted_and_not_all_shown(site: Site) -> None:
    keys = [f"key {number}" for number in range(100)]
    error = times_out(lambda: site.open().wait(keys, SHORT))
    assert error.keys == tuple(keys)
    assert "100 of 100" in error.message
    assert "key 50" not in error.message


# What is particular to a PrefixStore


def test_a_prefix_store_is_a_part_of_its_store() -> None:
    with HashStore() as whole:
        whole.set("outside", "0")
        part = PrefixStore("outer", PrefixStore("inner", whole))
        part.set("key", "1")
        assert whole.get("inner/outer/key") == b"1"
        assert part.list_keys() == ["key"]
        assert part.num_keys() == whole.num_keys() == 2
        assert isinstance(part.underlying_store, PrefixStore)
        assert part.underlying_store.underlying_store is whole
        part.set_timeout(7)
        assert whole.timeout.total_seconds() == 7


def test_closing_a_prefix_store_leaves_its_store_open() -> None:
    with HashStore() as whole:
        part = PrefixStore("part", whole)
        twin = part.clone()
        part.close()
        whole.set("part/key", "value")
        assert twin.get("key") == b"value"
        twin.close()
        with pytest.raises(RallypointError, match="closed"):
            twin.underlying_store.get("part/key")
        assert whole.get("part/key") == b"value"
