"""How often ranks are looked at, and how long they may wait for others before it is said. Pure."""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

_EVERY_SECONDS: Final = 10.0
_LEAST_SECONDS: Final = 0.5
_LOOKS: Final = 8
"""So many looks are taken before the time of a rank is over: only then is it known for how long it waits."""
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
        """Between two looks."""
        return max(min(_EVERY_SECONDS, self.waiting / _LOOKS), _LEAST_SECONDS)

    @property
    def family_after(self) -> float:
        """What takes longer is asked of a rank that has stood still for so long: threads, processes."""
        return min(_FAMILY_SECONDS, self.waiting / 2)
