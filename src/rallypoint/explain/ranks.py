"""Numbers of ranks, in few words. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def runs_of(ranks: Iterable[int]) -> list[tuple[str, int]]:
    """Runs of ranks that follow each other, and how many each has: `3`, `5 and 6`, `8 to 15`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [(_name(run), len(run)) for run in runs]


def _name(run: list[int]) -> str:
    return f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run))
