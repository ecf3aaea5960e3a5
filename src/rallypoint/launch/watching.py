"""What a job's processes have left word of: read from the folder of `rallypoint.pytorch.reports`."""

from __future__ import annotations

from pathlib import Path

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
    return "; ".join(f"{_runs(sorted(ranks))} on {host}" for host, ranks in missing.items())


def _runs(ranks: list[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs]
    return ", ".join(words)
