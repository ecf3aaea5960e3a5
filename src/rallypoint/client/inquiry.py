"""Whether a client asks for the missing ranks, and when: shortly before the time of a wait is over.

After the wait it would be too late: the ranks leave one after the other, and barriers empty. A snapshot of
thousands of ranks costs the server a tenth of a second, and where one rank is missing, all others time out
together. So only a few ranks ask, and none asks often. A short wait is a poll: it does not ask at all.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from rallypoint.errors import ConnectError
from rallypoint.store.connect.connection import ConnectionPool, Late
from rallypoint.store.connect.deadline import Deadline, within
from rallypoint.store.rollcall.identity import Identity, Role

if TYPE_CHECKING:
    from rallypoint.store.rollcall.roll import Roll

ASKERS: Final = 16
"""At most this many ranks of a job ask when all of them time out."""

_SHORTEST_WAIT: Final = 1.0
_EXPLAIN_SECONDS: Final = 1.0
"""How long a store that gave no answer is asked why, when the time is over."""
_AHEAD_SECONDS: Final = 2.0
_AHEAD_PER_RANK: Final = 0.00025  # a snapshot of many ranks takes its time to be made, sent and read
_AHEAD_SHARE: Final = 0.25  # of the whole time, at most
_LEAST_PAUSE: Final = 0.5
_FAILED_PAUSE: Final = 10.0  # after a question to which there was no answer
_PAUSE_PER_RANK: Final = 0.002  # so that repeated questions take only some percent of the server's time


def is_asker(who: Identity) -> bool:
    """Whether this client may ask. Launchers and tools may not: their waits are polls."""
    if who.role in (Role.AGENT, Role.TOOL):
        return False
    if who.rank < 0:
        return who.world_size <= ASKERS or random.random() < ASKERS / who.world_size
    if who.world_size < 0:
        return who.rank < ASKERS
    return who.rank % max(1, -(-who.world_size // ASKERS)) == 0


class Inquiry:
    """The questions of one store, over its connections, to the server at an address.

    If that is a relay, and it is known where the store behind it is, the store itself is asked: a relay does
    not know who is expected.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        server: tuple[str, int],
        who: Identity,
        head: tuple[str, int] | None = None,
    ) -> None:
        self._pool = pool
        self._server = server
        self._head = head
        self._ahead = _AHEAD_SECONDS + _AHEAD_PER_RANK * max(who.world_size, 0)
        self._pause = Deadline(0.0)
        self._last: Roll | None = None
        self.is_asker = is_asker(who)

    def moment(self, deadline: Deadline) -> Deadline:
        """When to ask about a wait with this deadline."""
        return Deadline(deadline.remaining - min(self._ahead, _AHEAD_SHARE * deadline.seconds))

    def ask(self, deadline: Deadline) -> Roll | None:
        """The roll of the job; None without an answer by the deadline, or after a question a moment ago."""
        if deadline.seconds < _SHORTEST_WAIT or not self._pause.passed:
            return None
        self._pause = Deadline(_FAILED_PAUSE)
        self._last = None
        try:
            roll = within(deadline.remaining, lambda: self._find_roll(deadline))
        except Exception:  # whatever goes wrong: the error of the wait is the one to be told
            return None
        if roll is not None:
            self._pause = Deadline(max(_LEAST_PAUSE, _PAUSE_PER_RANK * (len(roll.ranks) + roll.unknown)))
        self._last = roll
        return roll

    def explain(self, late: Late, deadline: Deadline) -> Late:
        """The error of a store that gave no answer, with what keeps it from answering, if that is known."""
        is_silent = late.is_silent if isinstance(late, ConnectError) else not late.keys
        if not is_silent or not self.is_asker or deadline.seconds < _SHORTEST_WAIT:
            return late
        roll = self.ask(Deadline(_EXPLAIN_SECONDS)) or self._last
        if roll is None or not roll.trouble:
            return late
        return type(late)(f"{late.message}: {roll.trouble}", hint=roll.advice)

    def _find_roll(self, deadline: Deadline) -> Roll | None:
        from rallypoint.client.snapshots import find_roll, find_roll_behind  # late, since most waits end well

        if self._head is None:
            return find_roll(self._pool, self._server, deadline)
        return find_roll_behind(self._server, self._head, deadline)
