"""A job of simulated ranks: they come up, pass barriers, and come up again with a store made anew."""

from __future__ import annotations

import time
from array import array
from base64 import b64decode
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final

from rallypoint.bench import machine
from rallypoint.bench.faults import BenchError
from rallypoint.bench.load import Load, sample
from rallypoint.bench.results import Sample, percentile
from rallypoint.bench.session import Measurement, Session
from rallypoint.bench.targets import BehindRelays, Place, Target
from rallypoint.bench.workers import Message, Worker, gather, start

RANKS_PER_PROCESS: Final = 18_000
RUN_LIMIT_S: Final = 180.0


class SwarmProcesses:
    """The processes of a swarm, and where the ranks of each connect."""

    def __init__(self, resources: ExitStack, ranks: int) -> None:
        count = -(-ranks // min(RANKS_PER_PROCESS, machine.most_connections()))
        self.workers = [
            start(resources, partial(Worker, "rallypoint.bench.swarm", f"ranks, process {number + 1}"))
            for number in range(count)
        ]

    def everyone(self, **order: object) -> list[Message]:
        """The same order to all."""
        return self.each([order] * len(self.workers))

    def each(self, orders: Sequence[Message]) -> list[Message]:
        """An order for each; their answers."""
        for worker, order in zip(self.workers, orders, strict=True):
            worker.order(**order)
        return gather(self.workers, RUN_LIMIT_S)

    def firsts(self) -> list[bool]:
        """True for one of the processes, for what only one is to do."""
        return [number == 0 for number in range(len(self.workers))]

    def shares(self, places: Sequence[Place]) -> list[list[Place]]:
        """The places of each process: a relay's ranks together, the ranks of a server in equal parts."""
        count = len(self.workers)
        if len(places) >= count * 8:
            return [list(places[number::count]) for number in range(count)]
        shares: list[list[Place]] = [[] for _ in range(count)]
        for host, port, source, ranks in places:
            for number, share in enumerate(shares):
                share.append((host, port, source, ranks // count + (number < ranks % count)))
        return shares


class WithRanks(Session):
    """A session with a swarm that is not connected yet."""

    def __init__(self, target: Target, measurement: Measurement) -> None:
        super().__init__(target, measurement)
        self.ranks = measurement.ranks
        self.barriers = 0
        self.joined = 0
        """How many have counted themselves at this store so far."""

    def open(self) -> None:
        self.swarm = SwarmProcesses(self.resources, self.ranks)
        self.swarm.everyone(do="leave")  # there are none yet; but that it answers tells that it is up

    def come_up(self) -> Sample:
        """Connect all ranks."""
        shares = self.swarm.shares(self.target.places(self.ranks))
        orders: list[Message] = [
            {"do": "connect", "dialect": self.target.dialect.name, "places": share, "limit_s": RUN_LIMIT_S}
            for share in shares
        ]
        measured = self.phase(orders, 2, self.joined)
        self.joined += self.ranks
        return measured

    def barrier(self, *, at_once: bool) -> Sample:
        """All ranks pass a barrier, with keys of its own."""
        self.barriers += 1
        order: Message = {"name": str(self.barriers), "ranks": self.ranks, "at_once": at_once}
        return self.phase([{"do": "barrier", **order, "limit_s": RUN_LIMIT_S}] * len(self.swarm.workers), 3)

    def leave(self) -> None:
        """Disconnect all ranks."""
        self.swarm.everyone(do="leave")

    def phase(self, orders: Sequence[Message], requests: int = 0, before: int = 0) -> Sample:
        """Let the swarm do something, measure what that takes, and check what it was told.

        Each rank sends that many requests then, besides those who find a count full; if they count
        themselves, so many have done so before.
        """
        counters = self.target.counters()
        answers, cpu = self.metered(lambda: self._answers(orders))
        check_counts(self.ranks, answers, before)
        after = self.target.counters()
        extras = {name: after[name] - counters[name] for name in counters}
        if requests and "messages" not in extras:
            full = sum(answer.get("full", 0) for answer in answers)
            extras["messages"] = 2 * requests * self.ranks + full
        return self._sample(answers, cpu, extras)

    def _answers(self, orders: Sequence[Message]) -> list[Message]:
        """What the swarm says; a server that has died is the reason for whatever else went wrong."""
        try:
            answers = self.swarm.each(orders)
        except BenchError as error:
            try:
                self.target.check_alive()
            except BenchError as death:
                raise BenchError(f"{error}; {death}") from error
            raise
        self.target.settle()
        return answers

    def _sample(self, answers: Sequence[Message], cpu: float, extras: dict[str, float]) -> Sample:
        names = ("operations", "start", "end", "cpu")
        loads = [Load(**{name: answer[name] for name in names}) for answer in answers]
        seconds = max(load.end for load in loads) - min(load.start for load in loads)
        taken = sorted(value for answer in answers for value in unpack("f", answer["taken"]))
        extras["swarm_cpu"] = sum(load.cpu for load in loads)
        measured = sample(seconds, loads, cpu, self.ranks)
        p50, p99 = percentile(taken, 0.5), percentile(taken, 0.99)
        return replace(measured, p50=p50, p99=p99, extras=extras)


class ComingUp(WithRanks):
    """All ranks connect, and count themselves; then they leave again."""

    def round(self) -> Sample:
        files, resident = self.target.open_files(), self.target.resident_bytes()
        measured = self.come_up()
        memory = (self.target.resident_bytes() - resident) / self.ranks
        extras = {**measured.extras, "whole_seconds": self.start_seconds + measured.value}
        if isinstance(self.target, BehindRelays):
            extras |= {"relays": self.target.shape.relays, "relays_bytes": self.target.relays_bytes()}
        self.leave()
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
        self.leave()
        self.target.renew()
        self.joined = 0
        renewed = time.monotonic()
        self.come_up()
        self.barrier(at_once=True)
        ended = time.monotonic()
        return Sample(ended - begun, extras={"renew_seconds": renewed - begun})


def check_counts(ranks: int, answers: Sequence[Message], before: int = 0) -> None:
    """Raise unless each of the counts from then on was given once, and what was seen later is among them."""
    if "counted" not in answers[0]:
        return
    counted = sorted(number for answer in answers for number in unpack("I", answer["counted"]))
    if counted != list(range(before + 1, before + ranks + 1)):
        raise BenchError(f"the results of {ranks:,} ADDs are not so many numbers from {before + 1} on")
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
