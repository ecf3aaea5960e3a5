"""The simulation of relays and ranks, on a store of two or three processes that share a log.

The processes are killed, stopped for seconds and told to end; the engine that has the log is away, or does
not say whether it has written something; in some runs it goes back to what it was a moment ago.

    python tests/tools/replicated_simulation.py --seeds 2000 [--first 0] [--keep-going]
    python tests/tools/replicated_simulation.py --seed 17 --verbose
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from rallypoint.store.core.store import Core
from rallypoint.store.engine import Engine
from rallypoint.store.wire.limits import Limits
from simulated_network import Place
from simulated_nodes import SECONDS_EACH, Cluster, Process
from simulated_ranks import Rank
from simulation import Options, Simulation, main, run_simulation

_MOST_RANKS = 16
_EMPTY = Core()


class ReplicatedSimulation(Simulation):
    """One run. It is made by its seed alone."""

    seconds_each = SECONDS_EACH
    check_every = 150
    plain_share = 0.4
    _is_audited = False
    sizes: ClassVar = {"small": (5, 5), "medium": (8, 6), "large": (12, 6)}

    def _make_store(self) -> Place:
        rng = self.rng
        self.slow_steps = rng.choice((5, 20, 60))
        self._away = rng.choice((5, 30, 100))
        limits = Limits(session_seconds=rng.choice((6.0, 60.0)))
        self.cluster = Cluster(self, limits, rng.randint(2, 3), may_lose=rng.random() < 0.15)
        return self.cluster

    @property
    def engine(self) -> Engine[Any]:
        leader = self.cluster.leader
        assert leader is not None
        return leader.replica.stores.get("", _EMPTY).engine

    @property
    def _is_store_at_rest(self) -> bool:
        return self.cluster.is_at_rest

    def replace_ranks(self, count: int) -> None:
        if self._is_audited:
            return  # what new ones push behind the audit's pops, nobody would pop
        for _ in range(min(count, _MOST_RANKS - len(self.ranks))):
            self.after(self.rng.randint(1, 200), self._add_rank)

    def tell(self, key: bytes, is_there: bool) -> None:
        """Mostly to one without a relay, and best to one whose leader was stopped, and leads no more."""
        idle = [rank for rank in self._idle if rank.at == "store"]
        if idle and self.rng.random() < 0.7:
            rank = self.rng.choice([rank for rank in idle if not self._is_led(rank)] or idle)
            rank.heard = ("GET", (key,))
            self.ready.append(rank.go_on)
        else:
            super().tell(key, is_there)

    @property
    def _idle(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.is_alive and not rank.replies]

    def _is_led(self, rank: Rank) -> bool:
        """Whether the process that a rank without a relay asks still leads."""
        leader = self.cluster.leader
        assert rank.wire is not None
        return leader is not None and rank.wire.server is leader.serving

    def _pass(self, seconds: float) -> None:
        """The leader renews its term meanwhile, if it can: time does not go on for the log without that."""
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            self.cluster.renew()
        super()._pass(0.0)

    # Faults

    def _plan_faults(self, steps: int) -> None:
        rng = self.rng
        steps = max(steps, rng.choice((200, 600)))
        super()._plan_faults(steps)
        self._sometime(self._kill_process, rng.choice((0, 1, 1, 2)), steps)
        self._sometime(self._pause_process, rng.choice((0, 1, 1, 2)), steps)
        self._sometime(self._stop_process, rng.choice((0, 0, 0, 1)), steps)
        self._sometime(self._be_without_engine, rng.choice((0, 0, 1, 2)), steps)
        self._sometime(self._fail_write, rng.choice((0, 2, 4)), steps)
        self._sometime(self._keep, rng.choice((0, 1, 3)), steps)
        if self.cluster.may_lose:
            self._sometime(self._lose, 1, steps)

    def _choose(self) -> Process:
        """A process; most faults are those of a leader."""
        leader = self.cluster.leader
        return (
            leader
            if leader is not None and self.rng.random() < 0.8
            else self.rng.choice(self.cluster.processes)
        )

    def _kill_process(self) -> None:
        self._choose().kill(self.rng.randint(10, 300))

    def _pause_process(self) -> None:
        """At times for so long that another leads; then some write there, and tell one who is still here."""
        steps = self.rng.choice((20, 150, 400, 700)) + self.rng.randint(0, 60)
        if steps >= 400 and self.cluster.find() is not None and len(self.ranks) < _MOST_RANKS:
            self._connect_rank(f"r{len(self.ranks)}", self.cluster, 0)
            for _ in range(3):
                self.after(self.rng.randint(200, steps), self._write)
        self._choose().pause(steps)

    def _write(self) -> None:
        if idle := [rank for rank in self._idle if rank.at != "store" or self._is_led(rank)]:
            rank = self.rng.choice(idle)
            rank.heard = ("SET", (self.rng.choice(self.keys.texts),))
            rank.go_on()

    def _stop_process(self) -> None:
        self._choose().stop(self.rng.randint(10, 300))

    def _be_without_engine(self) -> None:
        self.cluster.memory.is_away = True
        self.after(self.rng.choice((20, 100, 300)), self._have_engine)

    def _have_engine(self) -> None:
        self.cluster.memory.is_away = False

    def _fail_write(self) -> None:
        self.cluster.memory.fail_next(carried_out=self.rng.random() < 0.5)

    def _lose(self) -> None:
        """The engine loses what it is about to acknowledge; the leader may die with it."""
        go_back = self.cluster.remember()

        def lose() -> None:
            go_back()
            if self.rng.random() < 0.5:
                self._kill_process()

        self.after(self.rng.randint(5, 100), lose)

    def _audit_barriers(self) -> None:
        self._is_audited = True
        if self.cluster.has_lost:  # a leader finds out when it writes, and ends: not in the audit
            probe = self._probe()
            probe.ask("ADD", self.keys.counters[0], argument=0)
            probe.send()
            self.run_until_rest()
        super()._audit_barriers()

    def _audit_values(self) -> None:
        super()._audit_values()
        if self.cluster.has_lost:
            self._forget_the_dead()

    def _forget_the_dead(self) -> None:
        """What those saw who have lost their connection: they were told that something is wrong.

        Nothing more can be promised by an engine that loses what it has acknowledged. Whoever has seen what
        is lost is disconnected: clients by the change of leaders, relays as their sessions are ahead of the
        log. All others have to see one store.
        """
        gone = {rank.name for rank in self.ranks if not rank.is_alive}
        for operation in self.history.operations:
            if operation.who in gone and operation.end is not None:
                operation.died, operation.end, operation.result = operation.end, None, None

    def _keep(self) -> None:
        if self.cluster.leader is not None:
            self.cluster.leader.keep()


def simulate(seed: int, options: Options | None = None) -> ReplicatedSimulation:
    """Run one seed; whatever is wrong comes out as FailedError, which names the seed."""
    return run_simulation(ReplicatedSimulation(seed, options))


if __name__ == "__main__":
    sys.exit(main(simulate))
