"""How long the machines of a job take to meet: `python tests/tools/meeting_bench.py 1250 2500 5000 10000`.

All of it runs on this machine. The server is a process. So is the launcher of the first machine, which is
the scribe and the keeper. All other launchers are simulated: a few processes have a share of them each. A
launcher is a `Participant` with a client and a connection of its own, as in a job, and makes the same
requests by the same code. What is simulated is who waits: such a process lets all of its launchers come, each
up to its wait for a seat, and then takes their seats one after the other. So as many waits are under way at
the server as there are machines, and no launcher needs a thread.

What else a launcher does is left out: it starts its interpreter, looks up the endpoint's name and starts a
relay, on its own machine; and gives signs of life, every five seconds.

The time is that of the whole, from the first connection until the last launcher knows its rank. The CPU time
is told apart: the server's, and that of all launchers, of which each machine has but its own in a job. The
exponent is that of the straight line through all counts, of the CPU time: other work on this machine does not
change that.
"""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import psutil

from rallypoint import build
from rallypoint.client.base import Timeout
from rallypoint.client.tcp import TCPStore
from rallypoint.launch.options import RendezvousSettings
from rallypoint.launch.rendezvous.digest import Digest
from rallypoint.launch.rendezvous.participant import Participant
from rallypoint.launch.rendezvous.roster import Ending, Member, Size
from rallypoint.store.connect.connection import Connection
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.server.process.hosting import HostedServer, host_server
from rallypoint.store.wire.encoding import counted_request
from rallypoint.store.wire.opcodes import Op

_PROCESSES = 4
_SECONDS = 300.0

Launchers = subprocess.Popen[str]


class Figures(NamedTuple):
    """What a meeting took: seconds on the clock, and of CPU time."""

    machines: int
    connected: float
    met: float
    server_cpu: float
    launchers_cpu: float

    @property
    def seconds(self) -> float:
        return self.connected + self.met

    @property
    def cpu(self) -> float:
        return self.server_cpu + self.launchers_cpu

    def __str__(self) -> str:
        return (
            f"{self.machines:6,} machines: {self.seconds:6.2f} s (connected in {self.connected:.2f} s, "
            f"met in {self.met:.2f} s); CPU time {self.server_cpu:6.2f} s of the server, "
            f"{self.launchers_cpu:6.2f} s of all launchers"
        )


def measure(machines: int) -> Figures:
    """Let machines meet."""
    with _server() as server, ExitStack() as stack:
        launchers = [stack.enter_context(_launchers(server, machines, each)) for each in _shares(machines)]
        _hear(launchers, "started")
        before = [_cpu_seconds(pid) for pid in (server.pid, *(each.pid for each in launchers))]
        began = time.monotonic()
        _say(launchers, "connect")
        _hear(launchers, "connected")
        connected = time.monotonic()
        _say(launchers, "meet")
        _hear(launchers, "met")
        met = time.monotonic()
        after = [_cpu_seconds(pid) for pid in (server.pid, *(each.pid for each in launchers))]
    server_cpu, *launchers_cpu = (b - a for a, b in zip(before, after, strict=True))
    return Figures(machines, connected - began, met - connected, server_cpu, sum(launchers_cpu))


def exponent(figures: Sequence[Figures]) -> float:
    """Of the CPU time, by the number of machines: 1 if twice as many take twice as long."""
    points = [(math.log(each.machines), math.log(each.cpu)) for each in figures]
    x, y = (sum(each[axis] for each in points) / len(points) for axis in (0, 1))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def _shares(machines: int) -> Iterator[range]:
    """The first launcher, then the others, for the processes."""
    yield range(1)
    for number in range(_PROCESSES):
        yield range(1 + number, machines, _PROCESSES)


@contextmanager
def _server() -> Iterator[HostedServer]:
    server = host_server("localhost", 0)
    yield server
    server.release()


@contextmanager
def _launchers(server: HostedServer, machines: int, share: range) -> Iterator[Launchers]:
    numbers = (server.port, machines, share.start, share.stop, share.step)
    command = [sys.executable, __file__, "--launchers", server.address[0], *map(str, numbers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launchers:
        yield launchers
        launchers.kill()


def _hear(launchers: Sequence[Launchers], word: str) -> None:
    for each in launchers:
        assert each.stdout is not None
        assert each.stdout.readline().strip() == word, f"the launchers have not {word}"


def _say(launchers: Sequence[Launchers], word: str) -> None:
    for each in launchers:
        assert each.stdin is not None
        print(word, file=each.stdin, flush=True)


def _cpu_seconds(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return used.user + used.system


class _Client(TCPStore):
    """A launcher's client, whose next wait can be begun ahead."""

    _begun: tuple[ExitStack, Connection, Deadline] | None = None

    def begin_wait(self, key: str) -> None:
        deadline, lent = Deadline(_SECONDS), ExitStack()
        connection = lent.enter_context(self._pool.lend(deadline))
        connection.send(counted_request(Op.WAIT, [f"/{key}".encode()]), deadline)
        self._begun = lent, connection, deadline

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        if self._begun is None:
            super().wait(keys, timeout)
            return
        (lent, connection, deadline), self._begun = self._begun, None
        with lent:
            stopped, _ = self._await_stop(connection, deadline)
            assert stopped


class _Launcher(Participant):
    """A machine that comes, and waits later."""

    def __init__(self, client: _Client, number: int, machines: int) -> None:
        member = Member(f"{number:016x}", f"node-{number:05}", 10_000 + number, keeps=number == 0)
        times = RendezvousSettings(join_timeout=_SECONDS)
        super().__init__(client, "job", member, Size(machines, machines), times)
        self._client = client
        self._arrived: Digest | None = None

    def arrive(self) -> None:
        self._arrived = super()._join()
        self._client.begin_wait(f"{self.prefix}/seat/{self.member.id}/{self.member.visit}")

    def _join(self, ending: Ending | None = None) -> Digest:
        return self._arrived or super()._join(ending)


def _launch(host: str, port: int, machines: int, share: range) -> None:
    """Be some of the launchers of a job."""
    gc.disable()  # it would look at those of the other launchers as well
    _await_turn("started")
    launchers = []
    for number in share:
        client = _Client(host, port, timeout=_SECONDS, role=Role.AGENT)
        launchers.append(_Launcher(client, number, machines))
    _await_turn("connected")
    if len(launchers) > 1:
        for each in launchers:
            each.arrive()
    ranks = {each.next_round(lambda _: "node-00000:29500").rank for each in launchers}
    assert len(ranks) == len(share)
    _await_turn("met")


def _await_turn(word: str) -> None:
    print(word, flush=True)
    sys.stdin.readline()


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--launchers"]:
        host, port, machines, *share = arguments[1:]
        _launch(host, int(port), int(machines), range(*map(int, share)))
        return
    print(f"the server's build: {build.in_use()}", flush=True)
    figures = []
    for count in map(int, arguments):
        figures.append(measure(count))
        print(figures[-1], flush=True)
    if len(figures) > 1:
        print(f"exponent {exponent(figures):.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
