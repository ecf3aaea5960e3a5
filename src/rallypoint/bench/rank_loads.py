"""Loads of a job: its ranks come up, pass barriers, wait for a key, and come up again with a new store.

Ranks are simulated by the processes of a swarm. Only what PyTorch's tutorial on the libuv backend times has
real clients of torch, each rank a process.
"""

from __future__ import annotations

import statistics
import time
from array import array
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rallypoint.bench import machine
from rallypoint.bench.contest import Measurement, Session
from rallypoint.bench.results import BenchError, Sample, percentile
from rallypoint.bench.targets import KINDS, TORCH_HOST, BehindRelays, Hosts, Kind, RanksAt, Target
from rallypoint.bench.workers import Load, Message, ask_all, ask_each, start, together

RANKS_PER_PROCESS: Final = 18_000
RUN_LIMIT_S: Final = 180.0
TUTORIAL_LIMIT_S: Final = 120.0
TUTORIAL_BARRIERS: Final = 5
TUTORIAL_TARGETS: Final = ("rallypoint-libuv", "rallypoint-legacy", "torch-libuv", "torch-legacy")
"""What torch's constructor can bring up: rank 0 is the master, so there is no server beforehand."""


def processes_for(ranks: int) -> int:
    """How many processes that many ranks need."""
    return -(-ranks // min(RANKS_PER_PROCESS, machine.most_connections()))


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

    def __init__(self, target: Target, measurement: Measurement) -> None:
        super().__init__(target, measurement)
        self.ranks = measurement.ranks
        self.barriers = 0
        self.joined = 0
        """How many have counted themselves at this store so far."""

    def open(self) -> None:
        self.swarm = [
            start(self.resources, "rallypoint.bench.swarm", f"ranks, process {number + 1}")
            for number in range(processes_for(self.ranks))
        ]
        self.everyone(do="leave")  # there are none yet, but an answer tells that it is up

    def everyone(self, **order: object) -> None:
        """The same order to all processes of the swarm."""
        ask_all(self.swarm, RUN_LIMIT_S, **order)

    def come_up(self) -> Sample:
        """Connect all ranks."""
        order: Message = {"do": "connect", "dialect": self.target.dialect.name, "limit_s": RUN_LIMIT_S}
        shares = shares_of(self.target.places(self.ranks), len(self.swarm))
        measured = self.phase([{**order, "places": share} for share in shares], 2, self.joined)
        self.joined += self.ranks
        return measured

    def barrier(self, *, at_once: bool) -> Sample:
        """All ranks pass a barrier, with keys of its own."""
        self.barriers += 1
        order: Message = {"name": str(self.barriers), "ranks": self.ranks, "at_once": at_once}
        return self.phase([{"do": "barrier", **order, "limit_s": RUN_LIMIT_S}] * len(self.swarm), 3)

    def phase(self, orders: Sequence[Message], requests: int = 0, before: int = 0) -> Sample:
        """Let the swarm do something, measure what that takes, and check what it was told.

        `requests` is how many each rank sends, besides a SET if it finds a count full; `before` is how many
        ranks have counted themselves already.
        """
        answers, cost = self.metered(lambda: self._answers(orders))
        check_counts(self.ranks, answers, before)
        names = ("operations", "start", "end", "cpu", "share")
        load = together([Load(**{name: answer[name] for name in names}) for answer in answers])
        taken = sorted(value for answer in answers for value in unpack("f", answer["taken"]))
        load = replace(load, p50=percentile(taken, 0.5), p99=percentile(taken, 0.99))
        if requests and "messages" not in cost.extras:
            full = sum(answer.get("full", 0) for answer in answers)
            cost.extras["messages"] = 2 * requests * self.ranks + full
        cost.extras["swarm_cpu"] = load.cpu
        return cost.sample(load.seconds, load)

    def _answers(self, orders: Sequence[Message]) -> list[Message]:
        """What the swarm says; if the server has died, that is the reason of any other fault."""
        try:
            answers = ask_each(self.swarm, RUN_LIMIT_S, orders)
        except BenchError as error:
            try:
                self.target.check_alive()
            except BenchError as death:
                raise BenchError(f"{error}; {death}") from error
            raise
        self.target.settle()
        return answers


class ComingUp(WithRanks):
    """All ranks connect, and count themselves; then they leave again."""

    def round(self) -> Sample:
        files, resident = machine.open_files(self.target.pid), machine.resident_bytes(self.target.pid)
        measured = self.come_up()
        memory = (machine.resident_bytes(self.target.pid) - resident) / self.ranks
        extras = {**measured.extras, "whole_seconds": self.target.start_seconds + measured.value}
        if isinstance(self.target, BehindRelays):
            extras |= {"relays": self.target.relays, "relays_bytes": self.target.relays_bytes()}
        self.everyone(do="leave")
        self.target.await_open_files(files)
        self.target.await_quiet()
        return replace(measured, memory=memory, extras=extras)


class Barriers(WithRanks):
    """All ranks are connected, and pass barriers."""

    at_once = True

    def open(self) -> None:
        super().open()
        self.come_up()
        self.barrier(at_once=False)  # to warm up

    def round(self) -> Sample:
        self.target.await_quiet()
        return self.barrier(at_once=self.at_once)


class TrickledBarriers(Barriers):
    """The same, when ranks come one after the other."""

    at_once = False


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
        self.everyone(do="wait", key=key)
        self.target.settle()
        self.target.await_quiet()
        self.everyone(do="check_asleep")
        order: Message = {"do": "wake", "key": key, "since": time.monotonic(), "limit_s": RUN_LIMIT_S}
        # One of the processes sets it.
        return self.phase([{**order, "release": number == 0} for number in range(len(self.swarm))])


class Restarts(WithRanks):
    """A job that is up is started again: its ranks leave, the store is made anew, and they come back.

    It is over when they have passed their first barrier. A store that still had the counts of the try
    before would be found out.
    """

    def open(self) -> None:
        super().open()
        self.come_up()
        self.barrier(at_once=True)

    def round(self) -> Sample:
        begun = time.monotonic()
        self.everyone(do="leave")
        self.target.renew()
        self.joined = 0
        renewed = time.monotonic()
        self.come_up()
        self.barrier(at_once=True)
        ended = time.monotonic()
        return Sample(ended - begun, extras={"renew_seconds": renewed - begun})


def check_counts(ranks: int, answers: Sequence[Message], before: int = 0) -> None:
    """Raise unless each of the counts from then on was given once, and those seen later are among them."""
    if "counted" not in answers[0]:
        return
    counted = sorted(number for answer in answers for number in unpack("I", answer["counted"]))
    if counted != list(range(before + 1, before + ranks + 1)):
        raise BenchError(f"{ranks:,} ADDs did not give each number from {before + 1} on once")
    if "full" not in answers[0]:
        return
    least, most = min(answer["least"] for answer in answers), max(answer["most"] for answer in answers)
    if least < 1 or most != ranks:
        raise BenchError(
            f"ADDs of 0 found {least} to {most:,}; of {ranks:,} ranks the last must see them all"
        )


def unpack(code: str, text: str) -> Sequence[float]:
    """Numbers that a process of the swarm has packed."""
    numbers: array[float] = array(code)
    numbers.frombytes(b64decode(text))
    return numbers


# With real clients of torch


class RankZero(Target):
    """The server that rank 0 makes itself: it lives only during a round."""

    def __init__(self, kind: Kind, hosts: Hosts) -> None:
        super().__init__(kind, hosts)
        self._torch = hosts.get(TORCH_HOST)

    def start(self) -> None:
        """Nothing to do."""

    def check_alive(self) -> None:
        """Nothing to check."""

    def time(self, ranks: int, barriers: int) -> tuple[float, list[float]]:
        """The times of the constructor and of barriers, as rank 0 sees them."""
        order = {"target": self.name, "ranks": ranks, "barriers": barriers, "limit_s": TUTORIAL_LIMIT_S}
        answer = self._torch.ask(TUTORIAL_LIMIT_S, do="tutorial", **order)
        return answer["init"], answer["barrier"]


def make_rank_zero(name: str, hosts: Hosts, _: int) -> Target:
    """The target of that name, as rank 0 makes it."""
    return RankZero(KINDS[name], hosts)


class TutorialInit(Session):
    """The constructor on rank 0, which returns when all have joined."""

    target: RankZero

    def open(self) -> None:
        """Nothing to do: all happens in a round."""

    def round(self) -> Sample:
        seconds, _ = self.target.time(self.measurement.ranks, 0)
        return Sample(seconds)


class TutorialBarrier(TutorialInit):
    """Barriers on that store: the median of some in a row."""

    def round(self) -> Sample:
        _, seconds = self.target.time(self.measurement.ranks, TUTORIAL_BARRIERS)
        return Sample(statistics.median(seconds))
