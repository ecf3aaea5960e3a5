"""A request for a `snapshot` of a server or relay, and what the names of the keys in it tell. Pure.

torch puts the keys of a group below `GROUP//DEVICE//`, after `default_pg/` if it made the store itself. The
members of a group are numbered within the group; only in the default group, whose name is 0, these numbers
are ranks of the job:

    0//cpu//0/3       gloo: where rank 3 listens, on the first of its network devices
    0//cuda//0        NCCL: the id of the first communicator, which rank 0 makes
    0//cuda//2:5      NCCL: the same for ranks 2 and 5 alone, which the first of them makes
    0//1//cpu//0/3    a group of the name 1: its member 3, whichever rank that is

    store_based_barrier_key:0:last_worker    set by the last of all ranks to arrive
    torchelastic/role_info/1                 of torchrun's agents: what the agent of machine 1 runs
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final

from rallypoint.codec import Within, from_text, to_text
from rallypoint.errors import ProtocolError

KEYS_NAMED: Final = 8
"""How many keys of one wait are named; the rest is counted."""

PLAN: Final = "rallypoint/roll"
"""The key with a launcher's plan: which machine has which ranks; see `plan`."""

STALL: Final = "rallypoint/stall"
"""The key with a launcher's report of a stalled job, as text. It deletes the key when the job goes on."""

STALL_BYTES: Final = 65_536
"""The rest of that text is ignored."""

_Count = Annotated[int, Within(0, 1 << 62)]


@dataclass(frozen=True)
class Question:
    """What to report besides clients, barriers and figures, which are always reported."""

    keys: _Count = 0
    """How many keys to list at most."""
    search: str = ""
    """Only keys that contain this text."""
    value: str | None = None
    """A key whose value to report, up to `value_bytes`."""
    value_bytes: _Count = 4096

    def to_json(self) -> bytes:
        return to_text(self).encode()

    @staticmethod
    def from_json(data: bytes) -> Question:
        """Raises ProtocolError for an invalid question."""
        try:
            return from_text(Question, data or b"{}")
        except ValueError as error:
            raise ProtocolError(f"SNAPSHOT asks what cannot be understood: {error}") from None


def key_name(wire_key: bytes) -> str:
    """A key as scripts name it; bytes that are no UTF-8 become surrogates, as in Python's file names."""
    return wire_key.removeprefix(b"/").decode(errors="surrogateescape")


# torch's keys

_BEFORE: Final = r"(?:(?:.*[^/])?/)?0//"
_BY_RANK: Final = re.compile(
    _BEFORE
    + r"(?:(?:cpu|cuda)//[0-9]+/(?:rank_)?(?P<gloo>[0-9]{1,9})"
    + r"|cuda//(?P<pair>[0-9]{1,9}):[0-9]+"
    + r"|cuda//[0-9]+)",
    re.DOTALL,
)
_BY_MEMBER: Final = re.compile(
    _BEFORE + r"(?P<group>[^/]+)//(?:cpu|cuda)//[0-9]+/(?P<member>[0-9]+)", re.DOTALL
)
_BY_AGENT: Final = re.compile(
    r"(?:.*/)?torchelastic/(?:role_info/(?P<machine>[0-9]{1,9})|assigned_ranks/[0-9]+)", re.DOTALL
)
_OF_ALL: Final = re.compile(r"(?:.*/)?store_based_barrier_key:(?:0|default_pg)", re.DOTALL)
_LAST: Final = (":last_worker", "/last_member")


def owing_rank(key: str) -> int:
    """The rank that alone writes this key; -1: its name does not tell."""
    found = _BY_RANK.fullmatch(key)
    return int(found["gloo"] or found["pair"] or 0) if found else -1


def owing_whom(key: str) -> str:
    """Who alone writes this key, in words; nothing: its name does not tell."""
    rank = owing_rank(key)
    if rank >= 0:
        return f"rank {rank}"
    if found := _BY_MEMBER.fullmatch(key):
        return f"member {found['member']} of the group {found['group']}"
    if found := _BY_AGENT.fullmatch(key):
        return f"the agent of machine {found['machine'] or 0}"
    return ""


def barrier_of(key: str) -> str:
    """The barrier whose last arrival sets this key; nothing: the key stands for no barrier."""
    return next((key.removesuffix(end) for end in _LAST if key.endswith(end)), "")


def is_of_all(barrier: str) -> bool:
    """Whether all ranks of the job have to come to this barrier."""
    return _OF_ALL.fullmatch(barrier) is not None
