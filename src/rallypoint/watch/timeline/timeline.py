"""How a job came up: what `judgement` makes of a record, for `words` and `drawing`. Pure.

Times are seconds since the first member came, unless they are said to be something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from rallypoint.store.rollcall.events import BarrierComplete, Erred, Hung, Stalled, Started
from rallypoint.watch.timeline.records import WaitEnding, WaitRecord

_LONG: Final = 1.0
"""Seconds: a wait that was given up sooner has stopped no member."""
_CAME_LATE: Final = 0.9
"""Part of its lateness: a member that came only after that is late because it came late."""


@dataclass(frozen=True)
class StartupMember:
    """A rank, with all its connections; or a client that may be a rank, but it is not known which."""

    name: str
    """`rank 3`, `process 12`, or its address."""
    host: str
    """Its machine; empty: not known. For a member that never came, the machine in the plan."""
    came: float | None
    """When it connected; None: it never came."""
    rank: int = -1
    pid: int = 0
    known: float | None = None
    """When its client said which rank it is; None: never."""
    late: float = 0.0
    """Until when others waited for it: until it came, or until it wrote the keys that they waited for."""
    ready: float = 0.0
    """When its last wait of the start-up ended."""
    waited: float = 0.0
    """For how many seconds of the start-up it waited."""
    waits: tuple[WaitRecord, ...] = ()
    """Its waits during the start-up, by their beginnings; their times are unix times."""
    left: float | None = None
    """When its last connection was closed; None: not yet."""
    why: str = ""
    """Why the server closed it; empty if the member closed it itself."""

    @property
    def came_late(self) -> bool:
        """Whether it was late because it connected late; else it came in time, and then others waited."""
        return self.came is not None and self.came >= _CAME_LATE * self.late

    @property
    def ending(self) -> WaitEnding:
        """How its last long wait of the start-up ended; MET if it never waited for long."""
        long_ones = (each for each in self.waits if each.seconds >= _LONG)
        last = max(long_ones, key=lambda each: each.ended, default=None)
        return WaitEnding.MET if last is None else last.ending


@dataclass(frozen=True)
class Straggling:
    """The members that came last, and how long the others waited."""

    members: tuple[StartupMember, ...]
    """The last one first; several if they came together, long after all others. Or all that never came."""
    waiters: int
    """How many members waited meanwhile."""
    waited: float
    """For how many seconds they waited, in sum."""
    is_for_them: bool
    """Whether it is known that they waited for the stragglers; else they only waited at the same time."""

    def as_json(self) -> dict[str, Any]:
        return {
            "members": [each.name for each in self.members],
            "seconds": _round(self.members[0].late),
            "waiters": self.waiters,
            "waited": _round(self.waited),
            "is_for_them": self.is_for_them,
        }


@dataclass(frozen=True)
class Timeline:
    """One start-up."""

    writers: tuple[Started, ...]
    """The servers and relays that wrote the events, as far as the files name them."""
    origin: float
    """The unix time at which the first member came."""
    seconds: float
    """Until the start-up was over: all members had come, and none waited. Or until the events end."""
    is_over: bool
    """False: a member has not come, or has waited in vain and is not known to have gone on."""
    ended: float
    """When the events end."""
    expected: int
    """How many ranks the job has; -1: not known."""
    members: tuple[StartupMember, ...]
    """First the members that never came, then the latest first."""
    straggling: Straggling | None
    """None: no member was late by a second."""
    barriers: tuple[BarrierComplete, ...]
    """All barriers of the run, not only of the start-up; likewise `stalls`, `hangs` and `errors`."""
    stalls: tuple[Stalled, ...]
    hangs: tuple[Hung, ...]
    """What launchers have said, in the order of time."""
    errors: tuple[Erred, ...]
    names: Mapping[int, str]
    """The names of clients by their numbers, which are in `WaitRecord.by` and `BarrierComplete.last`."""
    others: int = 0
    """How many clients are no members: tools, launchers, and clients of earlier tries."""
    remarks: tuple[str, ...] = ()
    """Sentences on gaps in the events, and on what is therefore not known."""

    @property
    def missing(self) -> tuple[StartupMember, ...]:
        return tuple(each for each in self.members if each.came is None)

    @property
    def present(self) -> tuple[StartupMember, ...]:
        return tuple(each for each in self.members if each.came is not None)

    def as_json(self) -> dict[str, Any]:
        """All of it. Times are seconds since `origin`, which alone is a unix time."""
        return {
            "origin": self.origin,
            "seconds": _round(self.seconds),
            "is_over": self.is_over,
            "ended": _round(self.ended),
            "expected": self.expected,
            "writers": [self._event(each) for each in self.writers],
            "straggling": self.straggling.as_json() if self.straggling else None,
            "members": [self._member(each) for each in self.members],
            "barriers": [
                self._event(each) | {"last": self.names.get(each.last, "")} for each in self.barriers
            ],
            "stalls": [self._event(each) for each in self.stalls],
            "hangs": [self._event(each) for each in self.hangs],
            "errors": [self._event(each) for each in self.errors],
            "others": self.others,
            "remarks": list(self.remarks),
        }

    def _event(self, event: Started | BarrierComplete | Stalled | Hung | Erred) -> dict[str, Any]:
        return asdict(event) | {"time": _round(event.time - self.origin)}

    def _member(self, each: StartupMember) -> dict[str, Any]:
        told = {
            name: _round(value) if isinstance(value, float) else value
            for name, value in vars(each).items()
            if name != "waits"
        }
        return told | {"waits": [self._wait(wait) for wait in each.waits]}

    def _wait(self, wait: WaitRecord) -> dict[str, Any]:
        return {
            "began": _round(wait.began - self.origin),
            "seconds": _round(wait.seconds),
            "keys": wait.keys,
            "key_count": wait.key_count,
            "ending": wait.ending.value,
            "by": self.names.get(wait.by, ""),
        }


def _round(value: float) -> float:
    return round(value, 6)
