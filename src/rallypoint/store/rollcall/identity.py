"""Which process and rank is behind a connection, and how a client introduces itself.

A hello is a DELETE_KEY of a key that does not exist: `rallypoint/hello/1/` followed by JSON. Every client of
the protocol can send one, torch's own in C++ included; a relay does not pass it on; torch's server finds
nothing to delete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Final

from rallypoint.codec import Within, at_most, from_text, to_text

HELLO: Final = "rallypoint/hello/1/"
_HELLO_ON_WIRE: Final = b"/" + HELLO.encode()
_MOST_CHARACTERS: Final = 255
_LARGEST: Final = (1 << 32) - 1
_Number = Annotated[int, Within(-1, _LARGEST)]


class Role(str, Enum):
    """What a client is in its job."""

    RANK = "rank"
    AGENT = "agent"
    """A launcher of ranks, not a rank itself."""
    TOOL = "tool"
    """A tool that only inspects the store, such as `rallypoint status` or `rallypoint kv`."""
    UNKNOWN = ""


class Source(str, Enum):
    """The source of an identity, the most reliable first."""

    HELLO = "hello"
    """Its own hello."""
    PROCESS = "process"
    """The environment of its process, on the machine of the server or relay."""
    KEYS = "keys"
    """A key that only this rank writes."""
    NONE = ""


@dataclass(frozen=True)
class Identity:
    """Who a client is; -1, 0 or an empty text where unknown."""

    host: Annotated[str, at_most(_MOST_CHARACTERS)] = ""
    pid: Annotated[int, Within(0, _LARGEST)] = 0
    rank: _Number = -1
    local_rank: _Number = -1
    world_size: _Number = -1
    role: Role = Role.UNKNOWN
    source: Source = Source.NONE

    @property
    def is_rank(self) -> bool:
        """Whether it is a rank of known number."""
        return self.rank >= 0 and self.role in (Role.RANK, Role.UNKNOWN)


NOBODY: Final = Identity()

WORKER: Final = "worker-"
"""The addresses of a server's own workers begin so, and no others: `worker-1:4711`, of process 4711."""


def identity_of(environ: Mapping[str, str], host: str, pid: int) -> Identity:
    """The identity in the launcher's environment variables; a rank only if they name one."""

    def number(name: str) -> int:
        text = environ.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1

    rank = number("RANK")
    return Identity(
        host=host[:_MOST_CHARACTERS],
        pid=pid,
        rank=rank,
        local_rank=number("LOCAL_RANK"),
        world_size=number("WORLD_SIZE"),
        role=Role.RANK if rank >= 0 else Role.UNKNOWN,
    )


def hello_key(who: Identity) -> str:
    """The key of the DELETE_KEY by which a client introduces itself."""
    return HELLO + to_text(who, sparse=True)


def is_hello(wire_key: bytes) -> bool:
    """Whether a DELETE_KEY of this key is a hello."""
    return wire_key.startswith(_HELLO_ON_WIRE)


def parse_hello(wire_key: bytes) -> Identity | None:
    """The identity in a hello; None if it cannot be read, which is no reason to disconnect the client."""
    try:
        return replace(from_text(Identity, wire_key[len(_HELLO_ON_WIRE) :]), source=Source.HELLO)
    except ValueError:
        return None
