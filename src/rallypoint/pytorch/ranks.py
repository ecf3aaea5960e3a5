"""What a process knows of itself when its rendezvous begins: which rank it is, and for how long it will wait.

A launcher names the rank in a variable. `torch.multiprocessing.spawn` passes it as an argument; then it is
known only here, and only now can the process answer for it. Imports no torch.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from importlib import import_module
from threading import current_thread, main_thread
from typing import Any, NamedTuple

from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.handover import read_handover
from rallypoint.launch.reports import folder_of, report_joined
from rallypoint.launch.stacks.steps import be_rank


class Joining(NamedTuple):
    """The first arguments of torch's function that makes the store of a rendezvous."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout: timedelta

    @staticmethod
    def of(arguments: tuple[Any, ...]) -> Joining | None:
        """None if another torch has others, or no launcher asks."""
        if folder_of(os.environ) is None or len(arguments) < 5:
            return None
        given = Joining(*arguments[:5])
        is_known = isinstance(given.rank, int) and isinstance(given.timeout, timedelta)
        return given if is_known and given.rank >= 0 else None

    def answer(self) -> None:
        """Answer for this rank when the launcher asks what it does."""
        given = read_handover(os.environ)
        if given.reports is None or not given.signals or current_thread() is not main_thread():
            return
        be_rank(self.rank)
        # If it came with the environment, it has been imported under the name that it has there.
        of_start = sys.modules.get("rallypoint_hooks")
        hooks: Any = of_start or import_module("rallypoint.pytorch.injection.rallypoint_hooks")
        hooks.answer_for_stacks(str(given.reports), self.rank, list(given.signals))

    def report(self) -> None:
        """The store has been reached."""
        place = str(Endpoint(self.host, self.port))
        report_joined(place, self.rank, self.world_size, self.timeout.total_seconds())
