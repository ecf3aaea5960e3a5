"""One request with very many keys, from one client."""

from __future__ import annotations

from typing import Final

from rallypoint.bench.dialects import Exchange
from rallypoint.bench.load import Load, Stopwatch, sample
from rallypoint.bench.results import Sample
from rallypoint.bench.session import Session
from rallypoint.bench.sockets import connect, converse

MANY_KEYS: Final = 100_000


def keys_of(count: int, name: str = "key") -> list[bytes]:
    """Keys that look like those of a job: a prefix and a number."""
    return [b"/bench/%s-%06d" % (name.encode(), number) for number in range(count)]


def values_of(count: int, generation: int = 0) -> list[bytes]:
    """Values of 16 bytes, a different one for every key and every generation."""
    return [b"%04d-%011d" % (generation, number) for number in range(count)]


class Bulk(Session):
    """A request of many keys, and the way it is made."""

    def open(self) -> None:
        self.keys = keys_of(MANY_KEYS)
        self.generation = 0
        self.client = self.resources.enter_context(connect(self.target.port, self.target.dialect))
        self.seed()
        self.measure(1_000)

    def round(self) -> Sample:
        return self.measure(MANY_KEYS)

    def seed(self) -> None:
        """Store what has to be there."""

    def measure(self, count: int) -> Sample:
        """The request with that many of the keys."""
        raise NotImplementedError

    def timed(self, exchange: Exchange) -> Sample:
        """Send the request and check its reply."""
        load, cpu = self.metered(lambda: self.ask(exchange))
        return sample(load.seconds, [load], cpu)

    def ask(self, exchange: Exchange) -> Load:
        watch = Stopwatch()
        converse(self.client, exchange)
        return watch.stop(1)


class MultiGet(Bulk):
    """Many keys are read."""

    def seed(self) -> None:
        self.values = values_of(MANY_KEYS)
        store = self.target.dialect.store
        # One after the other in a row: torch takes ten seconds for the request that would store them all.
        each = [store(key, value) for key, value in zip(self.keys, self.values, strict=True)]
        requests, replies = (
            b"".join(part) for part in zip(*((x.request, x.reply) for x in each), strict=True)
        )
        self.ask(Exchange(requests, replies))

    def measure(self, count: int) -> Sample:
        return self.timed(self.target.dialect.multi_get(self.keys[:count], self.values[:count]))


class MultiSet(Bulk):
    """Many values are stored, other ones each time; some are read afterwards."""

    def measure(self, count: int) -> Sample:
        self.generation += 1
        dialect, values = self.target.dialect, values_of(count, self.generation)
        measured = self.timed(dialect.multi_set(self.keys[:count], values))
        for number in range(0, count, max(1, count // 100)):
            self.ask(dialect.get(self.keys[number], values[number]))
        return measured
