"""The state of a store that torch serves itself: by its keys alone, and without changing any.

torch's protocol does not tell which clients are connected, nor what they wait for. But torch counts the
workers that know the size of their world, and each rank that uses gloo leaves its address, which begins with
its machine's name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from rallypoint.client.snapshots import read_if_there
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import ConnectionLostError
from rallypoint.store.connect.connecting import connect
from rallypoint.store.connect.connection import who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import format_address
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.question import owing_rank
from rallypoint.text import LONGEST_KEY, counted, ranks_text, shown

_WORKERS: Final = b"init/"
_ADDRESS: Final = "default_pg/0//cpu//0/{}"
_RANKS_CHECKED: Final = 1024
"""Where keys cannot be listed, they are asked for one by one."""
_ADDRESSES_READ: Final = 256
"""Each of them grows with the number of ranks."""
_MACHINES_SHOWN: Final = 8
_LENGTH: Final = struct.Struct("<Q")
_LONGEST_HOST: Final = 255


@dataclass(frozen=True)
class ForeignStore:
    """What is known of a store of torch's own."""

    address: str
    key_count: int
    keys: tuple[str, ...] | None
    """None: the server cannot list them."""
    workers: int | None
    """How many workers have counted themselves in; None: there is no counter."""
    writers: dict[int, str]
    """Ranks that have left keys, with their machines; an empty name: not known."""


# Asking


def examine(host: str, port: int, seconds: float) -> ForeignStore:
    """Ask a store of torch's own for all that it tells. Nothing is changed."""
    deadline = Deadline(seconds)
    with closing(connect(host, port, deadline, who_am_i(Role.TOOL))) as connection:
        counter = read_if_there(connection, _WORKERS, deadline)  # an ADD of 0 would make one
    workers = int(counter) if counter is not None and counter.isdigit() else None
    with TCPStore(host, port, timeout=seconds, role=Role.TOOL) as store:
        key_count, keys = store.num_keys(), _list_keys(store)
        writers = _machines(store, _addresses(store, keys))
    return ForeignStore(format_address(host, port), key_count, keys, workers, writers)


def _list_keys(store: TCPStore) -> tuple[str, ...] | None:
    try:
        return tuple(sorted(store.list_keys()))
    except ConnectionLostError:
        return None  # an older server ends a connection that asks for them


def _addresses(store: TCPStore, keys: tuple[str, ...] | None) -> dict[int, str]:
    """The keys that ranks of the default group have written; of several, the first, which is gloo's."""
    if keys is None:
        asked = (_ADDRESS.format(rank) for rank in range(_RANKS_CHECKED))
        keys = tuple(key for key in asked if store.check([key]))
    return {rank: key for key in reversed(keys) if (rank := owing_rank(key)) >= 0}


def _machines(store: TCPStore, addresses: dict[int, str]) -> dict[int, str]:
    ranks = sorted(addresses)
    if len(ranks) > _ADDRESSES_READ:
        return dict.fromkeys(ranks, "")
    return {rank: host_of(store.get(addresses[rank])) for rank in ranks}


def host_of(address: bytes) -> str:
    """The machine's name at the beginning of a gloo address; nothing if there is none."""
    if len(address) < _LENGTH.size:
        return ""
    length = _LENGTH.unpack_from(address)[0]
    name = address[_LENGTH.size : _LENGTH.size + length]
    known = 0 < length <= _LONGEST_HOST and len(name) == length
    return name.decode(errors="replace") if known else ""


# Telling


def describe(store: ForeignStore) -> Iterator[str]:
    """A few lines: what is known, and what cannot be."""
    yield f"{shown(store.address)} is a server of torch's own, which does not tell who its clients are"
    yield ""
    yield f"keys      {store.key_count:,}"
    if store.workers is not None:
        yield f"workers   {store.workers:,} counted in; of how many is not known"
    yield from _writer_rows(store.writers)
    yield "not told  who is connected, who waits for what, who is missing: torch's protocol does not have it"
    yield "hint      serve the store with `rallypoint serve`, or start the job with `rallypoint run`"


def _writer_rows(writers: dict[int, str]) -> Iterator[str]:
    by_machine: dict[str, list[int]] = {}
    for rank, host in writers.items():
        by_machine.setdefault(host, []).append(rank)
    for at, (host, ranks) in enumerate(list(by_machine.items())[:_MACHINES_SHOWN]):
        where = f" on {shown(host)}" if host else ""
        yield f"{'' if at else 'ranks':<10}{ranks_text(ranks)}{where} came; who is still here is not known"
    if (more := len(by_machine) - _MACHINES_SHOWN) > 0:
        yield f"{'':<10}and those of {counted(more, 'machine')} more"


def describe_keys(store: ForeignStore, search: str) -> Iterator[str]:
    """The names of the keys that hold a text: torch's protocol does not tell sizes or writers."""
    if store.keys is None:
        yield f"{counted(store.key_count, 'key')}; this version of torch's server does not list them"
    yield from (shown(key, LONGEST_KEY) for key in store.keys or () if search in key)
