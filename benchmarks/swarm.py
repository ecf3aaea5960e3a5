"""Simulated ranks, thousands in one process: each does on the wire what torch's client does.

A rank connects, sends VALIDATE and PING, and counts itself at `init/`. At a barrier of `init_process_group`
it ADDs 1 and then 0 to a key, SETs a second one if the count is full, and WAITs for that. It sends each
request when the reply to the one before has come. All replies are checked when all ranks have theirs.

The ranks of one machine stand next to each other, and begin so, a few microseconds apart. Either all begin
before any goes on, or the next ones begin when most of those before them have been counted: as in a job
whose ranks do not come all at the same moment, only the last ones then find the count full.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
import time
from array import array
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

import frames
from load import leave, port_range, seek_port_quickly
from servers import ServerError
from workers import Message, answer

BEGIN_TOGETHER = 64
"""How many ranks begin before the others are looked at."""

UNCOUNTED = 512
"""How many may have begun without being counted, unless all begin at once: less than any backlog."""

CONNECT_LIMIT_S = 20
READ_BYTES = 64  # more than any reply: what is too much shows
PARENT = 0

Arrive = Callable[[int], None]
"""Lets those ranks begin that stand from there on, BEGIN_TOGETHER of them."""


class Step:
    """A request, and the reply to it: of so many bytes, the same for all ranks if it is known."""

    def __init__(self, name: str, request: bytes, size: int = 8, expected: bytes | None = None) -> None:
        self.name = name
        self.request = request
        self.size = len(expected) if expected is not None else size
        self.expected = expected
        self.follow_up: dict[bytes, bytes] = {}
        """What a rank sends besides if this is its reply; there is no reply to that."""
        self.replies: list[bytes] = []

    def counts(self) -> array[int]:
        """The replies as numbers."""
        numbers = array("q", b"".join(self.replies))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def check(self) -> None:
        """Raise unless all replies are as expected."""
        for reply, count in Counter(self.replies).items() if self.expected is not None else ():
            if reply != self.expected:
                raise ServerError(f"{count} ranks got {reply!r} for {self.name}, not {self.expected!r}")


def come_up() -> list[Step]:
    """What a rank does when it has connected."""
    return [
        Step("VALIDATE and PING", frames.HELLO, expected=frames.PONG),
        Step("ADD of 1 to init/", frames.add(b"init/", 1)),
    ]


def barrier(name: str, ranks: int) -> list[Step]:
    """What a rank does at a barrier for so many."""
    key = f"/default_pg/0//store_based_barrier_key:{name}".encode()
    last = key + b":last_worker"
    look = Step("ADD of 0", frames.add(key, 0))
    look.follow_up = {struct.pack("<q", ranks): frames.store(last, b"1")}
    return [Step("ADD of 1", frames.add(key, 1)), look, Step("WAIT", frames.wait([last]), expected=b"\x00")]


class Swarm:
    """The ranks of one process."""

    def __init__(self) -> None:
        self._ranks: list[socket.socket] = []
        self._step: list[int] = []  # by descriptor: which reply it waits for
        self._pieces: dict[int, bytes] = {}  # by descriptor: of a reply that came in pieces
        self._poll = select.epoll()
        self._poll.register(PARENT, select.EPOLLIN)
        self._done = 0

    def connect(self, places: Sequence[tuple[str, int, int]], limit_s: float) -> Message:
        """Bring up so many ranks at each address and port; return how they counted themselves."""
        addresses = [(host, port) for host, port, count in places for _ in range(count)]
        steps, ports = come_up(), port_range()
        total = len(addresses)

        def arrive(start: int) -> None:
            for address in addresses[start : start + BEGIN_TOGETHER]:
                self._add_rank(address, ports, steps[0].request)

        started, cpu = time.monotonic(), time.process_time()
        self._run("coming up", arrive, total, steps, UNCOUNTED, limit_s)
        return report(started, cpu, counted=pack(steps[1].counts()))

    def pass_barrier(self, name: str, ranks: int, at_once: bool, limit_s: float) -> Message:
        """All ranks of this process pass a barrier; return what they were told."""
        steps = barrier(name, ranks)
        files = [rank.fileno() for rank in self._ranks]
        first, write, step = steps[0].request, os.write, self._step

        def arrive(start: int) -> None:
            for file in files[start : start + BEGIN_TOGETHER]:
                step[file] = 0
                write(file, first)

        for file in files:
            step[file] = -1
        started, cpu = time.monotonic(), time.process_time()
        self._run(f"barrier {name}", arrive, len(files), steps, ranks if at_once else UNCOUNTED, limit_s)
        seen = steps[1].counts()
        return report(
            started,
            cpu,
            counted=pack(steps[0].counts()),
            least=min(seen),
            most=max(seen),
            full=seen.count(ranks),
        )

    def leave(self) -> Message:
        """Disconnect all."""
        leave(self._ranks)
        return {}

    def _add_rank(self, address: tuple[str, int], ports: bytes, hello: bytes) -> None:
        rank = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._ranks.append(rank)
        # The kernel's own timeout: one of Python's would cost a poll.
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", CONNECT_LIMIT_S, 0))
        rank.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seek_port_quickly(rank, ports)
        rank.connect(address)
        rank.setblocking(False)
        file = rank.fileno()
        while len(self._step) <= file:
            self._step.append(-1)
        self._step[file] = 0
        self._poll.register(file, select.EPOLLIN)
        os.write(file, hello)

    def _run(
        self, what: str, arrive: Arrive, total: int, steps: list[Step], uncounted: int, limit_s: float
    ) -> None:
        """Let all arrive and go through the steps; raise if that takes too long, or a reply is wrong.

        The second step counts them: so many may have begun without it.
        """
        deadline = time.monotonic() + limit_s
        counted = steps[1].replies
        self._done = 0
        try:
            for start in range(0, total, BEGIN_TOGETHER):
                while start - len(counted) >= uncounted:
                    self._go_on(steps, deadline)
                arrive(start)
            while self._done < total:
                self._go_on(steps, deadline)
            for step in steps:
                step.check()
            if strays := self._poll.poll(0):
                raise ServerError(f"{len(strays)} ranks got more than they had asked for")
        except (ServerError, OSError) as error:
            raise ServerError(f"{what}: {error}; {self._how_far(steps, total)}") from error

    def _go_on(self, steps: list[Step], deadline: float) -> None:
        """Take what has come, and send what comes next: the hot path."""
        read, write, at, pieces = os.read, os.write, self._step, self._pieces
        requests = [step.request for step in steps]
        last = len(steps) - 1
        events = self._poll.poll(max(0.0, deadline - time.monotonic()))
        if not events:
            raise ServerError("time is up")
        for file, _ in events:
            if file == PARENT:
                end_with_parent()
            data = read(file, READ_BYTES)
            number = at[file]
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
                self._done += 1
                at[file] = -1  # whatever it gets now is too much
            else:
                at[file] = number = number + 1
                write(file, requests[number])

    def _whole(self, file: int, data: bytes, step: Step) -> bytes | None:
        """A reply that may have come in pieces, if it is whole now."""
        if not data:
            raise ServerError("a rank was disconnected")
        data = self._pieces.pop(file, b"") + data
        if len(data) > step.size or self._step[file] < 0:
            raise ServerError(f"a rank got {data!r}, which is more than the reply to {step.name}")
        if len(data) < step.size:
            self._pieces[file] = data
            return None
        return data

    def _how_far(self, steps: list[Step], total: int) -> str:
        waiting = Counter(number for number in self._step if number >= 0)
        each = [f"{waiting[number]:,} wait for {step.name}" for number, step in enumerate(steps)]
        sent = self._done + sum(waiting.values())
        return (
            f"of {total:,} ranks {total - sent:,} had not begun, {', '.join(each)}, {self._done:,} are done"
        )


def pack(numbers: array[int]) -> str:
    """Numbers below 2**32 as text."""
    return b64encode(array("I", numbers).tobytes()).decode()


def report(started: float, cpu: float, **more: object) -> Message:
    """What an order took, and what came of it."""
    return {"start": started, "end": time.monotonic(), "cpu": time.process_time() - cpu, **more}


def end_with_parent() -> NoReturn:
    """The other side says nothing while ranks are busy: so it has ended."""
    sys.exit(1)


def main() -> None:
    """Carry out orders."""
    swarm = Swarm()
    for line in sys.stdin:
        order = json.loads(line)
        work: dict[str, Callable[..., Message]]
        work = {"connect": swarm.connect, "barrier": swarm.pass_barrier, "leave": swarm.leave}
        try:
            answer(work[order.pop("do")](**order))
        except (ServerError, OSError, OverflowError) as error:
            answer({"error": str(error)})


if __name__ == "__main__":
    main()
