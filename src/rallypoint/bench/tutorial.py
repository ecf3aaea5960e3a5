"""What PyTorch's tutorial on the libuv backend times, with real clients of torch: each rank is a process.

The time of the constructor on rank 0, which returns when all have joined, and of a barrier on that store.
"""

from __future__ import annotations

from typing import Final

from rallypoint.bench.results import Sample
from rallypoint.bench.session import Session
from rallypoint.bench.targets import KINDS, TORCH_FAMILY, Hosts, Kind, Target

LIMIT_S: Final = 120.0
BARRIERS: Final = 5
TARGETS: Final = ("rallypoint-libuv", "rallypoint-legacy", "torch-libuv", "torch-legacy")
"""What torch's constructor can bring up: rank 0 is the master, so there is no server beforehand."""


class RankZero(Target):
    """The server that rank 0 makes itself: nothing runs before a round does."""

    def __init__(self, kind: Kind, hosts: Hosts) -> None:
        super().__init__(kind, hosts)
        self._torch = hosts.of(TORCH_FAMILY)

    def start(self) -> None:
        """Nothing to do."""

    def check_alive(self) -> None:
        """It lives only during a round."""

    def time(self, ranks: int, barriers: int) -> tuple[float, list[float]]:
        """The time of the constructor, and of so many barriers, as rank 0 sees them."""
        order = {"target": self.name, "ranks": ranks, "barriers": barriers, "limit_s": LIMIT_S}
        answer = self._torch.ask(LIMIT_S, do="tutorial", **order)
        return answer["init"], answer["barrier"]


def make_rank_zero(name: str, hosts: Hosts, _: int) -> Target:
    """The target of that name, as rank 0 makes it."""
    return RankZero(KINDS[name], hosts)


class TutorialInit(Session):
    """The constructor."""

    def open(self) -> None:
        assert isinstance(self.target, RankZero)
        self.rank_zero = self.target

    def round(self) -> Sample:
        seconds, _ = self.rank_zero.time(self.measurement.ranks, 0)
        return Sample(seconds)


class TutorialBarrier(TutorialInit):
    """Barriers: the median of some in a row."""

    def round(self) -> Sample:
        _, seconds = self.rank_zero.time(self.measurement.ranks, BARRIERS)
        return Sample(sorted(seconds)[BARRIERS // 2])
