"""Clients of a store that is killed again and again: they note all that they ask and are told.

Each is a thread with a connection of its own, to a relay. The clients of a round have keys of their own, so
that a history stays short enough to be judged.
"""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from histories import History
from linearizability import Operation
from rallypoint.store.wire.encoding import VALIDATE
from simulated_ranks import REQUESTS, FailedError, Keys, Reader, ping

PATIENCE = 40.0
"""Seconds after which a client that has no reply gives up: then something is wrong."""

_MIXED, _TOGETHER = 3, 2
"""How many clients behind each relay do all sorts of things, and how many meet at barriers. One more adds."""

TOTAL = b"total"
"""A counter of all rounds."""


class Client:
    """One connection, and what is asked on it."""

    def __init__(self, name: str, port: int, history: History, ticks: itertools.count[int]) -> None:
        self._name = name
        self._history = history
        self._ticks = ticks
        self._numbers = itertools.count()
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self._socket.sendall(VALIDATE)
        self.spans: list[tuple[float, float]] = []
        """From when to when it was without the reply to a request that nothing but the store can delay."""

    def close(self) -> None:
        self._socket.close()

    def value(self) -> bytes:
        """A value that nobody else writes."""
        return f"{self._name}.{next(self._numbers)};".encode()

    def count(self, key: bytes, amount: int) -> int:
        """Add to a counter that is no part of the history."""
        begun = time.monotonic()
        encode, read = REQUESTS["ADD"]
        assert read is not None
        self._socket.sendall(encode([key], amount))
        total = int(self._read(read))
        self.spans.append((begun, time.monotonic()))
        return total

    def ask(self, what: str, key: bytes, argument: Any = None) -> Any:
        """Ask, note it, and return the reply; where there is none, a PING behind it tells that it is done."""
        encode, read = REQUESTS[what]
        data = encode([key], argument)
        if read is None:
            pinged, read = ping(next(self._numbers))
            data += pinged
        operation = Operation(self._name, what, (key,), argument, next(self._ticks))
        self._history.operations.append(operation)
        begun = time.monotonic()
        self._socket.sendall(data)
        operation.result = self._read(read)
        operation.end = next(self._ticks)
        if what not in ("WAIT", "BARRIER"):
            self.spans.append((begun, time.monotonic()))
        return operation.result

    def _read(self, read: Reader) -> Any:
        while (found := read(self._received)) is None:
            data = self._socket.recv(1 << 16)
            if not data:
                raise FailedError(f"{self._name} was disconnected")
            self._received += data
        value, length = found
        del self._received[:length]
        return value


class Crowd:
    """The clients of one round, behind all relays."""

    def __init__(self, relays: Sequence[int], rng: random.Random, prefix: str) -> None:
        self._rng = rng
        self.keys = Keys(
            texts=[f"{prefix}/text{number}".encode() for number in range(2)],
            counters=[f"{prefix}/sum{number}".encode() for number in range(2)],
            queues=[f"{prefix}/queue".encode()],
            barriers=[(f"{prefix}/barrier".encode(), _TOGETHER * len(relays))],
        )
        self.history = History(self.keys)
        self._met = f"{prefix}/met/".encode()
        self._ticks = itertools.count()
        self._stopped = threading.Event()
        self._last_meeting: int | None = None
        self._failures: list[BaseException] = []
        self.totals: list[int] = []
        """What the sum of all rounds was, as the clients were told."""
        self._last = Client("last", relays[0], self.history, self._ticks)
        self._clients: list[Client] = []
        self._adding: list[Client] = []
        self._threads: list[threading.Thread] = []
        for number, port in enumerate(relays):
            self._enlist(f"adds{number}", port, self._add)
            self._adding.append(self._clients[-1])
            for which in range(_MIXED):
                self._enlist(f"mixed{number}.{which}", port, self._mix)
            for which in range(_TOGETHER):
                self._enlist(f"meets{number}.{which}", port, self._meet, sets_end=number == which == 0)

    def _enlist(self, name: str, port: int, script: Callable[..., None], **options: bool) -> None:
        client = Client(name, port, self.history, self._ticks)
        rng = random.Random(self._rng.random())

        def run() -> None:
            try:
                script(client, rng, **options)
            except (OSError, FailedError) as error:
                self._failures.append(FailedError(f"{name}: {error}"))

        self._clients.append(client)
        self._threads.append(threading.Thread(target=run, name=name, daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Have all come to an end, read everything, and judge. FailedError if something is wrong."""
        try:
            self._finish()
        except OSError as error:
            raise FailedError(f"a client that is to read everything: {error}") from error
        self.history.check()

    def _finish(self) -> None:
        self._stopped.set()
        deadline = time.monotonic() + PATIENCE
        while (busy := [each.name for each in self._threads if each.is_alive()]) and not self._failures:
            if time.monotonic() > deadline:
                raise FailedError(f"{', '.join(busy)} hang")
            for key in self.keys.texts:  # those who wait are released
                self._last.ask("SET", key, self._last.value())
            for key in self.keys.queues:
                self._last.ask("PUSH", key, self._last.value())
            time.sleep(0.05)
        if self._failures:
            raise self._failures[0]
        for key in self.keys.queues:
            while self._last.ask("POP", key)[1] is not None:
                pass
        for key in self.keys.values:
            self._last.ask("GET", key)
        for client in (self._last, *self._clients):
            client.close()

    def goes_on(self, since: float) -> bool:
        """Whether those who add have asked something after a moment, and were told. FailedError if that
        will not be."""
        if self._failures:
            raise self._failures[0]
        return all(each.spans and each.spans[-1][0] > since for each in self._adding)

    def pause(self, since: float) -> float:
        """The longest time that a client was without a reply since a moment."""
        return max(
            end - max(begun, since) for each in self._clients for begun, end in each.spans if end > since
        )

    # What they do

    def _add(self, client: Client, rng: random.Random) -> None:
        while not self._stopped.is_set():
            client.ask("ADD", rng.choice(self.keys.counters), rng.randint(1, 3))
            self.totals.append(client.count(TOTAL, 1))

    def _mix(self, client: Client, rng: random.Random) -> None:
        (queue,) = self.keys.queues
        seen = b""
        while not self._stopped.is_set():
            key, chance = rng.choice(self.keys.texts), rng.random()
            if chance < 0.2:
                client.ask("SET", key, client.value())
            elif chance < 0.4:
                seen = client.ask("GET", key)
            elif chance < 0.5:
                client.ask("CAS", key, (seen, client.value()))
            elif chance < 0.55:
                client.ask("APPEND", key, client.value())
            elif chance < 0.6:
                client.ask("DELETE", key)
            elif chance < 0.65:
                client.ask("WAIT", key)
            elif chance < 0.8:
                client.ask("PUSH", queue, client.value())
            elif chance < 0.9:
                client.ask("WAIT", queue)
                client.ask("POP", queue)
            else:
                client.ask("POP", queue)
            time.sleep(rng.uniform(0, 0.02))

    def _meet(self, client: Client, _: random.Random, *, sets_end: bool) -> None:
        """Meet at one barrier again and again: whoever comes out finds that all had come."""
        ((key, size),) = self.keys.barriers
        for number in itertools.count():
            if sets_end and self._stopped.is_set():
                self._last_meeting = number  # nobody can be behind the barrier of this number
            met = b"%b%d" % (self._met, number)
            client.count(met, 1)
            client.ask("BARRIER", key, size)
            if (there := client.count(met, 0)) != size:
                raise FailedError(f"a barrier of {size} was over when {there} had come")
            if self._last_meeting == number:
                return
            time.sleep(0.01)
