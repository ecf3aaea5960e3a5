"""Which rank in the whole job a rank within a machine is, as far as a log tells. Pure.

torchrun's tee writes `[default3]:` before the lines of a process, and that is its rank within its machine.
The ranks of one machine follow each other, so one number tells all of them: the first rank of the machine.
Rows of torchrun's table have it, lines with both ranks, and what torchrun says of a rendezvous. A log in
which two machines are mixed has several; then it counts only with the host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from rallypoint.diagnose.explain.prefixes import Line

MARKS: Final = ("global_ranks=[", "group_world_size=1", "GROUP_RANK", "LOCAL_WORLD_SIZE")
"""Every line that matters here, but for torchrun's table, has one of these or both ranks."""
_FIRST: Final = re.compile(r"\bglobal_ranks=\[(?P<first>\d{1,9})")
_ALONE: Final = re.compile(r"\bgroup_world_size=1\b")
_GROUP: Final = re.compile(
    r"\b(?P<name>GROUP_RANK|LOCAL_WORLD_SIZE)[\"']?[=: ]{1,3}[\"']?(?P<number>\d{1,9})\b"
)
_MOST_HOSTS: Final = 100_000


@dataclass
class LocalRanks:
    """The first rank of each machine of a log, read line by line."""

    _firsts: dict[str | None, set[int]] = field(default_factory=dict)
    _groups: dict[str | None, dict[str, int]] = field(default_factory=dict)

    def take(self, line: Line) -> None:
        if line.rank is not None and line.local is not None:
            self.note(line.host, line.rank, line.local)
        if found := _FIRST.search(line.text):
            self.note(line.host, int(found["first"]), 0)
        elif _ALONE.search(line.text):
            self.note(line.host, 0, 0)
        for found in _GROUP.finditer(line.text):
            self._note_group(line.host, found["name"], int(found["number"]))

    def note(self, host: str | None, rank: int, local: int) -> None:
        """A process of a machine has these two ranks."""
        if rank >= local and (host in self._firsts or len(self._firsts) < _MOST_HOSTS):
            self._firsts.setdefault(host, set()).add(rank - local)

    def _note_group(self, host: str | None, name: str, number: int) -> None:
        if host not in self._groups and len(self._groups) >= _MOST_HOSTS:
            return
        group = self._groups.setdefault(host, {})
        group[name] = number
        if len(group) == 2:
            self.note(host, group["GROUP_RANK"] * group["LOCAL_WORLD_SIZE"], 0)

    def rank_of(self, local: int, host: str | None) -> int | None:
        """The rank in the whole job; None if the log does not tell, or not clearly."""
        firsts = self._firsts.get(host) if host is not None else None
        if firsts is None:
            firsts = set().union(*self._firsts.values())
        return local + min(firsts) if len(firsts) == 1 else None
