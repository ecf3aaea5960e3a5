"""A job of simulated ranks: a store, relays or none, and the ranks, all in processes of their own."""

from __future__ import annotations

import os
import resource
import time
from array import array
from base64 import b64decode
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from contest import say, uninterrupted
from servers import HOST, Server, ServerError
from workers import Message, Worker, gather

RANKS_PER_SWARM = 18_000
SPARE_FILES = 256
"""What a process may open besides its connections."""

FILES_PER_RELAY = 2
"""Of a relay itself: one to listen, one upstream."""

BYTES_PER_RANK = 32 << 10
"""What a rank and its part of a relay take, kernel included, and generously: a job has to fit into memory."""

RUN_LIMIT_S = 90.0


def most_files() -> int:
    """How many connections a process here may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES


def most_relays() -> int:
    """How many relays one store can have here: by its open files, and by the ports that clients get."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return min(most_files(), (int(high) - int(low)) * 9 // 10)


@dataclass(frozen=True)
class Shape:
    """How many ranks, behind relays of how many each; 0: behind none."""

    ranks: int
    per_relay: int

    @property
    def relays(self) -> int:
        return -(-self.ranks // self.per_relay) if self.per_relay else 0

    @property
    def hosts(self) -> int:
        """How many processes the relays need."""
        return -(-self.relays * (FILES_PER_RELAY + self.per_relay) // most_files())

    @property
    def swarms(self) -> int:
        """How many processes the ranks need."""
        return -(-self.ranks // min(RANKS_PER_SWARM, most_files()))

    def __str__(self) -> str:
        if not self.per_relay:
            return f"{self.ranks:,} ranks"
        return f"{self.ranks:,} ranks behind {self.relays:,} relays, {self.per_relay} each"


def fit(wanted: Shape) -> Shape:
    """The shape that is nearest to the one wanted, and that this machine can hold."""
    shape = wanted
    while shape.relays > most_relays():  # fewer and wider ones
        shape = Shape(shape.ranks, shape.per_relay * 2)
    while not shape.per_relay and shape.ranks > most_relays():
        shape = Shape(shape.ranks // 2, 0)
    room = int(psutil.virtual_memory().available * 0.8)
    files = room_for_files()
    while shape.ranks * BYTES_PER_RANK > room or 2 * (shape.ranks + 2 * shape.relays) > files:
        shape = Shape(shape.ranks // 2, shape.per_relay)
    return shape


def room_for_files() -> int:
    """How many files may still be opened on this system."""
    opened, _, most = Path("/proc/sys/fs/file-nr").read_text().split()
    return int(most) - int(opened)


@dataclass(frozen=True)
class Phase:
    """What one phase of a job took. CPU times are in seconds; `swarm` and `relays` are of all processes."""

    seconds: float
    head_cpu: float
    swarm_cpu: float
    relays_cpu: float
    head_share: float
    """How much of a core the head took."""
    swarm_share: float
    """How much of a core the busiest process of ranks took: near 1, it may have been the bottleneck."""
    relays_share: float
    """The same for the busiest process of relays, over the whole phase."""
    machine_share: float
    """How much of all cores all of these took together: near 1, the machine was the bottleneck."""
    messages: int
    """How many the head got and sent: requests and replies of ranks, or batches and frames of relays."""
    requests: int
    """How many requests these held."""
    full: int
    """How many ranks found the count full, and so SET the key."""


class Job:
    """A job in progress. Whatever it starts it ends when its `with` block does."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name = name
        self.shape = shape
        self.resources = ExitStack()
        self.hosts: list[Worker] = []
        self.swarms: list[Worker] = []
        self._barriers = 0

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.resources.close()

    def start(self) -> None:
        """Start all processes; after that, all relays are connected."""
        with uninterrupted():
            self.head = Server("libuv")
            self.resources.callback(self.head.stop)
        self.hosts = [self._worker("relay_host.py", "relays", number) for number in range(self.shape.hosts)]
        self.swarms = [self._worker("swarm.py", "ranks", number) for number in range(self.shape.swarms)]
        self.head.await_ready()
        self._places = self._start_relays() if self.hosts else [(HOST, self.head.port, self.shape.ranks)]

    def come_up(self) -> Phase:
        """Connect all ranks."""
        return self._phase("coming up", 2, [{"do": "connect", "places": places} for places in self._shares()])

    def barrier(self, *, at_once: bool) -> Phase:
        """All ranks pass a barrier, with keys of its own; they come at once, or one after the other."""
        self._barriers += 1
        name, ranks = str(self._barriers), self.shape.ranks
        order: Message = {"do": "barrier", "name": name, "ranks": ranks, "at_once": at_once}
        return self._phase(f"barrier {self._barriers}", 3, [order] * len(self.swarms))

    def leave(self) -> None:
        """Disconnect all ranks."""
        for swarm in self.swarms:
            swarm.order(do="leave")
        gather(self.swarms, f"{self.name}, leaving", RUN_LIMIT_S)

    def hosts_bytes(self) -> int:
        """The memory of all processes of relays together."""
        return sum(host.resident_bytes() for host in self.hosts)

    def _worker(self, script: str, kind: str, number: int) -> Worker:
        with uninterrupted():
            worker = Worker(script, f"{self.name}, {kind}, process {number + 1}")
            self.resources.callback(worker.stop)
        return worker

    def _start_relays(self) -> list[tuple[str, int, int]]:
        """Start the relays; return where each listens, and for how many ranks."""
        # An address for each process: 127.0.0.0/8 is all this machine's.
        addresses = [f"127.0.{1 + number // 250}.{1 + number % 250}" for number in range(len(self.hosts))]
        left = self.shape.relays
        for number, host in enumerate(self.hosts):
            count = left // (len(self.hosts) - number)
            left -= count
            upstream = (HOST, self.head.port)
            host.order(
                do="start", host=addresses[number], count=count, upstream=upstream, limit_s=RUN_LIMIT_S
            )
        answers = gather(self.hosts, f"{self.name}, starting relays", RUN_LIMIT_S)
        places = []
        ranks = self.shape.ranks
        for address, answer in zip(addresses, answers, strict=True):
            for port in answer["ports"]:
                places.append((address, port, min(ranks, self.shape.per_relay)))
                ranks -= places[-1][2]
        return places

    def _shares(self) -> list[list[tuple[str, int, int]]]:
        """Where the ranks of each process connect."""
        count = len(self.swarms)
        if not self.hosts:
            host, port, ranks = self._places[0]
            return [[(host, port, ranks // count + (number < ranks % count))] for number in range(count)]
        return [self._places[number::count] for number in range(count)]

    def _phase(self, what: str, per_rank: int, orders: list[Message]) -> Phase:
        """Give the swarms their orders, measure what that takes, and check what they were told.

        Each rank then sends that many requests, besides those who find a count full.
        """
        before = self._counters()
        cpu, relays_before = self.head.cpu_seconds(), [host.cpu_seconds() for host in self.hosts]
        begun = time.monotonic()
        for swarm, order in zip(self.swarms, orders, strict=True):
            swarm.order(**order, limit_s=RUN_LIMIT_S)
        answers = self._answers(what)
        took = time.monotonic() - begun
        if self.hosts:
            gather(self._tell(self.hosts, do="settle"), f"{self.name}, settling", RUN_LIMIT_S)
        relays = [host.cpu_seconds() - old for host, old in zip(self.hosts, relays_before, strict=True)]
        cpu = self.head.cpu_seconds() - cpu
        check_counts(self.shape.ranks, answers)
        full = sum(answer.get("full", 0) for answer in answers)
        requests, messages = per_rank * self.shape.ranks + full, 2 * per_rank * self.shape.ranks + full
        if self.hosts:
            after = self._counters()
            requests = after["requests"] - before["requests"]
            messages = after["batches"] - before["batches"] + after["frames"] - before["frames"]
        swarm_cpu = sum(answer["cpu"] for answer in answers)
        phase = Phase(
            seconds=max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers),
            head_cpu=cpu,
            swarm_cpu=swarm_cpu,
            relays_cpu=sum(relays),
            head_share=cpu / took,
            swarm_share=max(answer["cpu"] / (answer["end"] - answer["start"]) for answer in answers),
            relays_share=max(relays, default=0.0) / took,
            machine_share=(cpu + sum(relays) + swarm_cpu) / took / (os.cpu_count() or 1),
            messages=messages,
            requests=requests,
            full=full,
        )
        say(f"{self.name}: {what}: {phase.seconds:.2f} s, head {phase.head_cpu:.3f} s of CPU")
        return phase

    def _answers(self, what: str) -> list[Message]:
        """What the swarms say; a head that has died is the reason for whatever else went wrong."""
        try:
            return gather(self.swarms, f"{self.name}, {what}", RUN_LIMIT_S)
        except ServerError as error:
            try:
                self.head.check_alive()
            except ServerError as death:
                raise ServerError(f"{error}; the head: {death}") from error
            raise

    def _counters(self) -> Message:
        """What has passed between all relays and the head."""
        stats = gather(self._tell(self.hosts, do="stats"), f"{self.name}, counting", RUN_LIMIT_S)
        return {name: sum(each[name] for each in stats) for name in ("batches", "frames", "requests")}

    @staticmethod
    def _tell(workers: Sequence[Worker], **order: object) -> Sequence[Worker]:
        for worker in workers:
            worker.order(**order)
        return workers


def check_counts(ranks: int, answers: Sequence[Message]) -> None:
    """Raise unless each of the counts from 1 on was given once, and what was seen later is among them."""
    counted = array("I")
    for answer in answers:
        counted.frombytes(b64decode(answer["counted"]))
    if sorted(counted) != list(range(1, ranks + 1)):
        raise ServerError(f"the results of {ranks:,} ADDs are not the numbers up to that, each once")
    if "full" not in answers[0]:
        return
    least, most = min(answer["least"] for answer in answers), max(answer["most"] for answer in answers)
    if least < 1 or most != ranks:
        raise ServerError(
            f"ADDs of 0 found {least} to {most:,}; of {ranks:,} ranks the last must see them all"
        )
