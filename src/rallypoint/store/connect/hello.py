"""The identity of this process, as it tells the servers that it connects to."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from rallypoint.store.rollcall.identity import Identity, Role, identity_of


def who_am_i(role: Role = Role.UNKNOWN, rank: int = -1, world_size: int = -1) -> Identity:
    """The identity that the launcher's variables name, unless a rank is given.

    `role` is for launchers and tools, which have no rank, whatever the variables say.
    """
    who = identity_of(os.environ, socket.gethostname(), os.getpid())
    if role not in (Role.UNKNOWN, Role.RANK):
        return replace(who, role=role, rank=-1, local_rank=-1, world_size=-1)
    if rank < 0:
        return who
    local_rank = who.local_rank if who.rank == rank else -1
    return replace(who, role=Role.RANK, rank=rank, local_rank=local_rank, world_size=world_size)
