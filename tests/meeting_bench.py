"""How long the machines of a job take to meet: `python tests/meeting_bench.py 1250 2500 5000 10000`.

The server is a process. The launchers are in two more, each with a `Meeting` and a connection of its own, as
in a job. A few threads drive them: a thread lets all of its launchers come, then waits for the place of one
after the other. So the server gets the requests that it would get from as many machines, but for those waits
that are over before they begin. All of it runs on this machine, and the time is that of the whole: from the
first connection until the last launcher knows its rank. The exponent is that of the straight line through all
counts, of the CPU time: other work on this machine does not change that.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import psutil

from rallypoint.launch.rendezvous.digest import Digest
from rallypoint.launch.rendezvous.meeting import Meeting, MeetingTimes
from rallypoint.launch.rendezvous.roster import Member, Size
from rallypoint.rollcall.identity import Role
from rallypoint.server.process.hosting import host_server
from rallypoint.stores.tcp import TCPStore

_PROCESSES = 2
_SECONDS = 300.0
_THREADS = 8


class Figures(NamedTuple):
    """What a meeting took: seconds on the clock, and of CPU time in all processes."""

    machines: int
    connected: float
    met: float
    cpu: float

    @property
    def seconds(self) -> float:
        return self.connected + self.met

    def __str__(self) -> str:
        return (
            f"{self.machines:6,} machines: {self.seconds:6.2f} s (connected in {self.connected:.2f} s, "
            f"met in {self.met:.2f} s), {self.cpu:6.2f} s of CPU time"
        )


def measure(machines: int) -> Figures:
    """Let machines meet."""
    server = host_server("localhost", 0)
    share = machines // _PROCESSES
    shares = [(share * number, share) for number in range(_PROCESSES)]
    host, port = server.address
    began = time.monotonic()
    command = [sys.executable, __file__, "--launchers", host, str(port), str(share * _PROCESSES)]
    launchers = [
        subprocess.Popen(
            [*command, *map(str, each)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for each in shares
    ]
    try:
        _hear(launchers, "connected")
        connected = time.monotonic()
        for each in launchers:
            assert each.stdin is not None
            print("meet", file=each.stdin, flush=True)
        _hear(launchers, "met")
        met = time.monotonic()
        cpu = sum(_cpu_seconds(pid) for pid in (server.pid, *(each.pid for each in launchers)))
    finally:
        for each in launchers:
            each.kill()
            each.wait()
        server.release()
    return Figures(share * _PROCESSES, connected - began, met - connected, cpu)


def exponent(figures: Sequence[Figures]) -> float:
    """Of the CPU time, by the number of machines: 1 if twice as many take twice as long."""
    points = [(math.log(each.machines), math.log(each.cpu)) for each in figures]
    x, y = (sum(each[axis] for each in points) / len(points) for axis in (0, 1))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def _hear(launchers: Sequence[subprocess.Popen[str]], word: str) -> None:
    for each in launchers:
        assert each.stdout is not None
        assert each.stdout.readline().strip() == word, f"the launchers have not {word}"


def _cpu_seconds(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return used.user + used.system


class _Launcher(Meeting):
    """A machine that comes and waits in two steps."""

    def arrive(self) -> None:
        self._arrived = super()._come()

    def _come(self) -> Digest:
        return self._arrived


def _launch(host: str, port: int, machines: int, first: int, count: int) -> None:
    """Be some of the launchers of a job."""
    size, times = Size(machines, machines), MeetingTimes(join=_SECONDS)
    launchers = []
    for number in range(first, first + count):
        store = TCPStore(host, port, timeout=_SECONDS, role=Role.AGENT)
        store.add("connected", 1)
        member = Member(f"{number:016x}", f"node-{number:05}", 10_000 + number, keeps=number == 0)
        launchers.append(_Launcher(store, "job", member, size, times))
    print("connected", flush=True)
    sys.stdin.readline()
    with ThreadPoolExecutor(_THREADS) as threads:
        parts = [launchers[part::_THREADS] for part in range(_THREADS)]
        ranks = [rank for part in threads.map(_meet, parts) for rank in part]
    assert len(set(ranks)) == count
    print("met", flush=True)
    sys.stdin.readline()


def _meet(launchers: Sequence[_Launcher]) -> list[int]:
    for each in launchers:
        each.arrive()
    return [each.next_round(lambda _: "node-00000:29500").rank for each in launchers]


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--launchers"]:
        host, *numbers = arguments[1:]
        _launch(host, *map(int, numbers))
        return
    figures = []
    for machines in map(int, arguments):
        figures.append(measure(machines))
        print(figures[-1], flush=True)
    if len(figures) > 1:
        print(f"exponent {exponent(figures):.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
