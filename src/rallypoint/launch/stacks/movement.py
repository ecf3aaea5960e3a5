"""Since when a rank stands still or makes no progress, how fast it steps, and how long it may wait. Pure.

A rank that trains is often seen at the same line, the one that takes longest. So its stack alone does not
tell: a rank stands still if its main thread was also hardly ever woken between two samples, as one is that
waits in one and the same call. Where a script calls `rallypoint.step`, a new step is a move, whatever else.

Standing still and making no progress are different questions:

    seen between two samples                              stands still    makes no progress
    another stack, another step, much data moved          no              no
    the same stack, the main thread was woken often       no              yes: it polls for something
    the same stack, it uses half a core or more           yes             no, but for PATIENCE times as long
    the same stack, and nothing else                      yes             yes

The bound on computing is there because an endless loop looks like a long computation.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, NamedTuple

from rallypoint.launch.stacks.frames import Frame

_WAKES: Final = 4
_WAKES_PER_SECOND: Final = 2.0
"""How often a thread may be woken within one call: by the question itself, and by waits with a time."""
_STEPS_KEPT: Final = 7
PATIENCE: Final = 3
"""A rank that computes in one place has so many times as long as one that does nothing."""


class Movement:
    """One rank, sample by sample. Times are of one clock, in seconds."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._arrived = now
        self._computed = now
        self._before = now
        self._stack: tuple[Frame, ...] = ()
        self._wakes = -1
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS_KEPT)

    def note(
        self, now: float, stack: tuple[Frame, ...], wakes: int, step: int, *, computes: bool = False
    ) -> None:
        """A sample: its stack, how often its main thread has been woken so far (-1: not known), its step, and
        whether it computes.
        """
        most = _WAKES + _WAKES_PER_SECOND * (now - self._before)
        is_busy = min(wakes, self._wakes) >= 0 and wakes - self._wakes > most
        is_new_step = bool(self._steps) and step != self._steps[-1][1]
        if stack != self._stack or is_new_step:
            self.advance(now)
        if is_busy:
            self._since = now
        if computes:
            self._computed = now
        self._stack, self._wakes, self._before = stack, wakes, now
        self._note_step(now, step)

    def advance(self, now: float) -> None:
        """It has made progress: besides what `note` finds, it has moved much data."""
        self._since = self._arrived = now

    def restate(self, stack: tuple[Frame, ...]) -> None:
        """Its place as another tool describes it, which is no progress."""
        self._stack = stack

    def still_seconds(self, now: float) -> float:
        """For how long it has not moved."""
        return now - self._since

    def same_seconds(self, now: float) -> float:
        """For how long it has been at the same place."""
        return now - self._arrived

    def idle_seconds(self, now: float) -> float:
        """For how long it has made no progress, if nothing but its own work holds it up."""
        return max(now - max(self._arrived, self._computed), self.same_seconds(now) / PATIENCE)

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


_EVERY_SECONDS: Final = 10.0
_LEAST_SECONDS: Final = 0.5
_SAMPLES: Final = 8
"""Samples before the time of a rank is over: only they show for how long it waits."""
_BEFORE_TIMEOUT: Final = 0.75
_AFTER_END_SECONDS: Final = 30.0
"""Who waits for a rank that has ended waits in vain; a rank of another group may be slow, though."""
_FAMILY_SECONDS: Final = 30.0


class Pace(NamedTuple):
    """What is known of the patience of a job."""

    stall: float
    """For how long ranks may stand still, as the user says."""
    timeout: float = inf
    """The time-out of its process groups."""
    has_ended: bool = False
    """Whether a rank has ended while others go on."""

    @property
    def before_timeout(self) -> float:
        """A rank that has waited for so long will soon be ended by the time-out."""
        return _BEFORE_TIMEOUT * self.timeout

    @property
    def urgent(self) -> float:
        """For how long a rank may wait for others, even while those make progress."""
        return min(_AFTER_END_SECONDS if self.has_ended else inf, self.before_timeout)

    @property
    def waiting(self) -> float:
        """For how long a rank may wait for others."""
        return min(self.stall, self.urgent)

    @property
    def every(self) -> float:
        """Between two samples."""
        return max(min(_EVERY_SECONDS, self.waiting / _SAMPLES), _LEAST_SECONDS)

    @property
    def family_after(self) -> float:
        """A rank that has stood still for so long is examined further: its threads, its processes."""
        return min(_FAMILY_SECONDS, self.waiting / 2)
