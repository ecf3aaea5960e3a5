"""Simulated ranks, thousands in one process: each does on the wire what torch's client does.

A rank connects, sends VALIDATE and PING, and counts itself at `init/`. At a barrier of `init_process_group`
it ADDs 1 and then 0 to a key, SETs a second one if the count is full, and WAITs for that. It sends each
request when the reply to the one before has come. All replies are checked when all ranks have theirs.

The ranks of one machine stand next to each other, and begin so, a few microseconds apart. Either all begin
before any goes on, or the next ones begin when most of those before them have been counted: as in a job
whose ranks do not come all at the same moment, only the last ones then find the count full.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from rallypoint.bench.clients import TORCH, Dialect, come_from, leave, port_range, seek_port_quickly
from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import Load, Stopwatch, together

BEGIN_TOGETHER: Final = 64
"""How many ranks begin before the others are looked at."""

UNCOUNTED: Final = 512
"""How many may have begun without being counted, unless all begin at once: less than any backlog."""

CONNECT_LIMIT_S: Final = 20
DONE: Final = -1  # in place of a step
READ_BYTES: Final = 512  # more than any reply: what is too much shows

RanksAt = tuple[str, int, str, int]
"""An address, a port, the address to come from (empty: any), and how many ranks connect so."""

Answer = dict[str, Any]
"""`load`; `taken`, the seconds of each rank; `counted` and `seen`, the replies to ADDs of 1 and of 0."""

Arrive = Callable[[int], None]
"""Lets those ranks begin that stand from there on, BEGIN_TOGETHER of them."""


class Step:
    """A request, and the size of the reply to it; the reply itself where it is the same for all ranks."""

    def __init__(self, name: str, request: bytes, size: int = 0, expected: bytes | None = None) -> None:
        self.name = name
        self.request = request
        self.size = len(expected) if expected is not None else size
        """0: until the end of a line."""
        self.expected = expected
        self.follow_up: dict[bytes, bytes] = {}
        """By reply: a further request, which has no reply of its own."""
        self.replies: list[bytes] = []

    def check(self) -> None:
        """Raise unless all replies are as expected."""
        for reply, count in Counter(self.replies).items() if self.expected is not None else ():
            if reply != self.expected:
                raise BenchError(f"{count} ranks got {reply!r} for {self.name}, not {self.expected!r}")


def come_up(dialect: Dialect) -> list[Step]:
    """The steps of a rank that has connected."""
    hello = Step("its hello", dialect.hello.request, expected=dialect.hello.reply)
    return [hello, Step("ADD of 1 to init/", dialect.add(b"init/", 1), dialect.number_size)]


def barrier(dialect: Dialect, name: str, ranks: int) -> list[Step]:
    """The steps of a rank at a barrier of that many ranks."""
    key = f"/default_pg/0//store_based_barrier_key:{name}".encode()
    last = key + b":last_worker"
    add = Step("ADD of 1", dialect.add(key, 1), dialect.number_size)
    look = Step("ADD of 0", dialect.add(key, 0), dialect.number_size)
    look.follow_up = {dialect.number(ranks): dialect.release(last)}
    return [add, look, wait(dialect, last)]


def wait(dialect: Dialect, key: bytes) -> Step:
    """The step of waiting for a key."""
    exchange = dialect.wait(key)
    return Step("WAIT", exchange.request, expected=exchange.reply)


class Swarm:
    """The ranks of one process."""

    def __init__(self, *_: object) -> None:
        self._dialect: Dialect = TORCH
        self._ranks: dict[int, socket.socket] = {}  # by descriptor
        self._step: list[int] = []  # by descriptor: which reply it waits for; or DONE
        self._since: list[float] = []  # by descriptor: when it began
        self._taken: array[float] = array("d")  # of those that are done
        self._pieces: dict[int, bytes] = {}  # by descriptor: of a reply that came in pieces
        self._poll = select.epoll()
        self._ports = port_range()

    def connect(self, dialect: Dialect, places: Sequence[RanksAt], limit_s: float) -> Answer:
        """Bring up ranks at each place."""
        self._dialect = dialect
        addresses = [(host, port, source) for host, port, source, count in places for _ in range(count)]
        steps = come_up(dialect)

        def arrive(start: int) -> None:
            for host, port, source in addresses[start : start + BEGIN_TOGETHER]:
                self._add_rank((host, port), source, steps[0].request)

        watch = Stopwatch()
        self._run("coming up", steps, len(addresses), time.monotonic() + limit_s, arrive, UNCOUNTED)
        return self._answer(watch, counted=steps[1])

    def barrier(self, name: str, ranks: int, at_once: bool, limit_s: float) -> Answer:
        """All ranks of this process pass a barrier."""
        steps = barrier(self._dialect, name, ranks)
        arrive = self._beginning(steps[0])
        uncounted = ranks if at_once else UNCOUNTED
        watch, deadline = Stopwatch(), time.monotonic() + limit_s
        self._run(f"barrier {name}", steps, len(self._ranks), deadline, arrive, uncounted, together=True)
        return self._answer(watch, counted=steps[0], seen=steps[1])

    def leave(self) -> None:
        """Disconnect all."""
        leave(self._ranks.values())
        self._ranks = {}

    def _make_socket(self) -> socket.socket:
        rank = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        file = rank.fileno()
        self._ranks[file] = rank
        while len(self._step) <= file:
            self._step.append(DONE)
            self._since.append(0.0)
        self._since[file] = time.monotonic()
        rank.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seek_port_quickly(rank, self._ports)
        return rank

    def _add_rank(self, address: tuple[str, int], source: str, hello: bytes) -> None:
        rank = self._make_socket()
        # The kernel's own timeout: one of Python's would cost a poll.
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", CONNECT_LIMIT_S, 0))
        if source:
            come_from(rank, source)
        rank.connect(address)
        rank.setblocking(False)
        file = rank.fileno()
        self._step[file] = 0
        self._poll.register(file, select.EPOLLIN)
        os.write(file, hello)

    def _beginning(self, first: Step) -> Arrive:
        """How ranks that are connected begin with a step."""
        files = list(self._ranks)
        request, write, step, since, clock = first.request, os.write, self._step, self._since, time.monotonic

        def arrive(start: int) -> None:
            for file in files[start : start + BEGIN_TOGETHER]:
                step[file] = 0
                since[file] = clock()
                write(file, request)

        for file in files:
            step[file] = DONE
        return arrive

    def _run(
        self,
        what: str,
        steps: list[Step],
        total: int,
        deadline: float,
        arrive: Arrive | None = None,
        uncounted: int = 0,
        together: bool = False,
    ) -> None:
        """See all ranks through the steps; raise if that takes too long, or a reply is wrong.

        `arrive` lets them begin; without it they have begun. The second step counts them: `uncounted` is how
        many may have begun without it. `together`: none may be done before all have begun.
        """
        self._taken = array("d")
        try:
            if arrive:
                for start in range(0, total, BEGIN_TOGETHER):
                    while start - len(steps[1].replies) >= uncounted:
                        self._go_on(steps, deadline)
                    if together and self._taken:
                        raise BenchError(f"{len(self._taken):,} ranks did not wait for the others")
                    arrive(start)
            while len(self._taken) < total:
                self._go_on(steps, deadline)
            for step in steps:
                step.check()
            if strays := self._poll.poll(0):
                raise BenchError(f"{len(strays)} ranks got more than they had asked for")
        except (BenchError, OSError) as error:
            raise BenchError(f"{what}: {error}; {self._how_far(steps, total)}") from error

    def _go_on(self, steps: list[Step], deadline: float) -> None:
        """Take what has come, and send what comes next: the hot path."""
        read, write, clock = os.read, os.write, time.monotonic
        at, since, pieces = self._step, self._since, self._pieces
        requests = [step.request for step in steps]
        last = len(steps) - 1
        for file, _ in self._await_events(deadline):
            number = at[file]
            data = read(file, READ_BYTES)
            step = steps[number]
            if len(data) != step.size or pieces or number < 0:
                whole = self._whole(file, data, step)
                if whole is None:
                    continue
                data = whole
            step.replies.append(data)
            if data in step.follow_up:
                write(file, step.follow_up[data])
            if number == last:
                self._taken.append(clock() - since[file])
                at[file] = DONE  # anything that it gets now is too much
            else:
                at[file] = number = number + 1
                write(file, requests[number])

    def _await_events(self, deadline: float) -> list[tuple[int, int]]:
        """The sockets that can go on."""
        events = self._poll.poll(max(0.0, deadline - time.monotonic()))
        if not events:
            raise BenchError("time is up")
        return events

    def _whole(self, file: int, data: bytes, step: Step) -> bytes | None:
        """A reply that may have come in pieces, or is a line, if it is whole now."""
        if not data:
            raise BenchError("a rank was disconnected")
        data = self._pieces.pop(file, b"") + data
        size = step.size or (data.find(b"\n") + 1) or len(data) + 1
        if (len(data) > size) or self._step[file] < 0:
            raise BenchError(f"a rank got {data!r}, which is more than the reply to {step.name}")
        if len(data) < size:
            self._pieces[file] = data
            return None
        return data

    def _answer(self, watch: Stopwatch, **counts: Step) -> Answer:
        """The answer to an order, with the replies to some steps as numbers."""
        load = watch.stop(len(self._ranks))
        numbers = {name: list(map(self._dialect.value_of, step.replies)) for name, step in counts.items()}
        return {"load": load, "taken": self._taken, **numbers}

    def _how_far(self, steps: list[Step], total: int) -> str:
        waiting = Counter(number for number in self._step if number >= 0)
        each = [f"{waiting[number]:,} wait for {step.name}" for number, step in enumerate(steps)]
        done = len(self._taken)
        begun = done + sum(waiting.values())
        return f"of {total:,} ranks {total - begun:,} had not begun, {', '.join(each)}, {done:,} are done"


def load_of(answers: Sequence[Answer]) -> Load:
    """The load of several processes."""
    taken = [seconds for answer in answers for seconds in answer["taken"]]
    return together([answer["load"] for answer in answers], taken)
