"""What launchers have told of their ranks, look after look. Pure.

A launcher tells every ten seconds, and a page looks every second: what has been unpacked is kept for the next
look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rallypoint.launch.stacks.activity import MachineActivity, RankActivity, unpack
from rallypoint.launch.stacks.grouping import (
    NO_ACTIVITY,
    JobActivity,
    awaited_keys,
    put_together,
    recent_reporters,
)
from rallypoint.store.rollcall.snapshot import Snapshot


class RankTold(NamedTuple):
    """What one rank does, as its launcher says."""

    activity: RankActivity
    host: str
    seconds: float
    """Since it was said."""


@dataclass(frozen=True)
class Told:
    """What all ranks do."""

    work: JobActivity
    ranks: Mapping[int, RankTold] = field(default_factory=dict)


NOTHING_TOLD: Final = Told(NO_ACTIVITY)


class Reader:
    """Reads what launchers have told. Threads may use it at the same time: each puts all in place at once."""

    def __init__(self) -> None:
        self._unpacked: dict[str, MachineActivity | None] = {}
        self._last: tuple[Snapshot | None, Told] = (None, NOTHING_TOLD)

    def read(self, snapshot: Snapshot) -> Told:
        """What is told in a snapshot; the one that was read last is not read again."""
        seen, told = self._last
        if seen is not snapshot:
            told = self._read(snapshot)
            self._last = (snapshot, told)
        return told

    def _read(self, snapshot: Snapshot) -> Told:
        before, unpacked = self._unpacked, dict[str, MachineActivity | None]()
        ranks: dict[int, RankTold] = {}
        for client in recent_reporters(snapshot):
            text = client.told
            machine = unpacked[text] = before[text] if text in before else unpack(text)
            if machine is not None:
                for each in machine.ranks:
                    ranks[each.rank] = RankTold(each, machine.host, client.told_seconds)
        self._unpacked = unpacked
        machines = (each for each in unpacked.values() if each is not None)
        return Told(put_together(machines, awaited_keys(snapshot)), ranks)
