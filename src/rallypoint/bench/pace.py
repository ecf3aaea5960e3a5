"""How long the rest of a run will take, by what was planned and by what has been seen so far. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

Step = tuple[str, str, bool]
"""What is measured, with whom, and whether it is its start and not a round."""

_START_S: Final = 1.0


@dataclass
class _Kind:
    guess: float
    left: int
    seen: float = 0.0
    count: int = 0


class Pace:
    """Steps that are left, and the time of those that were taken."""

    def __init__(self, plan: Iterable[tuple[str, str, int, float]]) -> None:
        """`plan`: what, with whom, how many rounds, and how long one may take."""
        self._kinds: dict[Step, _Kind] = {}
        for what, target, rounds, seconds in plan:
            self._kinds[(what, target, True)] = _Kind(_START_S + seconds, 1)
            self._kinds[(what, target, False)] = _Kind(seconds, rounds)
        self.total = sum(kind.left for kind in self._kinds.values())

    @property
    def done(self) -> int:
        return self.total - sum(kind.left for kind in self._kinds.values())

    def took(self, step: Step, seconds: float) -> None:
        """A step was taken."""
        kind = self._kinds[step]
        kind.left = max(0, kind.left - 1)  # it may have been dropped meanwhile
        kind.count += 1
        kind.seen += seconds

    def drop(self, what: str, target: str) -> None:
        """The rounds that are left of it will not be taken."""
        for is_start in (True, False):
            self._kinds[(what, target, is_start)].left = 0

    def remaining(self) -> float:
        """Seconds: of the same kind, as those seen; else as guessed, and as much off as other guesses."""
        guessed = sum(kind.guess * kind.count for kind in self._kinds.values())
        seen = sum(kind.seen for kind in self._kinds.values())
        scale = seen / guessed if guessed else 1.0
        return sum(
            kind.left * (kind.seen / kind.count if kind.count else kind.guess * scale)
            for kind in self._kinds.values()
        )
