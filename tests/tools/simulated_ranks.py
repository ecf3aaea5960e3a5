"""The ranks of a simulation: each does a random script, and notes what it asked and was told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from linearizability import REFUSED, Operation
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

if TYPE_CHECKING:
    from simulated_network import Link
    from simulation import Simulation

CANCEL_WAIT = request(Op.CANCEL_WAIT)
CANCELLED = "cancelled"
_LONG = 300
"""Longer than what relays remember."""


class FailedError(AssertionError):
    """The system under test has done something wrong."""


Reader = Callable[[bytearray], tuple[Any, int] | None]
"""Reads a reply: its value and its length, or None if it is not complete."""


def _i64(data: bytearray) -> tuple[Any, int] | None:
    return (unpack_i64(data, 0)[0], 8) if len(data) >= 8 else None


def _byte(data: bytearray) -> tuple[Any, int] | None:
    return (data[0], 1) if data else None


def _blob(data: bytearray) -> tuple[Any, int] | None:
    if len(data) < 8:
        return None
    end = 8 + unpack_u64(data, 0)[0]
    return (bytes(data[8:end]), end) if len(data) >= end else None


def _pop(data: bytearray) -> tuple[Any, int] | None:
    if len(data) < 8:
        return None
    length = unpack_i64(data, 0)[0]
    if not length:
        return (0, None), 8
    value = _blob(data[8:])
    return ((length, value[0]), 8 + value[1]) if value is not None else None


def _exactly(expected: bytes) -> Reader:
    def read(data: bytearray) -> tuple[Any, int] | None:
        if len(data) < len(expected):
            return None
        if not data.startswith(expected):
            raise FailedError(f"expected the reply {expected!r}, but got {bytes(data[:40])!r}")
        return None, len(expected)

    return read


def _several(count: int) -> Reader:
    def read(data: bytearray) -> tuple[Any, int] | None:
        values, position = [], 0
        for _ in range(count):
            found = _blob(data[position:])
            if found is None:
                return None
            values.append(found[0])
            position += found[1]
        return tuple(values), position

    return read


_CANCEL = _exactly(b"\x01")

Encoder = Callable[[Sequence[bytes], Any], bytes]

REQUESTS: dict[str, tuple[Encoder, Reader | None]] = {
    "SET": (lambda keys, value: request(Op.SET, keys[0], value), None),
    "GET": (lambda keys, _: request(Op.GET, keys[0]), _blob),
    "ADD": (lambda keys, amount: request(Op.ADD, keys[0], tail=pack_i64(amount)), _i64),
    "DELETE": (lambda keys, _: request(Op.DELETE_KEY, keys[0]), _i64),
    "APPEND": (lambda keys, value: request(Op.APPEND, keys[0], value), None),
    "CAS": (lambda keys, values: request(Op.COMPARE_SET, keys[0], *values), _blob),
    "PUSH": (lambda keys, value: request(Op.QUEUE_PUSH, keys[0], value), None),
    "POP": (lambda keys, _: request(Op.QUEUE_POP, keys[0]), _pop),
    "LEN": (lambda keys, _: request(Op.QUEUE_LEN, keys[0]), _i64),
    "CHECK": (lambda keys, _: counted_request(Op.CHECK, keys), _byte),
    "WAIT": (lambda keys, _: counted_request(Op.WAIT, keys), _exactly(STOP_WAITING)),
    "BARRIER": (
        lambda keys, size: request(Op.BARRIER, keys[0], tail=pack_i64(size)),
        _exactly(STOP_WAITING),
    ),
    "NUMKEYS": (lambda keys, _: request(Op.GETNUMKEYS), _i64),
    "MULTI_GET": (lambda keys, _: counted_request(Op.MULTI_GET, keys), None),
    "MULTI_SET": (
        lambda keys, values: counted_request(
            Op.MULTI_SET, [part for pair in zip(keys, values, strict=True) for part in pair], blobs_each=2
        ),
        None,
    ),
}
"""Each operation: its request, of its keys and its argument, and how its reply is read, if it has one."""


def ping(number: int) -> tuple[bytes, Reader]:
    """A PING, for the end of what has no reply."""
    nonce = pack_u32(number)
    return request(Op.PING, tail=nonce), _exactly(nonce)


@dataclass(eq=False, slots=True)
class Reply:
    """A reply that a rank waits for, and the operations that end with it."""

    read: Reader
    ends: list[Operation]
    blocks: bool = False
    """Whether it may be long in coming: that of a WAIT or a BARRIER."""


@dataclass(frozen=True)
class Keys:
    """What there is to collide on. Values and queues have names of their own."""

    texts: list[bytes]
    counters: list[bytes]
    queues: list[bytes]
    barriers: list[tuple[bytes, int]]

    @property
    def values(self) -> list[bytes]:
        return [*self.texts, *self.counters]


class Rank:
    """One client, with one connection; it sends its next request when it has read all replies."""

    def __init__(
        self, host: Simulation, name: str, keys: Keys, weights: dict[str, int], count: int, at: str
    ) -> None:
        self.name = name
        self.at = at
        self.left = count
        self.is_alive = True
        self.wire: Link | None = None
        self.replies: deque[Reply] = deque()
        self.asked: list[Operation] = []  # that have no answer
        self._host = host
        self._rng = host.rng
        self._keys = keys
        self._kinds = list(weights)
        self._weights = list(weights.values())
        self._buffer = bytearray()
        self._numbers = 0
        self._seen: dict[bytes, bytes] = {}  # the values that it has read last
        self._to_pop: bytes | None = None
        self.heard: tuple[str, tuple[bytes, ...]] | None = None
        """What to do next because of what another rank has done, and has told this one past all servers."""
        self._sending = b""
        self._has_cancelled = False

    @property
    def is_blocked(self) -> bool:
        return len(self.replies) == 1 and self.replies[0].blocks

    # Events

    def connect(self, wire: Link) -> None:
        self.wire = wire
        wire.send(VALIDATE)

    def go_on(self) -> None:
        """Ask the next thing, if there is one."""
        if not self.is_alive or self.replies:
            return
        if self._to_pop is not None:  # who was woken by a push has to pop
            key, self._to_pop = self._to_pop, None
            self.ask("POP", key)
        elif self.heard is not None:
            self._do_heard(*self.heard)
        elif self.left <= 0:
            return
        else:
            self.left -= 1
            kind = self._rng.choices(self._kinds, self._weights)[0]
            getattr(self, f"_do_{kind}")()
        self.send()

    def send(self) -> None:
        data, self._sending = self._sending, b""
        assert self.wire is not None
        self.wire.send(data)

    def receive(self, _: Link, data: bytes) -> None:
        if not self.is_alive:
            return
        buffer, replies = self._buffer, self.replies
        buffer += data
        while replies and buffer:
            if replies[0].blocks:
                self._end_wait(buffer[0])
                del buffer[0]
                continue
            found = replies[0].read(buffer)
            if found is None:
                break
            result, length = found
            del buffer[:length]
            for operation in replies.popleft().ends:
                self._finish(operation, result)
        if not replies:
            if buffer:
                raise FailedError(f"{self.name} was sent {bytes(buffer[:40])!r}, for which it has not asked")
            self._host.after(self._pause(), self.go_on)

    def _pause(self) -> int:
        rng = self._rng
        return 0 if rng.random() < 0.6 else rng.randint(1, 60)

    def _finish(self, operation: Operation, result: Any) -> None:
        operation.end = self._host.step
        operation.result = result
        self.asked.remove(operation)
        if operation.what == "GET":
            self._seen[operation.keys[0]] = result
        elif operation.what in ("SET", "DELETE") and self._rng.random() < 0.5:
            self._host.tell(operation.keys[0], operation.what == "SET")

    def _end_wait(self, byte: int) -> None:
        """A wait has ended, or was cancelled; a wait that ended just before is told first."""
        (operation,) = self.replies.popleft().ends
        if byte == 0:
            self._finish(operation, None)
            if operation.keys[0] in self._keys.queues and not self._has_cancelled:
                self._to_pop = operation.keys[0]
        elif byte == 1 and self._has_cancelled:
            self._finish(operation, CANCELLED)
            self.replies.popleft()
        else:
            raise FailedError(f"{self.name} waited, and was sent {byte:#04x}")

    def lose(self, _: Link) -> None:
        """The other side has closed the connection."""
        if not self.is_alive:
            return
        if self.wire is not None and self.wire.excuse is None:
            refused = next(
                (ask for ask in self.asked if ask.what == "ADD" and ask.keys[0] in self._keys.texts), None
            )
            if refused is None:
                raise FailedError(f"{self.name} was disconnected without a cause")
            refused.end, refused.result = self._host.step, REFUSED
            self.asked.remove(refused)
        self.die()

    def die(self) -> None:
        self.is_alive = False
        for operation in self.asked:
            operation.died = self._host.step
        assert self.wire is not None
        self.wire.abandon()

    def cancel(self) -> None:
        """End the wait that it is in, as a client does whose time is up."""
        if self.is_alive and self.is_blocked:
            self._add_cancel()
            self.send()

    def _add_cancel(self) -> None:
        self._has_cancelled = True
        self._sending += CANCEL_WAIT
        self.replies.append(Reply(_CANCEL, []))

    # Asking

    def ask(self, what: str, *keys: bytes, argument: Any = None) -> Operation:
        """Note an operation, and add it to what is sent next."""
        operation = Operation(self.name, what, keys, argument, self._host.step, at=self.at)
        self._host.note(operation)
        self.asked.append(operation)
        encode, read = REQUESTS[what]
        self._sending += encode(keys, argument)
        if what == "MULTI_GET":
            read = _several(len(keys))
        if read is not None:
            self.replies.append(Reply(read, [operation], blocks=what in ("WAIT", "BARRIER")))
            self._has_cancelled = self._has_cancelled and not self.replies[-1].blocks
        return operation

    def _ping(self, *operations: Operation) -> None:
        self._numbers += 1
        data, read = ping(0x50000000 + self._numbers)
        self._sending += data
        self.replies.append(Reply(read, list(operations)))

    def _value(self) -> bytes:
        """A value that nobody else writes."""
        self._numbers += 1
        value = f"{self.name}.{self._numbers};".encode()
        return value.ljust(_LONG, b"x") if self._rng.random() < 0.25 else value

    def _set(self, key: bytes, value: bytes) -> Operation:
        return self.ask("SET", key, argument=value)

    def _perhaps_cancel(self) -> None:
        """Most waits have a time limit; some of them have none left when they begin."""
        chance = self._rng.random()
        if chance < 0.15:
            self._add_cancel()
            if self._rng.random() < 0.3:
                self.ask("GET", self._rng.choice(self._keys.texts))
        elif chance < 0.75:
            operation = self.replies[-1].ends[0]

            def time_out() -> None:
                if self.replies and self.replies[0].ends[:1] == [operation]:
                    self.cancel()

            self._host.after(self._rng.randint(1, self._rng.choice((60, 400))), time_out)

    # The script

    def _do_heard(self, what: str, keys: tuple[bytes, ...]) -> None:
        self.heard = None
        if what == "SET":
            self._ping(self._set(keys[0], self._value()))
            return
        self.ask(what, *keys)
        if what == "WAIT":
            self._perhaps_cancel()

    def _do_set(self) -> None:
        key = self._rng.choice(self._keys.texts)
        shared = b"done" if self._rng.random() < 0.3 else None  # as all write who find a barrier full
        self._ping(self._set(key, shared or self._value()))

    def _do_get(self) -> None:
        self.ask("GET", self._rng.choice(self._keys.values))

    def _do_add(self) -> None:
        amount = self._rng.choice((1, 1, 1, 1, 2, 5, 0, -1, -3))
        self.ask("ADD", self._rng.choice(self._keys.counters), argument=amount)

    def _do_add_to_text(self) -> None:
        """Refused if there is a text; so this rank's connection may be closed."""
        self.ask("ADD", self._rng.choice(self._keys.texts), argument=1)

    def _do_check(self) -> None:
        self.ask("CHECK", self._rng.choice([*self._keys.values, *self._keys.queues]))

    def _do_wait(self) -> None:
        keys = self._keys.values
        self.ask("WAIT", *sorted(self._rng.sample(keys, 2 if self._rng.random() < 0.35 else 1)))
        self._perhaps_cancel()

    def _do_delete(self) -> None:
        self.ask("DELETE", self._rng.choice(self._keys.values))

    def _do_compare_set(self) -> None:
        key = self._rng.choice(self._keys.texts)
        self.ask("CAS", key, argument=(self._seen.get(key, b""), self._value()))

    def _do_append(self) -> None:
        key, value = self._rng.choice(self._keys.texts), self._value()
        self._ping(self.ask("APPEND", key, argument=value))

    def _do_multi_get(self) -> None:
        self.ask("MULTI_GET", *self._rng.sample(self._keys.values, min(2, len(self._keys.values))))

    def _do_multi_set(self) -> None:
        keys = self._rng.sample(self._keys.texts, min(2, len(self._keys.texts)))
        self._ping(self.ask("MULTI_SET", *keys, argument=tuple(self._value() for _ in keys)))

    def _do_num_keys(self) -> None:
        self.ask("NUMKEYS")

    def _do_push(self) -> None:
        key, value = self._rng.choice(self._keys.queues), self._value()
        self._ping(self.ask("PUSH", key, argument=value))

    def _do_pop(self) -> None:
        self.ask("POP", self._rng.choice(self._keys.queues))

    def _do_length(self) -> None:
        self.ask("LEN", self._rng.choice(self._keys.queues))

    def _do_wait_and_pop(self) -> None:
        self.ask("WAIT", self._rng.choice(self._keys.queues))
        self._perhaps_cancel()

    def _do_barrier(self) -> None:
        key, size = self._rng.choice(self._keys.barriers)
        self.ask("BARRIER", key, argument=size)
        self._perhaps_cancel()

    def _do_pipeline(self) -> None:
        """Several requests in one send."""
        rng, keys = self._rng, self._keys
        writes: list[Operation] = []
        for _ in range(rng.randint(2, 5)):
            key, chance = rng.choice(keys.texts), rng.random()
            if chance < 0.35:
                writes.append(self._set(key, self._value()))
            elif chance < 0.7:
                self.ask("GET", key)
            elif chance < 0.9:
                self.ask("ADD", rng.choice(keys.counters), argument=rng.choice((1, 1, 0, 3)))
            else:
                self.ask("CHECK", key)
        self._ping(*writes)
        chance = rng.random()
        if chance < 0.15:
            self.ask("WAIT", rng.choice(keys.values))
            self._perhaps_cancel()
        elif chance < 0.25:
            self._do_barrier()
