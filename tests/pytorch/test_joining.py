"""Joining a store at an address where that of a destroyed process group may still be."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import ConnectionLostError
from rallypoint.pytorch import groups
from rallypoint.pytorch.groups import join
from rallypoint.pytorch.parameters import StoreParameters
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.question import Question
from raw import until

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    groups._joined.clear()
    yield
    groups._joined.clear()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def _worker(port: int, seconds: float = 20.0) -> StoreParameters:
    """What torch's rendezvous asks for, on a rank of two that is not the first."""
    return StoreParameters(HOST, port, 2, timeout=seconds, multi_tenant=True)


def _group(port: int = 0) -> TCPStore:
    """The store of a complete group of two."""
    store = TCPStore(HOST, port, is_master=True, timeout=20)
    store._add(b"init/", 2)
    return store


def _clients(store: TCPStore) -> int:
    """How many are connected: a worker that waits is one of them."""
    return len(fetch_snapshot(HOST, store.port, Question(), Deadline(20)).clients)


def _left(store: TCPStore) -> None:
    """This process has been in the store's group."""
    join(_worker(store.port), lambda: None)


def test_the_end_of_the_old_store_is_awaited(pool: ThreadPoolExecutor) -> None:
    old = _group()
    port = old.port
    _left(old)
    before = _clients(old)
    joined = pool.submit(join, _worker(port), lambda: TCPStore(HOST, port, timeout=20).get("key"))
    until(lambda: _clients(old) > before, "the worker looks")
    old.set("key", "old")
    old.close()
    with TCPStore(HOST, port, is_master=True, timeout=20) as new:
        new.set("key", "new")
        assert joined.result(20) == b"new"


def test_an_old_store_that_rank_0_joins_again_is_taken(pool: ThreadPoolExecutor) -> None:
    with _group() as old:
        _left(old)
        before = _clients(old)
        joined = pool.submit(join, _worker(old.port), lambda: "joined")
        until(lambda: _clients(old) > before, "the worker looks")
        assert not joined.done()
        old._add(b"init/", 1)
        assert joined.result(20) == "joined"


def test_the_time_out_ends_the_wait() -> None:
    with _group() as old:
        _left(old)
        assert join(_worker(old.port, 0.3), lambda: "joined") == "joined"


def test_a_store_by_hand_and_a_group_of_another_size_are_not_waited_for() -> None:
    with _group() as store:
        _left(store)
        by_hand = StoreParameters(HOST, store.port, 2, timeout=3600)
        assert join(by_hand, lambda: "joined") == "joined"
        # All others of the larger group may have come by now, which makes two as well.
        larger = StoreParameters(HOST, store.port, 3, timeout=3600, multi_tenant=True)
        assert join(larger, lambda: "joined") == "joined"


@pytest.mark.parametrize(
    "error",
    [
        dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
        dist.DistNetworkError("Connection reset by peer"),
        ConnectionLostError("the connection was lost"),
    ],
)
def test_a_connection_that_is_cut_is_tried_again(error: Exception) -> None:
    errors: list[Any] = [error, error]

    def attempt() -> str:
        if errors:
            raise errors.pop()
        return "joined"

    assert join(StoreParameters(HOST, 1, timeout=20), attempt) == "joined"


@pytest.mark.parametrize(
    ("error", "seconds"),
    [(dist.DistNetworkError("The client socket has timed out"), 20.0), (ConnectionLostError("lost"), 0.0)],
)
def test_other_errors_and_late_ones_are_not(error: Exception, seconds: float) -> None:
    def attempt() -> None:
        raise error

    with pytest.raises(type(error)):
        join(StoreParameters(HOST, 1, timeout=seconds), attempt)
