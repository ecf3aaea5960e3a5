"""The time, as a core knows it, and the figures that depend on it.

Those are how long the turns of the loop take, how much a server is asked, whether a job makes progress, and
how often trouble with one address is reported. The loop times its turns, and the parsers count requests by
themselves. Imports next to nothing: clients import the loops, and the loops import this.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from math import log2
from typing import Final

from rallypoint.store.wire.opcodes import PROGRESS_OPS, Op

_PER_OCTAVE: Final = 4
_BUCKETS: Final = 27 * _PER_OCTAVE  # up to two minutes


class Turn:
    """When the current turn of the loop began: the driver writes it once per turn.

    All cores on one loop share one.
    """

    __slots__ = ("now", "wall_ahead")

    def __init__(self, now: float = 0.0, wall_ahead: float = 0.0) -> None:
        self.now = now
        """Seconds of a monotonic clock."""
        self.wall_ahead = wall_ahead
        """How far the time of day is ahead of that clock. The driver updates it about once a second."""

    @property
    def wall(self) -> float:
        """The time of day, as unix time."""
        return self.now + self.wall_ahead


class Durations:
    """How durations are spread, to a quarter of an octave."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._total = 0

    def add(self, seconds: float) -> None:
        place = int(log2(max(seconds, 0.0) * 1e6 + 1.0) * _PER_OCTAVE)
        self._counts[min(place, _BUCKETS - 1)] += 1
        self._total += 1

    def copy(self) -> Durations:
        return self - Durations()

    def __sub__(self, earlier: Durations) -> Durations:
        """The durations that were added since the copy `earlier` was made."""
        rest = Durations()
        rest._counts = [now - then for now, then in zip(self._counts, earlier._counts, strict=True)]
        rest._total = self._total - earlier._total
        return rest

    def quantile(self, share: float) -> float:
        """The duration that this share of them does not exceed; -1 if there are none."""
        if not self._total:
            return -1.0
        wanted, seen = share * self._total, 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return float(2.0 ** ((place + 1) / _PER_OCTAVE) - 1.0) * 1e-6
        raise AssertionError("the counts do not add up")


_HISTORY_SECONDS: Final = 300
_RATE_SECONDS: Final = 5
MARK_SECONDS: Final = 150.0
"""Turns are reported for the last 150 to 300 seconds."""
_ERRORS_KEPT: Final = 128
_MOST_PEERS: Final = 1_000
_PEERS_NAMED: Final = 3
_OTHERS: Final = "other addresses"

Second = tuple[float, int, float, int, int]
"""One second of the past, in the order of `snapshot.Second`."""


class Traffic:
    """The figures of one server or relay. Not safe for threads."""

    __slots__ = ("_counts", "_marks", "_turns", "error_count", "errors", "history")

    def __init__(self) -> None:
        self._turns = Durations()  # of all turns of the loop, when the last second ended
        self._marks: deque[tuple[float, Durations]] = deque(maxlen=2)  # and at two times before
        self._counts: deque[tuple[float, Mapping[Op, int]]] = deque(maxlen=_RATE_SECONDS + 1)
        self.history: deque[Second] = deque(maxlen=_HISTORY_SECONDS)
        self.errors: deque[tuple[float, str, str]] = deque(maxlen=_ERRORS_KEPT)
        self.error_count = 0

    def note_error(self, wall: float, peer: str, reason: str) -> None:
        """A connection was closed or refused."""
        self.errors.append((wall, peer, reason))
        self.error_count += 1

    def end_second(
        self, turn: Turn, turns: Durations, counts: Mapping[Op, int], *, clients: int, waiting: int
    ) -> None:
        """About once a second: what has been counted until now, and how long all turns of the loop took."""
        before = sum(self._counts[-1][1].values()) if self._counts else 0
        self._counts.append((turn.now, counts))
        p99 = (turns - self._turns).quantile(0.99)
        self.history.append((turn.wall, sum(counts.values()) - before, p99, clients, waiting))
        self._turns = turns
        if not self._marks or turn.now - self._marks[-1][0] >= MARK_SECONDS:
            self._marks.append((turn.now, turns))

    def turn_quantile(self, share: float) -> float:
        """The seconds that this share of the last minutes' turns did not exceed; -1 if none was timed."""
        return (self._turns - self._marks[0][1]).quantile(share) if self._marks else -1.0

    def operations(self, now: float, counts: Mapping[Op, int]) -> list[tuple[str, int, float]]:
        """The operations so far: the name of each, its count, and its rate per second."""
        then, before = self._counts[0] if self._counts else (now, {})
        seconds = max(now - then, 1.0)
        return [
            (op.name, count, round((count - before.get(op, 0)) / seconds, 3) if self._counts else 0.0)
            for op, count in sorted(counts.items())
            if count
        ]


_SHORT_BREAK: Final = 5.0
"""A client that waits with shorter breaks, as torch's barrier does to log, counts as waiting all the time."""


class Progress:
    """When a client last made progress, to a second, and since when one waits."""

    __slots__ = ("_seen", "_waited_at", "_waiting_since", "last")

    def __init__(self, now: float) -> None:
        self.last = now
        self._seen = 0
        self._waiting_since: float | None = None
        self._waited_at = 0.0

    def end_second(
        self, now: float, arrivals: int, counts: Mapping[Op, int], oldest_wait: float | None, waiting: int
    ) -> None:
        """About once a second: how many clients have arrived, what was asked so far, and who waits."""
        seen = arrivals + sum(counts.get(op, 0) for op in PROGRESS_OPS)
        if seen != self._seen:
            self._seen, self.last = seen, now
        if waiting:
            self._waited_at = now
            if self._waiting_since is None:
                self._waiting_since = oldest_wait
        elif now - self._waited_at > _SHORT_BREAK:
            self._waiting_since = None

    def stalled_seconds(self, now: float) -> float:
        """How long clients have waited without any progress, to a second; 0 if none waits."""
        return 0.0 if self._waiting_since is None else now - max(self.last, self._waiting_since)


def address_of(peer: str) -> str:
    """The address of a peer without its port, which is another one for each of its connections."""
    address, colon, port = peer.rpartition(":")
    return address if colon and port.isdigit() else peer


class PeerLimit:
    """Limits how often trouble with a peer is reported: a few times a second for each kind; counts the rest.

    A peer that connects and sends garbage causes thousands of errors a second. A line for each would fill the
    disk, and hide the lines of other peers.
    """

    def __init__(self, most: int = 10, most_of_all_peers: int = 100) -> None:
        self._most = most
        self._most_of_all_peers = most_of_all_peers
        self._began = float("-inf")
        self._admitted: Counter[tuple[str, str]] = Counter()
        self._admitted_of_all = 0
        self._left_out: Counter[str] = Counter()

    def admits(self, kind: str, peer: str, now: float) -> bool:
        """Whether to report this one; if not, it is counted."""
        if now - self._began >= 1.0:
            self._began = now
            self._admitted.clear()
            self._admitted_of_all = 0
        address = address_of(peer)
        if self._admitted_of_all < self._most_of_all_peers and self._admitted[kind, address] < self._most:
            self._admitted[kind, address] += 1
            self._admitted_of_all += 1
            return True
        known = address in self._left_out or len(self._left_out) < _MOST_PEERS
        self._left_out[address if known else _OTHERS] += 1
        return False

    @property
    def has_left_out(self) -> bool:
        """Whether `take_left_out` has something to report."""
        return bool(self._left_out)

    def take_left_out(self, now: float) -> list[tuple[str, int]]:
        """Addresses and how many of theirs were left out, once the second is over; then they are forgotten.

        Addresses beyond the first few are one entry together.
        """
        if not self._left_out or now - self._began < 1.0:
            return []
        others = self._left_out.pop(_OTHERS, 0)
        most = self._left_out.most_common()
        self._left_out.clear()
        others += sum(count for _, count in most[_PEERS_NAMED:])
        return [*most[:_PEERS_NAMED], *([(_OTHERS, others)] if others else [])]
