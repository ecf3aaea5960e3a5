"""Clients that all connect at the same moment, say hello and await the answer."""

from __future__ import annotations

import select
import socket
import time
from typing import Final

from rallypoint.bench.dialects import DIALECTS, Dialect
from rallypoint.bench.faults import BenchError
from rallypoint.bench.load import Load, Stopwatch
from rallypoint.bench.sockets import ANSWER_LIMIT_S, HOST, check, leave, port_range, seek_port_quickly
from rallypoint.bench.workers import Message, Orders, end_with_parent, obey

_MOST_TRIES: Final = 10


class Crowd:
    """A crowd that may come, and leave, again and again."""

    def __init__(self, port: int, dialect: Dialect, count: int) -> None:
        self._address = (HOST, port)
        self._hello = dialect.hello
        self._count = count
        self._ports = port_range()
        self._clients: dict[int, socket.socket] = {}
        self._greeted: set[int] = set()
        self._waiting: set[int] = set()
        self._pieces: dict[int, bytes] = {}
        self._taken: list[float] = []
        self.turned_away = 0
        """How many connections were reset; such a client comes again, as torch's does."""

    def gather(self) -> None:
        """Make their sockets: beforehand, so that the time of it is nobody's."""
        self._taken, self.turned_away = [], 0
        for _ in range(self._count):
            self._make()

    def arrive(self) -> Load:
        """Connect them all at once; return when each has its answer."""
        with select.epoll(self._count) as poll:
            watch, start = Stopwatch(), time.monotonic()
            for descriptor in self._clients:
                self._connect(poll, descriptor)
            self._greet(poll, start)
            return watch.stop(self._count, self._taken)

    def close(self) -> None:
        """Disconnect them all."""
        leave(self._clients.values())
        self._clients = {}

    def _make(self) -> int:
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        client.setblocking(False)
        seek_port_quickly(client, self._ports)
        self._clients[client.fileno()] = client
        return client.fileno()

    def _connect(self, poll: select.epoll, descriptor: int) -> None:
        self._clients[descriptor].connect_ex(self._address)
        # Edge-triggered: one registration serves both for the connection and for the answer.
        poll.register(descriptor, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        self._waiting.add(descriptor)
        self._greeted.discard(descriptor)

    def _greet(self, poll: select.epoll, start: float) -> None:
        while self._waiting:
            events = poll.poll(1.0)
            for descriptor, event in events:
                try:
                    self._advance(descriptor, event, start)
                except ConnectionRefusedError as error:
                    raise BenchError(f"nobody listens for new clients: {error}") from error
                except OSError:
                    self._come_again(poll, descriptor)
            if time.monotonic() > start + ANSWER_LIMIT_S:
                raise BenchError(f"{len(self._waiting)} of {self._count} new clients got no answer")

    def _advance(self, descriptor: int, event: int, start: float) -> None:
        client, hello = self._clients[descriptor], self._hello
        if descriptor not in self._greeted:
            self._greeted.add(descriptor)
            client.send(hello.request)
        elif event & select.EPOLLIN:
            reply = client.recv(len(hello.reply) + 1)
            answer = self._pieces.pop(descriptor, b"") + reply
            if reply and len(answer) < len(hello.reply):
                self._pieces[descriptor] = answer
                return
            check(answer, hello.reply if descriptor in self._waiting else b"")
            self._waiting.remove(descriptor)
            self._taken.append(time.monotonic() - start)

    def _come_again(self, poll: select.epoll, descriptor: int) -> None:
        self.turned_away += 1
        if self.turned_away > _MOST_TRIES * self._count:
            raise BenchError(f"new clients were turned away {self.turned_away:,} times")
        self._waiting.discard(descriptor)
        self._pieces.pop(descriptor, None)
        self._clients.pop(descriptor).close()
        self._connect(poll, self._make())


class CrowdWorker:
    """A crowd, led by orders."""

    def gather(self, port: int, dialect: str, count: int) -> Message:
        self._crowd = Crowd(port, DIALECTS[dialect], count)
        self._crowd.gather()
        return {}

    def arrive(self) -> Message:
        return {"load": self._crowd.arrive().message(), "turned_away": self._crowd.turned_away}

    def leave(self) -> Message:
        self._crowd.close()
        return {}


def main() -> None:
    """Carry out orders."""
    end_with_parent()
    worker = CrowdWorker()
    obey({"gather": worker.gather, "arrive": worker.arrive, "leave": worker.leave}, Orders())


if __name__ == "__main__":
    main()
