"""Clients that wait for one key, that are busy until they are told; and a crowd that connects all at once."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.dialects import TORCH
from rallypoint.bench.clients import (
    ASKED,
    HOST,
    Ask,
    Clients,
    Dialect,
    begin,
    check,
    check_silent,
    leave,
    receive,
)
from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import Load

MOST_TRIES: Final = 10
"""How often, on average, the clients of a crowd may be turned away."""


def connect(port: int, dialect: Dialect, host: str = HOST) -> socket.socket:
    """A client whose hello has been answered."""
    client = begin(dialect, host, port)
    try:
        receive(client, dialect.hello.reply)
    except BaseException:
        client.close()
        raise
    return client


class WideClients(Clients):
    """The clients of one process, which can wait as well."""

    asked: Mapping[str, Ask] = {**ASKED, "CANCEL": lambda _, __, ___: TORCH.give_up(b"/bench/missing")}

    def ask_until(self, path: Path, operation: str, per_request: int) -> Load:
        """Keep all clients busy until there is such a file."""
        return self.ask(path.exists, self.asked[operation], per_request)

    def wait(self, key: str) -> None:
        """Let all ranks wait for a key."""
        for client in self.sockets:
            client.send(self.dialect.wait(key.encode()).request)

    def check_asleep(self) -> None:
        """Raise if a rank does not wait any more."""
        for client in self.sockets:
            check_silent(client)

    def wake(self, key: str, release: bool, since: float) -> Load:
        """See all ranks wake up, and how long after `since`; `release`: this process wakes them."""
        load = Load()
        if release:
            host, port = self.sockets[0].getpeername()
            with connect(port, self.dialect, host) as releaser:
                releaser.send(self.dialect.release(key.encode()))
        for client in self.sockets:
            receive(client, self.dialect.wait(key.encode()).reply)
            load.taken.append(time.monotonic() - since)
        load.stop(len(self.sockets))
        return load


class Crowd:
    """Clients that connect all at the same moment, and only say hello."""

    def __init__(self) -> None:
        self._clients: dict[int, socket.socket] = {}
        self._unanswered: set[int] = set()
        self._poll = select.epoll()

    def gather(self, dialect: Dialect, port: int, count: int) -> None:
        """Make their sockets."""
        self._dialect, self._address = dialect, (HOST, port)
        for _ in range(count):
            self._add()

    def leave(self) -> None:
        """Disconnect all."""
        leave(self._clients.values())
        self._clients = {}

    def arrive(self, limit_s: float) -> tuple[Load, int]:
        """Connect all at once, until each has its answer; and how many were turned away.

        A reset is no answer, and no fault: torch's client tries again as well.
        """
        load, deadline, turned_away = Load(), time.monotonic() + limit_s, 0
        for file in self._clients:
            self._connect(file)
        while self._unanswered:
            events = self._poll.poll(max(0.0, deadline - time.monotonic()))
            if not events:
                raise BenchError(f"time is up, and {len(self._unanswered):,} clients have no answer")
            for file, event in events:
                try:
                    if self._go_on(self._clients[file], event):
                        self._unanswered.remove(file)
                        load.taken.append(time.monotonic() - load.start)
                except (ConnectionResetError, BrokenPipeError):
                    turned_away += 1
                    if turned_away > MOST_TRIES * len(self._clients):
                        raise BenchError(f"new clients were turned away {turned_away:,} times") from None
                    self._unanswered.remove(file)
                    self._clients.pop(file).close()
                    self._connect(self._add())
        load.stop(len(self._clients))
        for client in self._clients.values():
            check_silent(client)
        return load, turned_away

    def _add(self) -> int:
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setblocking(False)
        self._clients[client.fileno()] = client
        return client.fileno()

    def _connect(self, file: int) -> None:
        """Begin to connect; the first event of the socket tells that it is done."""
        self._clients[file].connect_ex(self._address)
        self._poll.register(file, select.EPOLLOUT)
        self._unanswered.add(file)

    def _go_on(self, client: socket.socket, event: int) -> bool:
        """Say hello, or see it answered: then this is true."""
        if event & select.EPOLLIN:
            check(client.recv(512), self._dialect.hello.reply)
            return True
        try:
            client.send(self._dialect.hello.request)
        except ConnectionRefusedError as error:
            raise BenchError(f"nobody listens for new clients: {error}") from error
        self._poll.modify(client, select.EPOLLIN)
        return False
