"""The servers under measurement, each a process of its own, and where the ranks of a load connect to them."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Final

from rallypoint.bench import dialects, machine
from rallypoint.bench.faults import BenchError
from rallypoint.bench.host_redis import PROGRAM
from rallypoint.bench.names import REDIS, RELAY
from rallypoint.bench.sockets import HOST
from rallypoint.bench.workers import Message, Worker, gather, start
from rallypoint.server.machine import ports as system_ports

START_LIMIT_S: Final = 60.0
LEAVE_LIMIT_S: Final = 60.0
SPARE_FILES: Final = 8
"""What a server may open for itself on the way, besides connections."""

PER_RELAY: Final = 8
"""How many ranks a relay has: those of a machine with eight accelerators."""

FILES_PER_RELAY: Final = 2
"""Of a relay itself: one to listen, one upstream."""

Place = tuple[str, int, str, int]
"""An address, a port, the address to come from (empty: any), and how many ranks."""


@dataclass(frozen=True)
class Family:
    """Servers that come from one host process."""

    module: str
    dialect: dialects.Dialect
    package: str = ""
    """What has to be installed: a Python package."""
    program: str = ""
    """The same: a program."""

    @property
    def absence(self) -> str:
        """What is missing here for it; empty if nothing is."""
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.program and shutil.which(self.program) is None:
            return f"{self.program} is not installed"
        return ""


OURS: Final = Family("rallypoint.bench.host_ours", dialects.TORCH)
OURS_ON_LIBUV: Final = Family("rallypoint.bench.host_ours", dialects.TORCH, package="uvloop")
TORCH_FAMILY: Final = Family("rallypoint.pytorch.peers", dialects.TORCH, package="torch")
REDIS_FAMILY: Final = Family("rallypoint.bench.host_redis", dialects.REDIS, program=PROGRAM)


@dataclass(frozen=True)
class Kind:
    """What can be measured: a family, and what its host is told."""

    name: str
    family: Family
    order: Message


def _kinds() -> list[Kind]:
    return [
        Kind("rallypoint-libuv", OURS_ON_LIBUV, {"backend": "libuv"}),
        Kind("rallypoint-legacy", OURS, {"backend": "legacy"}),
        Kind(RELAY, OURS_ON_LIBUV, {"backend": "libuv"}),
        Kind("torch-libuv", TORCH_FAMILY, {"backend": "libuv", "as_is": False}),
        Kind("torch-legacy", TORCH_FAMILY, {"backend": "legacy", "as_is": False}),
        Kind(REDIS, REDIS_FAMILY, {}),
        Kind("torch-libuv-as-is", TORCH_FAMILY, {"backend": "libuv", "as_is": True}),
        Kind("torch-legacy-as-is", TORCH_FAMILY, {"backend": "legacy", "as_is": True}),
    ]


KINDS: Final = {kind.name: kind for kind in _kinds()}


class Hosts:
    """The host processes, each started when it is first needed."""

    def __init__(self, resources: ExitStack) -> None:
        self._resources = resources
        self._workers: dict[str, Worker] = {}

    def of(self, family: Family) -> Worker:
        """The host of a family."""
        module = family.module
        if module not in self._workers or not self._workers[module].is_alive:
            self._workers[module] = start(self._resources, partial(Worker, module, module.rpartition(".")[2]))
        return self._workers[module]


class Target:
    """One running server."""

    def __init__(self, kind: Kind, hosts: Hosts) -> None:
        self.name = kind.name
        self.dialect = kind.family.dialect
        self.port = 0
        """Where clients connect."""
        self.pid = 0
        self._kind = kind
        self._host = hosts.of(kind.family)

    def start(self) -> None:
        """Start it; after that, it answers."""
        self._take(self._host.ask(START_LIMIT_S, do="serve", **self._kind.order))

    def renew(self) -> None:
        """Make it anew, on the same port, with nothing in it."""
        self._take(self._host.ask(START_LIMIT_S, do="renew", pid=self.pid))

    def stop(self) -> None:
        """End it."""
        self._end(self.pid)
        self.pid = 0

    def places(self, ranks: int) -> list[Place]:
        """Where so many ranks connect: from as many addresses as they need ports."""
        low, high = system_ports.client_ports()
        ports = (high - low + 1) * 9 // 10
        whole, rest = divmod(ranks, ports)
        counts = [ports] * whole + [rest] * bool(rest)
        sources = ["", *(f"127.1.{1 + number // 250}.{1 + number % 250}" for number in range(len(counts)))]
        return [(HOST, self.port, source, count) for source, count in zip(sources, counts, strict=False)]

    def check_alive(self) -> None:
        """Raise if the process has ended."""
        if not machine.is_alive(self.pid):
            raise BenchError(f"{self.name} died; {self._host.last_words()}")

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far."""
        return machine.cpu_seconds(self.pid)

    def relay_cpu_seconds(self) -> float:
        """CPU time so far of a relay that all clients are connected to; 0 if there is none."""
        return 0.0

    def resident_bytes(self) -> int:
        """The memory that it holds."""
        return machine.resident_bytes(self.pid)

    def open_files(self) -> int:
        """How many file descriptors it holds."""
        return machine.open_files(self.pid)

    def await_open_files(self, at_most: int) -> None:
        """Wait until it has noticed that clients left: until it holds hardly more descriptors than this."""
        deadline = time.monotonic() + LEAVE_LIMIT_S
        while self.open_files() > at_most + SPARE_FILES:
            self.check_alive()
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name} kept the connections of clients that had left")
            time.sleep(0.02)

    def await_quiet(self) -> None:
        """Wait until it does nothing more: until it takes no CPU time for a while."""
        deadline = time.monotonic() + LEAVE_LIMIT_S
        before, now = -1.0, self.cpu_seconds()
        while now - before > 0.002:
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name} does not come to rest")
            time.sleep(0.1)
            before, now = now, self.cpu_seconds()

    def settle(self) -> None:
        """Let what follows from the last load happen before the next is measured."""

    def counters(self) -> Message:
        """What else can be counted; nothing, for a server that ranks are connected to themselves."""
        return {}

    def _end(self, pid: int) -> None:
        """Have the host end one of its processes, if it has been started."""
        try:
            if pid:
                self._host.ask(START_LIMIT_S, do="stop", pid=pid)
        except BenchError:
            pass  # it has ended before

    def _take(self, answer: Message) -> None:
        self.pid, self.port = answer.get("pid", self.pid), answer["port"]


class BehindOneRelay(Target):
    """A server of ours, and one relay that all clients connect to."""

    def __init__(self, kind: Kind, hosts: Hosts) -> None:
        super().__init__(kind, hosts)
        self._relay = 0

    def start(self) -> None:
        super().start()
        relay = self._host.ask(START_LIMIT_S, do="relay", upstream=self.port)
        self._relay, self.port = relay["pid"], relay["port"]

    def stop(self) -> None:
        self._end(self._relay)
        self._relay = 0
        super().stop()

    def relay_cpu_seconds(self) -> float:
        return machine.cpu_seconds(self._relay)


class BehindRelays(Target):
    """A server of ours, and a relay for each machine of a job, many in a process."""

    def __init__(self, kind: Kind, hosts: Hosts, ranks: int) -> None:
        super().__init__(kind, hosts)
        self.shape = fit(ranks)
        self._resources = ExitStack()
        self._relays: list[Worker] = []
        self._places: list[Place] = []

    def start(self) -> None:
        super().start()
        for number in range(self.shape.hosts):
            make = partial(Worker, "rallypoint.bench.host_relays", f"relays, process {number + 1}")
            self._relays.append(start(self._resources, make))
        self._start_relays()

    def stop(self) -> None:
        self._resources.close()
        super().stop()

    def places(self, ranks: int) -> list[Place]:
        assert ranks == self.shape.ranks
        return self._places

    def settle(self) -> None:
        self._all(do="settle")

    def counters(self) -> Message:
        stats = self._all(do="stats")
        return {
            "relays_cpu": sum(relay.cpu_seconds() for relay in self._relays),
            "messages": sum(each["batches"] + each["frames"] for each in stats),
        }

    def relays_bytes(self) -> int:
        """The memory of all processes of relays together."""
        return sum(relay.resident_bytes() for relay in self._relays)

    def _start_relays(self) -> None:
        # An address for each process: 127.0.0.0/8 is all this machine's.
        addresses = [f"127.0.{1 + number // 250}.{1 + number % 250}" for number in range(len(self._relays))]
        left = self.shape.relays
        for number, (relay, address) in enumerate(zip(self._relays, addresses, strict=True)):
            count = left // (len(self._relays) - number)
            left -= count
            upstream = (HOST, self.port)
            relay.order(do="start", host=address, count=count, upstream=upstream, limit_s=START_LIMIT_S)
        ranks = self.shape.ranks
        for address, answer in zip(addresses, gather(self._relays, START_LIMIT_S), strict=True):
            for port in answer["ports"]:
                self._places.append((address, port, "", min(ranks, self.shape.per_relay)))
                ranks -= self._places[-1][3]

    def _all(self, **order: object) -> list[Message]:
        for relay in self._relays:
            relay.order(**order)
        return gather(self._relays, START_LIMIT_S)


@dataclass(frozen=True)
class Shape:
    """How many ranks, behind relays of how many each."""

    ranks: int
    per_relay: int

    @property
    def relays(self) -> int:
        return -(-self.ranks // self.per_relay)

    @property
    def hosts(self) -> int:
        """How many processes the relays need."""
        return -(-self.relays * (FILES_PER_RELAY + self.per_relay) // machine.most_connections())


def fit(ranks: int) -> Shape:
    """Relays of eight ranks each; of more, if the server could not hold so many relays."""
    if machine.most_connections() < 1:
        raise BenchError("a process may open too few files here for any relay")
    shape = Shape(ranks, PER_RELAY)
    while shape.relays > machine.most_connections():
        shape = Shape(ranks, shape.per_relay * 2)
    return shape


def make_target(name: str, hosts: Hosts, ranks: int) -> Target:
    """A target for a load of so many ranks; 0: of some clients."""
    kind = KINDS[name]
    if name != RELAY:
        return Target(kind, hosts)
    return BehindRelays(kind, hosts, ranks) if ranks else BehindOneRelay(kind, hosts)


def absences(names: Sequence[str]) -> dict[str, str]:
    """Which of these are not installed here, and what is missing."""
    return {name: absence for name in names if (absence := KINDS[name].family.absence)}


def redis_version() -> str:
    """The version of the redis server that is installed."""
    try:
        said = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "not installed"
    words = dict(word.split("=", 1) for word in said.split() if "=" in word)
    return words.get("v", said.strip())
