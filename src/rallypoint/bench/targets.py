"""The servers under measurement, each a process of its own, and where the ranks of a load connect to them."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from rallypoint.bench import machine
from rallypoint.bench.clients import HOST
from rallypoint.bench.dialects import REDIS as REDIS_DIALECT
from rallypoint.bench.dialects import TORCH, Dialect
from rallypoint.bench.names import REDIS, RELAY
from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import Message, Worker, ask_all, ask_each, start
from rallypoint.server.machine import ports as system_ports

START_LIMIT_S: Final = 60.0
LEAVE_LIMIT_S: Final = 60.0
SPARE_FILES: Final = 8
"""What a server may open for itself on the way, besides connections."""

PER_RELAY: Final = 8
"""How many ranks a relay has: those of a machine with eight accelerators."""

FILES_PER_RELAY: Final = 2
"""Of a relay itself: one to listen, one upstream."""

RanksAt = tuple[str, int, str, int]
"""An address, a port, the address to come from (empty: any), and how many ranks connect so."""

SERVER_HOST: Final = "rallypoint.bench.host_servers"
TORCH_HOST: Final = "rallypoint.bench.host_torch"
"""The modules of host processes."""


@dataclass(frozen=True)
class Kind:
    """A server that can be measured: how it is started, and how clients speak to it."""

    name: str
    host: str
    """The module of the process that starts it."""
    order: Message
    """What that process is told."""
    needs: str = ""
    """A Python package or a program that has to be installed."""
    dialect: Dialect = TORCH


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("rallypoint-libuv", SERVER_HOST, {"backend": "libuv"}, "uvloop"),
        Kind("rallypoint-legacy", SERVER_HOST, {"backend": "legacy"}),
        Kind(RELAY, SERVER_HOST, {"backend": "libuv"}, "uvloop"),
        Kind("torch-libuv", TORCH_HOST, {"backend": "libuv"}, "torch"),
        Kind("torch-legacy", TORCH_HOST, {"backend": "legacy"}, "torch"),
        Kind(REDIS, SERVER_HOST, {"backend": "redis"}, "redis-server", REDIS_DIALECT),
        Kind("torch-libuv-as-is", TORCH_HOST, {"backend": "libuv", "as_is": True}, "torch"),
        Kind("torch-legacy-as-is", TORCH_HOST, {"backend": "legacy", "as_is": True}, "torch"),
    )
}


def absences(names: Sequence[str]) -> dict[str, str]:
    """Which of these are not installed here, and what is missing."""
    needs = {name: KINDS[name].needs for name in names}
    return {
        name: f"{need} is not installed"
        for name, need in needs.items()
        if need and find_spec(need) is None and shutil.which(need) is None
    }


class Hosts:
    """The host processes, each started when it is first needed."""

    def __init__(self, resources: ExitStack) -> None:
        self._resources = resources
        self._workers: dict[str, Worker] = {}

    def get(self, module: str) -> Worker:
        """The host process of that module; a new one, if it has ended."""
        if module not in self._workers or not self._workers[module].is_alive:
            self._workers[module] = start(self._resources, module, module.rpartition(".")[2])
        return self._workers[module]


class Target:
    """One running server."""

    def __init__(self, kind: Kind, hosts: Hosts) -> None:
        self.name = kind.name
        self.dialect = kind.dialect
        self.port = 0
        """Where clients connect."""
        self.pid = 0
        self.start_seconds = 0.0
        """How long it and its load took to start."""
        self._kind = kind
        self._host = hosts.get(kind.host)

    def start(self) -> None:
        """Start it; after that, it answers."""
        self._take(self._host.ask(START_LIMIT_S, do="serve", **self._kind.order))

    def renew(self) -> None:
        """Make it anew, on the same port, with nothing in it."""
        self._take(self._host.ask(START_LIMIT_S, do="renew", pid=self.pid))

    def stop(self) -> None:
        """End it, if it has been started."""
        try:
            if self.pid:
                self._host.ask(START_LIMIT_S, do="stop", pid=self.pid)
        except BenchError:
            pass  # it has ended before
        self.pid = 0

    def places(self, ranks: int) -> list[RanksAt]:
        """Where ranks connect, and from which addresses: one address has not enough ports for all."""
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

    def await_open_files(self, at_most: int) -> None:
        """Wait until it has noticed that clients left: until it holds hardly more descriptors than this."""
        deadline = time.monotonic() + LEAVE_LIMIT_S
        while machine.open_files(self.pid) > at_most + SPARE_FILES:
            self.check_alive()
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name} kept the connections of clients that had left")
            time.sleep(0.02)

    def await_quiet(self) -> None:
        """Wait until it does nothing more: until it takes no CPU time for a while."""
        deadline = time.monotonic() + LEAVE_LIMIT_S
        before, now = -1.0, machine.cpu_seconds(self.pid)
        while now - before > 0.002:
            if time.monotonic() > deadline:
                raise BenchError(f"{self.name} does not come to rest")
            time.sleep(0.1)
            before, now = now, machine.cpu_seconds(self.pid)

    def settle(self) -> None:
        """Let what follows from the last load happen before the next is measured."""

    def counters(self) -> Message:
        """What else can be counted, since its start; without relays, nothing."""
        return {}

    def _take(self, answer: Message) -> None:
        self.pid, self.port = answer["pid"], answer["port"]


class BehindRelays(Target):
    """A server of ours, and a relay for each machine of a job, many in a process.

    A load without ranks has one relay, which all of its clients connect to.
    """

    def __init__(self, kind: Kind, hosts: Hosts, ranks: int) -> None:
        super().__init__(kind, hosts)
        self._ranks = ranks
        self.per_relay = ranks_per_relay(ranks)
        self.relays = -(-ranks // self.per_relay) or 1
        self._resources = ExitStack()
        self._hosts: list[Worker] = []
        self._places: list[RanksAt] = []

    def start(self) -> None:
        super().start()
        files = self.relays * (FILES_PER_RELAY + self.per_relay)
        for number in range(-(-files // machine.most_connections())):
            name = f"relays, process {number + 1}"
            self._hosts.append(start(self._resources, "rallypoint.bench.host_relays", name))
        self._start_relays()

    def stop(self) -> None:
        self._resources.close()
        super().stop()

    def places(self, ranks: int) -> list[RanksAt]:
        assert ranks == self._ranks
        return self._places

    def settle(self) -> None:
        ask_all(self._hosts, START_LIMIT_S, do="settle")

    def counters(self) -> Message:
        answers = ask_all(self._hosts, START_LIMIT_S, do="messages")
        return {
            "relays_cpu": sum(machine.cpu_seconds(host.pid) for host in self._hosts),
            "messages": sum(each["messages"] for each in answers),
        }

    def relays_bytes(self) -> int:
        """The memory of all processes of relays together."""
        return sum(machine.resident_bytes(host.pid) for host in self._hosts)

    def _start_relays(self) -> None:
        # An address for each process: 127.0.0.0/8 is all this machine's.
        count = len(self._hosts)
        addresses = [f"127.0.{number // 250}.{1 + number % 250}" for number in range(count)]
        order: Message = {"do": "start", "upstream": (HOST, self.port), "limit_s": START_LIMIT_S}
        orders = [
            {**order, "host": address, "count": self.relays // count + (number < self.relays % count)}
            for number, address in enumerate(addresses)
        ]
        left = self._ranks
        answers = ask_each(self._hosts, START_LIMIT_S, orders)
        for address, answer in zip(addresses, answers, strict=True):
            for port in answer["ports"]:
                self._places.append((address, port, "", min(left, self.per_relay)))
                left -= self.per_relay
        if not self._ranks:
            self.port = self._places[0][1]


def ranks_per_relay(ranks: int) -> int:
    """Eight; more, if the server could not hold the connections of all relays then."""
    per_relay = PER_RELAY
    while -(-ranks // per_relay) > machine.most_connections():
        per_relay *= 2
    return per_relay


def make_target(name: str, hosts: Hosts, ranks: int) -> Target:
    """A target for a load of that many ranks; 0: for a load of a few clients."""
    kind = KINDS[name]
    return BehindRelays(kind, hosts, ranks) if name == RELAY else Target(kind, hosts)


def redis_version() -> str:
    """The version of the redis server that is installed."""
    try:
        said = subprocess.run([KINDS[REDIS].needs, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "not installed"
    words = dict(word.split("=", 1) for word in said.stdout.split() if "=" in word)
    return words.get("v", said.stdout.strip())
