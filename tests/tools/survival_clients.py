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
from rallypoint.store.wire.encoding import (
    VALIDATE,
    counted_request,
    pack_i64,
    pack_u32,
    request,
    unpack_i64,
    unpack_u64,
)
from rallypoint.store.wire.opcodes import STOP_WAITING, Op
from simulated_ranks import FailedError, Keys

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
        self._replies = self._socket.makefile("rb")
        self._socket.sendall(VALIDATE)
        self.spans: list[tuple[float, float]] = []
        """From when to when it was without the reply to a request that nothing but the store can delay."""

    def close(self) -> None:
        self._replies.close()
        self._socket.close()

    def value(self) -> bytes:
        """A value that nobody else writes."""
        return f"{self._name}.{next(self._numbers)};".encode()

    def add(self, key: bytes, amount: int) -> int:
        data = request(Op.ADD, key, tail=pack_i64(amount))
        return int(self._ask("ADD", (key,), amount, data, self._i64))

    def count(self, key: bytes, amount: int) -> int:
        """Add to a counter that is no part of the history."""
        begun = time.monotonic()
        self._socket.sendall(request(Op.ADD, key, tail=pack_i64(amount)))
        total = self._i64()
        self.spans.append((begun, time.monotonic()))
        return total

    def get(self, key: bytes) -> bytes:
        return bytes(self._ask("GET", (key,), None, request(Op.GET, key), self._blob))

    def set(self, key: bytes, value: bytes) -> None:
        self._ask("SET", (key,), value, request(Op.SET, key, value), None)

    def append(self, key: bytes, value: bytes) -> None:
        self._ask("APPEND", (key,), value, request(Op.APPEND, key, value), None)

    def delete(self, key: bytes) -> None:
        self._ask("DELETE", (key,), None, request(Op.DELETE_KEY, key), self._i64)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> None:
        data = request(Op.COMPARE_SET, key, expected, desired)
        self._ask("CAS", (key,), (expected, desired), data, self._blob)

    def push(self, key: bytes, value: bytes) -> None:
        self._ask("PUSH", (key,), value, request(Op.QUEUE_PUSH, key, value), None)

    def pop(self, key: bytes) -> bytes | None:
        found: tuple[int, bytes | None]
        found = self._ask("POP", (key,), None, request(Op.QUEUE_POP, key), self._popped)
        return found[1]

    def wait(self, key: bytes) -> None:
        self._ask("WAIT", (key,), None, counted_request(Op.WAIT, [key]), self._released)

    def barrier(self, key: bytes, size: int) -> None:
        data = request(Op.BARRIER, key, tail=pack_i64(size))
        self._ask("BARRIER", (key,), size, data, self._released)

    def _ask(
        self,
        what: str,
        keys: tuple[bytes, ...],
        argument: Any,
        data: bytes,
        read: Callable[[], Any] | None,
    ) -> Any:
        """Ask, and note it; without `read`, a PING behind it tells that it is done."""
        if read is None:
            nonce = pack_u32(next(self._numbers))
            data += request(Op.PING, tail=nonce)
            read = self._expecting(nonce)
        operation = Operation(self._name, what, keys, argument, next(self._ticks))
        self._history.operations.append(operation)
        begun = time.monotonic()
        self._socket.sendall(data)
        operation.result = read()
        operation.end = next(self._ticks)
        if what not in ("WAIT", "BARRIER"):
            self.spans.append((begun, time.monotonic()))
        return operation.result

    def _exactly(self, count: int) -> bytes:
        data = self._replies.read(count)
        if len(data) < count:
            raise FailedError(f"{self._name} was disconnected")
        return data

    def _i64(self) -> int:
        return int(unpack_i64(self._exactly(8), 0)[0])

    def _blob(self) -> bytes:
        return self._exactly(unpack_u64(self._exactly(8), 0)[0])

    def _popped(self) -> tuple[int, bytes | None]:
        length = self._i64()
        return (length, self._blob()) if length else (0, None)

    def _released(self) -> None:
        self._expecting(STOP_WAITING)()

    def _expecting(self, expected: bytes) -> Callable[[], None]:
        def read() -> None:
            if (got := self._exactly(len(expected))) != expected:
                raise FailedError(f"{self._name} was sent {got!r}, and not {expected!r}")

        return read


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
                self._last.set(key, self._last.value())
            for key in self.keys.queues:
                self._last.push(key, self._last.value())
            time.sleep(0.05)
        if self._failures:
            raise self._failures[0]
        for key in self.keys.queues:
            while self._last.pop(key) is not None:
                pass
        for key in self.keys.values:
            self._last.get(key)
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
            client.add(rng.choice(self.keys.counters), rng.randint(1, 3))
            self.totals.append(client.count(TOTAL, 1))

    def _mix(self, client: Client, rng: random.Random) -> None:
        (queue,) = self.keys.queues
        seen = b""
        while not self._stopped.is_set():
            key, chance = rng.choice(self.keys.texts), rng.random()
            if chance < 0.2:
                client.set(key, client.value())
            elif chance < 0.4:
                seen = client.get(key)
            elif chance < 0.5:
                client.compare_set(key, seen, client.value())
            elif chance < 0.55:
                client.append(key, client.value())
            elif chance < 0.6:
                client.delete(key)
            elif chance < 0.65:
                client.wait(key)
            elif chance < 0.8:
                client.push(queue, client.value())
            elif chance < 0.9:
                client.wait(queue)
                client.pop(queue)
            else:
                client.pop(queue)
            time.sleep(rng.uniform(0, 0.02))

    def _meet(self, client: Client, _: random.Random, *, sets_end: bool) -> None:
        """Meet at one barrier again and again: whoever comes out finds that all had come."""
        ((key, size),) = self.keys.barriers
        for number in itertools.count():
            if sets_end and self._stopped.is_set():
                self._last_meeting = number  # nobody can be behind the barrier of this number
            met = b"%b%d" % (self._met, number)
            client.count(met, 1)
            client.barrier(key, size)
            if (there := client.count(met, 0)) != size:
                raise FailedError(f"a barrier of {size} was over when {there} had come")
            if self._last_meeting == number:
                return
            time.sleep(0.01)
