"""Who is to blame for a wait: whoever ended it, or should have, unless that one was waiting itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rallypoint.rollcall.torch_keys import owing_rank
from rallypoint.watch.timeline.records import Wait

_MOSTLY: Final = 0.5
"""Of a wait: who waited for that much of it itself is not to blame."""


@dataclass(frozen=True)
class Blame:
    """Finds who is to blame. Members are numbered."""

    owners: Mapping[int, int]
    """The member of each client."""
    ranks: Mapping[int, int]
    """The member of each rank."""
    waits: Sequence[Sequence[Wait]]
    """Of each member, those that are long enough to matter; none of those who never came."""

    def each_wait(self) -> Iterator[tuple[Wait, int, int]]:
        """All waits with their members, and those to blame; -1: not known."""
        for owner, waits in enumerate(self.waits):
            for wait in waits:
                yield wait, owner, self._culprit(wait, owner)

    def _culprit(self, wait: Wait, owner: int) -> int:
        seen = {owner}
        while True:
            member = self._ended_by(wait)
            if member < 0 or member in seen:
                return -1
            cause = self._cause(member, wait)
            if cause is None:
                return member
            seen.add(member)
            wait = cause

    def _ended_by(self, wait: Wait) -> int:
        """Who ended a wait, by the events, else who should, by the name of the key."""
        if wait.by:
            return self.owners.get(wait.by, -1)
        rank = owing_rank(wait.keys[0]) if wait.key_count == 1 and wait.keys else -1
        return self.ranks.get(rank, -1)

    def _cause(self, member: int, wait: Wait) -> Wait | None:
        """What a member itself waited for, most of the time in which it kept another waiting."""
        for each in self.waits[member] if member < len(self.waits) else ():
            if min(each.ended, wait.ended) - max(each.began, wait.began) >= _MOSTLY * wait.seconds:
                return each
        return None
