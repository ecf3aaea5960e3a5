"""What an engine costs: ADDs of a store on etcd and on Redis, in turns with those of a plain store.

All is on one machine, the load as well, so the engine's own work counts against it. Rounds take turns, so
that a noisy machine is equally noisy to all; the figures are medians.

    python tests/tools/engine_figures.py [--rounds 5] [--seconds 2] [--targets plain,etcd,redis,redis+1]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from engines import EtcdCluster, RedisCluster, await_that, etcd_cluster, free_ports, is_open, redis_cluster
from processes import serving
from rallypoint.bench.clients import HOST, TORCH, Clients, Dialect, Exchange
from rallypoint.bench.targets import cpu_seconds
from survival import FrontEnd, front_end


@dataclass(frozen=True)
class Load:
    """Clients that always have so many ADDs in flight, in one write."""

    clients: int
    in_flight: int

    def __str__(self) -> str:
        return f"{self.clients:,} x {self.in_flight}"

    def ask(self, dialect: Dialect, number: int, turn: int) -> Exchange:
        """Each adds to a counter of its own, another one with each load: so the right reply is known."""
        key = b"/bench/%d/%d" % (self.clients, number)
        return Exchange(dialect.add(key, 1), dialect.number(turn))


LOADS = [Load(100, 32), Load(1_000, 1), Load(1, 1)]


@dataclass
class Target:
    """A store that is measured."""

    port: int
    pid: int
    rates: dict[Load, list[float]] = field(default_factory=dict)
    cpu: dict[Load, list[float]] = field(default_factory=dict)

    def measure(self, load: Load, clients: Clients, seconds: float) -> None:
        cpu = cpu_seconds(self.pid)
        deadline = time.monotonic() + seconds
        done = clients.ask(lambda: time.monotonic() >= deadline, load.ask, load.in_flight)
        self.rates.setdefault(load, []).append(done.operations / done.seconds)
        self.cpu.setdefault(load, []).append((cpu_seconds(self.pid) - cpu) / done.operations)


ENGINES: dict[str, tuple[Callable[[Path], AbstractContextManager[EtcdCluster | RedisCluster]], int]] = {
    "etcd": (partial(etcd_cluster, count=3), 0),
    "redis": (redis_cluster, 0),
    "redis+1": (partial(redis_cluster, replicas=2), 1),
}
"""How each engine is started, and how many acknowledgements its store asks for."""


def _start(name: str, folder: Path, stack: ExitStack) -> Target:
    if name == "plain":
        log = stack.enter_context((folder / "serve.log").open("w+"))
        plain = stack.enter_context(serving("libuv", log))
        return Target(plain.port, plain.process.pid)
    start_engine, acks = ENGINES[name]
    url = stack.enter_context(start_engine(folder)).url("figures")
    server: FrontEnd = front_end(url, acks, free_ports(1)[0], folder / "serve.log")
    stack.callback(server.kill)
    server.start()
    await_that(lambda: is_open(server.port), lambda: f"nobody leads:\n{server.log.read_text()}")
    assert server.process is not None
    return Target(server.port, server.process.pid)


def measure(names: list[str], rounds: int, seconds: float) -> dict[str, Target]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets: dict[str, Target] = {}
        for name in names:
            (own := folder / name).mkdir()
            targets[name] = _start(name, own, stack)
        for load in LOADS:
            with ExitStack() as connections:
                clients: dict[str, Clients] = {}
                for name, target in targets.items():
                    clients[name] = Clients()
                    connections.callback(clients[name].leave)
                    clients[name].come_up(TORCH, [(HOST, target.port, load.clients)])
                for _ in range(rounds):
                    for name, target in targets.items():
                        target.measure(load, clients[name], seconds)
        return targets


def main() -> int:
    parser = argparse.ArgumentParser(description="what an engine costs, in turns with a plain store")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round")
    parser.add_argument(
        "--targets", default=",".join(["plain", *ENGINES]), help="others are compared to the first"
    )
    arguments = parser.parse_args()
    targets = measure(arguments.targets.split(","), arguments.rounds, arguments.seconds)
    first = next(iter(targets.values()))
    print("| clients x in flight | store | ADDs a second | of the first | least to most | CPU us per ADD |")
    print("|---|---|---:|---:|---:|---:|")
    for load in LOADS:
        base = statistics.median(first.rates[load])
        for name, target in targets.items():
            rates = target.rates[load]
            rate = statistics.median(rates)
            cpu = statistics.median(target.cpu[load]) * 1e6
            spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
            print(f"| {load} | {name} | {rate:,.0f} | {rate / base:.2f} | {spread} | {cpu:.1f} |")
    print(f"load average: {os.getloadavg()}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
