"""Which machine has which ranks, as a launcher knows it before the ranks come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from rallypoint.codec import Within, at_most, from_text, to_text

MOST_RANKS: Final = 1 << 17
"""Who says that a job has more is not believed: each of them would be listed as missing."""
_MOST_ROUNDS: Final = (1 << 31) - 1
_MOST_CHARACTERS: Final = 255


class PlannedMachine(NamedTuple):
    """A machine, its first rank, and how many ranks it has."""

    host: Annotated[str, at_most(_MOST_CHARACTERS)]
    first: int
    size: Annotated[int, Within(0, MOST_RANKS)]

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.size)


def _whole(machines: tuple[PlannedMachine, ...]) -> tuple[PlannedMachine, ...]:
    """Refuses machines that do not have every rank of a job, from 0 on, exactly once."""
    free = 0
    for each in sorted(machines, key=lambda each: (each.first, each.size)):
        if each.first != free:
            raise ValueError(f"rank {free} is on no machine, or on two")
        free += each.size
    if not 0 < free <= MOST_RANKS:
        raise ValueError(f"{free} ranks are none, or too many")
    return machines


@dataclass(frozen=True)
class Plan:
    """All machines of a round; the round is counted from 0, so it is how often the job was started again."""

    round: Annotated[int, Within(0, _MOST_ROUNDS)]
    machines: Annotated[tuple[PlannedMachine, ...], _whole]

    @property
    def world_size(self) -> int:
        return sum(each.size for each in self.machines)

    @property
    def hosts(self) -> dict[int, str]:
        """The machine of each rank."""
        return {rank: each.host for each in self.machines for rank in each.ranks}

    def host_of(self, rank: int) -> str:
        """The machine of a rank; nothing if the plan does not know it."""
        return next((each.host for each in self.machines if rank in each.ranks), "")

    def to_json(self) -> str:
        return to_text(self)

    @staticmethod
    def from_json(text: str) -> Plan | None:
        """None for what is no plan: whoever reaches a store can write its keys."""
        try:
            return from_text(Plan, text)
        except ValueError:
            return None
