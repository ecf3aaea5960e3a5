"""Which users of this machine may be at the other end of a connection. Pure.

Everybody who has an account on a machine can connect to its loopback, and can listen there. A store server
obeys its clients, and a job obeys what it finds in its store. So both look at the user at the other end, as
the system tells it, before a request is carried out or sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

USERS_VARIABLE: Final = "RALLYPOINT_ALLOW_USER"
"""Names or numbers of users, with commas between them. It reaches every process of a job."""

INSECURE_VARIABLE: Final = "RALLYPOINT_INSECURE"
"""A switch. It reaches every process of a job."""

ROOT: Final = 0


class NoUser(Enum):
    """Why the system names no user for the other end of a connection."""

    UNTOLD = "the system does not tell"
    """Not on this system, not in this container, or a user whom this container has no number for."""

    GONE = "the socket at the other end is closed, or hidden"
    """The connection is within this machine, but its other end is not found, or has no owner any more.

    The other end can bring that about on purpose: it closes right behind its requests, which can still be
    read, or binds its socket to an interface. So this must not count as UNTOLD.
    """

    ELSEWHERE = "it is another machine"


Owner = int | NoUser
"""The number of the user at the other end of a connection, or why there is none."""


@dataclass(frozen=True)
class Access:
    """Whom this process lets in, and whom it connects to."""

    users: frozenset[int]
    """Users of this machine who are trusted: this process's own, root, and those who were named."""

    insecure: bool = False
    """Whether users are not looked at."""

    def refuses(self, owner: Owner) -> bool:
        """Whether nothing may be asked of, or carried out for, the process at the other end."""
        if owner in self.users or self.insecure:  # to look up a member of an enum takes longer than this
            return False
        return owner is not NoUser.UNTOLD and owner is not NoUser.ELSEWHERE
