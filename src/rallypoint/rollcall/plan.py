"""Which machine has which ranks, as a launcher knows it before the ranks come."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

MOST_RANKS: Final = 1 << 17
"""Who says that a job has more is not believed: each of them would be listed as missing."""
_MOST_ROUNDS: Final = 1 << 31
_MOST_CHARACTERS: Final = 255


@dataclass(frozen=True)
class Machine:
    """A machine, and its ranks: so many, from the first on."""

    host: str
    first: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class Plan:
    """All machines of a round; the round is counted from 0, so it is how often the job was started again."""

    round: int
    machines: tuple[Machine, ...]

    @property
    def world_size(self) -> int:
        return sum(each.count for each in self.machines)

    @property
    def hosts(self) -> dict[int, str]:
        """The machine of each rank."""
        return {rank: each.host for each in self.machines for rank in each.ranks}

    def host_of(self, rank: int) -> str:
        """The machine of a rank; nothing if the plan does not know it."""
        return next((each.host for each in self.machines if rank in each.ranks), "")

    def to_json(self) -> str:
        machines = [[each.host, each.first, each.count] for each in self.machines]
        return json.dumps({"round": self.round, "machines": machines}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Plan | None:
        """None for what is no plan: whoever reaches a store can write its keys."""
        try:
            content = json.loads(text)
            plan = Plan(content["round"], tuple(_machine(*each) for each in content["machines"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        rounds = type(plan.round) is int and 0 <= plan.round < _MOST_ROUNDS
        return plan if rounds and _is_whole(plan.machines) else None


def _machine(host: Any, first: Any, count: Any) -> Machine:
    if not isinstance(host, str) or type(first) is not int or type(count) is not int or count < 0:
        raise TypeError("of the wrong kind")
    return Machine(host[:_MOST_CHARACTERS], first, count)


def _is_whole(machines: tuple[Machine, ...]) -> bool:
    """Whether every rank of the job, from 0 on, is on exactly one machine."""
    free = 0
    for each in sorted(machines, key=lambda each: (each.first, each.count)):
        if each.first != free:
            return False
        free += each.count
    return 0 < free <= MOST_RANKS
