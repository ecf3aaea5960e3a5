"""Ranks that wait for one key, and a crowd: ranks that connect all at the same moment, and only say hello."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Final

from rallypoint.bench.clients import HOST, Dialect, connect, leave
from rallypoint.bench.results import BenchError
from rallypoint.bench.swarm import BEGIN_TOGETHER, DONE, READ_BYTES, Answer, Step, Swarm, come_up, wait
from rallypoint.bench.workers import Stopwatch

MOST_TRIES: Final = 10
"""How often, on average, the ranks of a crowd may be turned away."""

CONNECTING: Final = -2  # in place of a step


class WideSwarm(Swarm):
    """The ranks of one process, which can wait as well."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self._crowd_at: tuple[str, int] | None = None
        self._turned_away = 0
        self._waiting: list[Step] = []
        self._releaser: socket.socket | None = None

    def wait(self, key: str) -> None:
        """Let all ranks wait for a key; the client that is to wake them connects as well."""
        if self._releaser is None:
            host, port = next(iter(self._ranks.values())).getpeername()
            self._releaser = connect(port, self._dialect, host)
        self._waiting = [wait(self._dialect, key.encode())]
        arrive = self._beginning(self._waiting[0])
        for start in range(0, len(self._ranks), BEGIN_TOGETHER):
            arrive(start)

    def check_asleep(self) -> None:
        """Raise if a rank does not wait any more."""
        if early := self._poll.poll(0):
            raise BenchError(f"{len(early):,} ranks did not wait for the key")

    def wake(self, key: str, release: bool, since: float, limit_s: float) -> Answer:
        """See all ranks wake up, and how long after `since`; `release`: this process wakes them."""
        watch = Stopwatch()
        for file in self._ranks:
            self._since[file] = since
        if release:
            assert self._releaser
            self._releaser.send(self._dialect.release(key.encode()))
        self._run("waking up", self._waiting, len(self._ranks), since + limit_s)
        return self._answer(watch)

    def gather(self, dialect: Dialect, port: int, count: int) -> None:
        """Make the sockets of a crowd."""
        self._dialect, self._crowd_at, self._turned_away = dialect, (HOST, port), 0
        for _ in range(count):
            self._make_socket().setblocking(False)

    def arrive(self, limit_s: float) -> Answer:
        """Connect the crowd at once; when each has its answer, also `turned_away`: how many were reset."""
        watch, start = Stopwatch(), time.monotonic()
        for file in list(self._ranks):
            self._connect_soon(file, start)
        self._run("arriving", come_up(self._dialect)[:1], len(self._ranks), start + limit_s)
        return {**self._answer(watch), "turned_away": self._turned_away}

    def leave(self) -> None:
        """Disconnect all."""
        super().leave()
        leave([self._releaser] if self._releaser else [])
        self._releaser, self._crowd_at = None, None

    # The crowd

    def _go_on(self, steps: list[Step], deadline: float) -> None:
        if not self._crowd_at:
            super()._go_on(steps, deadline)
            return
        (hello,) = steps
        for file, _ in self._await_events(deadline):
            try:
                if self._step[file] == CONNECTING:
                    self._greet(file, hello.request)
                    continue
                data = self._whole(file, os.read(file, READ_BYTES), hello)
            except (ConnectionResetError, BrokenPipeError):
                self._come_again(file)
                continue
            if data is not None:
                hello.replies.append(data)
                self._taken.append(time.monotonic() - self._since[file])
                self._step[file] = DONE

    def _connect_soon(self, file: int, since: float) -> None:
        """Begin to connect; the first event of the socket tells that it is done."""
        assert self._crowd_at
        self._step[file], self._since[file] = CONNECTING, since
        self._ranks[file].connect_ex(self._crowd_at)
        self._poll.register(file, select.EPOLLOUT)

    def _greet(self, file: int, hello: bytes) -> None:
        """A rank of the crowd has connected."""
        try:
            os.write(file, hello)
        except ConnectionRefusedError as error:
            raise BenchError(f"nobody listens for new clients: {error}") from error
        self._step[file] = 0
        self._poll.modify(file, select.EPOLLIN)

    def _come_again(self, file: int) -> None:
        """A reset is no answer of a crowd, and no fault: torch's client tries again as well."""
        self._turned_away += 1
        if self._turned_away > MOST_TRIES * len(self._ranks):
            raise BenchError(f"new clients were turned away {self._turned_away:,} times")
        since, self._step[file] = self._since[file], DONE
        self._pieces.pop(file, None)
        self._ranks.pop(file).close()
        rank = self._make_socket()
        rank.setblocking(False)
        self._connect_soon(rank.fileno(), since)
