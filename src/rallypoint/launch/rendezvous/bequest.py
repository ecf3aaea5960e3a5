"""What an agent leaves to its launcher: how to say at the meeting place that the agent was killed.

A launcher sees at once that its agent was killed. The other machines would miss it after some seconds without
a sign of life.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rallypoint.client.prefix import PrefixStore
from rallypoint.client.tcp import TCPStore
from rallypoint.codec import from_text, to_text
from rallypoint.errors import RallypointError
from rallypoint.launch.rendezvous.register import Register
from rallypoint.launch.rendezvous.roster import Ending, Line, Member, Size
from rallypoint.store.rollcall.identity import Role

_FILE: Final = "member.json"
_SECONDS: Final = 3.0
_LAST_VISIT: Final = 1 << 31  # however often the agent has come


@dataclass(frozen=True)
class Bequest:
    """An agent's place at a meeting: the store's address, the prefix of its keys there, and the agent."""

    host: str
    port: int
    prefix: str
    member: Member
    size: Size

    def leave_to(self, folder: Path) -> None:
        (folder / _FILE).write_text(to_text(self), encoding="utf-8")


def give_up_for_agent(folder: Path, how: str) -> None:
    """Report how the agent of this folder has ended. Does nothing if it had not joined a rendezvous."""
    try:
        left = from_text(Bequest, (folder / _FILE).read_text(encoding="utf-8"))
        with TCPStore(left.host, left.port, timeout=_SECONDS, role=Role.AGENT) as store:
            register = Register(PrefixStore(left.prefix, store), left.member.id, left.size)
            leave = replace(left.member, visit=_LAST_VISIT)
            ending = Ending(f"torchrun's agent on {left.member} has ended {how}", time.time())
            register.post(Line(leave=leave, lost=True, ending=ending))
    except (OSError, ValueError, RallypointError):
        pass  # then it is missed, after a while
