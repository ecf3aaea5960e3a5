"""What a job's processes have left word of: read from the folder of `rallypoint.launch.reports`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rallypoint.launch.reports import Elsewhere, Exit, Exits, Failure, Identity, Roll, read, read_failures
from rallypoint.text import ranks_text, shown


class Reports:
    """The folder of one job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def roll(self) -> Roll:
        """Of the whole job where its first machine is this one; else of the ranks on this machine."""
        for roll in read(self._folder, "roll", Roll):
            return roll
        joined = list(read(self._folder, "joined-*", Identity))
        tries = max((each.tries for each in joined), default=0)
        return _roll_of_machine([each for each in joined if each.tries == tries])

    def failures(self) -> list[Failure]:
        """Exceptions that ended a process of this machine, first come first."""
        return read_failures(self._folder)

    def elsewhere(self) -> list[str]:
        """What other machines say of their failures."""
        return [text for each in read(self._folder, "elsewhere", Elsewhere) for text in each.told]

    def exits(self) -> list[Exit]:
        """How ranks of the last try ended, as torchrun's agent on this machine saw it."""
        found = [each for some in read(self._folder, "exits-*", Exits) for each in some.exits]
        return sorted(found, key=lambda each: each.time)


def _roll_of_machine(joined: Sequence[Identity]) -> Roll:
    ranks = {each.rank for each in joined}
    expected = max((each.local_world_size for each in joined), default=0)
    whole = all(each.world_size == each.local_world_size for each in joined)
    firsts = {each.rank - each.local_rank for each in joined if each.local_rank >= 0}
    absent = ""
    if len(firsts) == 1:  # else nobody knows how the ranks of this machine are numbered
        missing = sorted({first + number for first in firsts for number in range(expected)} - ranks)
        absent = f"missing: {ranks_text(missing)} on {shown(joined[0].host)}" if missing else ""
    return Roll(len(ranks), max(expected, 0), absent, whole)
