"""A combiner whose batches are taken and answered by hand, and clients that note what they are answered."""

from __future__ import annotations

from ends import i64
from rallypoint.store.relay.core.combining import Combiner
from rallypoint.store.relay.core.slots import Arrival, Call, Waiter
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.sessions import Status

DONE, REFUSED, CALLED, UNCHANGED = Status.DONE, Status.REFUSED, Status.CALLED, Status.UNCHANGED


class Client:
    """A line of its own, which notes what it is answered."""

    def __init__(self) -> None:
        self.last = 0
        self.is_present = True
        self.got: list[object] = []
        self.calls: list[Call] = []

    def answer(self, status: Status, content: bytes) -> None:
        self.got.append(content if status is DONE else (status, content))

    def left(self, count: int) -> None:
        self.got.append(("left", count))


class Wait(Waiter):
    def __init__(self, client: Client) -> None:
        super().__init__(client, client)
        self._client = client

    def end(self, refusal: bytes | None, call: Call | None) -> None:
        got = "over" if refusal is None and call is None else "called" if call else refusal
        self._client.got.append(got)
        if call is not None:
            self._client.calls.append(call)


class AtBarrier(Arrival):
    def __init__(self, client: Client, weight: int) -> None:
        super().__init__(weight)
        self._client = client

    def release(self, status: Status, content: bytes) -> None:
        self._client.answer(status, content)


class Bench:
    """A combiner, with batches taken and answers given by hand."""

    def __init__(self) -> None:
        self.combiner = Combiner()
        self.number = 0

    def ask(self, client: Client, op: Op, *blobs: bytes, tail: bytes = b"") -> None:
        self.combiner.ask(client, op, list(blobs), tail, client)
        self.combiner.check_invariants()

    def get(self, client: Client, key: bytes = b"k") -> None:
        self.ask(client, Op.GET, key)

    def set(self, client: Client, key: bytes = b"k", value: bytes = b"v") -> None:
        self.ask(client, Op.SET, key, value)

    def add(self, client: Client, amount: int, key: bytes = b"n") -> None:
        self.ask(client, Op.ADD, key, tail=i64(amount))

    def wait(self, client: Client, *keys: bytes, in_turn: bool = False) -> Waiter:
        waiter = Wait(client)
        self.combiner.wait(waiter, keys, in_turn=in_turn)
        self.combiner.check_invariants()
        return waiter

    def arrive(self, client: Client, size: int, weight: int = 1, key: bytes = b"b") -> Arrival:
        arrival = AtBarrier(client, weight)
        self.combiner.arrive(arrival, client, key, size)
        self.combiner.check_invariants()
        return arrival

    def leave(self, client: Client, arrival: Arrival, count: int = 1) -> None:
        self.combiner.leave(arrival, count, client)
        self.combiner.check_invariants()

    def cancel(self, waiter: Waiter) -> None:
        self.combiner.cancel(waiter)
        self.combiner.check_invariants()

    def send(self, most_bytes: int = 1 << 20, longest: int = 1 << 32) -> list[bytes]:
        self.number += 1
        requests = self.combiner.take_batch(self.number, most_bytes, longest)
        self.combiner.check_invariants()
        return requests

    def take(self, tag: int, content: bytes = b"", status: Status = DONE) -> None:
        self.combiner.take(tag, status, content)
        self.combiner.check_invariants()


def clients(count: int) -> list[Client]:
    return [Client() for _ in range(count)]
