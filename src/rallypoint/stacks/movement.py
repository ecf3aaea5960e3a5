"""Since when a rank stands still, and how fast it steps: from samples of it. Pure.

A rank that trains is often seen at the same line, the one that takes longest. So its stack alone does not
tell: a rank stands still if its main thread was also hardly ever woken between two samples, as one is that
waits in one and the same call. Where a script calls `rallypoint.step`, a new step is a move, whatever else.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from rallypoint.stacks.frames import Frame

_WAKES: Final = 4
_WAKES_PER_SECOND: Final = 2.0
"""How often a thread may be woken within one call: by the question itself, and by waits with a time."""
_STEPS_KEPT: Final = 7


class Movement:
    """One rank, sample by sample. Times are of one clock, in seconds."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._before = now
        self._stack: tuple[Frame, ...] = ()
        self._wakes = -1
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS_KEPT)

    def note(self, now: float, stack: tuple[Frame, ...], wakes: int, step: int) -> None:
        """A sample: its stack, how often its main thread has been woken so far (-1: not known), its step."""
        most = _WAKES + _WAKES_PER_SECOND * (now - self._before)
        is_busy = min(wakes, self._wakes) >= 0 and wakes - self._wakes > most
        is_new_step = bool(self._steps) and step != self._steps[-1][1]
        if stack != self._stack or is_busy or is_new_step:
            self._since = now
        self._stack, self._wakes, self._before = stack, wakes, now
        self._note_step(now, step)

    def still_seconds(self, now: float) -> float:
        """For how long it has not moved."""
        return now - self._since

    @property
    def steps_per_second(self) -> float:
        """Over the last samples; -1: not known."""
        if len(self._steps) < 2:
            return -1.0
        (began, first), (ended, last) = self._steps[0], self._steps[-1]
        return max(last - first, 0) / (ended - began) if ended > began else -1.0

    def _note_step(self, now: float, step: int) -> None:
        if step >= 0:
            if self._steps and step < self._steps[-1][1]:
                self._steps.clear()  # it has begun again
            self._steps.append((now, step))
