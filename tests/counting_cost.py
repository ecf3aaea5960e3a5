"""What the roll call costs a server that nobody looks at, against another source tree.

    git worktree add --detach /tmp/before REVISION
    python tests/counting_cost.py --against /tmp/before/src

First within one process, without sockets: what a read costs the interpreter in each tree, the least of many
tries. Then servers of both trees in turns, under the same load: CPU time per operation, which is mostly the
system's, and the median of the turns' ratios with its quartiles. On a machine that is not idle the second
says little; the first then still tells what was added, and the second what that is a part of.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rallypoint.server.core.store import Core
from rallypoint.server.loops import pump
from rallypoint.server.loops.legacy import LegacyLoop
from rallypoint.wire.encoding import VALIDATE, counted_request, pack_i64, request
from rallypoint.wire.opcodes import Op

HERE = Path(__file__).parents[1] / "src"
BEGINNING = VALIDATE + request(Op.SET, b"/key", b"value") + request(Op.PING, tail=b"here")
TRIES = 60
READS = 4_000


@dataclass(frozen=True)
class Load:
    """What clients do: what each sends at a time, and how long the answer is."""

    name: str
    message: bytes
    answer: int
    clients: int = 100
    operations: int = 1
    """In the message."""


GET = request(Op.GET, b"/key")
SET = request(Op.SET, b"/key", b"value")
LOADS = [
    Load("GET, one client", GET, 13, clients=1),
    Load("GET", GET, 13),
    Load("GET, 32 in flight", GET * 32, 13 * 32, operations=32),
    Load("SET and PING", SET + request(Op.PING, tail=b"done"), 4, operations=2),
    Load("ADD", request(Op.ADD, b"/count", tail=pack_i64(1)), 8),
    Load("CHECK", counted_request(Op.CHECK, [b"/key"]), 1),
    Load("WAIT", counted_request(Op.WAIT, [b"/key"]), 1),
]


# Within one process


def cost_of_reads() -> dict[str, float]:
    """Seconds for each operation, but for the system's part: reading and writing are done by nobody."""
    near, far = socket.socketpair()
    core = Core()
    link = pump._Link(pump.Pump(LegacyLoop(), core, []), near, core.open("127.0.0.1:1", 0.0))
    link.connection.receive(BEGINNING)
    pump._write = lambda _, data: len(data)
    found = {}
    with near, far:
        for load in LOADS:
            pump._read = lambda _, __, data=load.message: data  # type: ignore[misc]
            link._room = 1 << 15
            found[load.name] = min(_time(link) for _ in range(TRIES)) / load.operations
    return found


def _time(link: pump._Link[Any]) -> float:
    read = link.on_readable
    began = time.perf_counter()
    for _ in range(READS):
        read()
    return (time.perf_counter() - began) / READS


def least_cost(source: Path, turns: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--inside"]
    runs = [subprocess.check_output(command, env=environment(source), text=True) for _ in range(turns)]
    costs = [json.loads(run) for run in runs]
    return {load.name: min(cost[load.name] for cost in costs) for load in LOADS}


# With servers


def environment(source: Path) -> dict[str, str]:
    path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


class Server:
    """A server of one source tree."""

    def __init__(self, source: Path) -> None:
        command = [sys.executable, "-m", "rallypoint", "serve", "--port", "0"]
        self.process = subprocess.Popen(
            command, env=environment(source), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        found = re.search(r":(\d+) ", self.process.stdout.readline())
        assert found is not None
        self.port = int(found[1])

    def cpu(self) -> float:
        """Seconds of CPU time so far, to the nanosecond."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0]) / 1e9

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate()


@contextmanager
def clients(port: int, count: int) -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            client = socket.create_connection(("127.0.0.1", port))
            opened.append(client)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(BEGINNING)
            assert client.recv(4) == b"here"
        yield opened
    finally:
        for client in opened:
            client.close()


def drive(server: Server, load: Load, messages: int) -> float:
    """Seconds of CPU time per operation, while each client sends so many messages."""
    with clients(server.port, load.clients) as opened, selectors.DefaultSelector() as selector:
        left = dict.fromkeys(opened, messages)
        missing = dict.fromkeys(opened, load.answer)
        for client in opened:
            selector.register(client, selectors.EVENT_READ, client)
        before = server.cpu()
        for client in opened:
            client.sendall(load.message)
        while left:
            for key, _ in selector.select():
                client = key.data
                missing[client] -= len(client.recv(1 << 16))
                if missing[client]:
                    continue
                left[client] -= 1
                if left[client]:
                    missing[client] = load.answer
                    client.sendall(load.message)
                else:
                    del left[client]
                    selector.unregister(client)
        return (server.cpu() - before) / (messages * load.clients * load.operations)


def compare(servers: Sequence[Server], load: Load, messages: int, turns: int) -> tuple[float, list[float]]:
    """Seconds of CPU time per operation before, and the ratios of the turns."""
    measure = partial(drive, load=load, messages=messages)
    ratios, before = [], []
    for turn in range(turns):
        found = {server: measure(server) for server in (servers if turn % 2 else servers[::-1])}
        ratios.append(found[servers[0]] / found[servers[1]])
        before.append(found[servers[1]])
    return statistics.median(before), statistics.quantiles(ratios, n=4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="the src folder of the other tree")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--operations", type=int, default=10_000, help="in each turn")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(cost_of_reads()))
        return
    trees = [HERE, options.against.resolve()]
    after, before = (least_cost(tree, 5) for tree in trees)
    servers = [Server(tree) for tree in trees]
    print(f"{'per operation':20}{'added':>10}{'of all':>12}{'that is':>9}   servers in turns: ratio")
    try:
        for load in LOADS:
            messages = max(options.operations // load.clients // min(load.operations, 8), 1)
            whole, (low, middle, high) = compare(servers, load, messages, options.turns)
            added = after[load.name] - before[load.name]
            print(
                f"{load.name:20}{added * 1e9:7.0f} ns{whole * 1e6:9.2f} us{100 * added / whole:8.1f}%"
                f"   {middle:.3f} ({low:.3f} to {high:.3f})",
                flush=True,
            )
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    main()
