"""`rendezvous`: from a URL, as init_process_group takes it, to a store, a rank and a world size; no torch.

`tcp://host:port`, `env://` and `file:///path`, with `rank=`, `world_size=` and `use_libuv=` as queries.
Which backend serves is decided as in torch: the argument over the query over the variable USE_LIBUV.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from rallypoint.client.base import DEFAULT_TIMEOUT, Store, Timeout
from rallypoint.client.file import FileStore
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import UsageError
from rallypoint.store.server.loops.backend import Choice, choose

_SCHEMES: Final = ("tcp", "env", "file")
_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"


class Rendezvous(NamedTuple):
    """The result of a rendezvous: `store, rank, world_size = rendezvous(...)`."""

    store: Store
    rank: int
    world_size: int


def rendezvous(
    url: str,
    rank: int = -1,
    world_size: int = -1,
    *,
    timeout: Timeout = DEFAULT_TIMEOUT,
    use_libuv: bool | None = None,
) -> Rendezvous:
    """Meet the other ranks; -1 leaves rank or world size to the URL or the environment.

    Rank 0 of `tcp://` and `env://` starts the store server. UsageError says what is missing or wrong.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{url!r} is no URL: {error}", hint="write for example tcp://HOST:PORT") from None
    if parts.scheme not in _SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise UsageError(f"{url!r} is no rendezvous URL", hint=f"it begins with one of {known}")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    environ: Mapping[str, str] = os.environ if parts.scheme == "env" else {}
    choice = choose(use_libuv, query.get("use_libuv"))
    rank, world_size = rank_and_size(query, environ, rank, world_size)
    if parts.scheme == "file":
        return Rendezvous(FileStore(_path_of(parts), world_size, timeout), rank, world_size)
    if parts.scheme == "tcp":
        host, port = place_of(parts)
    elif host := environ.get("MASTER_ADDR", ""):
        port = _number("master_port", -1, {}, environ)
    else:
        raise UsageError("env:// needs the variable MASTER_ADDR", hint="a launcher sets it, or you do")
    store = TCPStore(
        host,
        port,
        world_size,
        # Under torchrun, the agent holds the store, and every rank is a client.
        is_master=rank == 0 and environ.get(_AGENT_STORE) != "True",
        timeout=timeout,
        multi_tenant=True,
        use_libuv=None if choice is Choice.AUTO else choice is Choice.LIBUV,
        rank=rank,
    )
    return Rendezvous(store, rank, world_size)


def _path_of(url: SplitResult) -> str:
    path = unquote(url.path)
    if url.netloc or not path:
        raise UsageError(f"{url.geturl()!r} names no file", hint="write file:///absolute/path")
    return path.lstrip("/") if os.name == "nt" else path  # file:///C:/store


def place_of(url: SplitResult) -> tuple[str, int]:
    """The host and the port in a URL; UsageError if it lacks one of them."""
    try:
        host, port = url.hostname, url.port
    except ValueError:
        raise UsageError(
            f"{url.geturl()!r} has no port that exists", hint="ports go from 1 to 65535"
        ) from None
    if not host or port is None:
        raise UsageError(f"{url.geturl()!r} lacks a host or a port", hint=f"write {url.scheme}://HOST:PORT")
    return host, port


def rank_and_size(
    query: Mapping[str, str], environ: Mapping[str, str], rank: int = -1, world_size: int = -1
) -> tuple[int, int]:
    """Rank and world size: as given, else by the query of a URL, else by the variables of these names."""
    rank = _number("rank", rank, query, environ)
    world_size = _number("world_size", world_size, query, environ)
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} does not exist in a world of {world_size}")
    return rank, world_size


def _number(name: str, argument: int, query: Mapping[str, str], environ: Mapping[str, str]) -> int:
    """A number from the argument, the query, or the variable of that name in capitals."""
    if argument >= 0:
        return argument
    text = query.get(name, environ.get(name.upper(), ""))
    if not text:
        where = (
            f"pass it, or put ?{name}= into the URL" if not environ else f"set the variable {name.upper()}"
        )
        raise UsageError(f"the {name.replace('_', ' ')} is not known", hint=where)
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the {name.replace('_', ' ')} is {text!r}, which is no number") from None
