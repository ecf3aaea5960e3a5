"""Waits: that end for many at once, and that are given up."""

from __future__ import annotations

import time

from rallypoint.bench.bulk import MANY_KEYS, keys_of
from rallypoint.bench.busy import RoundRobin, until
from rallypoint.bench.dialects import TORCH
from rallypoint.bench.load import Load, sample
from rallypoint.bench.ranks import RUN_LIMIT_S, WithRanks
from rallypoint.bench.results import Sample
from rallypoint.bench.session import Session
from rallypoint.bench.sockets import connect, converse
from rallypoint.bench.workers import Message


class Wakeups(WithRanks):
    """All ranks wait for one key; then it is set."""

    def open(self) -> None:
        super().open()
        self.come_up()
        self.rounds = 0
        self.round()

    def round(self) -> Sample:
        self.rounds += 1
        key = f"/bench/wake/{self.rounds}"
        self.swarm.everyone(do="wait", key=key)
        self.target.settle()
        self.target.await_quiet()
        self.swarm.everyone(do="check_asleep")
        order: Message = {"do": "wake", "key": key, "since": time.monotonic(), "limit_s": RUN_LIMIT_S}
        return self.phase([{**order, "release": first} for first in self.swarm.firsts()])


class Cancels(Session):
    """A client that waits and gives up, again and again, while another waits for very many keys."""

    def open(self) -> None:
        waiter = self.resources.enter_context(connect(self.target.port, TORCH))
        converse(waiter, TORCH.wait_for_missing(keys_of(MANY_KEYS, "absent")))
        self.client = RoundRobin(self.target.port, TORCH, 1)
        self.resources.callback(self.client.close)
        self.run(self.measurement.seconds / 2)

    def round(self) -> Sample:
        load, cpu = self.metered(lambda: self.run(self.measurement.seconds))
        return sample(load.seconds / load.operations, [load], cpu)

    def run(self, seconds: float) -> Load:
        """Give up for so long."""
        return self.client.run(until(time.monotonic() + seconds), TORCH.give_up(b"/bench/missing"))
