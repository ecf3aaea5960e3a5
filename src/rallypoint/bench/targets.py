"""The servers under measurement as a load sees them: where its ranks connect, and what the server spends."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Final

from rallypoint.bench import machine
from rallypoint.bench.clients import HOST
from rallypoint.bench.names import BY_NAME, RELAY
from rallypoint.bench.results import BenchError
from rallypoint.bench.servers import KINDS, START_LIMIT_S, Server, TorchHost
from rallypoint.bench.swarm import RanksAt
from rallypoint.bench.workers import Worker, ask_all, ask_each, start
from rallypoint.store.machine import ports as system_ports

LEAVE_LIMIT_S: Final = 60.0
SPARE_FILES: Final = 8
"""Files that a server may open for itself, besides connections."""

PER_RELAY: Final = 8
"""How many ranks a relay has: those of a machine with eight accelerators."""

FILES_PER_RELAY: Final = 2
"""A relay has one file to listen, and one upstream."""


class Target:
    """A server under measurement."""

    def __init__(self, name: str, torch: TorchHost) -> None:
        self.name = name
        self.dialect = KINDS[name].dialect
        self.torch = torch
        self.port = 0
        """Where clients connect."""
        self._server: Server | None = None

    @property
    def pid(self) -> int:
        """The server's process; 0 while there is none."""
        return self._server.pid if self._server else 0

    @property
    def pids(self) -> list[int]:
        """The server's process, and its workers."""
        return [self.pid, *(machine.children(self.pid) if self.name in BY_NAME else ())]

    def cpu_seconds(self) -> float:
        """CPU time so far."""
        return sum(map(machine.cpu_seconds, self.pids))

    def resident_bytes(self) -> int:
        """The memory that it holds."""
        return sum(map(machine.resident_bytes, self.pids))

    def open_files(self) -> int:
        """How many file descriptors it holds."""
        return sum(map(machine.open_files, self.pids))

    def start(self) -> None:
        """Start it; after that, it answers."""
        self._server = KINDS[self.name].serve(self.torch)
        self.port = self._server.port

    def renew(self) -> None:
        """Make it anew, on the same port, with nothing in it."""
        assert self._server
        self._server = self._server.renew()

    def stop(self) -> None:
        """End it, if it has been started."""
        if self._server:
            self._server.release()
        self._server = None

    def places(self, ranks: int) -> list[RanksAt]:
        """Where ranks connect, and from which addresses: one address has not enough ports for all."""
        low, high = system_ports.client_ports()
        ports = (high - low + 1) * 9 // 10
        whole, rest = divmod(ranks, ports)
        counts = [ports] * whole + [rest] * bool(rest)
        sources = ["", *(f"127.1.{1 + number // 250}.{1 + number % 250}" for number in range(len(counts)))]
        return [(HOST, self.port, source, count) for source, count in zip(sources, counts, strict=False)]

    def check_alive(self) -> None:
        """Raise if the server has been started, and its process has ended."""
        if self._server and not machine.is_alive(self.pid):
            raise BenchError(f"{self.name} died; {self._server.last_words()}".removesuffix("; "))

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

    def counters(self) -> dict[str, float]:
        """Further counters since its start; without relays, none."""
        return {}


class BehindRelays(Target):
    """A server of ours, and a relay for each machine of a job, many in a process.

    A load without ranks has one relay, which all of its clients connect to.
    """

    def __init__(self, torch: TorchHost, ranks: int) -> None:
        super().__init__(RELAY, torch)
        self._ranks = ranks
        self.per_relay = ranks_per_relay(ranks)
        self.relays = -(-ranks // self.per_relay) or 1
        self._resources = ExitStack()
        self._hosts: list[Worker] = []
        self._places: list[RanksAt] = []

    def start(self) -> None:
        super().start()
        files = self.relays * (FILES_PER_RELAY + self.per_relay)
        count = -(-files // machine.most_connections())
        for number in range(count):
            name = f"relays, process {number + 1}"
            self._hosts.append(start(self._resources, "rallypoint.bench.host_relays", name))
        # An address for each process: 127.0.0.0/8 is all this machine's.
        addresses = [f"127.0.{number // 250}.{1 + number % 250}" for number in range(count)]
        order = {"do": "start", "upstream": (HOST, self.port), "limit_s": START_LIMIT_S}
        orders = [
            {**order, "host": address, "count": self.relays // count + (number < self.relays % count)}
            for number, address in enumerate(addresses)
        ]
        left = self._ranks
        for address, ports in zip(addresses, ask_each(self._hosts, START_LIMIT_S, orders), strict=True):
            for port in ports:
                self._places.append((address, port, "", min(left, self.per_relay)))
                left -= self.per_relay
        if not self._ranks:
            self.port = self._places[0][1]

    def stop(self) -> None:
        self._resources.close()
        super().stop()

    def places(self, ranks: int) -> list[RanksAt]:
        assert ranks == self._ranks
        return self._places

    def settle(self) -> None:
        ask_all(self._hosts, START_LIMIT_S, do="settle")

    def counters(self) -> dict[str, float]:
        return {
            "relays_cpu": sum(machine.cpu_seconds(host.pid) for host in self._hosts),
            "messages": sum(ask_all(self._hosts, START_LIMIT_S, do="messages")),
        }

    def relays_bytes(self) -> int:
        """The memory of all processes of relays together."""
        return sum(machine.resident_bytes(host.pid) for host in self._hosts)


def ranks_per_relay(ranks: int) -> int:
    """Eight; more, if the server could not hold the connections of all relays then."""
    per_relay = PER_RELAY
    while -(-ranks // per_relay) > machine.most_connections():
        per_relay *= 2
    return per_relay


def make_target(name: str, torch: TorchHost, ranks: int) -> Target:
    """A target for a load of that many ranks; 0: for a load of a few clients."""
    return BehindRelays(torch, ranks) if name == RELAY else Target(name, torch)
