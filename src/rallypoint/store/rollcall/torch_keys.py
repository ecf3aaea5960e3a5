"""What the names of torch's keys tell: which rank writes a key, and which keys stand for barriers. Pure.

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
from typing import Final

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
