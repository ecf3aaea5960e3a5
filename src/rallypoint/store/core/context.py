"""What the parts of one core share. Pure."""

from __future__ import annotations

from typing import Any

from rallypoint.store.core.about import About
from rallypoint.store.core.journal import Journal
from rallypoint.store.core.outbox import Outbox, Work
from rallypoint.store.core.turn import Turn
from rallypoint.store.engine.budget import Budget
from rallypoint.store.wire.limits import Limits


class Context:
    """The limits, the time, the outbox and the journal of one core. Nothing in it is ever exchanged."""

    __slots__ = ("about", "budget", "journal", "limits", "outbox", "turn")

    def __init__(
        self,
        limits: Limits | None = None,
        turn: Turn | None = None,
        about: About | None = None,
        *,
        wants_events: bool = False,
        budget: Budget | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.turn = turn or Turn()
        self.about = about or About()
        self.budget = budget or Budget(self.limits)
        self.outbox: Outbox[Any] = Outbox()
        self.journal = Journal()
        if wants_events:
            from rallypoint.store.core.event_journal import EventJournal  # late: see `journal`

            self.journal = EventJournal(self.turn, self.outbox)

    def check_budget(self) -> None:
        """Ask the driver to close the client that holds the most, if all of them hold too much."""
        if self.budget.is_over and not self.budget.is_reported:
            self.budget.is_reported = True
            self.outbox.others.append(Work.LIGHTEN)
