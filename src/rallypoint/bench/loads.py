"""The loads: ranks that come up and pass barriers, and clients that repeat one operation; all in a table."""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from socket import MSG_WAITALL
from typing import Any, Final

from rallypoint.bench import clients, machine
from rallypoint.bench.clients import ANSWER_LIMIT_S, KEY, VALUE, Ask, Exchange, check, check_silent, connect
from rallypoint.bench.contest import Measurement, Session
from rallypoint.bench.results import BenchError, Sample
from rallypoint.bench.swarm import Answer, RanksAt, load_of
from rallypoint.bench.targets import Target
from rallypoint.bench.workers import Load, Stopwatch, ask_all, ask_each, start

RANKS_PER_PROCESS: Final = 18_000
FEWEST_RANKS: Final = 1_000
"""Where there are cores to spare, more processes than needed simulate ranks, of so many or more each: else a
quick server would wait for the load."""
RUN_LIMIT_S: Final = 180.0

CLIENTS: Final = 100
MANY_CLIENTS: Final = 1_000
PIPELINED: Final = 32

# Ranks


def processes_for(ranks: int) -> int:
    """How many processes simulate that many ranks."""
    needed = -(-ranks // min(RANKS_PER_PROCESS, machine.most_connections()))
    return max(needed, min(machine.spare_processes(), ranks // FEWEST_RANKS))


def shares_of(places: Sequence[RanksAt], count: int) -> list[list[RanksAt]]:
    """The places of each process: a relay's ranks together, the ranks of a server in equal parts."""
    if len(places) >= count * 8:
        return [list(places[number::count]) for number in range(count)]
    return [
        [(*place[:3], place[3] // count + (number < place[3] % count)) for place in places]
        for number in range(count)
    ]


class WithRanks(Session):
    """A session with a swarm that is not connected yet."""

    swarm_class = "rallypoint.bench.swarm:Swarm"

    def __init__(self, target: Target, measurement: Measurement) -> None:
        super().__init__(target, measurement)
        self.ranks = measurement.ranks
        self.barriers = 0
        self.joined = 0
        """How many have counted themselves at this store so far."""

    def open(self) -> None:
        self.swarm = [
            start(self.resources, self.swarm_class, f"ranks, process {number + 1}")
            for number in range(processes_for(self.ranks))
        ]
        self.everyone(do="leave")  # there are none yet, but an answer tells that it is up

    def everyone(self, **order: object) -> None:
        """The same order to all processes of the swarm."""
        ask_all(self.swarm, RUN_LIMIT_S, **order)

    def come_up(self) -> Sample:
        """Connect all ranks."""
        order = {"do": "connect", "dialect": self.target.dialect, "limit_s": RUN_LIMIT_S}
        shares = shares_of(self.target.places(self.ranks), len(self.swarm))
        measured = self.phase([{**order, "places": share} for share in shares], 2, self.joined)
        self.joined += self.ranks
        return measured

    def barrier(self, *, at_once: bool) -> Sample:
        """All ranks pass a barrier, with keys of its own."""
        self.barriers += 1
        order = {"do": "barrier", "name": str(self.barriers), "ranks": self.ranks, "at_once": at_once}
        return self.phase([{**order, "limit_s": RUN_LIMIT_S}] * len(self.swarm), 3)

    def phase(self, orders: Sequence[dict[str, Any]], requests: int = 0, before: int = 0) -> Sample:
        """Let the swarm do something, measure what that takes, and check the replies that it got.

        `requests` is how many each rank sends, besides a SET if it finds a count full; `before` is how many
        ranks have counted themselves already.
        """
        answers: list[Answer] = []

        def carry_out() -> Load:
            answers.extend(ask_each(self.swarm, RUN_LIMIT_S, orders))
            self.target.settle()  # relays have come to rest when the meter is read
            return load_of(answers)

        sample = self.metered(carry_out)
        check_counts(self.ranks, answers, before)
        if requests and "messages" not in sample.extras:
            full = sum(answer.get("seen", []).count(self.ranks) for answer in answers)
            sample.extras["messages"] = 2 * requests * self.ranks + full
        sample.extras["swarm_cpu"] = load_of(answers).cpu
        return sample


class ComingUp(WithRanks):
    """All ranks connect, and count themselves; then they leave again."""

    def round(self) -> Sample:
        files, resident = self.target.open_files(), self.target.resident_bytes()
        measured = self.come_up()
        memory = (self.target.resident_bytes() - resident) / self.ranks
        measured.extras.update(self.target.size())
        measured.extras["whole_seconds"] = self.start_seconds + measured.value
        self.everyone(do="leave")
        self.target.await_open_files(files)
        self.target.await_quiet()
        return replace(measured, memory=memory)


class Barriers(WithRanks):
    """All ranks are connected, and pass barriers, to which they come at once or one after the other."""

    def __init__(self, target: Target, measurement: Measurement, at_once: bool) -> None:
        super().__init__(target, measurement)
        self.at_once = at_once

    def open(self) -> None:
        super().open()
        self.come_up()
        self.barrier(at_once=False)  # to warm up

    def round(self) -> Sample:
        self.target.await_quiet()
        return self.barrier(at_once=self.at_once)


def check_counts(ranks: int, answers: Sequence[Answer], before: int = 0) -> None:
    """Raise unless each count from `before` on was given once, and those seen later are not lower."""
    counted = sorted(number for answer in answers for number in answer.get("counted", ()))
    if counted and counted != list(range(before + 1, before + ranks + 1)):
        raise BenchError(f"{ranks:,} ADDs did not give each number from {before + 1} on once")
    for answer in answers:
        before_and_after = (sorted(answer.get(name, ())) for name in ("counted", "seen"))
        if any(now < then for then, now in zip(*before_and_after, strict=False)):
            raise BenchError("a count was lower than it had been before")
    seen = [number for answer in answers for number in answer.get("seen", ())]
    if seen and max(seen) != ranks:
        raise BenchError(f"ADDs of 0 found up to {max(seen):,}; of {ranks:,} ranks the last must see all")


# Clients: the most that the server can do, and one operation at a time


class Busy:
    """Clients that always have a request in flight, in processes of their own, which the resources end.

    There are several where there are cores to spare: one cannot ask as fast as a server answers.
    """

    def __init__(self, resources: ExitStack, target: Target, count: int) -> None:
        processes = min(machine.spare_processes(), count)
        kind = "rallypoint.bench.clients:BusyWorker"
        self._workers = [start(resources, kind, "busy clients") for _ in range(processes)]
        place: dict[str, Any] = {"do": "connect", "port": target.port, "dialect": target.dialect}
        firsts = [count * number // processes for number in range(processes + 1)]
        shares = [{"first": first, "count": end - first} for first, end in itertools.pairwise(firsts)]
        ask_each(self._workers, ANSWER_LIMIT_S, [{**place, **share} for share in shares])

    def begin(self, ask: Ask, per_request: int) -> None:
        """Let all of them ask, until `end`."""
        for worker in self._workers:
            worker.order(do="run", ask=ask, per_request=per_request)

    def end(self) -> Load:
        """What they did."""
        return load_of(ask_all(self._workers, ANSWER_LIMIT_S, do="stop"))


def ask_once(target: Target, exchange: Exchange) -> None:
    """Let a client of its own ask something, and leave."""
    with connect(target.port, target.dialect) as client:
        client.sendall(exchange.request)
        check(client.recv(len(exchange.reply), MSG_WAITALL), exchange.reply)


class Timed(Session):
    """A load that goes on for as long as a round lasts: the same question again and again."""

    def __init__(self, target: Target, measurement: Measurement, ask: Ask) -> None:
        super().__init__(target, measurement)
        self.ask = ask

    def open(self) -> None:
        ask_once(self.target, self.target.dialect.store(KEY, VALUE))
        self.connect()
        self.run(self.measurement.seconds / 2)

    def round(self) -> Sample:
        return self.metered(lambda: self.run(self.measurement.seconds))

    @abstractmethod
    def connect(self) -> None:
        """Connect the clients."""

    @abstractmethod
    def run(self, seconds: float) -> Load:
        """Keep busy for that long."""


class Steady(Timed):
    """Many clients that always have a request in flight, each of `per_request` operations."""

    def __init__(
        self, target: Target, measurement: Measurement, ask: Ask, count: int = CLIENTS, per_request: int = 1
    ) -> None:
        super().__init__(target, measurement, ask)
        self.count, self.per_request = count, per_request

    def connect(self) -> None:
        self.busy = Busy(self.resources, self.target, self.count)

    def run(self, seconds: float) -> Load:
        self.busy.begin(self.ask, self.per_request)
        time.sleep(seconds)
        return self.busy.end()

    def value(self, load: Load) -> float:
        is_rate = self.measurement.unit == "rate"
        return load.operations / load.seconds if is_rate else load.seconds / load.operations


class OneAtATime(Timed):
    """One client, one operation at a time.

    It speaks for two clients in turn: a server may know a value that stays the same, and no job does that.
    """

    def connect(self) -> None:
        self.client = self.resources.enter_context(connect(self.target.port, self.target.dialect))
        self.counted = 0

    def value(self, load: Load) -> float:
        assert load.p50 is not None
        return load.p50

    def run(self, seconds: float) -> Load:
        watch, taken = Stopwatch(), list[float]()
        clock, send, receive = time.perf_counter, self.client.send, self.client.recv
        deadline = clock() + seconds
        ended = 0.0
        while ended < deadline:
            exchange = self.ask(self.target.dialect, self.counted % 2, self.counted // 2 + 1)
            self.counted += 1
            begun = clock()
            send(exchange.request)
            reply = receive(len(exchange.reply), MSG_WAITALL)
            ended = clock()
            taken.append(ended - begun)
            check(reply, exchange.reply)
        check_silent(self.client)
        return watch.stop(len(taken), taken)


# The table


def _barrier(name: str, how: str, *, at_once: bool) -> Measurement:
    session = partial(Barriers, at_once=at_once)
    return _with_ranks("barrier", name, f"ranks come to a barrier {how}", session)


def _with_ranks(command: str, name: str, load: str, session: Any) -> Measurement:
    return Measurement(command, name, load, session, sizes=RANKS, quick_sizes=QUICK_RANKS)


def _many(operation: str, ask: Ask, per_request: int = 1, count: int = CLIENTS) -> Measurement:
    name = operation.lower() + ("-pipelined" if per_request > 1 else f"-{count}" * (count > CLIENTS))
    each = f"{per_request} {operation}s" if per_request > 1 else f"one {operation}"
    session = partial(Steady, ask=ask, count=count, per_request=per_request)
    return Measurement(
        *("ops", name, f"{count:,} clients, {each} in flight each", session, operation, "rate"),
        seconds=0.8,
        connections=count,
    )


def _one(operation: str, ask: Ask) -> Measurement:
    load = f"one client, one {operation} at a time"
    session = partial(OneAtATime, ask=ask)
    return Measurement("ops", f"one-{operation.lower()}", load, session, operation, seconds=0.4)


RANKS: Final = (1_024, 4_096, 16_384)
QUICK_RANKS: Final = (1_024, 4_096)

_ASKED: Final[Mapping[str, Ask]] = {
    "GET": clients.get,
    "SET": clients.store,
    "ADD": clients.add,
    "CHECK": clients.exists,
}

MEASUREMENTS: Final = (
    _with_ranks("init", "init", "ranks connect, and are counted", ComingUp),
    _barrier("barrier", "all at once", at_once=True),
    _barrier("barrier-trickle", "one after the other", at_once=False),
    *(_many(operation, ask) for operation, ask in _ASKED.items()),
    *(_many(operation, ask, count=MANY_CLIENTS) for operation, ask in _ASKED.items()),
    _many("GET", clients.get, PIPELINED),
    _many("ADD", clients.add, PIPELINED),
    _one("GET", clients.get),
    _one("SET", clients.store),
    _one("ADD", clients.add),
)
"""In the order of the tables. The number of ranks goes in front of the words of a load that has any."""
