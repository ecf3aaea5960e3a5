"""What the clients of a relay, and the relays below it, ask of the store: how it goes upstream. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from rallypoint.store.core.context import Context
from rallypoint.store.core.outbox import DriverTask
from rallypoint.store.core.slices import Rest
from rallypoint.store.relay.core.combining import Combiner
from rallypoint.store.relay.core.slots import Asker, Line
from rallypoint.store.wire.opcodes import Op

_REPLY_BYTES: Final = 128
"""What a reply takes that is not there yet, roughly."""
_CROWD: Final = 1 << 15
"""Those who ask for much add to the next batch while it is smaller, in the measure of `Combiner.unsent_cost`.
All others always do. So these wait for one such batch at most, and for a part of their own."""


class Requests:
    """The combiner of one relay, and how much it holds. The outbox says when there is something to send."""

    __slots__ = (
        *("_is_crowded", "_is_due", "_is_pressed", "_leaving", "_limit", "_others"),
        *("combiner", "replies_due"),
    )

    def __init__(self, context: Context) -> None:
        self.combiner = Combiner()
        self.replies_due = 0
        """Replies that clients wait for, in their order."""
        self._limit = context.limits.relayed_bytes
        self._others = context.outbox.others
        self._is_due = False
        self._is_pressed = False
        self._is_crowded = False
        self._leaving: deque[Rest] = deque()  # of clients that waited for very much

    def renew(self) -> None:
        """The session upstream is lost, and with it all that was asked."""
        self.combiner = Combiner()
        self._leaving.clear()
        self.check_pressure()

    def ask(self, line: Line, op: Op, blobs: Sequence[bytes], tail: bytes, asker: Asker) -> None:
        """Ask the store what is answered at once."""
        self.combiner.ask(line, op, blobs, tail, asker)
        self.be_due()

    def be_due(self) -> None:
        """There may be something to send: say so, once until it is sent."""
        if not self._is_due:
            self._is_due = True
            self._others.append(DriverTask.FLUSH)
        self.check_pressure()

    def be_sent(self) -> None:
        """What could be sent has been."""
        self._is_due = False
        self._go_on_leaving()
        self.check_pressure()

    def leave(self, rest: Rest) -> None:
        """Take back what a client has asked, with other clients' requests in between."""
        self._leaving.append(rest)
        self._go_on_leaving()

    def _go_on_leaving(self) -> None:
        while self._leaving and self.combiner.unsent_cost <= _CROWD:
            if next(self._leaving[0], True):
                self._leaving.popleft()

    def check_pressure(self) -> None:
        """Have the driver read nothing more from clients while too much is held.

        And nothing from those who ask for much, while there is enough for the next batch.
        """
        is_crowded = self.combiner.unsent_cost > _CROWD
        if is_crowded != self._is_crowded:
            self._is_crowded = is_crowded
            self._others.append(DriverTask.CROWDED if is_crowded else DriverTask.ROOM)
        held = self.combiner.held_bytes + self.replies_due * _REPLY_BYTES
        if held > self._limit and not self._is_pressed:
            self._is_pressed = True
            self._others.append(DriverTask.HOLD)
        elif held <= self._limit // 2 and self._is_pressed:
            self._is_pressed = False
            self._others.append(DriverTask.READ_ON)
