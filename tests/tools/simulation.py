"""Relays and a store in one process, on a network that loses connections, under a scheduler of chance.

There are no sockets, threads or clocks: a seed decides everything, and the same seed gives the same run. At
each step one thing happens: some bytes arrive, a relay sends a batch, a connection breaks, one of its ends
notices that, a connection falls silent until beats find out, a rank asks or dies, time passes. In the end the
network heals and comes to rest. Then the history of all ranks must be one that a single store could have
given, and nobody may be left waiting for what is there.

    python tests/tools/simulation.py --seeds 20000 [--first 0] [--keep-going]
    python tests/tools/simulation.py --seed 17 --verbose
"""

from __future__ import annotations

import argparse
import heapq
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch

import pytest

from histories import History
from linearizability import Operation
from rallypoint.build import in_use
from rallypoint.store.core import context, sessions
from rallypoint.store.core.store import Core
from rallypoint.store.engine import Engine
from rallypoint.store.relay.core import upstream
from rallypoint.store.wire import sessions as wire_sessions
from simulated_network import Link, Node, Place, Relay, Task
from simulated_ranks import FailedError, Keys, Rank

_MOST_STEPS = 200_000

MIXES: dict[str, dict[str, int]] = {
    "all": {"set": 6, "get": 8, "add": 6, "check": 3, "wait": 5, "delete": 3, "compare_set": 4, "append": 3}
    | {"multi_get": 2, "multi_set": 2, "num_keys": 1, "push": 4, "pop": 2, "length": 1}
    | {"wait_and_pop": 4, "barrier": 5, "pipeline": 4, "add_to_text": 1},
    "adds": {"add": 12, "get": 3, "check": 1, "wait": 1, "pipeline": 2},
    "queues": {"push": 8, "wait_and_pop": 8, "pop": 2, "length": 1, "check": 1},
    "barriers": {"barrier": 12, "add": 3, "pipeline": 1},
    "values": {"set": 3, "get": 9, "delete": 3, "wait": 6, "append": 1, "pipeline": 4, "check": 2}
    | {"compare_set": 1},
    "reads": {"set": 6, "get": 12, "compare_set": 1},
    "waits": {"set": 7, "add": 3, "delete": 12, "wait": 8},
    "many": {"set": 4, "get": 4, "multi_get": 6, "multi_set": 6, "num_keys": 2, "delete": 2},
}
"""Scripts for the ranks: how often each operation is chosen. Those of few kinds collide more."""


@dataclass(frozen=True)
class Options:
    """What a run does besides what its seed says."""

    with_invariants: bool = True
    mix: str | None = None
    """Which of MIXES; the seed says it otherwise."""
    verbose: bool = False


class Simulation:
    """One run. It is made by its seed alone."""

    seconds_each = 0.0
    """How long a step takes."""
    check_every = 25
    """After so many steps, the invariants."""
    plain_share = 0.12
    """Of the ranks, those that have no relay."""
    sizes: ClassVar = {"small": (8, 6), "medium": (16, 8), "large": (40, 8)}
    """How many ranks there are, and what each asks, at most."""

    def __init__(self, seed: int, options: Options | None = None) -> None:
        self.seed = seed
        self.options = options or Options()
        self.rng = rng = Random(seed)
        self.step = 0
        self.now = 0.0
        self.ready: list[Task] = []
        self.broken = 0
        """How many ends have not noticed yet that their connection is gone."""
        self.moving = 0
        """How many pipes have something to deliver."""
        self.tokens = 1
        self.counts: Counter[str] = Counter()
        self.ranks: list[Rank] = []
        self._later: list[tuple[int, int, Task]] = []
        self._behind: list[tuple[int, int, Task]] = []
        self._tasks = 0
        slownesses: list[tuple[float, ...]] = [(0.0,), (0.0, 0.1, 0.3), (0.0, 0.0, 0.9), (0.3, 0.9)]
        self.slownesses = rng.choice(slownesses)
        """How likely it is that bytes have to wait; each direction of each connection has one of these."""
        self.slow_steps = rng.choice((30, 30, 200, 1000))
        self._away = rng.choice((10, 60, 300))
        size = rng.choices(("small", "medium", "large"), (80, 17, 3))[0]
        self._plan(size)

    # Topology and script

    def _plan(self, size: str) -> None:
        rng = self.rng
        root = self._make_store()
        self.relays = [Relay(self, f"R{number}", root) for number in range(rng.randint(1, 2))]
        if rng.random() < 0.6:
            for number in range(rng.randint(1, 2)):
                self.relays.append(Relay(self, f"R{number}{number}", rng.choice(self.relays[:2])))
        self.nodes: list[Place] = [root, *self.relays]
        self._hot = rng.choice(self.relays)  # has more ranks than the others
        few = rng.randint(1, 2)
        barriers = [(b"b0", rng.randint(2, 3)), (b"b0", rng.randint(3, 5)), (b"b1", rng.randint(1, 4))]
        self.keys = Keys(
            texts=[b"t%d" % number for number in range(rng.choice((1, few, few + 1)))],
            counters=[b"c%d" % number for number in range(few)],
            queues=[b"q%d" % number for number in range(few)],
            barriers=list(dict.fromkeys(barriers[: few + 1])),
        )
        self.history = History(self.keys)
        mix = rng.choice(list(MIXES))
        self._mix = MIXES[self.options.mix or mix]
        ranks, asks = self.sizes[size]
        self._asks = rng.randint(2, asks)
        for relay in self.relays:
            relay.connect()
        for _ in range(rng.randint(4, ranks)):
            self._add_rank()
        self._plan_faults(len(self.ranks) * self._asks * 8)

    def _make_store(self) -> Place:
        self._store = Core()
        return Node(self, "store", self._store)

    @property
    def engine(self) -> Engine[Any]:
        """Of the store."""
        return self._store.engine

    def _add_rank(self) -> None:
        chance = self.rng.random()
        plain = self.plain_share
        place = (
            self.nodes[0] if chance < plain else self._hot if chance < 0.5 else self.rng.choice(self.relays)
        )
        if place.find() is None:
            self.after(self.rng.randint(1, 60), self._add_rank)
            return
        rank = self._connect_rank(f"r{len(self.ranks)}", place, self._asks)
        self.after(self.rng.randint(0, 20), rank.go_on)

    def _connect_rank(self, name: str, place: Place, count: int) -> Rank:
        node = place.find()
        assert node is not None
        rank = Rank(self, name, self.keys, self._mix, count, place.name)
        link = Link(self, node, rank)
        node.accept(link, name)
        self.ranks.append(rank)
        rank.connect(link)
        return rank

    def _plan_faults(self, steps: int) -> None:
        rng = self.rng
        self._sometime(self._break_one, rng.choice((0, 1, 2, 4, 8)), steps)
        self._sometime(self._kill_one, rng.choice((0, 0, 1, 3)), steps)
        self._sometime(self._be_away_one, rng.choice((0, 1, 1, 3)), steps)
        self._sometime(self._tick, 3, steps)
        self._sometime(self._pass_second, 2, steps)
        if rng.random() < 0.12:
            self._sometime(self._kill_relay, 1, steps)
        if rng.random() < 0.12:
            self._sometime(self._pass_long, 1, steps)
        # By a chance of its own: all other runs stay as they were.
        if Random(f"silence {self.seed}").random() < 0.2:
            self._sometime(self._silence_one, rng.choice((1, 2, 4)), steps)
            self._sometime(self._beat_all, 8, steps)

    def _sometime(self, task: Task, count: int, steps: int) -> None:
        for _ in range(count):
            self.after(self.rng.randint(1, steps), task)

    # Faults

    def some_time(self) -> int:
        return self.rng.randint(0, self._away)

    def _break_one(self) -> None:
        self._break(self.rng.choice(self.relays))

    def _be_away_one(self) -> None:
        """Lose the same connection again and again."""
        relay = self.rng.choice(self.relays)
        for number in range(3):
            self.after(number * self._away + self.rng.randint(0, 20), lambda: self._break(relay))

    def _break(self, relay: Relay) -> None:
        if relay.uplink is not None:
            self.counts["drops"] += 1
            relay.uplink.break_()

    def _silence_one(self) -> None:
        relay = self.rng.choice(self.relays)
        link = relay.uplink
        if link is None or link.is_broken or link.down.is_cut:
            return
        self.counts["silences"] += 1
        link.swallow()
        for number in range(4):  # as many as it takes
            self.after(number * 10 + self.rng.randint(1, 10), lambda: self._beat(relay, link))

    def _beat(self, relay: Relay, link: Link) -> None:
        if relay.uplink is link:
            relay.beat()

    def _beat_all(self) -> None:
        for relay in self.relays:
            relay.beat()

    def _kill_one(self) -> None:
        rank = self.rng.choice(self.ranks) if self.ranks else None  # they wait until somebody answers
        if rank is not None and rank.is_alive:
            self.counts["deaths"] += 1
            rank.die()
            if self.rng.random() < 0.5:
                self._add_rank()

    def _kill_relay(self) -> None:
        self.rng.choice(self.relays).restart()
        self._add_rank()
        self._add_rank()

    def _tick(self) -> None:
        for relay in self.relays:
            relay.tick()

    def _pass_second(self) -> None:
        self._pass(1.0)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes:
            node.pass_time()

    def _pass_long(self) -> None:
        """So much time that sessions without a connection are given up."""
        for relay in self.relays:
            if self.rng.random() < 0.3:
                self._break(relay)
        self.after(self.rng.randint(0, self._away), self._pass_minutes)

    def _pass_minutes(self) -> None:
        for seconds in (1.0, 61.0):
            self._pass(seconds)
        self._add_rank()

    # Scheduling

    def note(self, operation: Operation) -> None:
        self.history.operations.append(operation)

    def tell(self, key: bytes, is_there: bool) -> None:
        """Tell a rank to do what a relay could confuse with something that is under way."""
        rng = self.rng
        idle = [rank for rank in self.ranks if rank.is_alive and not rank.replies]
        asked = [
            (rank.at, ask) for rank in self.ranks if rank.is_alive for ask in rank.asked if key in ask.keys
        ]
        waits = [(at, ask.keys) for at, ask in asked if ask.what == "WAIT"]
        places = [at for at, _ in waits]
        what = "GET"
        keys: tuple[bytes, ...] = (key,)
        if waits and not is_there:
            what = "WAIT"
            at, keys = rng.choice(waits)
            near = [rank for rank in idle if rank.at == at]
        elif waits and "delete" in self._mix:  # they are just being told
            what = "DELETE"
            near = [rank for rank in idle if rank.at not in places]
        else:
            places = [at for at, ask in asked if ask.what == "GET"]
            near = [rank for rank in idle if rank.at in places]
        if near:
            rank = rng.choice(near)
            rank.heard = (what, keys)
            self.ready.append(rank.go_on)

    def after(self, delay: int, task: Task) -> None:
        if not delay:
            self.ready.append(task)
            return
        self._tasks += 1
        heapq.heappush(self._later, (self.step + delay, self._tasks, task))

    def behind(self, delay: int, task: Task) -> None:
        """As `after`, for what is done again and again: nobody waits for its end."""
        self._tasks += 1
        heapq.heappush(self._behind, (self.step + max(delay, 1), self._tasks, task))

    @property
    def _is_at_rest(self) -> bool:
        """Whether nothing is under way."""
        return (
            not self.broken
            and not self.moving
            and self._is_store_at_rest
            and all(relay.is_at_rest for relay in self.relays)
        )

    @property
    def _is_store_at_rest(self) -> bool:
        return True

    def run_until_rest(self) -> None:
        ready, later, behind, rng = self.ready, self._later, self._behind, self.rng
        check_at = self.step
        while ready or later or not self._is_store_at_rest:
            before = self.step
            self.step += 1
            if not ready:
                if self._is_at_rest:
                    self.history.rests.append(self.step)
                self.step = max(self.step, min(heap[0][0] for heap in (later, behind) if heap))
            self.now += (self.step - before) * self.seconds_each
            while behind and behind[0][0] <= self.step:
                heapq.heappop(behind)[2]()
            while later and later[0][0] <= self.step:
                ready.append(heapq.heappop(later)[2])
            if not ready:
                continue
            number = int(rng.random() * len(ready))
            ready[number], ready[-1] = ready[-1], ready[number]
            ready.pop()()
            if self.step >= check_at and self.options.with_invariants:
                self.check_invariants()
                check_at = self.step + self.check_every
            if self.step > _MOST_STEPS:
                raise FailedError("it does not come to rest")
        self.step += 1
        self.history.rests.append(self.step)
        if self.options.with_invariants:
            self.check_invariants()

    def check_invariants(self) -> None:
        for node in self.nodes:
            node.check_invariants()

    def run(self) -> None:
        """The whole run; raises FailedError, or what the system under test raises."""
        self.run_until_rest()
        if not all(relay.is_at_rest for relay in self.relays):
            raise FailedError("a relay is not connected, though nothing stands in its way")
        self._check_rest()
        self._audit_barriers()
        self._audit_values()
        self.history.check()
        self.counts += self.history.counts
        self._check_leftovers()

    # What must hold in the end

    def _check_rest(self) -> None:
        """Nobody is left waiting for what is there."""
        engine = self.engine
        for rank in self.ranks:
            if not rank.is_alive or not rank.replies:
                continue
            if not rank.is_blocked:
                asked = "; ".join(map(str, rank.asked))
                raise FailedError(f"{rank.name} at {rank.at} has no answer to {asked}")
            operation = rank.asked[0]
            if operation.what == "WAIT" and not engine.missing(operation.keys):
                raise FailedError(f"{rank.name} at {rank.at} is not told that its wait is over: {operation}")
        for key, size in self.keys.barriers:
            if len(self._waiting_at(key, size)) >= max(size, 1):
                raise FailedError(f"the barrier {key!r} of {size} does not release those who are there")

    def _waiting_at(self, key: bytes, size: int) -> list[Rank]:
        return [
            rank
            for rank in self.ranks
            if rank.is_alive
            and rank.is_blocked
            and (rank.asked[0].what, rank.asked[0].keys, rank.asked[0].argument) == ("BARRIER", (key,), size)
        ]

    def _probe(self) -> Rank:
        return self._connect_rank(f"p{len(self.ranks)}", self.rng.choice(self.nodes), 0)

    def _audit_barriers(self) -> None:
        """Who is counted at a barrier: exactly those who wait there."""
        if all(operation.what != "BARRIER" for operation in self.history.operations):
            return
        for key, size in self.keys.barriers:
            there = self._waiting_at(key, size)
            probes = [self._probe() for _ in range(max(size, 1) - len(there))]
            for probe in probes[:-1]:
                probe.ask("BARRIER", key, argument=size)
                probe.send()
            arrivals = [rank.asked[0] for rank in (*there, *probes[:-1])]
            self.run_until_rest()
            free = [arrival.who for arrival in arrivals if arrival.end is not None]
            if free:
                raise FailedError(f"the barrier {key!r} of {size} counts one who is gone; released: {free}")
            probes[-1].ask("BARRIER", key, argument=size)
            arrivals.append(probes[-1].asked[0])
            probes[-1].send()
            self.run_until_rest()
            stuck = [arrival.who for arrival in arrivals if arrival.end is None]
            if stuck:
                raise FailedError(f"the barrier {key!r} of {size} is complete, but holds {stuck}")

    def _audit_values(self) -> None:
        """Read everything, at every place: this is a part of the history."""
        for node in self.nodes:
            probe = self._connect_rank(f"p{len(self.ranks)}", node, 0)
            for key in self.keys.values:
                probe.ask("GET", key)
            probe.send()
        self.run_until_rest()
        probe = self._connect_rank(f"p{len(self.ranks)}", self.rng.choice(self.nodes), 0)
        for key in self.keys.queues:
            for _ in range(self.engine.queue_length(key) + 1):
                probe.ask("POP", key)
        if probe.replies:
            probe.send()
        self.run_until_rest()
        self._check_rest()

    def _check_leftovers(self) -> None:
        """When all ranks are gone, nothing is kept for them."""
        for rank in self.ranks:
            if rank.is_alive:
                rank.die()
        self.run_until_rest()
        # The sessions of relays that were killed; some clocks are slow, and who leads may change meanwhile:
        # for the next one, that time has not passed.
        for seconds in (1.0, 70.0, 70.0):
            self._pass(seconds)
            self.run_until_rest()
        for node in self.nodes:
            notes = [note for session in node.sessions for note in session.notes.items()]
            if notes:
                raise FailedError(f"{node.name} keeps {notes}, which nobody waits for")
        for relay in self.relays:
            combiner = relay.relay.combiner
            if combiner.held_bytes or combiner.parked or combiner.has_unsent:
                raise FailedError(f"{relay.name} holds something, though nobody asks for anything")

    def report(self) -> str:
        """The whole history, for a person."""
        tree = ", ".join(f"{relay.name} on {relay.parent.name}" for relay in self.relays)
        places = ", ".join(f"{rank.name} at {rank.at}" for rank in self.ranks)
        return "\n".join([tree, places, *map(str, self.history.operations)])


SimulationT = TypeVar("SimulationT", bound=Simulation)


@contextmanager
def _short_pieces() -> Iterator[None]:
    """Values that are long to the ranks of a simulation come in some pieces, and not all at once.

    And relays that come and go have more waits than are gone through at once.
    """
    with ExitStack() as stack:
        for module, name, value in (
            (sessions, "LONG", 256),
            (sessions, "MOST_UNTAKEN", 400),
            (upstream, "MOST_UNTAKEN", 400),
            (wire_sessions, "PIECE_BYTES", 100),
            (context, "SLICE", 2),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


def simulate(seed: int, options: Options | None = None) -> Simulation:
    """Run one seed; whatever is wrong comes out as FailedError, which names the seed."""
    return run_simulation(Simulation(seed, options))


def run_simulation(simulation: SimulationT) -> SimulationT:
    """Run all of it; whatever is wrong comes out as FailedError, which names the seed."""
    try:
        with _short_pieces():
            simulation.run()
    except Exception as error:
        where = f"seed {simulation.seed}, step {simulation.step}"
        raise FailedError(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        if simulation.options.verbose:
            print(simulation.report())
            print(dict(simulation.counts))
    return simulation


def in_batches(quick: int, last: int) -> pytest.MarkDecorator:
    """Run a test with `seeds` from 0 on: so many are quick, and those from there to `last` are slow."""
    slow = [pytest.mark.slow, pytest.mark.timeout(600)]
    return pytest.mark.parametrize(
        "seeds",
        [
            *(range(each, each + 50) for each in range(0, quick, 50)),
            *(pytest.param(range(each, each + 250), marks=slow) for each in range(quick, last, 250)),
        ],
        ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}",
    )


def must_catch(
    what: str,
    seeds: int = 1_000,
    mix: str | None = None,
    first: int = 0,
    simulate: Callable[[int, Options], Simulation] = simulate,
) -> None:
    """The checks have to say one of these; the invariants, which would be quicker, are not asked.

    The first seed is one that has found it before. As long as nothing else changes, the search ends there.
    """
    if in_use() == "compiled":
        pytest.skip("a rule that is compiled cannot be broken")
    for seed in (first, *range(seeds)):
        try:
            simulate(seed, Options(with_invariants=False, mix=mix))
        except FailedError as error:
            if re.search(what, str(error)):
                return
    raise AssertionError(f"nothing was found in {seeds} runs")


def main(simulate: Callable[[int, Options], Simulation] = simulate) -> int:
    parser = argparse.ArgumentParser(description="simulate relays on a network that fails")
    parser.add_argument("--seeds", type=int, default=20_000, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--verbose", action="store_true", help="print the histories")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.seed is not None:
        seeds = range(arguments.seed, arguments.seed + 1)
    options = Options(verbose=arguments.verbose)
    counts: Counter[str] = Counter()
    failures = 0
    began = told = time.monotonic()
    for seed in seeds:
        try:
            counts += simulate(seed, options).counts
        except FailedError as error:
            failures += 1
            print(error, flush=True)
            if arguments.seed is not None and error.__cause__ is not None:
                raise error.__cause__ from None
            if not arguments.keep_going:
                return 1
        counts["runs"] += 1
        if time.monotonic() > told + 10:
            told = time.monotonic()
            print(f"{counts['runs']:,} runs in {told - began:.0f} s", flush=True)
    parts = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
    print(f"{parts}, {failures} failures, {time.process_time():.0f} s of CPU")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
