"""Our stores where a program expects torch's: the same calls on torch's own store and on ours, side by side.

Results have to be equal, and exceptions of the same type. torch's message comes first, ours behind it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from rallypoint import FileStore, HashStore, TCPStore
from rallypoint.errors import ConnectionLostError, QueueEmptyError, StoreTimeoutError, UsageError
from rallypoint.pytorch import cpp_stores
from rallypoint.pytorch.parameters import StoreParameters, in_torchs_words
from rallypoint.pytorch.store import PythonStore, as_torch_errors
from store_contract import PATIENCE

_SHORT: Final = timedelta(milliseconds=50)
_LONG: Final = timedelta(seconds=PATIENCE)

Call = Callable[[Any], object]


class _Index:
    def __index__(self) -> int:
        return 2


def _set_late(store: Any, key: str) -> str:
    threading.Timer(0.1, store.clone().set, (key, "at last")).start()
    return key


# One after the other, each on what the ones before it have left.
_CALLS: Final[list[Call]] = [
    # Values
    lambda s: (s.set("key", "value"), s.get("key")),
    lambda s: (s.set(b"bytes", b"\xff\x00"), s.get("bytes"), s.get(b"bytes"), s.get(bytearray(b"bytes"))),
    lambda s: (s.set("ключ 🔑\0", "ü"), s.get("ключ 🔑\0")),
    lambda s: (s.set("", bytearray(b"none")), s.get("")),
    lambda s: (s.set("long", "x" * (2 << 20)), len(s.get("long")), s.delete_key("long")),
    lambda s: [s.add("n", 5), s.add(b"n", -7), s.add("n", True), s.add("n", _Index()), s.get("n")],
    lambda s: s.add("n", torch.tensor(3)),
    lambda s: [s.compare_set("c", *pair) for pair in (("x", "y"), ("", "y"), ("x", "z"), (b"y", b"\xff"))],
    lambda s: (s.append("a", "po"), s.append(b"a", b"ta"), s.get("a")),
    lambda s: (s.multi_set(["x", b"y"], ["1", b"2"]), s.multi_get(["y", "x"]), s.multi_get([])),
    lambda s: [s.multi_get(keys) for keys in (("y", b"x"), {"x"}, (key for key in "xy"))],
    lambda s: (s.multi_set([], []), s.multi_set(("x",), ("3",)), s.get("x")),
    lambda s: s.multi_set(["x", "y"], ["1"]),
    lambda s: (s.delete_key("key"), s.delete_key("key"), s.delete_key(b"bytes"), s.check(["key"])),
    lambda s: (s.num_keys(), sorted(s.list_keys()), s.has_extended_api()),
    # Waiting
    lambda s: [s.check(keys) for keys in ([], ["x"], ("x", b"y"), ["x", "none"])],
    lambda s: (s.wait(["x"]), s.wait((b"x",), _LONG), s.wait([], _LONG), s.wait(["x"], PATIENCE)),
    lambda s: s.wait(["no", "x", "no 2"], _SHORT),
    lambda s: s.wait(["no"], 0.05),
    lambda s: s.wait(["no"], timedelta(microseconds=1900)),
    lambda s: s.wait([_set_late(s, "late")], timedelta(seconds=-1)),
    lambda s: s.set_timeout(_SHORT),
    lambda s: s.timeout,
    lambda s: s.get("нет"),
    lambda s: s.wait(["no"]),
    lambda s: s.multi_get(["x", "no"]),
    lambda s: s.queue_pop("no"),
    lambda s: (s.set_timeout(1.5), s.timeout, s.set_timeout(timedelta(microseconds=1900)), s.timeout),
    lambda s: s.set_timeout(_LONG),
    lambda s: (s.barrier("b", 1), s.barrier(b"b", 1, None), s.barrier(key="b", world_size=1, timeout=_LONG)),
    lambda s: s.barrier("b", 0, _LONG),
    # Queues
    lambda s: (s.queue_push("q", "1"), s.queue_push(b"q", b"\xff"), s.queue_len("q"), s.check(["q"])),
    lambda s: (s.queue_pop(key="q"), s.queue_pop(b"q", True), s.queue_len(b"q")),
    lambda s: (s.queue_push(b"\xff", "1"), s.queue_pop(b"\xff")),
    lambda s: s.queue_pop("q", False),
    lambda s: s.queue_pop("q", block=None),
    # The store itself
    lambda s: (s.clone().timeout, s.clone().set("of clone", "1"), s.get("of clone"), s.clone() == s, s == s),
    lambda s: [isinstance(s, kind) for kind in (dist.Store, dist.TCPStore, dist.FileStore, dist.PrefixStore)],
    lambda s: (bool(s), s.has_extended_api()),
    copy.copy,
    len,
    # What is no argument
    lambda s: s.set("key", 5),
    lambda s: s.set(None, "value"),
    lambda s: s.set("\ud800", "value"),
    lambda s: s.set("key", "\ud800"),
    lambda s: s.check(["\udcff"]),
    lambda s: s.set("key", memoryview(b"value")),
    lambda s: s.set("key"),
    lambda s: s.set(key="key", value="value"),
    lambda s: s.get("key", 1),
    lambda s: s.add("n", 1.0),
    lambda s: s.add("n", "1"),
    lambda s: s.add("n", 1 << 63),
    lambda s: s.compare_set("c", "x"),
    lambda s: s.append("a", 1),
    lambda s: s.check("x"),
    lambda s: s.check([None]),
    lambda s: s.check({"x": 1}),
    lambda s: s.multi_get(None),
    lambda s: s.multi_set("xy", "12"),
    lambda s: s.wait(["x"], 1),
    lambda s: s.wait(["x"], None),
    lambda s: s.wait(["x"], timeout=_SHORT),
    lambda s: s.wait("x"),
    lambda s: s.set_timeout(2),
    lambda s: s.queue_push("q", 1),
    lambda s: s.queue_pop(5),
    lambda s: s.queue_pop("q", "no"),
    lambda s: s.barrier("b", "1"),
    lambda s: s.num_keys(1),
]


def _outcome(call: Call, store: Any) -> tuple[type, str]:
    """The type and the text of what a call returns or raises; without the store that it was called with."""
    try:
        result = call(store)
    except Exception as error:
        return type(error), str(error).partition("Invoked with")[0].replace(_name(store), "A STORE")
    return type(result), repr(result)


def _name(store: Any) -> str:
    return (
        "PythonStore"
        if isinstance(store, PythonStore)
        else f"{type(store).__module__}.{type(store).__name__}"
    )


def _assert_alike(calls: list[Call], theirs: Any, ours: Any) -> None:
    for number, call in enumerate(calls):
        expected, got = _outcome(call, theirs), _outcome(call, ours)
        if issubclass(expected[0], Exception):
            got = (got[0], got[1][: len(expected[1])])
        assert got == expected, f"call {number}"


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    """A store of torch's and one of ours."""
    cpp_stores.install()
    theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=_LONG)
    ours = PythonStore(TCPStore("127.0.0.1", 0, is_master=True, timeout=_LONG))
    yield theirs, ours
    ours.close()


def test_every_call(pair: tuple[Any, Any]) -> None:
    """A barrier's words are left to the end: torch's server counts it as a key."""
    late = [lambda s: s.barrier("two", 2, _SHORT), lambda s: s.barrier("three", 3, 0.05)]
    _assert_alike([*_CALLS, *late], *pair)


def test_every_call_through_prefix_stores(pair: tuple[Any, Any]) -> None:
    for prefix in ("p", "of p"):
        pair = (dist.PrefixStore(prefix, pair[0]), dist.PrefixStore(prefix, pair[1]))
        _assert_alike(_CALLS, *pair)
    assert pair[1].clone().list_keys() == pair[1].list_keys() != []
    assert type(pair[1]._underlying_non_prefix_store) is PythonStore


def test_a_prefix_store_sets_the_time_out_of_its_store(pair: tuple[Any, Any]) -> None:
    """C++ does not call back for it: it would be ignored."""
    for store in pair:
        dist.PrefixStore("p", store).set_timeout(_SHORT)
        assert store.timeout == _SHORT
        with pytest.raises(dist.DistStoreError, match="wait timeout after 50ms, keys: /missing"):
            store.get("missing")


def test_a_store_in_a_file(tmp_path: Path) -> None:
    calls: list[Call] = [
        lambda s: (s.set("key", "value"), s.get(b"key"), s.path is not None),
        lambda s: (s.set_timeout(_SHORT), s.timeout),
        lambda s: isinstance(s, dist.FileStore),
    ]
    late: list[Call] = [lambda s: s.get("no"), lambda s: s.wait(["no"])]
    theirs, ours = dist.FileStore(str(tmp_path / "theirs"), 1), PythonStore(FileStore(tmp_path / "ours", 1))
    _assert_alike(calls, theirs, ours)
    for call in late:  # torch's is a bare RuntimeError
        expected, got = _outcome(call, theirs), _outcome(call, ours)
        assert issubclass(got[0], expected[0])
        assert got[1].startswith(expected[1])
    ours.close()


def test_errors_of_ours_become_torchs() -> None:
    cases = [
        (QueueEmptyError("of mine"), dist.QueueEmptyError, "queue is empty: of mine"),
        (ConnectionLostError("of mine"), dist.DistNetworkError, "Failed to recv, got 0 bytes."),
        (StoreTimeoutError("of mine"), dist.DistStoreError, "of mine"),
        (UsageError("of mine"), ValueError, "of mine"),
    ]
    for error, kind, words in cases:
        with pytest.raises(kind, match=words), as_torch_errors():
            raise error


@pytest.mark.parametrize(
    ("world_size", "error"), [(0, ValueError), (None, dist.DistNetworkError), (2, dist.DistNetworkError)]
)
def test_a_client_of_port_0(world_size: int | None, error: type[Exception]) -> None:
    with pytest.raises(error), in_torchs_words(StoreParameters("127.0.0.1", 0, world_size)):
        TCPStore("127.0.0.1", 0, world_size)


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_a_process_group_takes_a_store_of_ours(kind: str) -> None:
    cpp_stores.install()
    store = HashStore() if kind == "memory" else TCPStore("127.0.0.1", 0, is_master=True)
    with store:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 1
            assert PythonStore.over(store) is PythonStore.over(store)
        finally:
            dist.destroy_process_group()
