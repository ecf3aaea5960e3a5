"""`init_method` URLs: `rally://host:port`, and `file://` with checks for stale files.

    rally://host:port?rank=0&world_size=2&use_libuv=0&client=python&timeout=60

Rank 0 starts the server, in a process of its own, and the others connect. Under a launcher, whose
agent has started one already (TORCHELASTIC_USE_AGENT_STORE), all connect.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit
from urllib.request import url2pathname

import torch.distributed as dist

from rallypoint.client.file import FileStore
from rallypoint.client.rendezvous import place_of, rank_and_size
from rallypoint.errors import StaleFileError, UsageError
from rallypoint.launch.options import parse_seconds
from rallypoint.launch.switches import ClientChoice, Patch, client_of, parse_choice
from rallypoint.pytorch.groups import end_with_group
from rallypoint.pytorch.parameters import StoreParameters
from rallypoint.pytorch.store import PythonStore, as_torch_errors
from rallypoint.pytorch.substitution import make_store, support_made_stores
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.server.loops.backend import parse_switch

Yielded = Iterator[tuple[dist.Store, int, int]]

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_LEAVING_PAUSE = 0.02
_KNOWN: Final = ("rank", "world_size", "use_libuv", "client", "timeout")


def register_schemes() -> None:
    """Make `rally://` known, and let `file://` go to our file store."""
    register_rally()
    # torch refuses to register a scheme that it has already.
    _handlers()["file"] = meet_at_file


def register_rally() -> None:
    """Make `rally://` known to `init_process_group`, and stores of ours; a second call does nothing."""
    support_made_stores()
    if "rally" not in _handlers():
        dist.register_rendezvous_handler("rally", meet_at_server)


def _handlers() -> dict[str, Any]:
    # A function of the same name stands in the module's way.
    handlers: dict[str, Any] = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    return handlers


def meet_at_server(url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **_: Any) -> Yielded:
    """What torch calls for a `rally://` URL."""
    parts = urlsplit(url)
    query = _query_of(parts)
    host, port = place_of(parts)
    rank, world_size = rank_and_size(query, {})
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    wanted = StoreParameters(
        host,
        port,
        world_size,
        is_master=rank == 0 and not hosted,
        timeout=timedelta(seconds=_seconds(query, timeout)),
        multi_tenant=not hosted,  # the agent's store outlives a group: nobody waits for its end
        use_libuv=parse_switch(query["use_libuv"], "use_libuv in the URL") if "use_libuv" in query else None,
    )
    client = query.get("client")
    chosen = parse_choice(ClientChoice, client, "client in the URL") if client else client_of()
    store = make_store(wanted, chosen, Patch.ALWAYS)
    if isinstance(store, PythonStore):
        end_with_group(store)
    yield store, rank, world_size
    raise RuntimeError("a rally:// rendezvous happens once")


def meet_at_file(url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **_: Any) -> Yielded:
    """What torch calls for a `file://` URL, once `register_schemes` has been called."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    # As torch reads it: on Windows also `file://C:/store`.
    path = url2pathname(parts.netloc + parts.path) if os.name == "nt" else unquote(parts.path)
    given = {
        "path": path,
        "rank parameter": query.get("rank"),
        "world size parameter": query.get("world_size"),
    }
    missing = next((what for what, value in given.items() if not value), "")
    if missing:
        raise UsageError(
            f"Error initializing torch.distributed using file:// rendezvous: {missing} missing",
            hint="write init_method='file:///absolute/path', rank=... and world_size=...",
        )
    rank, world_size = rank_and_size(query, {})
    with as_torch_errors():
        store = _join_file(path, world_size, timeout)
    yield store, rank, world_size
    raise RuntimeError("Unable to perform rerendezvous using file:// method")


_met: dict[tuple[int, str], list[PythonStore]] = {}
"""The stores of a process in a file, by process and path."""


def _join_file(path: str, world_size: int, timeout: timedelta) -> PythonStore:
    """A store in a file. A process that has one there, say for RPC beside a process group, shares its place.

    It leaves with its process group. If that is made again, the file may be there until all members of the
    old group have left: then that is waited for, as its keys are old.
    """
    before = _met.setdefault((os.getpid(), path), [])
    known = next((store for store in before if store.is_open), None)
    joined = known.clone() if known else _enter_file(path, world_size, timeout, again=bool(before))
    before.append(joined)
    end_with_group(joined)
    return joined


def _enter_file(path: str, world_size: int, timeout: timedelta, *, again: bool) -> PythonStore:
    deadline = Deadline(timeout.total_seconds())
    while True:
        try:
            return PythonStore(FileStore(path, world_size, timeout))
        except StaleFileError:
            if not again or deadline.passed:
                raise
        time.sleep(_LEAVING_PAUSE)


def _query_of(parts: SplitResult) -> dict[str, str]:
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = [name for name in query if name not in _KNOWN]
    if unknown:
        raise UsageError(
            f"{parts.geturl()!r} has {unknown[0]!r}, which is not known",
            hint=f"known are {', '.join(_KNOWN)}",
        )
    return query


def _seconds(query: dict[str, str], timeout: timedelta) -> float:
    text = query.get("timeout")
    try:
        return parse_seconds(text) if text is not None else timeout.total_seconds()
    except ValueError:
        hint = "write a positive number of seconds"
        raise UsageError(f"timeout in the URL is {text!r}", hint=hint) from None
