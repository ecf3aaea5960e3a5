"""What a job's processes have left word of: read from the folder of `rallypoint.pytorch.reports`."""

from __future__ import annotations

from pathlib import Path

from rallypoint.explain.ranks import runs_of
from rallypoint.pytorch.reports import Exit, Failure, Identity, Roll, read, read_failures


class Reports:
    """The folder of one job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def roll(self) -> Roll:
        """Of the whole job where its first machine is this one; else of the ranks on this machine."""
        for content in read(self._folder, "roll"):
            return Roll(**content)
        joined = [Identity(**content) for content in read(self._folder, "joined-*")]
        ranks = {each.rank for each in joined}
        expected = max((each.local_world_size for each in joined), default=0)
        whole = all(each.world_size == each.local_world_size for each in joined)
        return Roll(len(ranks), max(expected, 0), whole=whole)

    def failures(self) -> list[Failure]:
        """Exceptions that ended a process of this machine, first come first."""
        return read_failures(self._folder)

    def elsewhere(self) -> list[str]:
        """What other machines say of their failures."""
        return [text for content in read(self._folder, "elsewhere") for text in content["told"]]

    def exits(self) -> list[Exit]:
        """How ranks of the last try ended, as torchrun's agent on this machine saw it."""
        found = [Exit(**each) for content in read(self._folder, "exits-*") for each in content["exits"]]
        return sorted(found, key=lambda each: each.time)


def describe_ranks(missing: dict[str, list[int]]) -> str:
    """`3 and 7 on node-b; 8 to 15 on node-c`."""
    return "; ".join(f"{_list(ranks)} on {host}" for host, ranks in missing.items())


def _list(ranks: list[int]) -> str:
    return ", ".join(name for name, _ in runs_of(sorted(ranks)))
